"""The numpy backend against NumPy's own argmax of widened logits, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from vpa.backends import numpy_
from vpa.bench import arms, floors, timing
from vpa.bench.headline import Row, checks, logits_of, row_of
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job, wrong_rows
from vpa.bench.settings import Settings


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Callable[[str], None]) -> Iterator[Row]:
    """Checks as in the headline; then, for each dtype and batch size, the timed rank's whole scan and pick."""
    yield from checks(settings, job, source, progress)
    if settings.check_only:
        return
    fused = arms.fused(numpy_, settings.layout, "numpy")
    for name, dtype, logits in logits_of(settings, job, source):
        shard = job.shards[job.timed]
        ids = shard.ids()
        for rows in settings.rows:
            if rows == 0 or not shard.valid:
                continue
            progress(f"timing {rows} rows of {dtype}")
            part = logits[job.timed][:rows]
            valid = np.ascontiguousarray(part[:, ids >= 0])  # row-major, as the yardstick is best
            candidates = np.empty(*fused.contribution(rows))

            def ours(part=part, shard=shard, candidates=candidates, rows=rows) -> np.ndarray:
                fused.local(part, shard, candidates)
                return fused.finish(candidates, rows)

            def widened(valid=valid) -> np.ndarray:
                return valid.astype(np.float32).argmax(axis=1)

            expected = ids[ids >= 0][widened()]
            wrong = {"existing": 0, "fused": wrong_rows(ours(), expected), "floor: plain read": None}
            steps = {"existing": widened, "fused": ours, "floor: plain read": floors.plain_read(valid)}
            barrier = getattr(job.comm, "barrier", lambda: None)
            samples = timing.time_called(steps, settings.calls, settings.rounds, barrier, lambda: None)
            for arm in steps:
                slowest = job.largest(samples[arm])
                yield row_of(settings, job, rows, dtype, name, arm, wrong[arm], mode="host", samples=slowest)
