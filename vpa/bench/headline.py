"""The headline: are the tokens right, and what do they cost against the existing path?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa import backends
from vpa.bench import arms, floors, timing
from vpa.bench.experiment import Progress, Row, checks, inputs_of, row_of
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job, copy, to_host, wait, wrong_rows
from vpa.bench.settings import Settings
from vpa.order import MAX_PAIRS_VOCAB_SIZE

#: A ring of inputs this many times as large as the L2 cache finds none of it there.
COLD_RING = 3

#: Rounds of a cold graph, which holds a call for each input of its ring: hundreds or thousands.
COLD_ROUNDS = 10


@dataclass(frozen=True)
class Step:
    """An arm, or a floor, as calls to time: one for each input of a ring. A floor gives no tokens.

    library: whose CUDA graph captures the calls. external: others' code, shown but not ours to be right.
    """

    calls: list[Callable[[], Any]]
    library: str
    gives_tokens: bool = True
    external: bool = False


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """Rows of the record, in order: the checks of every input, then, unless ``check_only``, the times of the first."""
    yield from checks(settings, job, source, progress)
    if settings.check_only:
        return
    name, dtype, logits = next(inputs_of(settings, job, source))
    expected = job.full_argmax(logits)
    for rows in settings.rows:
        if rows == 0:
            continue
        parts = {rank: array[:rows] for rank, array in logits.items()}
        reason = _without_existing(job)
        if reason:
            yield row_of(settings, job, rows, dtype, name, "existing", None, skipped=reason)
        for gather, mode, cache in _points(job):
            progress(f"timing {rows} rows, gather {gather}, {mode}, {cache}")
            steps = steps_of(settings, job, parts, rows, gather, ring=_ring(parts[job.timed], cache))
            calls = settings.calls if cache == "hot" else len(steps["fused"].calls)
            rounds = settings.rounds if cache == "hot" else min(settings.rounds, COLD_ROUNDS)
            wrong, kernels, samples = timed(job, steps, mode, calls, rounds, expected[:rows])
            for arm, step in steps.items():
                yield row_of(
                    settings, job, rows, dtype, name, arm, wrong[arm], external=step.external, gather=gather, mode=mode,
                    cache=cache, calls=calls, kernels=kernels.get(arm), samples=job.largest(samples[arm]),
                )  # fmt: skip


def steps_of(
    settings: Settings, job: Job, parts: dict[int, Any], rows: int, gather: str, ring: list[Any]
) -> dict[str, Step]:
    """The arms and floors at one batch size. ``ring``: copies of the timed rank's logits, one for each call."""
    library = job.library.__name__
    module = backends.select(settings.backend, parts[job.timed])
    candidates = [arms.fused(module, settings.layout, library)]
    if not _without_existing(job):
        candidates = [arms.existing(library), *([arms.existing_torch()] if library == "cupy" else []), *candidates]
    steps = {
        arm.name: Step(_calls(arm, job, parts, rows, gather, ring), arm.library, external=arm.external)
        for arm in candidates
        if arm is not None
    }
    steps["fused (again)"] = steps["fused"]  # the same arm against itself: what a difference must exceed
    steps["floor: plain read"] = Step([floors.plain_read(logits) for logits in ring], library, gives_tokens=False)
    if library == "cupy":
        steps["floor: empty kernel"] = Step([floors.empty_kernel()] * len(ring), library, gives_tokens=False)
    if gather == "included":
        shape, dtype = candidates[-1].contribution(rows)
        send = job.library.zeros(shape, dtype)
        recv = job.library.empty((job.tp_size * shape[0], *shape[1:]), dtype)
        steps["floor: bare gather"] = Step([lambda: job.comm.all_gather(send, recv)], library, gives_tokens=False)
    return steps


