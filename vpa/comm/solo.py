"""The communicator of one rank: every collective is a copy."""

from __future__ import annotations

from typing import Any

from vpa.comm.gather import check_gather
from vpa.comm.reduce import check_all_reduce, check_reduce_scatter


class Solo:
    """One rank, any array library, nothing to wait for."""

    rank = 0
    size = 1
    device = None
    transport = "solo"
    reason = "one rank"
    carries = ("numpy", "cupy")
    capturable = True
    hosts = 1
    gpus = 0  # it binds none; arrays of any device are taken

    def all_gather(self, send: Any, recv: Any) -> None:
        """Copy ``send`` to ``recv``: C-contiguous, as many elements."""
        check_gather(send, recv, 1)
        _copy(send, recv)

    def all_reduce(self, send: Any, recv: Any) -> None:
        """Copy ``send`` to ``recv``, the sum over one rank: C-contiguous, as many elements of bf16, fp16 or fp32."""
        check_all_reduce(send, recv, 1)
        _copy(send, recv)

    def reduce_scatter(self, send: Any, recv: Any) -> None:
        """Copy ``send`` to ``recv``, the one part of the sum over one rank."""
        check_reduce_scatter(send, recv, 1)
        _copy(send, recv)

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Solo:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy(send: Any, recv: Any) -> None:
    recv.reshape(send.shape)[...] = send
