"""A draft loop with the local argmax and with the full gather: tokens at every position, times and bytes of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vpa import weights
from vpa.bench.experiment import Progress, Row, modes, row_of
from vpa.bench.head import kept_promise
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job, to_host, wrong_rows
from vpa.bench.settings import Settings
from vpa.bench.steps import Step, timed
from vpa.bench.ways import FULL, LOCAL, NO_HEAD, gathered_for_tokens, remembering
from vpa.draft import draft_by, full_selection
from vpa.drafters import NemotronHMTP, seeded_drafter, validate_local_argmax_reduction
from vpa.lm_head import ParallelLMHead
from vpa.logits import LogitsProcessor
from vpa.mtp import mixed
from vpa.order import LOGITS_DTYPES

FUSED = "fused product"

#: Tokens that a family drafts at a time, where none are asked for.
DRAFT_TOKENS = {"nemotron-h": 7, "deepseek": 3, "deepseek-v3.2": 3}


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a loop starts from, of the largest batch: hidden states, last tokens and their positions, from 0 on."""

    hidden: Any
    token_ids: Any
    positions: Any

    def of(self, rows: int) -> dict[str, Any]:
        """The arguments of a loop over the first rows."""
        return {"token_ids": self.token_ids[:rows], "positions": self.positions[:rows]}


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """Rows of the record: of every family and dtype the tokens of both arms at every position, checked against the
    oracle over the same logits; then, unless ``check_only``, the times of a step in the first dtype."""
    for dtype in settings.dtypes:
        for family in settings.drafters:
            progress(f"making {family} in {dtype}")
            drafter = _drafter(settings, job, source, family, dtype)
            validate_local_argmax_reduction(drafter)
            count = settings.draft_tokens[0] if settings.draft_tokens else DRAFT_TOKENS[family]
            given = _given(settings, job, source, drafter)
            for rows in settings.rows:
                progress(f"checking {rows} rows of {family} in {dtype}")
                wrong, drafts = _checked(job, drafter, given, rows, count)
                for arm, by_position in wrong.items():
                    for position, tokens in enumerate(by_position):
                        part = f"position {position}"
                        yield row_of(settings, job, rows, dtype, family, arm, job.total(int(tokens)), part=part)
                if rows and not settings.check_only and dtype == settings.dtypes[0]:
                    progress(f"timing {rows} rows of {family} in {dtype}")
                    yield from _timed(settings, job, drafter, given, rows, drafts, family, dtype)


