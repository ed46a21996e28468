"""Calls as one CUDA graph over fixed memory: captured once, replayed, and dropped before their communicator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def capture(stream: Any, enqueue: Callable[[], Any]) -> Any:
    """The graph of what ``enqueue`` puts on ``stream``, CuPy's current one. An error in it is raised as it is."""
    stream.begin_capture()
    try:
        enqueue()
    except BaseException:
        with contextlib.suppress(Exception):  # the stream's own error says only that the capture is invalid
            stream.end_capture()
        raise
    return stream.end_capture()


class Captured:
    """Some work as one CUDA graph over fixed memory: warmed up, then captured on a stream of its own.

    The graph reads and writes the arrays that were captured, and those in ``keep``, which it keeps alive; temporaries
    come from a memory pool of its own, kept as long as it is.

    enqueue: enqueues the work on CuPy's current stream, with the same calls each time; it is called twice, first to
    warm up: kernels are compiled, memory is there and the communicator has carried a collective before the capture.
    results: what every replay overwrites and returns.
    """

    def __init__(self, comm: Any, enqueue: Callable[[], Any], keep: tuple[Any, ...], results: Any) -> None:
        import cupy

        self._results = results
        self._comm, self._keep, self._pool = comm, keep, cupy.cuda.MemoryPool()
        caller, stream = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(caller.record())
        with cupy.cuda.using_allocator(self._pool.malloc), stream:
            enqueue()
            stream.synchronize()
            self._graph = capture(stream, enqueue)
        if hasattr(comm, "adopt"):
            comm.adopt(self)

    def replay(self) -> Any:
        """Launch the graph on CuPy's current stream; returns its results, complete when the stream comes this far."""
        if self._graph is None:
            raise RuntimeError("this graph was closed, with its communicator or by close()")
        import cupy

        stream = cupy.cuda.get_current_stream()
        self._graph.launch(stream)
        if hasattr(self._comm, "watch"):
            self._comm.watch(stream)
        return self._results

    def close(self) -> None:
        """Drop the graph. Its communicator does this when it is closed."""
        self._graph = None


class CapturedTokens(Captured):
    """Tokens as a CUDA graph; made by ``TopTokens.capture`` and ``capture_drafts``. Change what it reads in place."""

    @property
    def tokens(self) -> Any:
        """int64, a CuPy array that every ``replay`` overwrites and returns."""
        return self._results


def check_capturable(comm: Any) -> None:
    """Raise ``ValueError`` for a communicator whose collectives cannot be part of a CUDA graph."""
    if not getattr(comm, "capturable", False):
        raise ValueError(
            f"collectives over transport {getattr(comm, 'transport', '?')!r} cannot be captured; "
            f"use vpa.comm.from_mpi('nccl'), or call without capturing"
        )
