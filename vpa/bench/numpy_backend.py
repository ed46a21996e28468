"""The numpy backend against NumPy's own argmax of widened logits, side by side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vpa.backends import numpy_
from vpa.bench import arms, floors, timing
from vpa.bench.experiment import Progress, Row, checks, inputs_of, row_of
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job, wrong_rows
from vpa.bench.settings import Settings


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """Checks as in the headline; then, for each input, dtype and batch size, the timed rank's whole scan and pick."""
    yield from checks(settings, job, source, progress)
    if settings.check_only:
        return
    fused = arms.fused(numpy_, settings.layout, "numpy")
    for name, dtype, logits in inputs_of(settings, job, source):
        for rows in settings.rows:
            if rows == 0:
                continue
            if not all(each.num_valid for each in job.shards):  # all ranks skip, or none does: they share barriers
                yield row_of(settings, job, rows, dtype, name, "fused", None, skipped="a rank has no column")
                continue
            progress(f"timing {rows} rows of {name} {dtype}")
            shard = job.shards[job.timed]
            ids = shard.ids()
            part = logits[job.timed][:rows]
            valid = np.ascontiguousarray(part[:, ids >= 0])  # row-major, as the yardstick is best
            candidates = np.empty(*fused.contribution(rows))

            def ours(part=part, shard=shard, candidates=candidates, rows=rows) -> np.ndarray:
                fused.local(part, shard, candidates)
                return fused.finish(candidates, rows)

            def widened(valid=valid) -> np.ndarray:
                return valid.astype(np.float32).argmax(axis=1)

            wrong = {"numpy argmax": 0, "fused": job.total(wrong_rows(ours(), ids[ids >= 0][widened()]))}
            steps = {"numpy argmax": widened, "fused": ours, "floor: plain read": floors.plain_read(valid)}
            samples = timing.time_called(steps, settings.calls, settings.rounds, job.comm.barrier, lambda: None)
            for arm in steps:
                yield row_of(
                    settings, job, rows, dtype, name, arm, wrong.get(arm), mode="host", cache="hot",
                    calls=settings.calls, samples=job.largest(samples[arm]),
                )  # fmt: skip