def _checked(job: Job, drafter: Any, given: _Given, rows: int, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Wrong tokens of each arm at each position, and the right drafts [rows, count].

    All of one position pick from the same logits, which are computed once; the next position follows the right token.
    The fused product has sums of its own, and is held to what it promises: see ``vpa.bench.head.kept_promise``.
    """
    fused = _fused(job, drafter)
    drafter = _remembering(drafter)
    arms = {FULL: full_selection(drafter), LOCAL: drafter.get_top_tokens}
    if fused is not None:
        arms[FUSED] = fused.get_top_tokens
    wrong = {arm: np.zeros(count, np.int64) for arm in arms}

    def select(hidden: Any, step: int) -> Any:
        parts = job.by_rank(drafter.compute_logits_local(hidden, step))
        right = job.full_argmax(parts)
        for arm, way in arms.items():
            tokens = to_host(way(hidden, step))
            if arm == FUSED:
                tokens = kept_promise(job, parts, tokens, right)
            wrong[arm][step] = wrong_rows(tokens, right)
        return job.place(right)

    drafts = draft_by(select, drafter, given.hidden[:rows], count, **given.of(rows))
    return wrong, to_host(drafts)


def _fused(job: Job, drafter: Any) -> Any:
    """The same drafter with a fused product; None where it has none: without a GPU, or by other backends."""
    processor = drafter.logits_processor
    if job.library is np or processor.backend not in (None, "raw") or processor.layout != "packed":
        return None
    return dataclasses.replace(drafter, logits_processor=dataclasses.replace(processor, fused=True))


def _timed(
    settings: Settings, job: Job, drafter: Any, given: _Given, rows: int, drafts: np.ndarray, family: str, dtype: str
) -> Iterator[Row]:
    """The time of a step: that of a whole loop divided by its positions. What is timed is checked, token by token; a
    fused product, whose drafts may part from the others', by what it promises at each position."""
    hidden, count = given.hidden[:rows], drafts.shape[1]
    fused = _fused(job, drafter)
    ways: dict[str, Callable[[Any, int], Any]] = {FULL: full_selection(drafter), LOCAL: drafter.get_top_tokens}
    if fused is not None:
        ways[FUSED] = fused.get_top_tokens
    ways[NO_HEAD] = lambda hidden, step: given.token_ids[:rows]

    def loop(way: Callable[[Any, int], Any]) -> Callable[[], Any]:
        return lambda: draft_by(way, drafter, hidden, count, **given.of(rows))

    moved = gathered_for_tokens(job, drafter.head_of(0), rows, settings.layout)
    moved[FUSED] = moved[LOCAL] if job.tp_size == 1 else job.tp_size * rows * 8
    for mode in modes(job):
        steps = {arm: Step([loop(way)], job.library.__name__) for arm, way in ways.items()}
        for arm in (FULL, LOCAL):
            steps[arm] = dataclasses.replace(steps[arm], expected=drafts)
        if fused is not None:
            steps[FUSED] = dataclasses.replace(
                steps[FUSED], expected=drafts, tokens=_along(job, drafter, given, drafts)
            )
        wrong, kernels, samples = timed(job, steps, mode, settings.calls, settings.rounds)
        for arm in steps:
            yield row_of(
                settings, job, rows, dtype, family, arm, wrong[arm], mode=mode, cache="hot",
                gather="excluded" if job.emulated else "included", calls=settings.calls * count,
                kernels=None if kernels.get(arm) is None else round(kernels[arm] / count, 2),
                samples=job.largest(samples[arm]) / count, bytes_moved=moved.get(arm),
            )  # fmt: skip


def _along(job: Job, drafter: Any, given: _Given, right: np.ndarray) -> Callable[[Any], np.ndarray]:
    """Drafts of a fused product, on the host, as ``right`` [rows, count] where each follows from those before it by
    what the product promises, and -1 elsewhere."""

    def judged(drafts: Any) -> np.ndarray:
        drafts, kept = to_host(drafts), []

        def select(hidden: Any, step: int) -> Any:
            parts = job.by_rank(drafter.compute_logits_local(hidden, step))
            best = job.full_argmax(parts)
            kept.append(kept_promise(job, parts, drafts[:, step], best) == best)
            return job.place(drafts[:, step])

        rows, count = drafts.shape
        draft_by(select, drafter, given.hidden[:rows], count, **given.of(rows))
        return np.where(np.stack(kept, axis=1), right, -1)

    return judged


def _drafter(settings: Settings, job: Job, source: HeadInput | None, family: str, dtype: str) -> Any:
    """A drafter of seeded weights; with a head's file, of that head, whose rows embed the tokens too."""
    processor = LogitsProcessor(job.comm, layout=settings.layout, backend=job.backend)
    rank = None if job.emulated else job.comm.rank
    sizes = {"intermediate_size": settings.intermediate_size, "dtype": dtype, "library": job.library}
    if source is None:
        return seeded_drafter(
            family, job.shards, processor, rank=rank, seed=settings.seed, hidden_size=settings.hidden_size, **sizes
        )
    where = f"{source.head.path}:{source.head.tensor}"
    heads = [ParallelLMHead.load(where, job.shards, one, dtype=dtype, library=job.library) for one in job.played]
    embedding = weights.read_rows(source.head, 0, source.head.vocab_size).astype(LOGITS_DTYPES[dtype])
    return seeded_drafter(
        family, job.shards, processor, rank=rank, seed=settings.seed, hidden_size=source.head.hidden_size, **sizes,
        head=heads if job.emulated else heads[0], embedding=job.place(embedding),
    )  # fmt: skip


def _given(settings: Settings, job: Job, source: HeadInput | None, drafter: Any) -> _Given:
    rows, (vocab_size, hidden_size) = max(settings.rows), drafter.embedding.shape
    hidden = weights.seeded_rows(mixed(settings.seed, 3), 0, rows, hidden_size)
    if source is not None and source.hidden is not None:
        hidden = source.hidden[:rows]
    hidden = hidden.astype(drafter.embedding.dtype)
    rng = np.random.default_rng(mixed(settings.seed, 4))
    token_ids = rng.integers(0, vocab_size, rows)
    return _Given(job.place(hidden), job.place(token_ids), job.place(np.arange(rows)))


def _remembering(drafter: Any) -> Any:
    """The same drafter with heads that remember."""
    if isinstance(drafter, NemotronHMTP):
        return dataclasses.replace(drafter, lm_head=remembering(drafter.lm_head))
    return dataclasses.replace(drafter, heads={number: remembering(head) for number, head in drafter.heads.items()})
