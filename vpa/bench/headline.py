"""The headline: are the tokens right, and what do they cost against the existing path?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vpa import backends
from vpa.bench import arms
from vpa.bench.experiment import Progress, Row, checks, inputs_of, row_of
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job
from vpa.bench.settings import Settings
from vpa.bench.steps import COLD_ROUNDS, Step, floor_steps, pair, ring_of, timed, unable


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
        reason = unable(arms.existing(job.library.__name__), job)
        if reason:
            yield row_of(settings, job, rows, dtype, name, "existing", None, skipped=reason)
        for gather, mode, cache in points(job):
            progress(f"timing {rows} rows, gather {gather}, {mode}, {cache}")
            steps = _steps(settings, job, parts, expected[:rows], gather, ring_of(parts[job.timed], cache))
            calls = settings.calls if cache == "hot" else len(steps["fused"].calls)
            rounds = settings.rounds if cache == "hot" else min(settings.rounds, COLD_ROUNDS)
            wrong, kernels, samples = timed(job, steps, mode, calls, rounds)
            for arm, step in steps.items():
                yield row_of(
                    settings, job, rows, dtype, name, arm, wrong[arm], external=step.external, gather=gather, mode=mode,
                    cache=cache, calls=calls, kernels=kernels.get(arm), samples=job.largest(samples[arm]),
                )  # fmt: skip


def _steps(
    settings: Settings, job: Job, parts: dict[int, Any], expected: np.ndarray, gather: str, ring: list[Any]
) -> dict[str, Step]:
    """The arms and floors at one batch size. ``ring``: copies of the timed rank's logits, one for each call."""
    library = job.library.__name__
    module = backends.select(settings.backend, parts[job.timed])
    fused = arms.fused(module, settings.layout, library, job.plan(parts[job.timed]).splits)
    made = [arms.existing(library), arms.if_installed(arms.existing_torch) if library == "cupy" else "", fused]
    able = [arm for arm in made if isinstance(arm, arms.Arm) and not unable(arm, job)]
    steps = {arm.name: pair(arm, job, parts, ring, expected, gather) for arm in able}
    steps["fused (again)"] = steps["fused"]  # the same arm against itself: what a difference must exceed
    steps.update(floor_steps(ring, library))
    if gather == "included":
        shape, dtype = fused.contribution(len(expected))
        send = job.library.zeros(shape, dtype)
        recv = job.library.empty((job.tp_size * shape[0], *shape[1:]), dtype)
        steps["floor: bare gather"] = Step([lambda: job.comm.all_gather(send, recv)], library)
    return steps


def points(job: Job) -> Iterator[tuple[str, str, str]]:
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
