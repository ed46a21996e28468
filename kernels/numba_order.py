"""The order of comparison as Numba CUDA device functions: ``order.cuh`` in Python, same names, same results.

Numba computes on 64-bit integers and turns a mixture of int64 and uint64 into a float, so every step here is cut back
to ``uint32`` or ``int64``; the compiler then drops the widening again.
"""

from __future__ import annotations

import functools
import types

import numpy as np

from vpa.kernels import numba_device as device

u32, u64, i64 = np.uint32, np.uint64, np.int64

FLOAT_SIGN = u32(0x80000000)
FLOAT_INFINITY = u32(0x7F800000)
FLOAT_NAN = u32(0x7FC00000)
ALL_ONES = u32(0xFFFFFFFF)
NO_CANDIDATE = u64(0)


@device.function
def key_of_bits(bits, sign, infinity, nan):
    """The key, uint32, of a floating-point number of any width, given its bits, sign bit and the bits of infinity;
    ``nan``: the key of a NaN."""
    ones = u32(sign | (sign - u32(1)))
    magnitude = u32(bits & (sign - u32(1)))
    if magnitude > infinity:
        return u32(nan)
    if magnitude == u32(0):
        return u32(sign)
    if bits & sign:
        return u32(bits ^ ones)
    return u32(bits ^ sign)


@device.function
def bits_of_key(key, sign):
    """Bits that have this key; NaN and zero lost their sign."""
    if key & sign:
        return u32(key ^ sign)
    return u32(key ^ (sign | (sign - u32(1))))


@device.function
def pack(key, id_complement):
    """A candidate, uint64: the better of two is the larger integer."""
    return u64(u64(key) << u64(32)) | u64(id_complement)


@device.function
def warp_best_of(candidate):
    """The best of the 32 candidates that a warp's lanes hold, in every lane."""
    own = u32(candidate >> u64(32))
    key = device.warp_max(own)
    return pack(key, device.warp_max(u32(candidate & u64(0xFFFFFFFF)) if own == key else u32(0)))


@device.function
def pair_of_packed(packed):
    """The bits of (value, id), two fp32 numbers."""
    if packed == NO_CANDIDATE:
        return u32(FLOAT_SIGN | FLOAT_INFINITY), FLOAT_INFINITY
    key, number = u32(packed >> u64(32)), device.float_bits(u32(ALL_ONES - u32(packed & u64(0xFFFFFFFF))))
    if key == ALL_ONES:
        return FLOAT_NAN, number
    return bits_of_key(key, FLOAT_SIGN), number


@device.function
def packed_of_pair(value, number):
    """The candidate of the bits of (value, id)."""
    if number == FLOAT_INFINITY:
        return NO_CANDIDATE
    key = key_of_bits(value, FLOAT_SIGN, FLOAT_INFINITY, ALL_ONES)
    return pack(key, u32(ALL_ONES - device.integer_of_float_bits(number)))


@device.function
def id_of_packed(packed):
    """The id, int64, of a candidate; -1 where there is none."""
    return i64(-1) if packed == NO_CANDIDATE else i64(0xFFFFFFFF) - i64(packed & u64(0xFFFFFFFF))


@device.function
def widen_bfloat16(word):
    """The bits of the fp32 number equal to a bf16 word."""
    return u32(u32(word) << u32(16))


@device.function
def widen_float32(word):
    """An fp32 word is its own widening."""
    return u32(word)


@device.function
def widen_float16(word):
    """The bits of the fp32 number equal to an fp16 word, by integers: a subnormal must not be flushed."""
    sign = u32((u32(word) & u32(0x8000)) << u32(16))
    exponent = (i64(word) >> 10) & 0x1F
    fraction = i64(word) & 0x3FF
    if exponent == 0x1F:
        return u32(sign | FLOAT_INFINITY | u32(fraction << 13))
    if exponent == 0:
        if fraction == 0:
            return sign
        exponent = i64(1)
        while fraction & 0x400 == 0:
            fraction = fraction << 1
            exponent = exponent - 1
        fraction = fraction & 0x3FF
    return u32(sign | u32((exponent + (127 - 15)) << 23) | u32(fraction << 13))


@functools.cache
def of_dtype(dtype: str, nan_ignored: bool = False) -> types.SimpleNamespace:
    """What ``order.cuh`` defines per dtype of the logits: constants of a word, and functions of words and keys.

    nan_ignored: a NaN is -inf, with its key.
    """
    sign, infinity = {
        "bfloat16": (u32(0x8000), u32(0x7F80)),
        "float16": (u32(0x8000), u32(0x7C00)),
        "float32": (u32(0x80000000), u32(0x7F800000)),
    }[dtype]
    ones = u32(sign | (sign - u32(1)))
    halves = dtype != "float32"
    minus_infinity = u32(ones ^ (sign | infinity))
    nan_key = minus_infinity if nan_ignored else ones
    larger_top = getattr(device, f"larger_{dtype}" + ("_number" if nan_ignored else ""))
    widen = globals()[f"widen_{dtype}"]

    @device.function
    def logit_key(word):
        return key_of_bits(word, sign, infinity, nan_key)

    @device.function
    def key_of_top(top):
        """The larger of a top's two halves, as a key; ``larger_top`` orders -0 below +0, which the key undoes."""
        if halves:
            return key_of_bits(u32(larger_top(top, u32(top >> u32(16))) & u32(0xFFFF)), sign, infinity, nan_key)
        return key_of_bits(top, sign, infinity, nan_key)

    @device.function
    def patterns_of(key):
        """(mask, low, span): the logits that have this key are those for which (bits & mask) - low <= span."""
        if nan_ignored:  # +inf too: where this key is the largest, there is none
            if key == minus_infinity:
                return u32(sign - u32(1)), infinity, u32(sign - u32(1) - infinity)
        elif key == ones:
            return u32(sign - u32(1)), u32(infinity + u32(1)), u32(sign - u32(2) - infinity)
        if key == sign:
            return u32(sign - u32(1)), u32(0), u32(0)
        return ones, bits_of_key(key, sign), u32(0)

    @device.function
    def is_among(word, at, patterns):
        """Whether the logit that begins at bit ``at`` of a 32-bit word is one of them."""
        rest = u32(u32(word & u32(patterns[0] << at)) - u32(patterns[1] << at))
        return rest <= u32(patterns[2] << at)

    @device.function
    def candidate_key(key):
        return key_of_bits(widen(bits_of_key(key, sign)), FLOAT_SIGN, FLOAT_INFINITY, ALL_ONES)

    return types.SimpleNamespace(
        word_bytes=2 if halves else 4,
        load_word=device.load_u16 if halves else device.load_u32,
        larger_top=larger_top,
        logit_key=logit_key,
        key_of_top=key_of_top,
        patterns_of=patterns_of,
        is_among=is_among,
        candidate_key=candidate_key,
    )
