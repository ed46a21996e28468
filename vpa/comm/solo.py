"""The communicator of one rank: a gather is a copy."""

from __future__ import annotations

from typing import Any

from vpa.comm.gather import check_gather


class Solo:
    """One rank, any array library, nothing to wait for."""

    rank = 0
    size = 1
    device = None
    transport = "solo"
    reason = "one rank"
    carries = ("numpy", "cupy")
    capturable = True

    def all_gather(self, send: Any, recv: Any) -> None:
        """Copy ``send`` to ``recv``: C-contiguous, as many elements."""
        check_gather(send, recv, 1)
        recv.reshape(send.shape)[...] = send

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
