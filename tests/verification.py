"""Greedy verification in plain Python, written from the rules alone, and requests to try them on.

Nothing here is taken from the package: a mistake of the package's own rules shows as a difference.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

Outcome = tuple[list[list[int]], list[int], list[int]]


def single(number: float) -> float:
    """The fp32 number nearest to a number."""
    return struct.unpack("<f", struct.pack("<f", number))[0]


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


def uniform(seed: int, position: int) -> float:
    """The draw of a seed and a position: the first word of Philox4x32-10, as a number in (0, 1)."""
    mask = 0xFFFFFFFF
    counter = [position & mask, position >> 32 & mask, 0, 0]
    key = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 32) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    word = counter[0] if counter[0] < 2**31 else counter[0] - 2**32
    step = single(4.6566127342e-10)
    return max(single(single(~word if word < 0 else word) * step), step)


def reference(
    argmax: Sequence[int],
    draft_ids: Sequence[int],
    cu: Sequence[int],
    k: int,
    positions: Sequence[int],
    seq_lens: Sequence[int],
    prefill_lens: Sequence[int],
    seeds: Sequence[int],
    vocab: int,
    rates: Sequence[float] | None = None,
) -> Outcome:
    """Tokens, and how many were sampled and rejected, request by request and draft by draft."""
    tokens, sampled, rejected = [], [], []
    for r in range(len(cu) - 1):
        start, end = int(cu[r]), int(cu[r + 1])
        line = [-1] * (k + 1)
        tokens.append(line)
        if start == end or seq_lens[r] < prefill_lens[r]:
            sampled.append(0)
            rejected.append(0)
            continue
        accepted = 0
        for i in range(end - start - 1):
            judged, row = start + i, start + i + 1
            draft, best = int(draft_ids[row]), int(argmax[judged])
            if positions[row] - (row - start) < prefill_lens[r]:
                draft = -1
            if draft < 0 or draft >= vocab:
                good = False
            elif rates is None:
                good = draft == best
            else:
                good = uniform(int(seeds[r]), int(positions[judged])) < float(rates[i])
            line[i] = draft if good else best
            if not good:
                break
            accepted += 1
        if accepted == end - start - 1:
            line[accepted] = int(argmax[end - 1])
        sampled.append(accepted + 1)
        rejected.append(end - start - accepted - 1)
    return tokens, sampled, rejected


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
