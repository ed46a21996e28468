"""Correct kernels: the checker must stay silent, and the results equal NumPy's exactly, in every block order."""

from __future__ import annotations

import numpy as np
import pytest

from vpa.backends.simt import RawModule

ORDERS = ["forward", "reverse", ("shuffle", 7)]

TEXT = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void
#define FULL (~(decltype(__activemask()))0)

KERNEL grid_stride(const float* __restrict__ x, float* __restrict__ y, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        y[i] = x[i] * 2.0f + 1.0f;
}
KERNEL double_buffer(const int* x, int* out, int steps) {  // one barrier a step, two buffers
    __shared__ int buffer[2][128];
    int t = threadIdx.x, now = 0;
    buffer[0][t] = x[blockIdx.x * 128 + t];
    __syncthreads();
    for (int step = 0; step < steps; ++step, now ^= 1) {
        buffer[now ^ 1][t] = buffer[now][(t + 1) % 128] + step;
        __syncthreads();
    }
    out[blockIdx.x * 128 + t] = buffer[now][t];
}
KERNEL early_exit(const int* x, int* out, int n) {  // returned threads count as arrived
    __shared__ int s[128];
    int i = blockIdx.x * 128 + threadIdx.x;
    if (i >= n) return;
    s[threadIdx.x] = x[i];
    __syncthreads();
    int left = threadIdx.x ? s[threadIdx.x - 1] : 0;
    __syncthreads();
    s[threadIdx.x] = left;
    __syncthreads();
    out[i] = s[threadIdx.x];
}
KERNEL last_block(const int* x, long long* partial, u32* count, long long* out, int n) {
    __shared__ long long s[64];
    __shared__ bool last;
    long long total = 0;
    for (int i = blockIdx.x * 64 + threadIdx.x; i < n; i += gridDim.x * 64) total += x[i];
    s[threadIdx.x] = total;
    for (int d = 32; d; d >>= 1) {
        __syncthreads();
        if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
    }
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = s[0];
        __threadfence();
        last = atomicAdd(count, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    total = 0;
    for (u32 i = threadIdx.x; i < gridDim.x; i += 64) total += partial[i];
    s[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0;
        for (int i = 0; i < 64; ++i) total += s[i];
        *out = total;
        *count = 0;
    }
}
KERNEL last_block_all_write(int* partial, u32* count, int* out) {  // every thread writes and fences, then one counts
    __shared__ u32 ticket;
    partial[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x + threadIdx.x;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ticket = atomicAdd(count, 1u);
    __syncthreads();
    if (ticket != gridDim.x - 1) return;
    int total = 0;
    for (u32 b = 0; b < gridDim.x; ++b) total += partial[b * blockDim.x + (threadIdx.x + 1) % blockDim.x];
    out[threadIdx.x] = total;
}
KERNEL last_block_barrier_then_fence(int* partial, u32* count, int* out) {  // as grid synchronisation does it
    __shared__ u32 ticket;
    partial[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x + threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        ticket = atomicAdd(count, 1u);
    }
    __syncthreads();
    if (ticket != gridDim.x - 1) return;
    int total = 0;
    for (u32 b = 0; b < gridDim.x; ++b) total += partial[b * blockDim.x + (threadIdx.x + 1) % blockDim.x];
    out[threadIdx.x] = total;
}
KERNEL warp_tail(const int* x, int* out) {  // shared memory down to two warps, then __syncwarp only
    __shared__ int s[256];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int d = 128; d >= warpSize; d >>= 1) {
        if (t < d) s[t] += s[t + d];
        __syncthreads();
    }
    if (t < warpSize) {
        int v = s[t];
        for (int d = warpSize / 2; d; d >>= 1) {
            int other = s[(t + d) % warpSize];
            __syncwarp();
            v = t < d ? v + other : v;
            s[t] = v;
            __syncwarp();
        }
        if (t == 0) out[blockIdx.x] = v;
    }
}
KERNEL half_warps(int* out) {  // two groups of lanes, each with its own mask
    __shared__ int s[64];
    int lane = threadIdx.x % warpSize, half = warpSize / 2;
    auto mask = lane < half ? FULL >> half : ~(FULL >> half);
    s[threadIdx.x] = threadIdx.x;
    __syncwarp(mask);
    int v = s[threadIdx.x ^ 1];
    __syncwarp(mask);
    s[threadIdx.x] = v;
    __syncwarp();
    out[threadIdx.x] = s[threadIdx.x ^ half];
}
KERNEL shuffles(const float* x, float* out, int width) {
    float v = x[threadIdx.x];
    out[threadIdx.x] = __shfl_sync(FULL, v, 3, width);
    out[64 + threadIdx.x] = __shfl_up_sync(FULL, v, 2, width);
    out[128 + threadIdx.x] = __shfl_down_sync(FULL, v, 2, width);
    out[192 + threadIdx.x] = __shfl_xor_sync(FULL, v, 5, width);
}
KERNEL block_max(const u64* x, u64* out, int n) {
    __shared__ u64 s[32];
    u64 best = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) best = max(best, x[blockIdx.x * n + i]);
    for (int d = warpSize / 2; d; d >>= 1) best = max(best, __shfl_xor_sync(FULL, best, d));
    if (threadIdx.x % warpSize == 0) s[threadIdx.x / warpSize] = best;
    __syncthreads();
    if (threadIdx.x < warpSize) {
        best = threadIdx.x < blockDim.x / warpSize ? s[threadIdx.x] : 0;
        for (int d = warpSize / 2; d; d >>= 1) best = max(best, __shfl_xor_sync(FULL, best, d));
        if (threadIdx.x == 0) out[blockIdx.x] = best;
    }
}
KERNEL partial_warp(const int* x, int* out) {  // the last warp is not full: naming lanes that are not there is no fault
    int v = x[threadIdx.x];
    auto positive = __ballot_sync(FULL, v > 0);
    out[threadIdx.x] = __shfl_xor_sync(FULL, v, 1) + __popcll(positive);
    __syncwarp();
}
KERNEL histogram(const unsigned char* x, u32* bins, int n) {
    __shared__ u32 s[256];
    s[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) atomicAdd(&s[x[i]], 1u);
    __syncthreads();
    if (s[threadIdx.x]) atomicAdd(&bins[threadIdx.x], s[threadIdx.x]);
}
KERNEL transpose(const float* x, float* out, int rows, int columns) {
    extern __shared__ float tile[];  // [16][17]
    int r = blockIdx.y * 16 + threadIdx.y, c = blockIdx.x * 16 + threadIdx.x;
    if (r < rows && c < columns) tile[threadIdx.y * 17 + threadIdx.x] = x[r * columns + c];
    __syncthreads();
    r = blockIdx.x * 16 + threadIdx.y, c = blockIdx.y * 16 + threadIdx.x;
    if (r < columns && c < rows) out[r * rows + c] = tile[threadIdx.x * 17 + threadIdx.y];
}
KERNEL two_dynamic_arrays(const int* x, long long* out) {  // they begin at one address: the second is offset by hand
    extern __shared__ int words[];
    extern __shared__ long long wide[];
    words[threadIdx.x] = x[threadIdx.x];
    wide[32 + threadIdx.x] = 10 * x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = words[63 - threadIdx.x] + wide[32 + 63 - threadIdx.x];
}
struct Ranges { long long start[2], count[2]; float scale; };
KERNEL struct_by_value(const float* x, float* out, Ranges r) {
    for (int k = 0; k < 2; ++k)
        for (long long i = threadIdx.x; i < r.count[k]; i += blockDim.x)
            out[r.start[k] + i] = x[r.start[k] + i] * r.scale;
}
KERNEL bytes_of_words(unsigned char* bytes, unsigned short* halves) {  // neighbours in one word are no race
    bytes[threadIdx.x] = (unsigned char)threadIdx.x;
    halves[threadIdx.x] = (unsigned short)(threadIdx.x * 3);
}
KERNEL wide_copy(const uint4* x, uint4* out) {
    __shared__ uint4 s[32];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s[31 - threadIdx.x];
}
KERNEL counts(int* out) {
    int even = __syncthreads_count(threadIdx.x % 2 == 0);
    int all = __syncthreads_and(threadIdx.x < 100), any = __syncthreads_or(threadIdx.x == 5);
    out[threadIdx.x] = even * 4 + (all != 0) * 2 + (any != 0);
}
KERNEL uniform_branches(int* out) {  // barriers in a branch that the whole block takes, and in a loop
    __shared__ int s[64];
    s[threadIdx.x] = 0;
    __syncthreads();
    for (u32 i = 0; i < 3 + blockIdx.x; ++i) {
        if (blockIdx.x % 2) {
            s[threadIdx.x] += i;
            __syncthreads();
        } else {
            s[63 - threadIdx.x] += 2 * i;
            __syncthreads();
        }
    }
    out[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x];
}
KERNEL flag_between_blocks(int* data, volatile int* flag, int* out) {  // block 0 waits for block 1
    if (threadIdx.x) return;
    if (blockIdx.x == 1) {
        data[0] = 42;
        __threadfence();
        flag[0] = 1;
    } else if (blockIdx.x == 0) {
        while (flag[0] == 0) {}
        __threadfence();
        out[0] = data[0];
    }
}
KERNEL look_back(const int* x, volatile int* state, int* sums, int* out) {  // a prefix sum in one pass, by flags
    __shared__ int before;
    int t = threadIdx.x, b = blockIdx.x, total = 0;
    for (int i = 0; i < 32; ++i) total += x[b * 32 + i];
    if (t == 0) {
        int sum = 0;
        if (b) {
            while (state[b - 1] == 0) {}
            __threadfence();
            sum = sums[b - 1];
        }
        before = sum;
        sums[b] = sum + total;
        __threadfence();
        state[b] = 1;
    }
    __syncthreads();
    int sum = before;
    for (int i = 0; i <= t; ++i) sum += x[b * 32 + i];
    out[b * 32 + t] = sum;
}
KERNEL spin_lock(int* lock, int* value) {
    for (bool done = false; !done;)
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            *value += threadIdx.x + 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
}
KERNEL grid_barrier(u32* arrived, int* data, int* out) {  // all blocks must be resident
    data[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrived, 1u);
        while (atomicAdd(arrived, 0u) < gridDim.x) {}
        __threadfence();
    }
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = data[(blockIdx.x + 1) % gridDim.x * blockDim.x + threadIdx.x];
}
KERNEL reuse_after_shuffle(int* out) {  // a warp's slot of shared memory, handed from lane to lane
    __shared__ int slot[4];
    int warp = threadIdx.x / warpSize, lane = threadIdx.x % warpSize, total = 0;
    for (int i = 0; i < 4; ++i) {
        if (lane == i) slot[warp] = threadIdx.x;
        __syncwarp();
        total += slot[warp];
        __syncwarp();
    }
    out[threadIdx.x] = total;
}
template <int N> __device__ int sum_of(int v) {
    __shared__ int s[N];
    s[threadIdx.x] = v;
    __syncthreads();
    int total = 0;
    for (int i = 0; i < N; ++i) total += s[i];
    __syncthreads();
    return total;
}
KERNEL templates(int* out) { out[threadIdx.x] = sum_of<64>(threadIdx.x) + sum_of<64>(1) * (threadIdx.x < 1 ? 1 : 2); }
__device__ int visits;
__constant__ int weights[4] = {1, 10, 100, 1000};
KERNEL variables(int* out) {
    atomicAdd(&visits, weights[threadIdx.x & 3]);
    out[blockIdx.x * blockDim.x + threadIdx.x] = weights[threadIdx.x & 3];
}
KERNEL local_arrays(int* out, int n) {
    int a[16];
    for (int i = 0; i < 16; ++i) a[i] = i * n;
    int* p = a + threadIdx.x % 16;
    out[threadIdx.x] = *p;
}
"""


@pytest.fixture(scope="module", params=[32, 64], ids=["warp32", "warp64"])
def module(request, compiler) -> RawModule:
    return RawModule(TEXT, name="clean.cu", warp_size=request.param, compiler=compiler)


@pytest.fixture(params=ORDERS, ids=["forward", "reverse", "shuffle"])
def order(request):
    return request.param


rng = np.random.default_rng(0)


def ints(*shape: int) -> np.ndarray:
    return rng.integers(-1000, 1000, shape).astype(np.int32)


def launch(module, order, name, grid, block, *args, **options):
    grid = grid if isinstance(grid, tuple) else (grid,)
    block = block if isinstance(block, tuple) else (block,)
    module.get_function(name)(grid, block, args, block_order=order, **options)


@pytest.mark.parametrize("n", [1, 1000, 4097])
def test_grid_stride(module, order, n):
    x, y = rng.standard_normal(n).astype(np.float32), np.zeros(n, np.float32)
    launch(module, order, "grid_stride", 4, 96, x, y, np.int64(n))
    np.testing.assert_array_equal(y, x * np.float32(2) + np.float32(1))


def test_double_buffer(module, order):
    x, out = ints(3, 128), np.zeros((3, 128), np.int32)
    launch(module, order, "double_buffer", 3, 128, x, out, np.int32(5))
    np.testing.assert_array_equal(out, np.roll(x, -5, axis=1) + sum(range(5)))


def test_early_exit(module, order):
    x, out = ints(300), np.zeros(300, np.int32)
    launch(module, order, "early_exit", 3, 128, x, out, np.int32(300))
    expected = np.concatenate([[0], x[:-1]])
    expected[::128] = 0
    np.testing.assert_array_equal(out, expected)


def test_last_block_with_fence(module, order):
    x, partial, count, out = ints(5000), np.zeros(40, np.int64), np.zeros(1, np.uint32), np.zeros(1, np.int64)
    for _ in range(2):  # the counter is left at zero for the next launch
        launch(module, order, "last_block", 40, 64, x, partial, count, out, np.int32(5000))
        assert out[0] == x.sum(dtype=np.int64) and count[0] == 0


@pytest.mark.parametrize("name", ["last_block_all_write", "last_block_barrier_then_fence"])
def test_last_block_where_all_threads_write(module, order, name):
    partial, count, out = np.zeros(8 * 96, np.int32), np.zeros(1, np.uint32), np.zeros(96, np.int32)
    launch(module, order, name, 8, 96, partial, count, out)
    np.testing.assert_array_equal(out, sum(range(8)) + 8 * ((np.arange(96) + 1) % 96))


def test_warp_tail(module, order):
    x, out = ints(5, 256), np.zeros(5, np.int32)
    launch(module, order, "warp_tail", 5, 256, x, out)
    np.testing.assert_array_equal(out, x.sum(1))


def test_half_warps(module, order):
    out = np.zeros(64, np.int32)
    launch(module, order, "half_warps", 1, 64, out)
    np.testing.assert_array_equal(out, np.arange(64) ^ (module.warp_size // 2) ^ 1)


@pytest.mark.parametrize("width", [2, 8, 16, 32])
def test_shuffle_widths(module, order, width):
    x, out = rng.standard_normal(64).astype(np.float32), np.zeros((4, 64), np.float32)
    launch(module, order, "shuffles", 1, 64, x, out, np.int32(width))
    lane = np.arange(64)
    first, last = lane // width * width, lane // width * width + width - 1
    np.testing.assert_array_equal(out[0], x[first + 3 % width])
    np.testing.assert_array_equal(out[1], x[np.where(lane - 2 < first, lane, lane - 2)])
    np.testing.assert_array_equal(out[2], x[np.where(lane + 2 > last, lane, lane + 2)])
    np.testing.assert_array_equal(out[3], x[np.where(lane ^ 5 > last, lane, lane ^ 5)])


def test_block_max_of_64_bit_keys(module, order):
    x, out = rng.integers(0, 2**64, (6, 777), dtype=np.uint64), np.zeros(6, np.uint64)
    launch(module, order, "block_max", 6, 128, x, out, np.int32(777))
    np.testing.assert_array_equal(out, x.max(1))


@pytest.mark.parametrize("block", [2, 40, 66])
def test_partial_warp(module, order, block):
    x, out = ints(block), np.zeros(block, np.int32)
    launch(module, order, "partial_warp", 1, block, x, out)
    warp = np.arange(block) // module.warp_size
    np.testing.assert_array_equal(out, x[np.arange(block) ^ 1] + np.bincount(warp, x > 0)[warp].astype(np.int32))


def test_atomic_histogram(module, order):
    x, bins = rng.integers(0, 50, 5000).astype(np.uint8), np.zeros(256, np.uint32)
    launch(module, order, "histogram", 5, 256, x, bins, np.int32(5000))
    np.testing.assert_array_equal(bins, np.bincount(x, minlength=256))


def test_dynamic_shared_memory_in_two_dimensions(module, order):
    x, out = rng.standard_normal((35, 50)).astype(np.float32), np.zeros((50, 35), np.float32)
    launch(module, order, "transpose", (4, 3), (16, 16), x, out, np.int32(35), np.int32(50), shared_mem=16 * 17 * 4)
    np.testing.assert_array_equal(out, x.T)


def test_two_dynamic_arrays_share_their_start(module, order):
    x, out = ints(64), np.zeros(64, np.int64)
    launch(module, order, "two_dynamic_arrays", 1, 64, x, out, shared_mem=64 * 4 + 64 * 8)
    np.testing.assert_array_equal(out, 11 * x[::-1].astype(np.int64))


def test_struct_by_value(module, order):
    dtype = np.dtype([("start", "i8", (2,)), ("count", "i8", (2,)), ("scale", "f4")], align=True)
    ranges = np.array([((3, 60), (10, 40), 2.5)], dtype)
    x, out = rng.standard_normal(100).astype(np.float32), np.zeros(100, np.float32)
    for value in (ranges, ranges[0]):
        out[:] = 0
        launch(module, order, "struct_by_value", 1, 32, x, out, value)
        expected = np.zeros(100, np.float32)
        for start, count in ((3, 10), (60, 40)):
            expected[start : start + count] = x[start : start + count] * np.float32(2.5)
        np.testing.assert_array_equal(out, expected)


def test_neighbouring_bytes(module, order):
    data, halves = np.zeros(70, np.uint8), np.zeros(70, np.uint16)
    launch(module, order, "bytes_of_words", 1, 70, data, halves)
    np.testing.assert_array_equal(data, np.arange(70))
    np.testing.assert_array_equal(halves, 3 * np.arange(70))


def test_wide_copy(module, order):
    x, out = rng.integers(0, 2**32, (32, 4), dtype=np.uint32), np.zeros((32, 4), np.uint32)
    launch(module, order, "wide_copy", 1, 32, x, out)
    np.testing.assert_array_equal(out, x[::-1])


def test_counting_barriers(module, order):
    out = np.zeros(101, np.int32)
    launch(module, order, "counts", 1, 101, out)
    np.testing.assert_array_equal(out, 51 * 4 + 1)


def test_barriers_in_uniform_branches(module, order):
    out = np.zeros((4, 64), np.int32)
    launch(module, order, "uniform_branches", 4, 64, out)
    np.testing.assert_array_equal(out[:, 0], [6, 6, 20, 15])
    np.testing.assert_array_equal(out, out[:, :1].repeat(64, 1))


def test_a_block_waits_for_another(module, order):
    data, flag, out = (np.zeros(1, np.int32) for _ in range(3))
    launch(module, order, "flag_between_blocks", 3, 33, data, flag, out)
    assert out[0] == 42


def test_decoupled_look_back(module, order):
    x, out = ints(20, 32), np.zeros((20, 32), np.int32)
    launch(module, order, "look_back", 20, 32, x, np.zeros(20, np.int32), np.zeros(20, np.int32), out)
    np.testing.assert_array_equal(out.ravel(), np.cumsum(x.ravel()))


def test_spin_lock(module, order):
    lock, value = np.zeros(1, np.int32), np.zeros(1, np.int32)
    launch(module, order, "spin_lock", 3, 70, lock, value)
    assert value[0] == 3 * 70 * 71 // 2 and lock[0] == 0


def test_grid_barrier(module, order):
    data, out = np.zeros(6 * 40, np.int32), np.zeros(6 * 40, np.int32)
    launch(module, order, "grid_barrier", 6, 40, np.zeros(1, np.uint32), data, out)
    np.testing.assert_array_equal(out.reshape(6, 40)[:, 0], [1, 2, 3, 4, 5, 0])


def test_slot_handed_from_lane_to_lane(module, order):
    out = np.zeros(128, np.int32)
    launch(module, order, "reuse_after_shuffle", 1, 128, out)
    first = np.arange(128) // module.warp_size * module.warp_size
    np.testing.assert_array_equal(out, 4 * first + 6)


def test_shared_memory_in_templates(module, order):
    out = np.zeros(64, np.int32)
    launch(module, order, "templates", 1, 64, out)
    np.testing.assert_array_equal(out, [2016 + 64] + [2016 + 128] * 63)


def test_device_and_constant_variables(module, order):
    visits, weights = module.get_global("visits").view(np.int32), module.get_global("weights").view(np.int32)
    visits[0] = 5
    weights[:] = [1, 2, 3, 4]
    out = np.zeros(128, np.int32)
    launch(module, order, "variables", 2, 64, out)
    np.testing.assert_array_equal(out, np.tile([1, 2, 3, 4], 32))
    assert visits[0] == 5 + 2 * 16 * 10


def test_local_arrays(module, order):
    out = np.zeros(64, np.int32)
    launch(module, order, "local_arrays", 1, 64, out, np.int32(3))
    np.testing.assert_array_equal(out, np.arange(64) % 16 * 3)
