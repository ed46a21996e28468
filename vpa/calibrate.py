"""``vpa.calibrate``: measures both ways to a greedy token on this job's ranks, and makes the switch between them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from vpa import arrays, weights
from vpa.bench import timing
from vpa.comm import agree, check_communicator
from vpa.crossover import COSTS, Point, pays_from, point
from vpa.lm_head import ParallelLMHead
from vpa.logits import LogitsProcessor
from vpa.shapes import shape_of
from vpa.switch import Entry, SwitchTable
from vpa.vocab import VocabShard, integer, positive, shard_vocab

#: Batch sizes that are measured by default.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def calibrate(
    comm: Any,
    shapes: Sequence[Any],
    *,
    dtype: Any = "bfloat16",
    rows: Sequence[int] = ROWS,
    library: Any = None,
    backend: str | None = None,
    layout: str = "packed",
    fused: bool = False,
    calls: int = 20,
    pairs: int = 5,
    seed: int = 0,
) -> SwitchTable:
    """The table by which ``LogitsProcessor(comm, mode="auto", switch=table)`` chooses, one for all ranks; all call.

    shapes: heads to measure, each a name of ``vpa.shapes``, a text ``HIDDENxVOCAB``, a pair (hidden size, vocabulary),
        or this rank's ``ParallelLMHead``, which is measured itself; for the others a head of ``dtype`` is seeded.
    rows: batch sizes. library: the module ``numpy`` or ``cupy``, whose arrays a seeded head has; by default ``cupy``
        where the communicator has a GPU. backend, layout, fused: as the processor will have them.
    calls, pairs: at each size both ways are timed in so many pairs of samples, order alternated, each sample of so many
        calls; eagerly, and as a CUDA graph where the communicator's collectives can be captured.

    Before any timing both ways have to give the same tokens. Over ranks a time is the slowest one's, and the table is
    rank 0's, told to all. Below the size from which it pays, the local argmax is left only where it clearly costs: its
    loss is more than the noise. Takes seconds a shape. ``TypeError`` or ``ValueError`` on every rank for what does not
    fit one, or where ranks have different devices.
    """
    check_communicator(comm)
    if not hasattr(comm, "exchange"):
        raise TypeError(f"comm is a {type(comm).__name__} without exchange, by which ranks tell each other their times")
    heads, processor, error = [], None, None
    try:
        sizes = tuple(sorted({positive("rows", one) for one in rows}))
        if not sizes or not len(shapes):
            raise ValueError(f"rows are {list(rows)}, shapes {list(shapes)}; at least one of each is accepted")
        counts = {"calls": positive("calls", calls), "pairs": positive("pairs", pairs)}
        xp = _library(library, comm)
        processor = LogitsProcessor(comm, layout=layout, backend=backend, fused=fused)
        heads = [_head(one, comm, arrays.check_logits_dtype(dtype), integer("seed", seed), xp) for one in shapes]
    except Exception as failure:  # told to the other ranks, then raised
        error = failure
    facts: dict[str, Any] = {}
    if error is None:
        named = [f"{one.hidden_size} x {one.shard.vocab_size}" for one in heads]
        places = [processor.place(one) for one in heads]
        facts = {"function": "calibrate", "rows": sizes, "shapes": named, "places": places, **counts}
        if len(set(places)) > 1:
            error = ValueError(
                f"heads are of {', '.join(sorted({one.dtype for one in places}))}; one dtype is accepted"
            )
    agree(comm, {} if error else facts, error)
    entries = []
    for head in heads:
        for captured in (False, True) if _capturable(comm, head) else (False,):
            points = [_point(processor, head, size, captured, calls, pairs, seed) for size in sizes]
            entries.append(_entry(head, captured, points))
    return comm.exchange(SwitchTable(places[0], tuple(entries)))[0]


def _library(library: Any, comm: Any) -> Any:
    """The module whose arrays seeded heads have."""
    if library is None:
        return importlib.import_module("numpy" if getattr(comm, "device", None) is None else "cupy")
    if not isinstance(library, ModuleType) or library.__name__ not in ("numpy", "cupy"):
        raise TypeError(f"library is {library!r}; the module numpy or cupy is accepted, or None")
    return library


def _head(shape: Any, comm: Any, dtype: np.dtype, seed: int, library: Any) -> ParallelLMHead:
    """This rank's head of a shape."""
    if isinstance(shape, ParallelLMHead):
        return shape
    if isinstance(shape, str):
        found = shape_of(shape)
        if found.hidden_size is None:
            raise ValueError(f"shape {shape!r} has no hidden size here; give (hidden size, {found.vocab_size})")
        shape = found.hidden_size, found.vocab_size
    if not isinstance(shape, Sequence) or len(shape) != 2:
        raise TypeError(f"a shape is {shape!r}; a name, (hidden size, vocabulary) or a ParallelLMHead is accepted")
    hidden_size, vocab_size = positive("hidden size", shape[0]), positive("vocabulary", shape[1])
    try:
        shards = shard_vocab(vocab_size, comm.size)
    except ValueError:  # padding to 64 does not divide
        shards = VocabShard.even(vocab_size, comm.size)
    return ParallelLMHead.seeded(seed, shards, comm.rank, hidden_size=hidden_size, dtype=dtype, library=library)


