"""Calls as one CUDA graph over fixed memory: captured once, replayed, and dropped before their communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CapturedTokens:
    """Some work that ends in tokens, as a CUDA graph; made by ``TopTokens.capture``, ``capture_drafts`` and the like.

    ``tokens``: int64, a CuPy array that every ``replay`` overwrites. The graph reads the arrays that were captured,
    which it keeps alive: change them in place. Temporaries come from a memory pool of its own, kept as long as it is.

    enqueue: enqueues the work on CuPy's current stream, with the same calls each time; it is called twice, first to
    warm up: kernels are compiled, memory is there and the communicator has carried a collective before the capture.
    keep: what has to live as long as the graph.
    """

    def __init__(self, comm: Any, enqueue: Callable[[], Any], keep: tuple[Any, ...], tokens: Any) -> None:
        import cupy

        self.tokens = tokens
        self._comm, self._keep, self._pool = comm, keep, cupy.cuda.MemoryPool()
        caller, stream = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(caller.record())
        with cupy.cuda.using_allocator(self._pool.malloc), stream:
            enqueue()
            stream.synchronize()
            stream.begin_capture()
            try:
                enqueue()
            finally:
                self._graph = stream.end_capture()
        if hasattr(comm, "adopt"):
            comm.adopt(self)

    def replay(self) -> Any:
        """Launch the graph on CuPy's current stream; returns ``tokens``, complete when the stream has come this far."""
        if self._graph is None:
            raise RuntimeError("this graph was closed, with its communicator or by close()")
        import cupy

        stream = cupy.cuda.get_current_stream()
        self._graph.launch(stream)
        if hasattr(self._comm, "watch"):
            self._comm.watch(stream)
        return self.tokens

    def close(self) -> None:
        """Drop the graph. Its communicator does this when it is closed."""
        self._graph = None


def check_capturable(comm: Any) -> None:
    """Raise ``ValueError`` for a communicator whose collectives pass through the host."""
    if not getattr(comm, "capturable", False):
        raise ValueError(
            f"collectives over transport {getattr(comm, 'transport', '?')!r} cannot be captured; "
            f"use vpa.comm.from_mpi('nccl'), or call without capturing"
        )
