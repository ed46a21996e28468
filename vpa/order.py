"""The order of comparison in NumPy: logits -> keys, (key, id) -> candidates in either layout, and back.

For candidates (value, id), the value widened to fp32 bit for bit:

1. NaN precedes every number, whatever its sign and payload; among NaNs the lower id precedes.
2. Otherwise the larger value precedes; -0 equals +0; infinities and subnormals are ordinary numbers.
3. Equal values: the lower id precedes.

On distinct ids this is a strict total order, so however a vocabulary is cut into shards, splits and lanes, the same id
wins. ``kernels/order.cuh`` and ``kernels/numba_order.py`` state the same rules for their languages.

Verification may be told to ignore NaN (``NAN_RULES``): then a NaN is -inf, with its key.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

#: The dtypes that logits may have, by name.
LOGITS_DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}

#: What a NaN is: before every number, or no more than -inf (so that a row of NaN alone gives its lowest id).
NAN_RULES = ("first", "ignore")

#: Ids must be below this: ``0xFFFFFFFF - id`` is what a packed candidate holds.
MAX_VOCAB_SIZE = 2**32 - 1

#: Above this an id is not exact as an fp32 number, and the ``pairs`` layout is refused.
MAX_PAIRS_VOCAB_SIZE = 2**24

#: The packed form of "no candidate". The smallest key of a real value, that of -inf, is above 0.
NO_CANDIDATE = np.uint64(0)

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_NAN_KEY = np.uint32(0xFFFFFFFF)
_MINUS_INFINITY_KEY = np.uint32(0x007FFFFF)
_NAN_BITS = np.uint32(0x7FC00000)
_LOW = np.uint64(0xFFFFFFFF)


def float_bits(values: np.ndarray) -> np.ndarray:
    """The bits, uint32, of ``values`` (bf16, fp16 or fp32, any shape) widened to fp32. No value changes."""
    values = np.asarray(values)
    if values.dtype == LOGITS_DTYPES["bfloat16"]:
        return values.view(np.uint16).astype(np.uint32) << np.uint32(16)
    if values.dtype not in (np.float16, np.float32):
        raise TypeError(f"values are {values.dtype}; the order is defined for {', '.join(LOGITS_DTYPES)}")
    with np.errstate(all="ignore"):  # a signalling NaN becomes a quiet one: a NaN either way
        return values.astype(np.float32, copy=False).view(np.uint32)


def keys(values: np.ndarray, nan: str = "first") -> np.ndarray:
    """Keys, uint32, same shape: ``a`` precedes ``b`` by value exactly when its key is larger, ties have one key."""
    bits = float_bits(values)
    magnitude = bits & ~_SIGN
    key = bits ^ np.where(bits & _SIGN, _NAN_KEY, _SIGN)
    key[magnitude == 0] = _SIGN
    key[magnitude > _INFINITY] = _NAN_KEY if nan == "first" else _MINUS_INFINITY_KEY
    return key


def values_of(keys: np.ndarray) -> np.ndarray:
    """The fp32 values that have these keys. Zeros come back as +0 and NaNs as the quiet NaN 0x7FC00000."""
    keys = np.asarray(keys, np.uint32)
    bits = keys ^ np.where(keys & _SIGN, _SIGN, _NAN_KEY)
    return np.where(keys == _NAN_KEY, _NAN_BITS, bits).view(np.float32)


def pack(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Packed candidates, uint64: ``key << 32 | (0xFFFFFFFF - id)``. The best of some candidates is their maximum."""
    return np.asarray(keys).astype(np.uint64) << np.uint64(32) | _LOW - np.asarray(ids).astype(np.uint64)


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys, uint32, and ids, int64, of packed candidates; "no candidate" has key 0 and id -1."""
    packed = np.asarray(packed, np.uint64)
    ids = (_LOW - (packed & _LOW)).astype(np.int64)
    return (packed >> np.uint64(32)).astype(np.uint32), np.where(packed == NO_CANDIDATE, np.int64(-1), ids)


def pairs_of(packed: np.ndarray) -> np.ndarray:
    """Packed candidates [rows, n] as pairs, float32 [rows, 2 * n]: value 0, id 0, value 1, id 1, ...

    "No candidate" is (-inf, +inf). Ids must be below ``MAX_PAIRS_VOCAB_SIZE``.
    """
    packed = np.asarray(packed, np.uint64)
    key, ids = unpack(packed)
    pairs = np.empty((packed.shape[0], 2 * packed.shape[1]), np.float32)
    pairs[:, 0::2] = np.where(packed == NO_CANDIDATE, np.float32(-np.inf), values_of(key))
    pairs[:, 1::2] = np.where(packed == NO_CANDIDATE, np.float32(np.inf), ids.astype(np.float32))
    return pairs


def packed_of(pairs: np.ndarray) -> np.ndarray:
    """Pairs, float32 [rows, 2 * n], as packed candidates, uint64 [rows, n]."""
    values, ids = np.asarray(pairs)[:, 0::2], np.asarray(pairs)[:, 1::2]
    empty = np.isposinf(ids)
    packed = pack(keys(np.ascontiguousarray(values)), np.where(empty, np.float32(0), ids).astype(np.uint64))
    return np.where(empty, NO_CANDIDATE, packed)