def _capturable(comm: Any, head: ParallelLMHead) -> bool:
    return not arrays.is_host(head.weight) and bool(getattr(comm, "capturable", False))


def _point(
    processor: LogitsProcessor, head: ParallelLMHead, rows: int, captured: bool, calls: int, pairs: int, seed: int
) -> Point:
    """Both ways at one batch size, and the local argmax against itself."""
    comm = processor.comm
    full = LogitsProcessor(comm, layout=processor.layout, backend=processor.backend, mode="full")
    hidden = weights.seeded_rows(seed + 1, 0, rows, head.hidden_size).astype(head.weight.dtype)
    hidden = arrays.namespace(head.weight).asarray(hidden)
    ways: dict[str, Callable[[], Any]] = {
        "full": lambda: full.get_top_tokens(head, hidden),
        "local": lambda: processor.get_top_tokens(head, hidden),
    }
    ways["again"] = ways["local"]
    tokens = {name: np.asarray(_to_host(way())) for name, way in ways.items()}
    differ = max(comm.exchange(int((tokens["full"] != tokens["local"]).sum())))
    if differ and not processor.fused:  # a fused product may round to another logit: see LogitsProcessor
        raise RuntimeError(
            f"both ways differ in {differ} of {rows} tokens of a head of {head.weight.shape}; nothing is timed"
        )
    samples = _samples(ways, comm, not arrays.is_host(hidden), captured, calls, pairs)
    slowest = {name: np.max(comm.exchange(mine), axis=0) for name, mine in samples.items()}
    return point(rows, slowest["full"], slowest["local"], slowest["again"])


def _samples(
    ways: dict[str, Callable[[], Any]], comm: Any, on_gpu: bool, captured: bool, calls: int, pairs: int
) -> dict[str, np.ndarray]:
    barrier = getattr(comm, "barrier", lambda: comm.exchange(None))
    if not captured:
        return timing.time_called(ways, calls, pairs, barrier, _wait if on_gpu else lambda: None)
    graphs: dict[str, timing.Captured] = {}
    try:
        for name, way in ways.items():
            graphs[name] = timing.Captured([way] * calls)
        return timing.time_captured(graphs, pairs, barrier)
    finally:
        _wait()
        for graph in graphs.values():
            graph.close()


def _entry(head: ParallelLMHead, captured: bool, points: Sequence[Point]) -> Entry:
    """What was measured of a head, and the size from which the local argmax does not clearly cost."""
    sizes = [one.rows for one in points]
    judged = [one.saved if one.verdict == COSTS else max(one.saved, 1e-3) for one in points]
    start = pays_from(sizes, np.array(judged))
    first = None if math.isinf(start) else max(math.ceil(start), 1)
    saved = tuple(round(one.saved, 3) for one in points)
    verdicts = tuple(one.verdict for one in points)
    return Entry(head.hidden_size, head.shard.vocab_size, captured, tuple(sizes), saved, verdicts, first)


def _to_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def _wait() -> None:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
