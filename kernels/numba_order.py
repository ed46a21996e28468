"""The order of comparison as Numba CUDA device functions: ``order.cuh`` in Python, same names, same results.

Numba computes on 64-bit integers and turns a mixture of int64 and uint64 into a float, so every step here is cut back
to ``uint32`` or ``int64``; the compiler then drops the widening again.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

u32, i64 = np.uint32, np.int64

FLOAT_SIGN = u32(0x80000000)
FLOAT_INFINITY = u32(0x7F800000)
FLOAT_NAN = u32(0x7FC00000)
ALL_ONES = u32(0xFFFFFFFF)


@cuda.jit(device=True, inline=True)
def key_of_bits(bits, sign, infinity):
    """The key, uint32, of a floating-point number of any width, given its bits, sign bit and the bits of infinity."""
    ones = u32(sign | (sign - u32(1)))
    magnitude = u32(bits & (sign - u32(1)))
    if magnitude > infinity:
        return ones
    if magnitude == u32(0):
        return u32(sign)
    if bits & sign:
        return u32(bits ^ ones)
    return u32(bits ^ sign)


@cuda.jit(device=True, inline=True)
def bits_of_key(key, sign):
    """Bits that have this key; NaN and zero lost their sign."""
    if key & sign:
        return u32(key ^ sign)
    return u32(key ^ (sign | (sign - u32(1))))


@cuda.jit(device=True, inline=True)
def widen_bfloat16(word):
    """The bits of the fp32 number equal to a bf16 word."""
    return u32(u32(word) << u32(16))


@cuda.jit(device=True, inline=True)
def widen_float32(word):
    """An fp32 word is its own widening."""
    return u32(word)


@cuda.jit(device=True)
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


@cuda.jit(device=True, inline=True)
def precedes(key, id_complement, other_key, other_id_complement):
    """Whether one candidate comes before another: the larger key, and among equal keys the lower id."""
    return key > other_key or (key == other_key and id_complement > other_id_complement)
