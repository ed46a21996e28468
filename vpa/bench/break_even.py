"""Where the local argmax pays: both ways to tokens, over batch sizes, in pairs of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from vpa import weights
from vpa.bench.experiment import Progress, Row, modes, row_of
from vpa.bench.inputs import HeadInput, family_logits
from vpa.bench.job import Job, shards_of, to_host, wrong_rows
from vpa.bench.settings import Settings
from vpa.bench.steps import Step, timed
from vpa.bench.ways import FULL, LOCAL, gathered_for_tokens
from vpa.full_gather import full_argmax
from vpa.lm_head import Head, ParallelLMHead
from vpa.logits import LogitsProcessor
from vpa.mtp import mixed
from vpa.order import LOGITS_DTYPES
from vpa.shapes import Shape, shape_of

AGAIN = f"{LOCAL} (again)"
PRODUCT, GATHER_LOGITS, GATHER_CANDIDATES = "floor: product", "floor: gather of logits", "floor: gather of candidates"

#: Rows from which a sample has a quarter of the calls: the full gather of one call takes milliseconds there.
FEWER_CALLS_FROM = 256


@dataclasses.dataclass(frozen=True, eq=False)
class GivenLogits(ParallelLMHead):
    """A head whose product is given: for as many hidden states as there are, the first rows of ``logits`` [B, width].

    So both arms pick from the very same logits, by the functions that they go through with any other head.
    """

    logits: Any = None

    def product(self, hidden: Any) -> Any:
        return self.logits[: len(hidden)]


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """Rows of the record: for every shape, dtype and batch size the tokens of both arms, checked against the oracle
    over the same logits; then, unless ``check_only``, the times of the first dtype."""
    shapes = [shape_of(name) for name in settings.shapes]
    if source is not None:
        shapes = [Shape("head", source.head.hidden_size, source.head.vocab_size, source.head.path)]
    for shape in shapes:
        here = dataclasses.replace(job, shards=shards_of(shape.vocab_size, job.tp_size)[0])
        for dtype in settings.dtypes:
            progress(f"making {shape.name} in {dtype}")
            study = _Study.of(settings, here, shape, source, dtype)
            for rows in settings.rows:
                progress(f"{rows} rows of {shape.name} in {dtype}")
                right = yield from study.checks(rows)
                if rows and not settings.check_only and dtype == settings.dtypes[0]:
                    yield from study.times(rows, right)


@dataclasses.dataclass(frozen=True)
class _Study:
    """One shape in one dtype: heads of the played ranks and hidden states [most rows, hidden], or logits instead."""

    settings: Settings
    job: Job
    name: str
    hidden_size: int | None
    dtype: str
    processor: LogitsProcessor
    head: Head
    hidden: Any

    @classmethod
    def of(cls, settings: Settings, job: Job, shape: Shape, source: HeadInput | None, dtype: str) -> _Study:
        rows, given = max(settings.rows), settings.source == "logits"
        if given:
            logits = family_logits("random", settings.seed, rows, dtype, job)
            heads: list[ParallelLMHead] = [_given(job, rank, logits[rank]) for rank in job.played]
            hidden = job.place(np.zeros((rows, 1), LOGITS_DTYPES[dtype]))
        else:
            heads, hidden = _made(settings, job, shape, source, dtype)
        processor = LogitsProcessor(job.comm, layout=settings.layout, backend=job.backend)
        name = f"{shape.name} logits" if given else shape.name
        hidden_size = None if given else shape.hidden_size
        return cls(settings, job, name, hidden_size, dtype, processor, heads if job.emulated else heads[0], hidden)

    def checks(self, rows: int) -> Iterator[Row]:
        """Rows with the wrong tokens of each arm at one batch size; returns the right tokens."""
        job, hidden = self.job, self.hidden[:rows]
        parts = self.processor.compute_logits_local(self.head, hidden)
        parts = job.by_rank(parts)
        given = [_given(job, rank, part) for rank, part in parts.items()]
        head = given if job.emulated else given[0]
        right = job.full_argmax(parts)
        tokens = {FULL: self.full(head, hidden), LOCAL: self.processor.get_top_tokens(head, hidden)}
        for arm, found in tokens.items():
            yield self.row(rows, arm, job.total(wrong_rows(to_host(found), right)))
        return right

    def times(self, rows: int, right: np.ndarray) -> Iterator[Row]:
        """Rows with the times of the arms and floors at one batch size, in each mode."""
        job, settings, hidden = self.job, self.settings, self.hidden[:rows]
        library = job.library.__name__
        local = Step([lambda: self.processor.get_top_tokens(self.head, hidden)], library, right)
        steps = {FULL: Step([lambda: self.full(self.head, hidden)], library, right), LOCAL: local, AGAIN: local}
        moved = gathered_for_tokens(job, self.head, rows, settings.layout)
        moved[AGAIN] = moved[LOCAL]
        if self.hidden_size is not None:
            heads = self.head if job.emulated else [self.head]
            steps[PRODUCT] = Step([lambda: [head.product(hidden) for head in heads]], library)
        if job.comm.size > 1:
            for arm, count in ((GATHER_LOGITS, moved[FULL]), (GATHER_CANDIDATES, moved[LOCAL])):
                steps[arm], moved[arm] = _bare_gather(job, count), count
        for mode in modes(job):
            calls = max(settings.calls // (4 if rows >= FEWER_CALLS_FROM else 1), 1)
            wrong, kernels, samples = timed(job, steps, mode, calls, settings.rounds)
            for arm in steps:
                yield self.row(
                    rows, arm, wrong[arm], mode=mode, cache="hot", calls=calls, kernels=kernels.get(arm),
                    samples=job.largest(samples[arm]), bytes_moved=moved.get(arm),
                    gather="excluded" if job.emulated else "included",
                )  # fmt: skip

    def full(self, head: Head, hidden: Any) -> Any:
        """The tokens by way of all logits."""
        return full_argmax(self.processor.compute_logits(head, hidden))

    def row(self, rows: int, arm: str, wrong: int | None, **more: Any) -> Row:
        more["hidden_size"] = self.hidden_size
        return row_of(self.settings, self.job, rows, self.dtype, self.name, arm, wrong, **more)


def _given(job: Job, rank: int, logits: Any) -> GivenLogits:
    weight = job.place(np.zeros((job.shards[rank].width, 1), logits.dtype))
    return GivenLogits(weight, job.shards, rank, logits=logits)


def _made(
    settings: Settings, job: Job, shape: Shape, source: HeadInput | None, dtype: str
) -> tuple[list[ParallelLMHead], Any]:
    """The played ranks' heads, seeded or read from a file, and hidden states [most rows, hidden]."""
    made = {"dtype": dtype, "library": job.library}
    if source is None:
        size = shape.hidden_size
        heads = [ParallelLMHead.seeded(settings.seed, job.shards, r, hidden_size=size, **made) for r in job.played]
    else:
        where = f"{source.head.path}:{source.head.tensor}"
        heads = [ParallelLMHead.load(where, job.shards, rank, **made) for rank in job.played]
    rows = max(settings.rows)
    hidden = weights.seeded_rows(mixed(settings.seed, 3), 0, rows, heads[0].hidden_size)
    if source is not None and source.hidden is not None:
        hidden = source.hidden[:rows]
    return heads, job.place(hidden.astype(LOGITS_DTYPES[dtype]))


def _bare_gather(job: Job, total: int) -> Step:
    """The collective alone, of ``total`` bytes of all ranks."""
    send = job.library.zeros(total // job.tp_size, np.uint8)
    recv = job.library.empty(total, np.uint8)
    return Step([lambda: job.comm.all_gather(send, recv)], job.library.__name__)
