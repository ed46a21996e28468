"""Arms and floors as calls to time: their buffers, their inputs, and the check of what was timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from vpa.bench import floors, timing
from vpa.bench.arms import Arm
from vpa.bench.job import Job, copy, to_host, wait, wrong_rows
from vpa.order import MAX_PAIRS_VOCAB_SIZE

#: A ring of inputs this many times as large as the L2 cache finds none of it there.
COLD_RING = 3

#: Rounds of a cold graph, which holds a call for each input of its ring: hundreds or thousands.
COLD_ROUNDS = 10

#: What an experiment knows its steps by.
Key = TypeVar("Key")


@dataclass(frozen=True)
class Step:
    """An arm, a part of one, or a floor, as calls to time: one for each input of a ring.

    library: whose CUDA graph captures the calls. expected: the tokens int64 [B] that they have to give; None for a
    floor, which gives none. tokens: the tokens in a call's result, on the host. external: others' code, shown but not
    ours to be right.
    """

    calls: list[Callable[[], Any]]
    library: str
    expected: np.ndarray | None = None
    tokens: Callable[[Any], np.ndarray] = to_host
    external: bool = False


def ring_of(logits: Any, cache: str) -> list[Any]:
    """The logits themselves for a hot cache; for a cold one as many copies as leave none of them in it."""
    if cache == "hot":
        return [logits]
    import cupy

    l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
    return [logits.copy() for _ in range(-(-COLD_RING * l2 // logits.nbytes))]


def unable(arm: Arm, job: Job) -> str:
    """Why an arm cannot run on the job's shards; empty if it can."""
    if not arm.one_range:
        return ""
    if any(len(shard.ranges) != 1 for shard in job.shards):
        return "it adds one number to a rank's ids; here a rank has no column, or several ranges"
    if job.shards[0].vocab_size > MAX_PAIRS_VOCAB_SIZE:
        return f"it holds ids as fp32, exact below 2^24; the vocabulary has {job.shards[0].vocab_size}"
    return ""


def pair(arm: Arm, job: Job, parts: dict[int, Any], ring: list[Any], expected: np.ndarray, gather: str) -> Step:
    """Local part, gather and finish of the timed rank, a call for each input of its ``ring``. Calls share buffers.

    parts: the played ranks' logits. expected: the tokens. Where the gather is excluded, a copy of all ranks'
    contributions stands for it.
    """
    rows, shard, tp_size = len(ring[0]), job.shards[job.timed], job.tp_size
    everyone = _contributed(arm, job, parts)
    gathered = job.library.empty_like(everyone)
    mine = everyone[job.timed * rows : (job.timed + 1) * rows]
    if gather == "included":
        mine = job.library.empty_like(mine)
    mine[...] = 0  # what is checked is what the calls write, not what was contributed above
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

    return Step([call_on(logits) for logits in ring], arm.library, expected, arm.to_host, arm.external)


def local(arm: Arm, job: Job, ring: list[Any], expected: np.ndarray) -> Step:
    """The local part alone, a call for each input of ``ring``. expected: the tokens of the timed rank's shard alone.

    Its contribution is read by the arm's own finish, as if there were no other rank.
    """
    rows, shard = len(ring[0]), job.shards[job.timed]
    shape, dtype = arm.contribution(rows)
    mine = arm.wrap(job.library.zeros(shape, dtype))

    def call_on(logits: Any) -> Callable[[], Any]:
        wrapped = arm.wrap(logits)

        def call() -> Any:
            arm.local(wrapped, shard, mine)
            return mine

        return call

    def tokens(contribution: Any) -> np.ndarray:
        if arm.finish is None:
            return arm.to_host(contribution) + shard.ranges[0][2]
        return arm.to_host(arm.finish(contribution, rows))

    return Step([call_on(logits) for logits in ring], arm.library, expected, tokens, arm.external)


def finish(arm: Arm, job: Job, parts: dict[int, Any], expected: np.ndarray) -> Step:
    """The finish alone, on what all ranks contribute."""
    everyone, rows = arm.wrap(_contributed(arm, job, parts)), len(parts[job.timed])
    return Step([lambda: arm.finish(everyone, rows)], arm.library, expected, arm.to_host, arm.external)


def floor_steps(ring: list[Any], library: str) -> dict[str, Step]:
    """The floors that need no communication, by name, over the same ``ring`` of inputs."""
    steps = {}
    if ring[0].nbytes >= 16:  # one load
        steps["floor: plain read"] = Step([floors.plain_read(logits) for logits in ring], library)
    if library == "cupy":
        steps["floor: empty kernel"] = Step([floors.empty_kernel()] * len(ring), library)
    return steps


def timed(
    job: Job, steps: dict[Key, Step], mode: str, calls: int, rounds: int
) -> tuple[dict[Key, int | None], dict[Key, float | None], dict[Key, np.ndarray]]:
    """Wrong rows over all ranks, kernel nodes per call, and samples, of each step. What is timed is what is checked."""
    barrier = job.comm.barrier
    if mode == "captured":
        graphs = {
            key: timing.Captured([step.calls[i % len(step.calls)] for i in range(calls)], step.library)
            for key, step in steps.items()
        }
        samples = timing.time_captured(graphs, rounds, barrier)
        wait()
        wrong = {key: _wrong(job, step, graphs[key].last) for key, step in steps.items()}
        kernels = {key: graph.kernels for key, graph in graphs.items()}
        for graph in graphs.values():
            graph.close()
        return wrong, kernels, samples
    wrong = checked(job, steps)
    eager = {key: step.calls[0] for key, step in steps.items()}
    return wrong, {}, timing.time_called(eager, calls, rounds, barrier, wait if mode == "eager" else lambda: None)


def checked(job: Job, steps: dict[Key, Step]) -> dict[Key, int | None]:
    """Wrong rows over all ranks of one call of each step; None for a floor."""
    return {key: _wrong(job, step, step.calls[0]()) for key, step in steps.items()}


def _wrong(job: Job, step: Step, result: Any) -> int | None:
    return None if step.expected is None else job.total(wrong_rows(step.tokens(result), step.expected))


def _contributed(arm: Arm, job: Job, parts: dict[int, Any]) -> Any:
    """What all ranks give to the gather, in rank order."""
    shape, dtype = arm.contribution(len(parts[job.timed]))
    contributions = {rank: job.library.empty(shape, dtype) for rank in job.played}
    for rank, contribution in contributions.items():
        arm.local(arm.wrap(parts[rank]), job.shards[rank], arm.wrap(contribution))
    return job.gather(contributions)
