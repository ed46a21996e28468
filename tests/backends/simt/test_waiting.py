"""Blocks and warps that wait for one another through flags, counters and locks: fences order what they publish."""

from __future__ import annotations

import numpy as np
import pytest

from vpa.backends.simt import RaceError, RawModule

TEXT = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void
#define FULL 0xffffffffu

// A prefix sum in one pass: a warp looks back at 32 blocks at a time. State: value << 2 | 0 none, 1 own sum, 2 prefix.
KERNEL look_back(const u32* x, volatile u64* state, u32* out) {
    __shared__ u32 sums[4], before;
    int t = threadIdx.x, lane = t % 32, warp = t / 32, b = blockIdx.x;
    u32 sum = x[b * 128 + t], total = 0, mine = 0;
    for (int d = 1; d < 32; d *= 2) {
        u32 other = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    for (int i = 0; i < 4; ++i) {
        if (i < warp) mine += sums[i];
        total += sums[i];
    }
    if (warp == 0) {
        if (lane == 0) state[b] = (u64)total << 2 | (b ? 1 : 2);
        u32 found = 0;
        for (int at = b - 1; at >= 0; at -= 32) {
            u64 word = 2;
            int i = at - lane;
            if (i >= 0) do word = state[i]; while ((word & 3) == 0);
            u32 prefixes = __ballot_sync(FULL, (word & 3) == 2);
            int stop = __ffs(prefixes) - 1;
            u32 part = lane <= (stop < 0 ? 31 : stop) && i >= 0 ? (u32)(word >> 2) : 0;
            for (int d = 16; d; d >>= 1) part += __shfl_xor_sync(FULL, part, d);
            found += part;
            if (stop >= 0) break;
        }
        if (lane == 0) {
            before = found;
            if (b) state[b] = (u64)(found + total) << 2 | 2;
        }
    }
    __syncthreads();
    out[b * 128 + t] = before + mine + sum;
}
KERNEL ticket_lock(u32* next, volatile u32* serving, u32* data) {
    if (threadIdx.x % 32) return;
    u32 ticket = atomicAdd(next, 1u);
    while (*serving != ticket) {}
    __threadfence();
    for (int i = 0; i < 4; ++i) data[i] += ticket + i;
    __threadfence();
    *serving = ticket + 1;
}
// BARRIER 0: none, 1: a barrier of the whole grid between two rounds.
template <int BARRIER> __device__ void rounds_of(u32* count, volatile u32* sense, int* a, int* b, int rounds) {
    u32 want = 1;
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    for (int r = 0; r < rounds; ++r) {
        int *from = r & 1 ? b : a, *to = r & 1 ? a : b;
        to[i] = from[(i + 1) % n] + from[(i + n - 1) % n];
        __syncthreads();
        if (BARRIER && threadIdx.x == 0) {
            __threadfence();
            if (atomicAdd(count, 1u) == gridDim.x - 1) {
                *count = 0;
                __threadfence();
                *sense = want;
            } else {
                while (*sense != want) {}
            }
            __threadfence();
        }
        __syncthreads();
        want ^= 1;
    }
}
KERNEL grid_rounds(u32* count, volatile u32* sense, int* a, int* b, int n) { rounds_of<1>(count, sense, a, b, n); }
KERNEL block_rounds(u32* count, volatile u32* sense, int* a, int* b, int n) { rounds_of<0>(count, sense, a, b, n); }
KERNEL flag_by_atomics(u32* flag, int* data, int* out) {
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) {
            data[0] = 11, data[1] = 12;
            __threadfence();
            atomicExch(flag, 1u);
        } else {
            while (atomicCAS(flag, 1u, 1u) != 1u) {}
            __threadfence();
        }
    }
    __syncthreads();
    if (blockIdx.x && threadIdx.x < 2) out[blockIdx.x * 2 + threadIdx.x] = data[threadIdx.x];
}
template <int ORDER> __device__ void through_cpp_atomics(int* flag, int* data, int* out) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        data[0] = 21;
        __atomic_store_n(flag, 1, ORDER);
    } else {
        while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) == 0) {}
        out[blockIdx.x] = data[0];
    }
}
KERNEL release_store(int* flag, int* data, int* out) { through_cpp_atomics<__ATOMIC_RELEASE>(flag, data, out); }
KERNEL relaxed_store(int* flag, int* data, int* out) { through_cpp_atomics<__ATOMIC_RELAXED>(flag, data, out); }
// Long waits that do end, though nobody writes meanwhile.
KERNEL reads_volatile_for_long(const volatile int* x, int* out, int n, int rounds) {
    int total = 0;
    for (int r = 0; r < rounds; ++r)
        for (int i = threadIdx.x; i < n; i += blockDim.x) total += x[i];
    out[threadIdx.x] = total;
}
KERNEL polls_a_number_of_times(volatile int* flag, int* out, int most) {
    int n = 0;
    while (*flag == 0 && n < most) ++n;
    out[threadIdx.x] = n;
}
KERNEL polls_until_a_time(volatile int* flag, int* out, long long ns) {
    long long start = clock64();
    while (*flag == 0 && clock64() - start < ns) {}
    out[threadIdx.x] = 1;
}
KERNEL ring(const int* x, int* out, int tiles) {  // one warp fills a ring of two tiles, another empties it
    __shared__ int tile[2][32];
    __shared__ volatile int full[2], empty[2];
    int lane = threadIdx.x % 32, total = 0;
    if (threadIdx.x < 2) full[threadIdx.x] = 0, empty[threadIdx.x] = 1;
    __syncthreads();
    for (int t = 0; t < tiles; ++t) {
        int k = t & 1;
        if (threadIdx.x < 32) {
            while (empty[k] == 0) {}
            __threadfence_block();
            __syncwarp();
            if (lane == 0) empty[k] = 0;
            tile[k][lane] = x[t * 32 + lane];
            __threadfence_block();
            __syncwarp();
            if (lane == 0) full[k] = t + 1;
        } else {
            while (full[k] != t + 1) {}
            __threadfence_block();
            total += tile[k][31 - lane];
            __threadfence_block();
            __syncwarp();
            if (lane == 0) empty[k] = 1;
        }
    }
    if (threadIdx.x >= 32) out[lane] = total;
}
"""


@pytest.fixture(scope="module")
def module(compiler) -> RawModule:
    return RawModule(TEXT, name="waiting.cu", compiler=compiler)


@pytest.fixture(params=["forward", "reverse", ("shuffle", 1)], ids=["forward", "reverse", "shuffle"])
def launch(module, request):
    def run(name, grid, block, *args):
        module.get_function(name)((grid,), (block,), args, block_order=request.param)

    return run


rng = np.random.default_rng(0)


def words(n: int) -> np.ndarray:
    return np.zeros(n, np.uint32)


def test_look_back(launch):
    x, out = rng.integers(0, 100, 40 * 128).astype(np.uint32), words(40 * 128)
    launch("look_back", 40, 128, x, np.zeros(40, np.uint64), out)
    np.testing.assert_array_equal(out, np.cumsum(x, dtype=np.uint32))


def test_ticket_lock(launch):
    data = words(4)
    launch("ticket_lock", 5, 96, words(1), words(1), data)
    np.testing.assert_array_equal(data, 105 + 15 * np.arange(4))


def test_rounds_need_a_barrier_of_the_grid(launch):
    a, b = rng.integers(0, 9, 240).astype(np.int32), np.zeros(240, np.int32)
    expected = a.copy()
    for _ in range(5):
        expected = np.roll(expected, -1) + np.roll(expected, 1)
    launch("grid_rounds", 6, 40, words(1), words(1), a, b, np.int32(5))
    np.testing.assert_array_equal(b, expected)
    with pytest.raises(RaceError, match="nothing orders the two blocks"):
        launch("block_rounds", 6, 40, words(1), words(1), a, b, np.int32(5))


def test_flag_by_atomics(launch):
    out = np.zeros(8, np.int32)
    launch("flag_by_atomics", 4, 32, words(1), np.zeros(2, np.int32), out)
    np.testing.assert_array_equal(out, [0, 0] + [11, 12] * 3)


def test_memory_orders_of_cpp_atomics(launch):
    out = np.zeros(4, np.int32)
    launch("release_store", 4, 32, np.zeros(1, np.int32), np.zeros(1, np.int32), out)
    np.testing.assert_array_equal(out, [0, 21, 21, 21])
    with pytest.raises(RaceError):
        launch("relaxed_store", 4, 32, np.zeros(1, np.int32), np.zeros(1, np.int32), out)


def test_long_waits_that_end(module):
    def launch(name, *args):
        module.get_function(name)((1,), (8,), args, timeout=60)

    out = np.zeros(8, np.int32)
    launch("reads_volatile_for_long", np.ones(8000, np.int32), out, np.int32(8000), np.int32(2500))
    assert (out == 1000 * 2500).all()
    launch("polls_a_number_of_times", np.zeros(1, np.int32), out, np.int32(2_000_000))
    assert (out == 2_000_000).all()
    launch("polls_until_a_time", np.zeros(1, np.int32), out, np.int64(1_500_000_000))
    assert (out == 1).all()


def test_ring_between_two_warps(launch):
    x, out = rng.integers(0, 9, (10, 32)).astype(np.int32), np.zeros(32, np.int32)
    launch("ring", 1, 64, x, out, np.int32(10))
    np.testing.assert_array_equal(out, x.sum(0)[::-1])
