"""The head of one rank, from hidden states to candidates: product and scan, or both in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vpa import backends, order, weights
from vpa.bench import floors
from vpa.bench.experiment import Progress, Row, row_of
from vpa.bench.inputs import HeadInput
from vpa.bench.job import Job, to_host
from vpa.bench.settings import Settings
from vpa.bench.steps import Step, timed
from vpa.lm_head import ParallelLMHead
from vpa.mtp import mixed
from vpa.order import LOGITS_DTYPES
from vpa.pick import pick_from_candidates
from vpa.scan import local_argmax_candidates
from vpa.transform import Transform

SEPARATE, FUSED = "product, scan", "fused product"

#: How far below the largest, in steps of the keys, a token's logit may be where fp32 sums in two orders are rounded:
#: two steps of a 16-bit dtype, since one sum may round up and the other down. Sums of fp32 differ themselves: on inputs
#: such as these, of variance 1, by less than 2^10 of its steps.
_STEPS = {"bfloat16": 2 << 16, "float16": 2 << 13, "float32": 1 << 10}


def run(settings: Settings, job: Job, source: HeadInput | None, progress: Progress) -> Iterator[Row]:
    """Rows of the record, each of them checked: the timed rank's candidates, without gather and pick.

    ``product, scan``: every row has the token of host NumPy over the very logits. ``fused product``: one that it
    promises, see ``kept_promise``. Without ``check_only`` they are timed.
    """
    for dtype in settings.dtypes:
        progress(f"making a head in {dtype}")
        head, hidden = _made(settings, job, source, dtype)
        for rows in settings.rows:
            if rows:
                progress(f"{rows} rows in {dtype}")
                timing = not settings.check_only and dtype == settings.dtypes[0]
                yield from _of(settings, job, head, hidden[:rows], dtype, timing)


def _of(settings: Settings, job: Job, head: ParallelLMHead, hidden: Any, dtype: str, timing: bool) -> Iterator[Row]:
    rows, shard = len(hidden), head.shard
    logits = head.product(hidden)
    right = job.shard_argmax(logits)
    module = backends.select(settings.backend, logits)
    splits = job.plan(logits).splits(rows)
    library = job.library.__name__

    def product() -> Any:
        return head.product(hidden)

    def separate() -> Any:
        return local_argmax_candidates(head.product(hidden), shard, splits=splits, backend=settings.backend)

    def tokens(candidates: Any) -> np.ndarray:
        return to_host(pick_from_candidates(candidates, rows))

    steps = {SEPARATE: Step([separate], library, right, tokens), f"{SEPARATE} (again)": Step([separate], library)}
    if getattr(module, "head_candidates", None):
        parts = {job.timed: logits}

        def promised(candidates: Any) -> np.ndarray:
            return kept_promise(job, parts, tokens(candidates), right, alone=True)

        steps[FUSED] = Step([lambda: head.candidates(hidden, Transform())], library, right, promised)
    steps["floor: product alone"] = Step([product], library)
    steps["floor: plain read"] = Step([floors.plain_read(head.weight)], library)
    if not timing:
        for arm, step in steps.items():
            if step.expected is not None:
                wrong = job.total(int((step.tokens(step.calls[0]()) != right).sum()))
                yield row_of(settings, job, rows, dtype, "head", arm, wrong)
        return
    for mode in ("host",) if job.library is np else ("captured", "eager"):
        wrong, kernels, samples = timed(job, steps, mode, settings.calls, settings.rounds)
        for arm in steps:
            yield row_of(
                settings, job, rows, dtype, f"head of {head.hidden_size}", arm, wrong[arm], gather="excluded",
                mode=mode, cache="hot", calls=settings.calls, kernels=kernels.get(arm),
                samples=job.largest(samples[arm]),
            )  # fmt: skip


def kept_promise(
    job: Job, logits: dict[int, Any], tokens: np.ndarray, right: np.ndarray, alone: bool = False
) -> np.ndarray:
    """``tokens`` [B], with the right one where a fused product may have picked another: one whose logit, in the played
    ranks' ``logits``, is within two rounding steps of the largest. alone: of this rank's shard, without the others'."""
    step = _STEPS[next(iter(logits.values())).dtype.name]
    values = np.stack([_keys_at(job, logits, ids) for ids in (tokens, right)])
    if not alone and not job.emulated:
        values = np.max(job.comm.exchange(values), axis=0)
    return np.where(values[1] - values[0] <= step, right, tokens)


def _keys_at(job: Job, logits: dict[int, Any], ids: np.ndarray) -> np.ndarray:
    """The keys, int64 [B], of each row's logit of an id, where a played rank has it; else -2^40."""
    found = np.full(len(ids), -(1 << 40), np.int64)
    for rank, array in logits.items():
        for start, count, first_id in job.shards[rank].ranges:
            here = np.flatnonzero((ids >= first_id) & (ids < first_id + count))
            columns = start + ids[here] - first_id
            words = array.view(f"u{array.itemsize}")
            picked = to_host(words[job.place(here), job.place(columns)]).view(array.dtype)
            found[here] = order.keys(picked).astype(np.int64)
    return found


def _made(settings: Settings, job: Job, source: HeadInput | None, dtype: str) -> tuple[ParallelLMHead, Any]:
    """The timed rank's head, seeded or read from a file, and hidden states [most rows, hidden]."""
    rows = max(settings.rows)
    if source is None:
        head = ParallelLMHead.seeded(
            settings.seed, job.shards, job.timed, hidden_size=settings.hidden_size, dtype=dtype, library=job.library
        )
    else:
        where = f"{source.head.path}:{source.head.tensor}"
        head = ParallelLMHead.load(where, job.shards, job.timed, dtype=dtype, library=job.library)
    hidden = weights.seeded_rows(mixed(settings.seed, 3), 0, rows, head.hidden_size)
    if source is not None and source.hidden is not None:
        hidden = source.hidden[:rows]
    return head, job.place(hidden.astype(LOGITS_DTYPES[dtype]))