def timed(
    job: Job, steps: dict[str, Step], mode: str, calls: int, rounds: int, expected: np.ndarray
) -> tuple[dict[str, int | None], dict[str, float | None], dict[str, np.ndarray]]:
    """Wrong rows over all ranks, kernel nodes per call, and samples, of each step. What is timed is what is checked."""
    barrier = job.comm.barrier
    if mode == "captured":
        graphs = {
            arm: timing.Captured([step.calls[i % len(step.calls)] for i in range(calls)], step.library)
            for arm, step in steps.items()
        }
        samples = timing.time_captured(graphs, rounds, barrier)
        wait()
        wrong = _wrong(job, steps, {arm: graph.last for arm, graph in graphs.items()}, expected)
        kernels = {arm: graph.kernels for arm, graph in graphs.items()}
        for graph in graphs.values():
            graph.close()
        return wrong, kernels, samples
    wrong = _wrong(job, steps, {arm: step.calls[0]() for arm, step in steps.items()}, expected)
    eager = {arm: step.calls[0] for arm, step in steps.items()}
    finish = wait if mode == "eager" else lambda: None
    return wrong, {}, timing.time_called(eager, calls, rounds, barrier, finish)


def _points(job: Job) -> Iterator[tuple[str, str, str]]:
    """(gather, mode, cache) of what is timed at a batch size."""
    for gather in ("excluded", "included"):
        if gather == "included" and job.comm.size == 1:
            continue
        if job.library is np:
            yield gather, "host", "hot"
            continue
        if gather == "excluded" or job.comm.capturable:
            yield gather, "captured", "hot"
        if gather == "excluded":
            yield gather, "captured", "cold"
        yield gather, "eager", "hot"


def _ring(logits: Any, cache: str) -> list[Any]:
    """The logits themselves for a hot cache; for a cold one as many copies as leave none of them in it."""
    if cache == "hot":
        return [logits]
    import cupy

    l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
    return [logits.copy() for _ in range(-(-COLD_RING * l2 // logits.nbytes))]


def _without_existing(job: Job) -> str:
    """Why the existing path cannot run; empty if it can."""
    if any(len(shard.ranges) != 1 for shard in job.shards):
        return "it adds one number to a rank's ids; here a rank has no column, or several ranges"
    if job.shards[0].vocab_size > MAX_PAIRS_VOCAB_SIZE:
        return f"it holds ids as fp32, exact below 2^24; the vocabulary has {job.shards[0].vocab_size}"
    return ""


def _calls(
    arm: arms.Arm, job: Job, parts: dict[int, Any], rows: int, gather: str, ring: list[Any]
) -> list[Callable[[], Any]]:
    """One call of the timed rank for each of its inputs.

    Where the gather is excluded, a copy of all ranks' contributions stands for it. Buffers are shared by the calls.
    """
    shape, dtype = arm.contribution(rows)
    contributions = {rank: job.library.empty(shape, dtype) for rank in job.played}
    for rank, contribution in contributions.items():
        arm.local(arm.wrap(parts[rank]), job.shards[rank], arm.wrap(contribution))
    everyone = job.gather(contributions)
    gathered = job.library.empty_like(everyone)
    shard, tp_size = job.shards[job.timed], job.tp_size
    mine = contributions[job.timed] if gather == "included" else everyone[job.timed * rows : (job.timed + 1) * rows]
    last = gathered if tp_size > 1 else everyone
    wrapped_mine, wrapped_last = arm.wrap(mine), arm.wrap(last)

    def call_on(logits: Any) -> Callable[[], Any]:
        wrapped = arm.wrap(logits)

        def call() -> Any:
            arm.local(wrapped, shard, wrapped_mine)
            if gather == "included":
                job.comm.all_gather(mine, gathered)
            elif tp_size > 1:
                copy(everyone, gathered)
            return arm.finish(wrapped_last, rows)

        return call

    return [call_on(logits) for logits in ring]


def _wrong(job: Job, steps: dict[str, Step], results: dict[str, Any], expected: np.ndarray) -> dict[str, int | None]:
    return {
        arm: job.total(wrong_rows(to_host(results[arm]), expected)) if step.gives_tokens else None
        for arm, step in steps.items()
    }
