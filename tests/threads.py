"""Ranks as threads of one process: a communicator that compares calls and carries host arrays, without MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class Rank:
    """One rank's communicator; all share ``slots`` and a barrier that gives up on ranks that part."""

    transport, reason, device, carries, capturable = "threads", "a test", None, ("numpy",), False

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, len(slots), slots, barrier

    def exchange(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait()
        told = list(self._slots)
        self._barrier.wait()  # none writes before all have read
        return told

    def all_gather(self, send: np.ndarray, recv: np.ndarray) -> None:
        recv[...] = np.concatenate(self.exchange(send.copy())).reshape(recv.shape)

    def close(self) -> None:
        pass


def on_ranks(size: int, body: Callable[[Any], Any]) -> list[Any]:
    """What ``body(comm)`` gives on each rank: its result, or ``"ValueError: ..."`` where it raises."""
    slots, barrier = [None] * size, threading.Barrier(size, timeout=20)

    def run(rank: int) -> Any:
        try:
            return body(Rank(rank, slots, barrier))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
