"""Programming patterns of real kernels, each in a correct form that must pass and in broken forms that must not.

A broken form is chosen by the macro BREAK; the correct one is BREAK == 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from vpa.backends.simt import (
    DivergenceError,
    HangError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    RawModule,
    UndefinedArithmeticError,
    UninitializedError,
)

TEXT = r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void
#define FULL 0xffffffffu

KERNEL work_queue(u32* next, int* out, u32 n) {  // 1: the second barrier is missing
    __shared__ u32 item;
    while (true) {
        if (threadIdx.x == 0) item = atomicAdd(next, 1u);
        __syncthreads();
        u32 mine = item;
#if BREAK != 1
        __syncthreads();
#endif
        if (mine >= n) break;
        out[mine * blockDim.x + threadIdx.x] = mine + threadIdx.x;
    }
}
// Two warps. 1: no fence before the flag, 2: a flag that is not volatile.
KERNEL producer_consumer(const int* x, int* out) {
    __shared__ int data[32];
#if BREAK == 2
    __shared__ int ready;
#else
    __shared__ volatile int ready;
#endif
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        data[lane] = x[lane];
#if BREAK != 1
        __threadfence_block();
#endif
        __syncwarp();
        if (lane == 0) ready = 1;
    } else {
        while (ready == 0) { __threadfence_block(); }
        __threadfence_block();
        out[lane] = data[31 - lane];
    }
}
KERNEL ping_pong(volatile int* turn, int* value, int rounds) {  // two blocks take turns; 1: no fence before the flag
    if (threadIdx.x) return;
    for (int i = 0; i < rounds; ++i) {
        while (turn[0] != 2 * i + (int)blockIdx.x) {}
        __threadfence();
        value[0] = value[0] * 3 + (int)blockIdx.x;
#if BREAK != 1
        __threadfence();
#endif
        turn[0] = 2 * i + (int)blockIdx.x + 1;
    }
}
KERNEL tagged_mailbox(volatile u64* box, u64* out) {  // value and tag in one word: no fence needed; 1: two words
    if (threadIdx.x == 0) box[blockIdx.x] = (u64)(blockIdx.x + 5) << 32 | 1;
    if (threadIdx.x < gridDim.x) {
        u64 word;
        do word = box[threadIdx.x]; while ((u32)word != 1);
        out[blockIdx.x * gridDim.x + threadIdx.x] = word >> 32;
    }
}
KERNEL hillis_steele(const int* x, int* out) {  // 1: the barrier between read and write is missing
    __shared__ int s[128];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    for (int d = 1; d < 128; d *= 2) {
        int v = t >= d ? s[t - d] : 0;
#if BREAK != 1
        __syncthreads();
#endif
        s[t] += v;
        __syncthreads();
    }
    out[t] = s[t];
}
// 1: no barrier after a tile, 2: into the padding.
KERNEL matrix_product(const float* a, const float* b, float* c, int n) {
    __shared__ float left[8][9], right[8][9];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * 8 + ty, column = blockIdx.x * 8 + tx;
    float total = 0;
    for (int k = 0; k < n; k += 8) {
        left[ty][tx] = row < n && k + tx < n ? a[row * n + k + tx] : 0;
        right[ty][tx] = column < n && k + ty < n ? b[(k + ty) * n + column] : 0;
        __syncthreads();
#if BREAK == 2
        for (int i = 0; i < 9; ++i) total += left[ty][i] * right[i % 8][tx];
#else
        for (int i = 0; i < 8; ++i) total += left[ty][i] * right[i][tx];
#endif
#if BREAK != 1
        __syncthreads();
#endif
    }
    if (row < n && column < n) c[row * n + column] = total;
}
KERNEL warp_slices(const int* x, int* out) {  // each warp its own part; 1: no __syncwarp, 2: a neighbour's part
    __shared__ int s[4][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    s[warp][lane] = x[threadIdx.x];
#if BREAK != 1
    __syncwarp();
#endif
#if BREAK == 2
    out[threadIdx.x] = s[(warp + 1) % 4][lane];
#else
    out[threadIdx.x] = s[warp][31 - lane];
#endif
}
KERNEL append(const int* x, u32* count, int* out, int n) {  // 1: the slot is not taken atomically
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && x[i] > 0) {
#if BREAK == 1
        u32 slot = *count;
        *count = slot + 1;
#else
        u32 slot = atomicAdd(count, 1u);
#endif
        out[slot] = x[i];
    }
}
KERNEL stencil(const float* in, float* out, int n) {  // 1: launched with in == out
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > 0 && i < n - 1) out[i] = in[i - 1] + in[i] + in[i + 1];
}
KERNEL any_row_alignment(const u16* x, long long stride, int width, u64* out) {  // 1: no peeling, 2: one load too many
    const u16* row = x + blockIdx.x * stride;
    u64 total = 0;
    int head = (int)(((16 - (u64)row % 16) % 16) / 2);
#if BREAK == 1
    head = 0;
#endif
    head = min(head, width);
    if ((int)threadIdx.x < head) total += row[threadIdx.x];
    int wide = (width - head) / 8;
#if BREAK == 2
    wide += 1;
#endif
    for (int i = threadIdx.x; i < wide; i += blockDim.x) {
        uint4 v = reinterpret_cast<const uint4*>(row + head)[i];
        u32 words[4] = {v.x, v.y, v.z, v.w};
        for (int k = 0; k < 4; ++k) total += (words[k] & 0xffff) + (words[k] >> 16);
    }
    for (int i = head + wide * 8 + threadIdx.x; i < width; i += blockDim.x) total += row[i];
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(FULL, total, d);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}
KERNEL dynamic_layout(const double* x, double* out, int n) {  // bytes, then doubles; 1: not rounded up
    extern __shared__ __align__(16) u8 raw[];
    u8* flags = raw;
#if BREAK == 1
    double* values = (double*)(raw + n);
#else
    double* values = (double*)(raw + (n + 7) / 8 * 8);
#endif
    for (int i = threadIdx.x; i < n; i += blockDim.x) flags[i] = x[i] > 0, values[i] = 2 * x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = flags[n - 1 - i] ? values[n - 1 - i] : 0;
}
KERNEL reinterpreted_after_a_barrier(int* out) {  // 1: without the barrier
    extern __shared__ __align__(16) u8 bytes[];
    u16* halves = (u16*)bytes;
    halves[threadIdx.x] = threadIdx.x;
    __syncthreads();
    int v = halves[threadIdx.x ^ 1];
#if BREAK != 1
    __syncthreads();
#endif
    ((int*)bytes)[threadIdx.x] = v;
    __syncthreads();
    out[threadIdx.x] = ((int*)bytes)[threadIdx.x ^ 3];
}
struct Odd { int a, b, c; };
KERNEL structures(const Odd* x, Odd* out) {  // 12 bytes each; 1: one member is never written
    __shared__ Odd s[32];
#if BREAK == 1
    s[threadIdx.x].a = x[threadIdx.x].a;
    s[threadIdx.x].b = x[threadIdx.x].b;
#else
    s[threadIdx.x] = x[threadIdx.x];
#endif
    __syncthreads();
    Odd v = s[31 - threadIdx.x];
    v.a += v.c;
    out[threadIdx.x] = v;
}
KERNEL converges(int* x, int* rounds) {  // a loop that the block leaves together; 1: each thread as it likes
    int n = 0, mine = x[threadIdx.x];
    while (true) {
        if (mine > 1) mine = mine % 2 ? 3 * mine + 1 : mine / 2;
#if BREAK == 1
        __syncthreads();
        if (mine <= 1) break;
        __syncthreads();
#else
        if (!__syncthreads_or(mine > 1)) break;
#endif
        ++n;
    }
#if BREAK == 1
    __syncthreads();
#endif
    x[threadIdx.x] = mine;
    if (threadIdx.x == 0) *rounds = n;
}
KERNEL lanes_in_a_loop(const int* count, int* out) {  // 1: the full mask although lanes have left the loop
    int v = threadIdx.x;
    for (int i = 0;; ++i) {
        u32 mask = __ballot_sync(FULL, i < count[threadIdx.x]);
        if (!mask) break;
        if (i < count[threadIdx.x])
#if BREAK == 1
            v += __shfl_sync(FULL, v, __ffs(mask) - 1);
#else
            v += __shfl_sync(mask, v, __ffs(mask) - 1);
#endif
    }
    out[threadIdx.x] = v;
}
__device__ __noinline__ void fill(int* p, int v) { p[threadIdx.x] = v; }
// Shared, local and global memory through one function. 1: past the end of the local array.
KERNEL generic_pointers(int* out, int n) {
    __shared__ int s[32];
    int local[32];
    fill(s, 1);
    fill(local, 2);
    fill(out, 3);
    __syncthreads();
#if BREAK == 1
    out[threadIdx.x] += s[31 - threadIdx.x] + local[threadIdx.x + n];
#else
    out[threadIdx.x] += s[31 - threadIdx.x] + local[threadIdx.x];
#endif
}
KERNEL bits(const int* x, u32* words, int n) {  // 1: a word that several threads update without atomics
    __shared__ u32 s[4];
    if (threadIdx.x < 4) s[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (x[i] > 0) {
#if BREAK == 1
            s[i / 32] |= 1u << i % 32;
#else
            atomicOr(&s[i / 32], 1u << i % 32);
#endif
        }
    __syncthreads();
    if (threadIdx.x < 4) words[threadIdx.x] = s[threadIdx.x];
}
// memcpy and memset in device code. 1: one byte too many, 2: threads that overlap.
KERNEL copies(const u8* x, u8* out, int n) {
    u8 room[64];
#if BREAK == 1
    if (threadIdx.x == 3) ++n;
#endif
    memset(room, 0, sizeof room);
    memcpy(room, x + threadIdx.x * 64, n);
#if BREAK == 2
    memcpy(out + threadIdx.x * 63, room, n);
#else
    memcpy(out + threadIdx.x * 64, room, n);
#endif
}
KERNEL overflowing_offset(const u8* x, u8* out, int rows, int stride) {  // 1: the product in 32 bits
    int row = rows - 1 - threadIdx.x;
#if BREAK == 1
    out[threadIdx.x] = x[(row * stride) % 64];
#else
    out[threadIdx.x] = x[((long long)row * stride) % 64];
#endif
}
KERNEL waits_for_later_blocks(volatile int* flag, int* out) {  // fine if all are resident
    if (threadIdx.x == 0) {
        if (blockIdx.x + 1 < gridDim.x) while (flag[blockIdx.x + 1] == 0) {}
        __threadfence();
        flag[blockIdx.x] = 1;
        out[blockIdx.x] = 1;
    }
}
KERNEL sum_of_a_warp_by_pairs(const int* x, int* out) {  // partial masks that grow; 1: a level is skipped
    __shared__ int s[32];
    int t = threadIdx.x;
    s[t] = x[t];
    for (int d = 1; d < 32; d *= 2) {
        u32 group = d == 16 ? FULL : ((1u << 2 * d) - 1) << (t / (2 * d) * 2 * d);
#if BREAK == 1
        if (d != 4)
#endif
        __syncwarp(group);
        if (t % (2 * d) == 0) s[t] += s[t + d];
    }
    if (t == 0) out[0] = s[0];
}
"""


