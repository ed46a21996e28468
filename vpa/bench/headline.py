"""The headline: are the tokens right, and what do they cost against the existing path?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa import backends
from vpa.bench import arms, floors, timing
from vpa.bench.inputs import HeadInput, family_logits, head_logits
from vpa.bench.job import Job, copy, to_host, wait, wrong_rows
from vpa.bench.settings import Settings
from vpa.order import LOGITS_DTYPES, MAX_PAIRS_VOCAB_SIZE

Row = dict[str, Any]


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Callable[[str], None]) -> Iterator[Row]:
    """Rows of the record, in order: first the checks of every family and dtype, then, unless ``check_only``, the times.

    Every rank yields the same rows. A row: its settings, ``arm``, ``wrong`` (rows with a wrong token over all ranks;
    None for floors), ``samples_us`` and ``median_us`` (empty and None for checks).
    """
    yield from checks(settings, job, source, progress)
    if not settings.check_only:
        yield from _times(settings, job, source, progress)


def logits_of(settings: Settings, job: Job, source: HeadInput | None) -> Iterator[tuple[str, str, dict[int, Any]]]:
    """(input, dtype, logits of the played ranks) at the largest number of rows."""
    rows = max(settings.rows)
    if source is None:
        for family in settings.families:
            for dtype in settings.dtypes:
                yield family, dtype, family_logits(family, settings.seed, rows, dtype, job)
        return
    product = head_logits(source, settings.seed, rows, job)
    for dtype in settings.dtypes:
        yield "head", dtype, {rank: logits.astype(LOGITS_DTYPES[dtype]) for rank, logits in product.items()}


def checks(settings: Settings, job: Job, source: HeadInput | None, progress: Callable[[str], None]) -> Iterator[Row]:
    for name, dtype, logits in logits_of(settings, job, source):
        progress(f"checking {name} {dtype}")
        expected = job.full_argmax(logits)
        for rows in settings.rows:
            tokens = job.top_tokens({rank: array[:rows] for rank, array in logits.items()}, settings.layout)
            wrong = job.total(wrong_rows(tokens, expected[:rows]))
            yield row_of(settings, job, rows, dtype, name, "get_top_tokens", wrong)


def _times(settings: Settings, job: Job, source: HeadInput | None, progress: Callable[[str], None]) -> Iterator[Row]:
    """Times at the first input and dtype: each batch size, the gather excluded and included, captured and eager."""
    name, dtype, logits = next(logits_of(settings, job, source))
    expected = job.full_argmax(logits)
    for rows in settings.rows:
        parts = {rank: array[:rows] for rank, array in logits.items()}
        for communication in ("excluded", "included"):
            if rows == 0 or (communication == "included" and job.comm.size == 1):
                continue
            steps = _steps(settings, job, parts, rows, communication)
            for mode in _modes(job, communication):
                progress(f"timing {rows} rows, gather {communication}, {mode}")
                wrong, samples = _timed(settings, job, steps, mode, expected[:rows])
                for arm in steps:
                    yield row_of(
                        settings, job, rows, dtype, name, arm, wrong[arm],
                        peer=steps[arm].peer, communication=communication, mode=mode, samples=job.largest(samples[arm]),
                    )  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """One call of an arm, or of a floor, which returns no tokens. library: whose graph captures it."""

    call: Callable[[], Any]
    library: str
    gives_tokens: bool = True
    peer: bool = False


def _modes(job: Job, communication: str) -> tuple[str, ...]:
    if job.library is np:
        return ("host",)
    return ("eager",) if communication == "included" and not job.comm.capturable else ("captured", "eager")


def _steps(settings: Settings, job: Job, parts: dict[int, Any], rows: int, communication: str) -> dict[str, _Step]:
    library = job.library.__name__
    module = backends.select(settings.backend, parts[job.timed])
    fused = arms.fused(module, settings.layout, library)
    baselines = []
    if all(len(shard.ranges) == 1 for shard in job.shards) and job.shards[0].vocab_size <= MAX_PAIRS_VOCAB_SIZE:
        # it adds one number to a rank's ids, and holds them as fp32
        baselines = [arms.existing(library)]
        torch_arm = arms.existing_torch() if library == "cupy" else None
        baselines += [torch_arm] if torch_arm else []
    steps = {
        arm.name: _Step(_call(arm, job, parts, rows, communication), arm.library, peer=arm.peer)
        for arm in (*baselines, fused)
    }
    steps["fused, again"] = steps["fused"]  # the same arm against itself: what a difference must exceed
    contiguous = job.library.ascontiguousarray(parts[job.timed])
    steps["floor: plain read"] = _Step(floors.plain_read(contiguous), library, False)
    if library == "cupy":
        steps["floor: empty kernel"] = _Step(floors.empty_kernel(), library, False)
    if communication == "included":
        shape, dtype = fused.contribution(rows)
        send = job.library.zeros(shape, dtype)
        recv = job.library.empty((job.tp_size * shape[0], *shape[1:]), dtype)
        steps["floor: bare gather"] = _Step(lambda: job.comm.all_gather(send, recv), library, False)
    return steps


def _call(arm: arms.Arm, job: Job, parts: dict[int, Any], rows: int, communication: str) -> Callable[[], Any]:
    """One call of the timed rank. Where the gather is excluded, a copy of all ranks' contributions stands for it."""
    shape, dtype = arm.contribution(rows)
    contributions = {rank: job.library.empty(shape, dtype) for rank in job.played}
    for rank, contribution in contributions.items():
        arm.local(parts[rank], job.shards[rank], contribution)
    everyone = job.gather(contributions)
    logits, shard = parts[job.timed], job.shards[job.timed]
    gathered = job.library.empty_like(everyone)

    def included() -> Any:
        send = contributions[job.timed]
        arm.local(logits, shard, send)
        job.comm.all_gather(send, gathered)
        return arm.finish(gathered, rows)

    def excluded() -> Any:
        arm.local(logits, shard, everyone[job.timed * rows : (job.timed + 1) * rows])
        if job.tp_size > 1:
            copy(everyone, gathered)
        return arm.finish(gathered if job.tp_size > 1 else everyone, rows)

    return included if communication == "included" else excluded


