"""Copies of more than a scalar, with every compiler: structures, memcpy and memset, and the padding that they carry."""

from __future__ import annotations

import numpy as np
import pytest

from vpa.backends.simt import (
    OutOfBoundsError,
    RaceError,
    RawModule,
    ReadOnlyError,
    UninitializedError,
)

TEXT = r"""
typedef unsigned char u8;
#define KERNEL extern "C" __global__ void
struct Three { u8 c[3]; };
struct Twelve { int a, b, c; };
struct Eighty { int b[20]; };
struct __align__(16) Words { unsigned w[4]; };

// --- memcpy, memmove, memset ---
KERNEL fill(u8* out) { memset(out, 7, 17); }
KERNEL copy(u8* out, const u8* x) { memcpy(out, x, 17); }
KERNEL move(u8* out, const u8* x) { memmove(out, x, 17); }
KERNEL builtin_copy(u8* out, const u8* x) { __builtin_memcpy(out, x, 17); }
KERNEL fill_three(u8* out) { memset(out, 7, 3); }
KERNEL copy_to_local(int* out, const int* x) {
    int t[6], sum = 0;
    memcpy(t, x, sizeof t);
    for (int i = 0; i < 6; ++i) sum += t[i];
    out[0] = sum;
}
KERNEL copies_race(int* out, const int* x) {
    __shared__ int s[12];
    memcpy(s, x, 48);
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x % 12];
}
KERNEL copied_by_one(int* out, const int* x) {
    __shared__ int s[12], t[32];
    if (threadIdx.x == 0) memcpy(s, x, 48);
    if (threadIdx.x == 1) memset(t, 0, sizeof t);
    __syncthreads();
    atomicAdd(&t[threadIdx.x], 1);
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x % 12] + t[31 - threadIdx.x];
}

// --- Structures ---
KERNEL second_of_three(Three* out, const Three* x) { out[0] = x[1]; }
KERNEL second_of_eighty(Eighty* out, const Eighty* x) { out[0] = x[1]; }
KERNEL zero_twelve(Twelve* out) { out[0] = Twelve{}; }
KERNEL zero_eighty(Eighty* out) { out[1] = Eighty{}; }
KERNEL words(unsigned* out, const Words* x) {
    Words a = x[threadIdx.x];
    unsigned all = 0;
    for (int i = 0; i < 4; ++i) all |= a.w[i];
    out[threadIdx.x] = all;
}
KERNEL group_of_words(unsigned* out, const Words* x, int n) {
    Words group[4];
    for (int i = 0; i < 4; ++i) group[i] = x[threadIdx.x + i];
    out[threadIdx.x] = group[n & 3].w[n & 1];
}
KERNEL structures_race(int* out, const Eighty* x) {
    __shared__ Eighty s;
    s = x[0];
    __syncthreads();
    out[threadIdx.x] = s.b[3];
}

// --- By value ---
struct Pair { float v; int i; };
__device__ Pair better(Pair a, Pair b) { return a.v > b.v || (a.v == b.v && a.i < b.i) ? a : b; }
__device__ float sum(float4 v) { return v.x + v.y + v.z + v.w; }
KERNEL pairs_by_value_race(const float* x, int* out) {
    __shared__ Pair s[64];
    int t = threadIdx.x;
    s[t].v = x[t], s[t].i = t;
    out[t] = better(better(s[t], s[63 - t]), s[(t + 1) & 63]).i;
}
KERNEL vectors_by_value_race(float* out) {
    __shared__ float4 s[64];
    s[threadIdx.x] = make_float4(1, 2, 3, 4);
    out[threadIdx.x] = sum(s[threadIdx.x]) + sum(s[63 - threadIdx.x]);
}
KERNEL vector_by_value(const float4* x, float* out) {
    out[threadIdx.x] = sum(x[threadIdx.x]) + sum(x[threadIdx.x + 1]);
}

// --- Padding ---
struct Padded { float v; long long i; };
struct Tail { double v; int i; };
struct Small { int i; char c; };
template <class T> __device__ void reduce(T* s, const float* x, long long* out) {
    int t = threadIdx.x;
    s[t].v = x[t], s[t].i = t;
    __syncthreads();
    for (int d = 32; d; d >>= 1) {
        if (t < d && s[t + d].v > s[t].v) s[t] = s[t + d];
        __syncthreads();
    }
    if (t == 0) out[0] = s[0].i;
}
KERNEL reduce_padded(const float* x, long long* out) {
    __shared__ Padded s[64];
    reduce(s, x, out);
}
KERNEL reduce_tail(const float* x, long long* out) {
    __shared__ Tail s[64];
    reduce(s, x, out);
}
KERNEL exchange_small(int* out) {
    __shared__ Small s[32], t[32];
    s[threadIdx.x].c = 1, s[threadIdx.x].i = threadIdx.x;
    __syncthreads();
    t[threadIdx.x] = s[31 - threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = t[threadIdx.x].i + t[threadIdx.x].c;
}
KERNEL padded_table(int* out) {
    __shared__ Small s[32];
    if (threadIdx.x < 32) s[threadIdx.x].c = 1, s[threadIdx.x].i = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) memcpy(out, s, sizeof s);
}
KERNEL first_member_missing(Padded* out) {
    __shared__ Padded s[32];
    s[threadIdx.x].i = 1;
    __syncthreads();
    out[threadIdx.x] = s[31 - threadIdx.x];
}
KERNEL half_of_an_array(int* out) {
    __shared__ int s[32];
    if (threadIdx.x < 8) s[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) memcpy(out, s, 64);
}
KERNEL half_of_a_word(unsigned* out) {
    __shared__ unsigned s[32];
    ((unsigned short*)s)[threadIdx.x * 2] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def module(any_compiler) -> RawModule:
    return RawModule(TEXT, name="copies.cu", compiler=any_compiler)


def run(module, name, *args, block=1):
    module.get_function(name)((1,), (block,), args)


def bytes_of(n: int) -> np.ndarray:
    return np.arange(1, n + 1, dtype=np.uint8)


def ints(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def test_copies_and_fills_arrive(module):
    for name in ("copy", "move", "builtin_copy"):
        out = np.zeros(20, np.uint8)
        run(module, name, out, bytes_of(17))
        assert list(out) == [*range(1, 18), 0, 0, 0], name
    out = np.zeros(20, np.uint8)
    run(module, "fill", out)
    assert list(out) == [7] * 17 + [0] * 3
    out = np.zeros(32, np.int32)
    run(module, "copied_by_one", out, ints(12), block=32)
    np.testing.assert_array_equal(out, np.arange(32) % 12 + 1)


OUTSIDE = {
    "fill": lambda: (bytes_of(16),),
    "fill_three": lambda: (bytes_of(2),),
    "copy": lambda: (bytes_of(17), bytes_of(16)),
    "move": lambda: (bytes_of(16), bytes_of(17)),
    "builtin_copy": lambda: (bytes_of(17), bytes_of(16)),
    "copy_to_local": lambda: (ints(1), ints(5)),
    "second_of_three": lambda: (bytes_of(3), bytes_of(5)),
    "second_of_eighty": lambda: (ints(20), ints(39)),
    "zero_eighty": lambda: (ints(39),),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside(module, name):
    with pytest.raises(OutOfBoundsError):
        run(module, name, *OUTSIDE[name]())


def test_outside_by_one_thread(module):
    out = np.zeros(32, np.uint32)
    with pytest.raises(OutOfBoundsError):
        run(module, "words", out, np.zeros(31 * 4, np.uint32), block=32)
    with pytest.raises(OutOfBoundsError):
        run(module, "group_of_words", out, np.zeros(31 * 4, np.uint32), np.int32(3), block=32)
    with pytest.raises(OutOfBoundsError):
        run(module, "vector_by_value", np.zeros(128, np.float32), np.zeros(32, np.float32), block=32)


def test_read_only(module):
    for name in ("fill", "zero_twelve"):
        out = ints(20)
        out.flags.writeable = False
        with pytest.raises(ReadOnlyError):
            run(module, name, out)


@pytest.mark.parametrize("name", ["copies_race", "structures_race", "pairs_by_value_race", "vectors_by_value_race"])
def test_race(module, name):
    args = {
        "pairs_by_value_race": (np.ones(64, np.float32), ints(64)),
        "vectors_by_value_race": (np.zeros(64, np.float32),),
    }.get(name, (ints(64), ints(20)))
    with pytest.raises(RaceError):
        run(module, name, *args, block=64)


def test_padding_may_be_copied(module):
    x = np.sin(np.arange(64)).astype(np.float32)
    for name in ("reduce_padded", "reduce_tail"):
        out = np.zeros(1, np.int64)
        run(module, name, x, out, block=64)
        assert out[0] == x.argmax(), name
    out = np.zeros(32, np.int32)
    run(module, "exchange_small", out, block=32)
    np.testing.assert_array_equal(out, np.arange(32, 0, -1))
    out = np.zeros(64, np.int32)
    run(module, "padded_table", out, block=32)
    np.testing.assert_array_equal(out[::2], np.arange(32))


@pytest.mark.parametrize("name", ["first_member_missing", "half_of_an_array", "half_of_a_word"])
def test_what_is_no_padding_may_not(module, name):
    with pytest.raises(UninitializedError):
        run(module, name, np.zeros(128, np.uint32 if name == "half_of_a_word" else np.int32), block=32)
