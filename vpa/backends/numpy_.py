"""Backend ``numpy``: the specification, and the default on a machine without a GPU.

Rows are scanned as integers, in the logits' own memory: as signed words positive numbers are in order, as unsigned
words negative ones are in reverse order, so one ``argmax`` and one ``max`` settle all but rare rows, those with a NaN
or whose maximum is a zero, which take a second look. No row is widened to fp32. ``python -m vpa.run numpy-backend``
measures what that gains.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from vpa import order
from vpa.rmsnorm import residual_rmsnorm as residual_rmsnorm  # the rules themselves
from vpa.transform import Transform
from vpa.transform import apply as apply_transform
from vpa.vocab import Run, VocabShard, split_runs

#: ``local_argmax_candidates`` takes a ``transform``.
TRANSFORMS = True

#: Bytes of logits handled per NumPy call: enough to hide the call's cost, few enough to stay in cache for both passes.
_BLOCK_BYTES = 1 << 21

#: dtype -> (signed word, unsigned word, bits of +inf)
_WORDS = {
    order.LOGITS_DTYPES["bfloat16"]: (np.int16, np.uint16, 0x7F80),
    order.LOGITS_DTYPES["float16"]: (np.int16, np.uint16, 0x7C00),
    order.LOGITS_DTYPES["float32"]: (np.int32, np.uint32, 0x7F800000),
}


def local_argmax_candidates(
    logits: np.ndarray,
    shard: VocabShard,
    layout: str,
    splits: int,
    out: np.ndarray,
    transform: Transform | None = None,
) -> None:
    """Write the best candidate of each split of each row of ``logits`` [rows, width] to ``out`` (``layout``)."""
    packed = out if layout == "packed" else np.empty((len(logits), splits), np.uint64)
    best_of_runs(logits, equal_runs(shard, splits), packed, transform)
    if layout == "pairs":
        out[...] = order.pairs_of(packed)


def best_of_runs(
    logits: np.ndarray,
    runs: Sequence[tuple[int, int, int, int, int]],
    packed: np.ndarray,
    transform: Transform | None = None,
    nan: str = "first",
) -> None:
    """Write the best candidate of each split of each row to ``packed`` uint64 [rows, splits]; see ``equal_runs``.

    transform: applied to each block of rows while it is in cache; padding is not transformed either. nan: one of
    ``order.NAN_RULES``.
    """
    packed[...] = order.NO_CANDIDATE
    signed, unsigned, infinity = _WORDS[logits.dtype]
    words = logits.view(signed)  # integers are quicker to index than ml_dtypes' bfloat16, too
    identity = transform is None or transform.is_identity
    for split, start, count, first_id, repeats in runs:
        step = max(_BLOCK_BYTES // (count * repeats * logits.itemsize), 1)
        first_ids = first_id + count * np.arange(repeats)
        for row in range(0, len(logits), step):
            block = words[row : row + step, start : start + count * repeats]
            if not identity:
                block = apply_transform(transform, block.view(logits.dtype)).view(signed)
            columns, best = _argmax(block.reshape(-1, repeats, count), unsigned, infinity, nan)
            candidates = order.pack(order.keys(best.view(logits.dtype), nan), first_ids + columns)
            target = packed[row : row + step, split : split + repeats]
            np.maximum(target, candidates, out=target)


def pick_from_candidates(gathered: np.ndarray, num_rows: int, out: np.ndarray) -> None:
    """Write the id of the best of each row's candidates to ``out`` int64 [num_rows]; -1 where there is none."""
    packed = gathered if gathered.dtype == np.uint64 else order.packed_of(gathered)
    best = packed.reshape(-1, num_rows, packed.shape[1]).max(axis=(0, 2))
    out[...] = order.unpack(best)[1]


@functools.lru_cache(maxsize=256)
def equal_runs(shard: VocabShard, splits: int) -> tuple[tuple[int, int, int, int, int], ...]:
    """The runs of a row's splits, with neighbours of one length taken together: see ``together``."""
    return together(split_runs(shard, splits))


def together(runs: Sequence[Run]) -> tuple[tuple[int, int, int, int, int], ...]:
    """Runs with neighbours of one length taken together: (split, local_start, count, first_id, repeats)."""

    def position(run: Run) -> tuple[int, int, int]:
        split, start, count, first_id = run
        return count, split * count - start, start - first_id  # equal for runs that follow one another

    groups = (list(group) for _, group in itertools.groupby(runs, key=position))
    return tuple((*group[0], len(group)) for group in groups)


def _argmax(words: np.ndarray, unsigned: type, infinity: int, nan_rule: str) -> tuple[np.ndarray, np.ndarray]:
    """The first column of the best value along the last axis of ``words`` (signed, not empty), and its word."""
    sign = np.iinfo(words.dtype).max + 1
    columns = words.argmax(axis=-1)
    largest = _taken(words, columns)
    largest_unsigned = words.view(unsigned).max(axis=-1)  # the most negative number, if there is a negative one

    negative = largest < 0  # all numbers are: the least unsigned word is the largest number
    if negative.any():
        columns[negative] = words[negative].view(unsigned).argmin(axis=-1)
    zero = largest == 0  # +0, and there may be a -0 before it
    if zero.any():
        columns[zero] = (words[zero] << 1 == 0).argmax(axis=-1)
    nan = (largest > infinity) | (largest_unsigned > sign + infinity)
    if nan.any():
        is_nan = words[nan].view(unsigned) << 1 > infinity << 1  # the sign is shifted out
        if nan_rule == "first":
            columns[nan] = is_nan.argmax(axis=-1)
        else:
            minus_infinity = words.dtype.type(infinity - sign)
            columns[nan], _ = _argmax(np.where(is_nan, minus_infinity, words[nan]), unsigned, infinity, nan_rule)
    return columns, _taken(words, columns)


def _taken(words: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.take_along_axis(words, columns[..., None], axis=-1)[..., 0]
