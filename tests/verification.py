"""Argmax and outcomes in plain Python, and requests to try greedy verification on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vpa.bench.verify_rules import Outcome, reference, uniform

__all__ = ["argmax", "batch", "expected", "lists", "reference", "uniform"]


def argmax(row: Sequence[float], nan: str = "first") -> int:
    """The lowest id of the largest value; NaN is larger than any number, or is -inf if it is ignored."""
    best = 0
    if nan == "ignore":
        row = [-math.inf if math.isnan(value) else value for value in row]
    for token, value in enumerate(row):
        if math.isnan(row[best]):
            break
        if math.isnan(value) or value > row[best]:
            best = token
    return best


def lists(outcome: Any) -> Outcome:
    """The three arrays of a result, of NumPy or CuPy, as lists."""
    return tuple(array.tolist() for array in outcome)


def batch(rng: np.random.Generator, best: np.ndarray, k: int, vocab: int, requests: int = 7) -> dict[str, np.ndarray]:
    """Requests over rows whose argmax is ``best``, of which the last may be nobody's.

    Most drafts agree. There are ragged counts, no rows, no drafts, placeholders, ids outside the vocabulary, a prompt
    of which a draft is a part, and one that is still to come.
    """
    counts = rng.integers(0, k + 2, requests)
    counts[:3] = k + 1, 1, 0
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    owned, rows = int(offsets[-1]), len(best)
    assert owned <= rows
    drafts = np.concatenate([[0], best[:-1]]).astype(np.int64)
    odd = rng.random(rows)
    drafts[odd < 0.1] = rng.integers(0, vocab, int((odd < 0.1).sum()))
    drafts[(odd > 0.1) & (odd < 0.14)] = -1
    drafts[(odd > 0.14) & (odd < 0.17)] = vocab
    starts = rng.integers(5, 2**40, requests)
    prefill = np.full(requests, 5)
    prefill[-1] = 9  # still in prefill
    starts[0], starts[-2] = 5, 4  # the first one's drafts just follow the prompt, the other's still belong to it
    positions = np.zeros(rows, np.int64)
    local = [np.arange(count) for count in counts]
    positions[:owned] = np.repeat(starts, counts) + np.concatenate(local)
    return {
        "draft_ids": drafts,
        "cu_num_rows": offsets,
        "positions": positions,
        "seq_lens": np.full(requests, 8, np.int32),
        "prefill_lens": prefill.astype(np.int32),
        "seeds": rng.integers(-(2**63), 2**63 - 1, requests),
    }


def expected(best: Sequence[int], given: dict[str, Any], k: int, vocab: int, rates: Any = None) -> Outcome:
    """The reference for the arrays that ``batch`` makes."""
    return reference(
        best, given["draft_ids"], given["cu_num_rows"], k, given["positions"], given["seq_lens"],
        given["prefill_lens"], given["seeds"], vocab, rates,
    )  # fmt: skip