@dataclass(frozen=True)
class Pattern:
    """`args` makes fresh arguments from a generator; `right` checks them after the correct form has run."""

    kernel: str
    args: object
    right: object
    broken: dict
    grid: tuple = (1,)
    block: tuple = (32,)
    shared_mem: int = 0


def zeros(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


def ints(r, *shape):
    return r.integers(-50, 50, shape).astype(np.int32)


def collatz(x):
    rounds, x = 0, x.copy()
    while (x > 1).any():
        x = np.where(x > 1, np.where(x % 2 == 1, 3 * x + 1, x // 2), x)
        rounds += 1
    return rounds


def lanes_in_a_loop(count):
    v = np.arange(32)
    for i in range(count.max()):
        mask = i < count
        v[mask] += v[np.flatnonzero(mask)[0]]
    return v


def ping_pong(rounds):
    value = 0
    for _ in range(rounds):
        value = value * 3 * 3 + 1
    return value


def rows_of_halves(r, width=1001):
    buffer = r.integers(0, 65536, 5 * (width + 4) + 9).astype(np.uint16)
    view = np.lib.stride_tricks.as_strided(buffer[3:], (5, width), (2 * (width + 4), 2))
    return (view, np.int64(width + 4), np.int32(width), zeros(5, dtype=np.uint64))


def in_place(r):
    x = r.standard_normal(100).astype(np.float32)
    return (x, x, np.int32(100))


PATTERNS = [
    Pattern(
        "work_queue",
        lambda r: (zeros(1, dtype=np.uint32), zeros(20, 32), np.uint32(20)),
        lambda a: (a[1] == np.arange(20)[:, None] + np.arange(32)).all(),
        {1: RaceError},
        grid=(3,),
    ),
    Pattern(
        "producer_consumer",
        lambda r: (ints(r, 32), zeros(32)),
        lambda a: (a[1] == a[0][::-1]).all(),
        {1: RaceError, 2: RaceError},
        block=(64,),
    ),
    Pattern(
        "ping_pong",
        lambda r: (zeros(1), zeros(1), np.int32(8)),
        lambda a: a[1][0] == ping_pong(8),
        {1: RaceError},
        grid=(2,),
    ),
    Pattern(
        "tagged_mailbox",
        lambda r: (zeros(4, dtype=np.uint64), zeros(4, 4, dtype=np.uint64)),
        lambda a: (a[1] == np.arange(4) + 5).all(),
        {},
        grid=(4,),
    ),
    Pattern(
        "hillis_steele",
        lambda r: (ints(r, 128), zeros(128)),
        lambda a: (a[1] == np.cumsum(a[0])).all(),
        {1: RaceError},
        block=(128,),
    ),
    Pattern(
        "matrix_product",
        lambda r: (*r.integers(-9, 9, (2, 20, 20)).astype(np.float32), zeros(20, 20, dtype=np.float32), np.int32(20)),
        lambda a: (a[2] == a[0] @ a[1]).all(),
        {1: RaceError, 2: UninitializedError},
        grid=(3, 3),
        block=(8, 8),
    ),
    Pattern(
        "warp_slices",
        lambda r: (ints(r, 128), zeros(128)),
        lambda a: (a[1].reshape(4, 32) == a[0].reshape(4, 32)[:, ::-1]).all(),
        {1: RaceError, 2: RaceError},
        block=(128,),
    ),
    Pattern(
        "append",
        lambda r: (ints(r, 300), zeros(1, dtype=np.uint32), zeros(300), np.int32(300)),
        lambda a: sorted(a[2][: a[1][0]]) == sorted(a[0][a[0] > 0]),
        {1: RaceError},
        grid=(5,),
        block=(64,),
    ),
    Pattern(
        "any_row_alignment",
        rows_of_halves,
        lambda a: (a[3] == a[0].sum(1, dtype=np.uint64)).all(),
        {1: MisalignedError, 2: OutOfBoundsError},
        grid=(5,),
    ),
    Pattern(
        "dynamic_layout",
        lambda r: (r.standard_normal(37), zeros(37, dtype=np.float64), np.int32(37)),
        lambda a: (a[1] == np.maximum(2 * a[0][::-1], 0)).all(),
        {1: MisalignedError},
        shared_mem=40 + 37 * 8,
    ),
    Pattern(
        "reinterpreted_after_a_barrier",
        lambda r: (zeros(32),),
        lambda a: (a[0] == np.arange(32) ^ 2).all(),
        {1: RaceError},
        shared_mem=128,
    ),
    Pattern(
        "structures",
        lambda r: (ints(r, 32, 3), zeros(32, 3)),
        lambda a: (a[1] == a[0][::-1] + a[0][::-1, 2:] * [1, 0, 0]).all(),
        {1: UninitializedError},
    ),
    Pattern(
        "converges",
        lambda r: (np.arange(1, 33, dtype=np.int32), zeros(1)),
        lambda a: a[1][0] == collatz(np.arange(1, 33)) - 1,
        {1: DivergenceError},
    ),
    Pattern(
        "lanes_in_a_loop",
        lambda r: (r.integers(0, 5, 32).astype(np.int32), zeros(32)),
        lambda a: (a[1] == lanes_in_a_loop(a[0])).all(),
        {1: DivergenceError},
    ),
    Pattern("generic_pointers", lambda r: (zeros(32), np.int32(5)), lambda a: (a[0] == 6).all(), {1: OutOfBoundsError}),
    Pattern(
        "bits",
        lambda r: (ints(r, 128), zeros(4, dtype=np.uint32), np.int32(128)),
        lambda a: (a[1] == np.packbits(a[0] > 0, bitorder="little").view(np.uint32)).all(),
        {1: RaceError},
        block=(64,),
    ),
    Pattern(
        "copies",
        lambda r: (r.integers(0, 255, 256).astype(np.uint8), zeros(256, dtype=np.uint8), np.int32(64)),
        lambda a: (a[0] == a[1]).all(),
        {1: OutOfBoundsError, 2: RaceError},
        block=(4,),
    ),
    Pattern(
        "overflowing_offset",
        lambda r: (np.arange(64, dtype=np.uint8), zeros(4, dtype=np.uint8), np.int32(40000), np.int32(60000)),
        lambda a: (a[1] == (39999 - np.arange(4)) * 60000 % 64).all(),
        {1: UndefinedArithmeticError},
        block=(4,),
    ),
    Pattern("waits_for_later_blocks", lambda r: (zeros(6), zeros(6)), lambda a: a[1].all(), {}, grid=(6,)),
    Pattern(
        "sum_of_a_warp_by_pairs", lambda r: (ints(r, 32), zeros(1)), lambda a: a[1][0] == a[0].sum(), {1: RaceError}
    ),
]
FORMS = [(p, b) for p in PATTERNS for b in (0, *p.broken)]


@pytest.fixture(scope="module")
def modules(compiler) -> dict[int, RawModule]:
    return {b: RawModule(TEXT, name="patterns.cu", options=(f"-DBREAK={b}",), compiler=compiler) for b in (0, 1, 2)}


@pytest.mark.parametrize(
    ("pattern", "form"), FORMS, ids=[f"{p.kernel}-{'broken' + str(b) if b else 'right'}" for p, b in FORMS]
)
def test_pattern(modules, compiler, pattern, form):
    if form and pattern.broken[form] is MisalignedError and pattern.kernel == "any_row_alignment" and compiler != "g++":
        pytest.skip("only g++ checks the alignment of a whole structure that is copied")
    for order in ("forward", "reverse", ("shuffle", 3)):
        args = pattern.args(np.random.default_rng(5))
        kernel = modules[form].get_function(pattern.kernel)
        if form:
            with pytest.raises(pattern.broken[form]) as caught:
                kernel(pattern.grid, pattern.block, args, shared_mem=pattern.shared_mem, block_order=order)
            assert type(caught.value) is pattern.broken[form] and caught.value.line
        else:
            kernel(pattern.grid, pattern.block, args, shared_mem=pattern.shared_mem, block_order=order)
            assert pattern.right(args)


def test_stencil_in_place_is_a_race(modules):
    x, out = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    kernel = modules[0].get_function("stencil")
    kernel((4,), (32,), (x, out, np.int32(100)))
    np.testing.assert_array_equal(out[1:-1], 3 * x[1:-1])
    with pytest.raises(RaceError):
        kernel((4,), (32,), (x, x, np.int32(100)))


def test_too_little_dynamic_shared_memory(modules):
    args = (np.ones(37), np.zeros(37), np.int32(37))
    with pytest.raises(OutOfBoundsError, match="of dynamic shared memory"):
        modules[0].get_function("dynamic_layout")((1,), (32,), args, shared_mem=40 + 36 * 8)


def test_a_wait_for_a_block_that_is_not_resident(modules):
    kernel = modules[0].get_function("waits_for_later_blocks")
    with pytest.raises(HangError, match="polls"):
        kernel((6,), (32,), (zeros(6), zeros(6)), resident_blocks=1)
    kernel((6,), (32,), (zeros(6), zeros(6)), resident_blocks=1, block_order="reverse")
