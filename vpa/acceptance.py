"""Which drafts a greedy verification accepts: the rules in NumPy, given each row's argmax.

A request owns rows ``s .. e - 1``: row ``s`` follows its last known token, row ``s + i`` its draft ``i - 1``, and row
``e - 1`` is the bonus row. Draft ``i``, which lies at row ``s + i + 1``, is judged against the argmax of row ``s + i``.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vpa.vocab import integer

#: What stands where there is no token, and for a draft that is none.
NO_TOKEN = -1

_SMALLEST = np.float32(4.6566127342e-10)  # 2^-31, the least that a draw gives


def conditional_acceptance(
    num_draft_tokens: int, *, rates: Sequence[float] | None = None, mean: float | None = None
) -> np.ndarray:
    """Rates float32 [K] at which synthetic acceptance takes each draft, given that it took those before.

    rates: a list or array of K numbers, how often each draft is accepted at all, in [0, 1], none above the one before.
    mean: instead, the mean number of tokens of a step, 1 to K + 1: as many leading drafts are always taken as it holds
        whole ones, and the next at the rate of its fraction.

    Raises ``TypeError`` for what is neither, ``ValueError`` for numbers out of range.
    """
    count = integer("num_draft_tokens", num_draft_tokens)
    if count < 0:
        raise ValueError(f"num_draft_tokens is {count}; it is at least 0")
    if (rates is None) == (mean is None):
        raise TypeError("give either rates or mean")
    if rates is not None:
        taken = _numbers("rates", rates)
        if taken.shape != (count,):
            raise ValueError(f"{taken.size} rates for {count} drafts; one for each is accepted")
        before = np.concatenate([[1.0], taken])[:count]
        if not (np.all(taken >= 0) and np.all(taken <= before)):
            raise ValueError(f"rates are {_shown(rates)}; numbers from 0 to 1, none above the one before, are accepted")
    else:
        length = _number("mean", mean)
        if not 1 <= length <= count + 1:
            raise ValueError(f"mean is {_shown(mean)}; with {count} drafts it is 1 to {count + 1} tokens")
        taken = np.clip(length - 1 - np.arange(count), 0, 1)
        before = np.concatenate([[1.0], taken])[:count]
    with np.errstate(all="ignore"):  # a rate that fp32 does not hold is 0
        return np.divide(taken, before, out=np.zeros(count), where=before > 0).astype(np.float32)


def draws(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in (0, 1) for each pair of a 64-bit seed and a position, float32: the same on every rank.

    The first word of Philox4x32-10 with the seed as key and the position as counter, as int32, its complement where it
    is negative, times 2^-31. The largest is 0.99999994, so a rate of 1 always accepts.
    """
    word = philox(np.asarray(seeds, np.int64), np.asarray(positions, np.int64)).view(np.int32)
    magnitude = np.where(word < 0, ~word, word).astype(np.float32)  # rounds to nearest, as the kernels do
    return np.maximum(magnitude * _SMALLEST, _SMALLEST)


def philox(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The first word, uint32, of Philox4x32-10 (Salmon et al., 2011); key: the seed, counter: (position, 0)."""
    low, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    key, counter = seeds.astype(np.int64).view(np.uint64), positions.astype(np.int64).view(np.uint64)
    key, counter = np.broadcast_arrays(key, counter)
    keys = [key & mask, key >> low]
    words = [counter & mask, counter >> low, np.zeros_like(counter), np.zeros_like(counter)]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [(second >> low) ^ words[1] ^ keys[0], second & mask, (first >> low) ^ words[3] ^ keys[1], first & mask]
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & mask, (keys[1] + np.uint64(0xBB67AE85)) & mask]
    return np.ascontiguousarray(words[0]).astype(np.uint32)


def accept(
    argmax: np.ndarray,
    *,
    draft_ids: np.ndarray,
    cu_num_rows: np.ndarray,
    num_draft_tokens: int,
    positions: np.ndarray,
    seq_lens: np.ndarray,
    prefill_lens: np.ndarray,
    seeds: np.ndarray,
    vocab_size: int,
    acceptance: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens int64 [R, K + 1], -1 beyond the sampled ones, and how many were sampled and rejected, int32 [R].

    argmax, draft_ids, positions: int64 [N], of all requests' rows. cu_num_rows: int32 [R + 1], where each request's
        rows begin. seq_lens, prefill_lens: int32 [R]; seeds: int64 [R]. acceptance: conditional rates float32 [K] of
        synthetic acceptance, which takes a draft by a draw and not because it is the argmax.

    A draft outside the vocabulary, a placeholder, or one whose row still belongs to the prompt is never accepted. A
    request that is still in prefill, or has no rows, samples nothing.
    """
    begins, ends = cu_num_rows[:-1].astype(np.int64), cu_num_rows[1:].astype(np.int64)
    counts = ends - begins
    active = (counts > 0) & (seq_lens >= prefill_lens)
    tokens = np.full((len(counts), num_draft_tokens + 1), NO_TOKEN, np.int64)
    accepted = np.zeros(len(counts), np.int64)
    going = active.copy()  # every draft so far was accepted
    for i in range(num_draft_tokens):
        judged = np.flatnonzero(going & (counts - 1 > i))
        row = begins[judged] + i
        draft, best = draft_ids[row + 1], argmax[row]
        prompt = positions[row + 1] < prefill_lens[judged].astype(np.int64) + (i + 1)  # on this side nothing wraps
        possible = (draft >= 0) & (draft < vocab_size) & ~prompt
        agreed = best == draft if acceptance is None else draws(seeds[judged], positions[row]) < acceptance[i]
        taken = possible & agreed
        tokens[judged, i] = np.where(taken, draft, best)
        accepted[judged] += taken
        going[judged] = taken
    whole = np.flatnonzero(going)  # all drafts were accepted: the bonus row gives one more
    tokens[whole, counts[whole] - 1] = argmax[ends[whole] - 1]
    sampled = np.where(active, accepted + 1, 0)
    rejected = np.where(active, counts - sampled, 0)
    return tokens, sampled.astype(np.int32), rejected.astype(np.int32)


def _number(name: str, value: Any) -> float:
    """A caller's number; words and flags are none."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {_shown(value)}; a number is accepted")
    try:
        number = float(value)
    except OverflowError:  # an integer that no float holds: out of any range here
        number = math.inf if value > 0 else -math.inf
    if math.isnan(number):
        raise ValueError(f"{name} is nan; a number is accepted")
    return number


def _numbers(name: str, value: Any) -> np.ndarray:
    """A caller's numbers, float64 [n]: of an array, or of a sequence, which has an order and is not spent by a look."""
    if isinstance(value, np.ndarray):
        fits = value.ndim == 1 and not isinstance(value, np.ma.MaskedArray)
    else:
        fits = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))
    if not fits:
        raise TypeError(f"{name} is {_shown(value)}; a list or a NumPy array [n] of numbers is accepted")
    return np.array([_number(f"{name}[{place}]", one) for place, one in enumerate(value)], np.float64)


def _shown(value: Any) -> str:
    """A value in one short line."""
    return " ".join(reprlib.repr(value).split())
