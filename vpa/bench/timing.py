"""How arms are timed: interleaved, order alternated, raw samples kept; in CUDA graphs, eagerly, or on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vpa.captured import capture


class Captured:
    """Some calls as one CUDA graph. ``launch()`` replays it on the stream it was captured on.

    Temporaries come from a memory pool of the graph's own, kept as long as the graph: no other work can be given memory
    that the graph will write. ``last`` is what the last captured call returned; a replay writes it again. ``kernels``
    is the number of kernel nodes per call, None where the graph cannot be looked into.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], library: str = "cupy") -> None:
        import cupy

        self.calls = len(calls)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._pool = cupy.cuda.MemoryPool()
        cupy.cuda.runtime.deviceSynchronize()
        capture = self._capture_torch if library == "torch" else self._capture_cupy
        with cupy.cuda.using_allocator(self._pool.malloc), self.stream:
            capture(calls)
        self.stream.synchronize()

    def launch(self) -> None:
        """Enqueue the graph."""
        self._replay()

    def close(self) -> None:
        """Drop the graph; do this before the communicator of a captured collective is closed."""
        self._graph = self._replay = None

    def _capture_cupy(self, calls: Sequence[Callable[[], Any]]) -> None:
        calls[0]()  # compiles, sets a communicator up, and fills the pool
        self.stream.synchronize()

        def enqueue() -> None:
            for call in calls:
                self.last = call()

        self._graph = capture(self.stream, enqueue)
        self._replay = lambda: self._graph.launch(self.stream)
        self.kernels = _kernel_nodes(self._graph.graph, self.calls)

    def _capture_torch(self, calls: Sequence[Callable[[], Any]]) -> None:
        import torch

        stream = torch.cuda.ExternalStream(self.stream.ptr)
        with torch.cuda.stream(stream):
            calls[0]()
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="relaxed"):
                for call in calls:
                    self.last = call()
            self.kernels = _kernel_nodes(self._graph.raw_cuda_graph(), self.calls)
            self._graph.instantiate()

        def replay() -> None:
            with torch.cuda.stream(stream):
                self._graph.replay()

        self._replay = replay


def time_captured(graphs: dict[str, Captured], rounds: int, barrier: Callable[[], None]) -> dict[str, np.ndarray]:
    """Microseconds per call by device events, [rounds] for each graph.

    Each sample is the second of two replays: the first keeps the device busy until the host has launched the second,
    and brings the ranks of a collective together.
    """
    import cupy

    def once(name: str) -> float:
        graph = graphs[name]
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        graph.launch()
        start.record(graph.stream)
        graph.launch()
        end.record(graph.stream)
        end.synchronize()
        return 1e3 * cupy.cuda.get_elapsed_time(start, end) / graph.calls

    return interleaved(list(graphs), once, rounds, barrier)


def _kernel_nodes(graph: int, calls: int) -> float | None:
    """Kernel nodes of a ``cudaGraph_t`` per call; None without the package cuda-bindings."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    handle = runtime.cudaGraph_t(init_value=graph)
    _, _, count = runtime.cudaGraphGetNodes(handle)
    _, nodes, _ = runtime.cudaGraphGetNodes(handle, count)
    kernel = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
    return round(sum(runtime.cudaGraphNodeGetType(node)[1] == kernel for node in nodes) / calls, 2)


def time_called(
    steps: dict[str, Callable[[], Any]],
    calls: int,
    rounds: int,
    barrier: Callable[[], None],
    finish: Callable[[], None],
) -> dict[str, np.ndarray]:
    """Microseconds per call by the host's clock, [rounds] for each step; ``finish`` waits for what was enqueued."""

    def once(name: str) -> float:
        step = steps[name]
        start = time.perf_counter()
        for _ in range(calls):
            step()
        finish()
        return 1e6 * (time.perf_counter() - start) / calls

    return interleaved(list(steps), once, rounds, barrier)


def interleaved(
    names: Sequence[str], once: Callable[[str], float], rounds: int, barrier: Callable[[], None], warm_up: int = 2
) -> dict[str, np.ndarray]:
    """Samples of ``once(name)``: every round takes each name, in turn forwards and backwards, after a barrier."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        for name in names if number % 2 == 0 else reversed(names):
            barrier()
            sample = once(name)
            if number >= warm_up:
                samples[name].append(sample)
    return {name: np.array(values) for name, values in samples.items()}
