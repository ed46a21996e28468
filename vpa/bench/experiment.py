"""What all experiments share: their inputs, the check of every row before any timing, and the rows of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vpa.bench.inputs import HeadInput, family_logits, head_logits
from vpa.bench.job import Job, wrong_rows
from vpa.bench.settings import Settings
from vpa.order import LOGITS_DTYPES

#: One entry of a record; see docs/measuring.md.
Row = dict[str, Any]

Progress = Callable[[str], None]


def inputs_of(settings: Settings, job: Job, source: HeadInput | None) -> Iterator[tuple[str, str, dict[int, Any]]]:
    """Every input that is asked for: (name, dtype, logits of the played ranks), at the largest number of rows.

    Without a head each family in each dtype; with one, its product with the hidden states, rounded to each dtype.
    """
    rows = max(settings.rows)
    if source is None:
        for family in settings.families:
            for dtype in settings.dtypes:
                yield family, dtype, family_logits(family, settings.seed, rows, dtype, job)
        return
    product = head_logits(source, settings.seed, rows, job)
    for dtype in settings.dtypes:
        with np.errstate(all="ignore"):  # what fp16 does not hold is an infinity, a logit like others
            rounded = {rank: logits.astype(LOGITS_DTYPES[dtype]) for rank, logits in product.items()}
        yield "head", dtype, rounded


def checks(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """The tokens that the public functions give, compared with the oracle, for every input and batch size."""
    for name, dtype, logits in inputs_of(settings, job, source):
        progress(f"checking {name} {dtype}")
        expected = job.full_argmax(logits)
        for rows in settings.rows:
            tokens = job.top_tokens({rank: array[:rows] for rank, array in logits.items()}, settings.layout)
            wrong = job.total(wrong_rows(tokens, expected[:rows]))
            yield row_of(settings, job, rows, dtype, name, "get_top_tokens", wrong)


def modes(job: Job) -> tuple[str, ...]:
    """How work with collectives is timed: on the host; eagerly and, where they allow that, as one CUDA graph."""
    if job.library is np:
        return ("host",)
    return ("captured", "eager") if job.comm.capturable else ("eager",)


def row_of(
    settings: Settings,
    job: Job,
    rows: int,
    dtype: str,
    name: str,
    arm: str,
    wrong: int | None,
    *,
    external: bool = False,
    part: str = "",
    strides: str = "",
    gather: str = "",
    mode: str = "",
    cache: str = "",
    calls: int = 0,
    kernels: float | None = None,
    samples: np.ndarray | None = None,
    skipped: str = "",
    bytes_moved: int | None = None,
    hidden_size: int | None = None,
    acceptance_length: float | None = None,
    sampling_requests: int | None = None,
) -> Row:
    """A row of the record. Every rank makes the same: ``wrong`` and ``samples`` are those of all ranks.

    part, strides: where an experiment has parts of its arms, and several layouts of memory; else empty. bytes_moved:
    that a rank has after the gather, where an experiment compares that. hidden_size: of a head whose size it varies.
    acceptance_length: mean tokens of the requests that sample any, where drafts are verified; sampling_requests: these.
    """
    shard = job.shards[0]
    return {
        "rows": rows, "dtype": dtype, "input": name, "seed": settings.seed, "vocab": shard.vocab_size,
        "tp": job.tp_size, "columns": shard.width, "layout": settings.layout, "backend": job.backend, "gather": gather,
        "mode": mode, "cache": cache, "arm": arm, "part": part, "strides": strides, "external": external,
        "kernels": kernels, "wrong": wrong, "skipped": skipped, "calls": calls,
        "samples_us": [] if samples is None else [round(float(sample), 3) for sample in samples],
        "median_us": None if samples is None else round(float(np.median(samples)), 3), "bytes_moved": bytes_moved,
        "hidden_size": hidden_size,
        "acceptance_length": None if acceptance_length is None else round(acceptance_length, 4),
        "sampling_requests": sampling_requests,
    }  # fmt: skip
