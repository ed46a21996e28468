"""Seeded input families: every logit is a function of seed, row and global id alone.

So a rank makes its own shard without another's data, the number of ranks changes no value, and any logit can be made
again from a record. Only integers and exact conversions are used: no value depends on a vector unit's rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from vpa.vocab import VocabShard

#: Padding columns hold this, so that a scan that reads one gives a wrong token.
PADDING = np.float32(np.nan)

_BLOCK = 1 << 18  # logits made at once: temporaries of 64 bits each stay in cache, and are few for a huge vocabulary


def make_shard(family: str, seed: int, rows: int, shard: VocabShard, dtype: np.dtype) -> np.ndarray:
    """The logits [rows, shard.width] of one rank, as a NumPy array of ``dtype`` (bf16, fp16 or fp32)."""
    logits = np.full((rows, shard.width), PADDING, dtype)
    for start, count, first_id in _blocks(shard):
        ids = np.arange(first_id, first_id + count)
        step = max(_BLOCK // count, 1)
        for row in range(0, rows, step):
            numbers = np.arange(row, min(row + step, rows))
            values = FAMILIES[family](seed, numbers, ids, shard.vocab_size)
            logits[row : row + step, start : start + count] = values.astype(dtype)
    return logits


def _blocks(shard: VocabShard) -> Iterator[tuple[int, int, int]]:
    """The shard's ranges, cut where they are longer than ``_BLOCK``."""
    for start, count, first_id in shard.ranges:
        for done in range(0, count, _BLOCK):
            yield start + done, min(_BLOCK, count - done), first_id + done


def random(seed: int, rows: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Bell-shaped, in steps of 2^-15 between -4 and 4: the sum of four 16-bit fields of a hash."""
    bits = _hash(seed, rows, ids)
    total = np.zeros(bits.shape, np.int32)
    for field in range(4):
        total += (bits >> np.uint64(16 * field)).astype(np.uint16)
    return (total - 131070).astype(np.float32) * np.float32(2.0**-15)


def ties(seed: int, rows: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Integers from -3 to 3: every row has thousands of maxima."""
    return ((_hash(seed, rows, ids) >> np.uint64(32)) % np.uint64(7)).astype(np.float32) - np.float32(3)


def planted(seed: int, rows: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """``random`` with one large value at V/3, 2V/3 and V-1."""
    return _put(
        random(seed, rows, ids, vocab_size), ids, {vocab_size // 3: 64, 2 * vocab_size // 3: 64, vocab_size - 1: 64}
    )


def minus_inf(seed: int, rows: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """All -inf."""
    return np.full((len(rows), len(ids)), -np.inf, np.float32)


def plus_inf(seed: int, rows: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """``random`` with +inf at two ids."""
    return _put(random(seed, rows, ids, vocab_size), ids, {vocab_size // 2: np.inf, vocab_size - 1: np.inf})


def nan(seed: int, rows: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """``random`` with NaN at two ids and a large number before them."""
    large = {vocab_size // 5: 1e4, vocab_size // 3: np.nan, 3 * vocab_size // 4: np.nan}
    return _put(random(seed, rows, ids, vocab_size), ids, large)


def zeros(seed: int, rows: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """All -1, with -0 at V/4 + 3 and +0 at 3V/4."""
    values = np.full((len(rows), len(ids)), -1, np.float32)
    return _put(values, ids, {3 * vocab_size // 4: 0.0, vocab_size // 4 + 3: -0.0})


FAMILIES: dict[str, Callable[[int, np.ndarray, np.ndarray, int], np.ndarray]] = {
    function.__name__: function for function in (random, ties, planted, minus_inf, plus_inf, nan, zeros)
}


def _put(values: np.ndarray, ids: np.ndarray, planted: dict[int, float]) -> np.ndarray:
    for token, value in planted.items():
        values[:, ids == token] = value
    return values


def _hash(seed: int, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """64 well-mixed bits for each (row, id): the finalizer of SplitMix64 over a counter, twice."""
    with np.errstate(all="ignore"):
        row_state = _mix(np.uint64(seed % 2**64) + _GOLDEN * (rows.astype(np.uint64) + np.uint64(1)))
        return _mix(row_state[:, None] + _GOLDEN * ids.astype(np.uint64)[None, :])


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood's SplitMix64 finalizer (OOPSLA 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