def _timed(
    settings: Settings, job: Job, steps: dict[str, _Step], mode: str, expected: np.ndarray
) -> tuple[dict[str, int | None], dict[str, np.ndarray]]:
    """Wrong rows over all ranks, and samples, of each step. What was timed is what was checked."""
    barrier = getattr(job.comm, "barrier", lambda: None)
    if mode == "captured":
        graphs = {arm: timing.Captured(step.call, settings.calls, step.library) for arm, step in steps.items()}
        for graph in graphs.values():
            graph.launch()
        last = {arm: graph.last for arm, graph in graphs.items()}
        wait()
        wrong = _wrong(job, steps, last, expected)
        samples = timing.time_captured(graphs, settings.calls, settings.rounds, barrier)
        for graph in graphs.values():
            graph.close()
        return wrong, samples
    wrong = _wrong(job, steps, {arm: step.call() for arm, step in steps.items()}, expected)
    calls = {arm: step.call for arm, step in steps.items()}
    return wrong, timing.time_called(
        calls, settings.calls, settings.rounds, barrier, (lambda: None) if mode == "host" else wait
    )


def _wrong(job: Job, steps: dict[str, _Step], results: dict[str, Any], expected: np.ndarray) -> dict[str, int | None]:
    return {
        arm: job.total(wrong_rows(to_host(results[arm]), expected)) if step.gives_tokens else None
        for arm, step in steps.items()
    }


def row_of(
    settings: Settings,
    job: Job,
    rows: int,
    dtype: str,
    family: str,
    arm: str,
    wrong: int | None,
    *,
    peer: bool = False,
    communication: str = "",
    mode: str = "",
    samples: np.ndarray | None = None,
) -> Row:
    shard = job.shards[0]
    return {
        "rows": rows, "dtype": dtype, "input": family, "vocab": shard.vocab_size, "tp": job.tp_size,
        "columns": shard.width, "layout": settings.layout, "backend": job.backend, "communication": communication,
        "mode": mode, "arm": arm, "peer": peer, "wrong": wrong,
        "samples_us": [] if samples is None else [round(float(sample), 3) for sample in samples],
        "median_us": None if samples is None else round(float(np.median(samples)), 3),
    }  # fmt: skip
