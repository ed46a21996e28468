"""The communicator of one rank: a gather is a copy."""

from __future__ import annotations

from typing import Any


class Solo:
    """One rank, any array library, nothing to wait for."""

    rank = 0
    size = 1
    transport = "solo"
    capturable = True
    reason = "one rank"

    def all_gather(self, send: Any, recv: Any) -> None:
        """Copy ``send`` to ``recv``, an array of as many elements."""
        recv.reshape(send.shape)[...] = send

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        return [value]

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Solo:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
