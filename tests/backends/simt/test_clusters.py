"""Thread block clusters: blocks that run together, their barrier, and the shared memory of one seen by another."""

from __future__ import annotations

import numpy as np
import pytest

from vpa.backends.simt import (
    DivergenceError,
    HangError,
    LaunchError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    RawModule,
    SimtError,
    UninitializedError,
)

TEXT = r"""
typedef unsigned int u32;
#define KERNEL extern "C" __global__ void
#define CLUSTER(n) __cluster_dims__(n, 1, 1)
constexpr int FOUR = 4;

// --- Correct ---
// BREAK 1: no barrier before the remote reads, 2: none before the exit, 3: one of the block only before the reads.
template <int BREAK> __device__ void sum_of_cluster(const int* x, int* out) {
    __shared__ int part[64], sum;
    part[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    for (int d = 32; d; d >>= 1) {
        __syncthreads();
        if (threadIdx.x < d) part[threadIdx.x] += part[threadIdx.x + d];
    }
    if (threadIdx.x == 0) sum = part[0];
    if (BREAK == 3) {
        __simt_cluster_barrier();
        if (threadIdx.x == 0) sum = part[0];
        __syncthreads();
    } else if (BREAK != 1) {
        __simt_cluster_barrier();
    }
    int total = 0;
    if (__simt_cluster_rank() == 0 && threadIdx.x < __simt_cluster_size())
        total = *__simt_cluster_map(&sum, threadIdx.x);
    if (BREAK != 2) __simt_cluster_barrier();
    if (__simt_cluster_rank() == 0 && threadIdx.x < 32) {
        for (int d = 16; d; d >>= 1) total += __shfl_down_sync((decltype(__activemask()))0xffffffffu, total, d, 32);
        if (threadIdx.x == 0) out[blockIdx.x / __simt_cluster_size()] = total;
    }
}
KERNEL CLUSTER(FOUR) sum_of_four(const int* x, int* out) { sum_of_cluster<0>(x, out); }
KERNEL __launch_bounds__(64) CLUSTER(16) sum_of_sixteen(const int* x, int* out) { sum_of_cluster<0>(x, out); }
KERNEL sum_of_one(const int* x, int* out) { sum_of_cluster<0>(x, out); }
KERNEL __cluster_dims__(2, 3) ranks(u32* out) {
    __shared__ u32 mine;
    mine = blockIdx.y * gridDim.x + blockIdx.x;
    __simt_cluster_barrier();
    for (u32 r = 0; r < 6; ++r) out[mine * 6 + r] = *__simt_cluster_map(&mine, r);
    __simt_cluster_barrier();
}
KERNEL CLUSTER(2) exchange(const float4* x, float4* out) {  // remote writes to dynamic shared memory, wide
    extern __shared__ float4 tile[];
    u32 other = __simt_cluster_rank() ^ 1;
    __simt_cluster_barrier();  // the other block has started
    __simt_cluster_map(tile, other)[31 - threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
    __simt_cluster_barrier();
    out[blockIdx.x * 32 + threadIdx.x] = tile[threadIdx.x];
}
KERNEL CLUSTER(4) histogram(const int* x, int* bins, int n) {  // each block holds a quarter of the bins; remote atomics
    __shared__ int mine[8];
    if (threadIdx.x < 8) mine[threadIdx.x] = 0;
    __simt_cluster_barrier();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&__simt_cluster_map(mine, x[i] / 8)[x[i] % 8], 1);
    __simt_cluster_barrier();
    if (threadIdx.x < 8) atomicAdd(&bins[__simt_cluster_rank() * 8 + threadIdx.x], mine[threadIdx.x]);
}
KERNEL CLUSTER(2) rounds(int* out, int n) {  // one barrier a round, two buffers
    __shared__ int buffer[2][32];
    int* other = __simt_cluster_map(&buffer[0][0], __simt_cluster_rank() ^ 1);
    int v = blockIdx.x * 32 + threadIdx.x;
    __simt_cluster_barrier();
    for (int i = 0; i < n; ++i) {
        other[(i & 1) * 32 + (threadIdx.x + 1) % 32] = v;
        __simt_cluster_barrier();
        v = buffer[i & 1][threadIdx.x] + i;
    }
    out[blockIdx.x * 32 + threadIdx.x] = v;
    __simt_cluster_barrier();
}
KERNEL CLUSTER(2) flag_between_blocks(int* out) {  // a volatile flag in the other block's shared memory
    __shared__ int data;
    __shared__ volatile int ready;
    if (threadIdx.x == 0) ready = 0;
    __simt_cluster_barrier();
    if (threadIdx.x == 0) {
        if (__simt_cluster_rank() == 0) {
            *__simt_cluster_map(&data, 1) = 17;
            __threadfence();
            *__simt_cluster_map(&ready, 1) = 1;
        } else {
            while (ready == 0) {}
            __threadfence();
            out[blockIdx.x] = data;
        }
    }
    __simt_cluster_barrier();
}
KERNEL CLUSTER(2) early_return(int* out) {  // threads and blocks that have returned count as arrived
    __shared__ int s;
    if (threadIdx.x >= 7 || blockIdx.x % 4 == 2) return;
    if (threadIdx.x == 0) s = blockIdx.x;
    __simt_cluster_barrier();
    u32 other = blockIdx.x < 2 ? __simt_cluster_rank() ^ 1 : __simt_cluster_rank();
    out[blockIdx.x * 7 + threadIdx.x] = *__simt_cluster_map(&s, other);
    __simt_cluster_barrier();
}
KERNEL CLUSTER(2) through_global_memory(int* data, int* out) {  // the barrier orders global memory, too
    data[blockIdx.x * 32 + threadIdx.x] = blockIdx.x;
    __simt_cluster_barrier();
    out[blockIdx.x * 32 + threadIdx.x] = data[(blockIdx.x ^ 1) * 32 + threadIdx.x];
}
KERNEL CLUSTER(2) last_cluster(int* data, u32* count, int* out) {  // one block publishes what both have written
    __shared__ bool last;
    data[blockIdx.x] = 1;
    __simt_cluster_barrier();
    if (threadIdx.x == 0 && __simt_cluster_rank() == 0) {
        __threadfence();
        last = atomicAdd(count, 1u) == gridDim.x / 2 - 1;
        if (last) {
            int total = 0;
            for (u32 i = 0; i < gridDim.x; ++i) total += data[i];
            out[0] = total;
        }
    }
}

// --- Broken ---
KERNEL CLUSTER(4) no_barrier_before_read(const int* x, int* out) { sum_of_cluster<1>(x, out); }
KERNEL CLUSTER(4) no_barrier_before_exit(const int* x, int* out) { sum_of_cluster<2>(x, out); }
KERNEL CLUSTER(4) barrier_of_the_block_only(const int* x, int* out) { sum_of_cluster<3>(x, out); }
KERNEL CLUSTER(2) write_before_start(int* out) {
    __shared__ int s[32];
    __simt_cluster_map(s, __simt_cluster_rank() ^ 1)[threadIdx.x] = 1;
    __simt_cluster_barrier();
    out[threadIdx.x] = s[threadIdx.x];
}
KERNEL CLUSTER(2) both_write(int* out) {
    __shared__ int s[32];
    __simt_cluster_barrier();
    __simt_cluster_map(s, 1)[threadIdx.x] = 1;
    __simt_cluster_barrier();
    out[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
}
KERNEL CLUSTER(2) buffer_reused(int* out, int n) {
    __shared__ int buffer[32];
    int* other = __simt_cluster_map(buffer, __simt_cluster_rank() ^ 1);
    int v = threadIdx.x;
    __simt_cluster_barrier();
    for (int i = 0; i < n; ++i) {
        other[threadIdx.x] = v;
        __simt_cluster_barrier();
        v = buffer[threadIdx.x] + i;
    }
    out[blockIdx.x * 32 + threadIdx.x] = v;
    __simt_cluster_barrier();
}
KERNEL CLUSTER(2) global_without_barrier(int* data, int* out) {
    data[blockIdx.x * 32 + threadIdx.x] = blockIdx.x;
    __syncthreads();
    out[blockIdx.x * 32 + threadIdx.x] = data[(blockIdx.x ^ 1) * 32 + threadIdx.x];
}
KERNEL CLUSTER(2) other_clusters(int* data, int* out) {  // a cluster's barrier orders no other cluster
    data[blockIdx.x * 32 + threadIdx.x] = blockIdx.x;
    __simt_cluster_barrier();
    out[blockIdx.x * 32 + threadIdx.x] = data[(blockIdx.x + 2) % gridDim.x * 32 + threadIdx.x];
}
KERNEL CLUSTER(2) past_the_end(int* out) {
    extern __shared__ int dynamic[];
    dynamic[threadIdx.x] = 1;
    __simt_cluster_barrier();
    out[blockIdx.x * 32 + threadIdx.x] = __simt_cluster_map(dynamic, __simt_cluster_rank() ^ 1)[threadIdx.x + 1];
    __simt_cluster_barrier();
}
KERNEL CLUSTER(2) misaligned(int* out) {
    __shared__ __align__(8) char s[64];
    s[threadIdx.x] = s[threadIdx.x + 32] = 1;
    __simt_cluster_barrier();
    out[threadIdx.x] = *(int*)(__simt_cluster_map(s, __simt_cluster_rank() ^ 1) + 2);
    __simt_cluster_barrier();
}
KERNEL CLUSTER(2) never_written(int* out) {
    __shared__ int s[32];
    if (threadIdx.x < 31) s[threadIdx.x] = 1;
    __simt_cluster_barrier();
    out[blockIdx.x * 32 + threadIdx.x] = __simt_cluster_map(s, __simt_cluster_rank() ^ 1)[threadIdx.x];
    __simt_cluster_barrier();
}
KERNEL CLUSTER(2) no_such_rank(int* out) {
    __shared__ int s;
    s = threadIdx.x;
    __simt_cluster_barrier();
    out[threadIdx.x] = *__simt_cluster_map(&s, 2);
}
KERNEL CLUSTER(2) not_shared(int* out) { *__simt_cluster_map(out, 1) = 1; }
KERNEL CLUSTER(2) polls_the_other_block(int* out) {
    __shared__ volatile int ready;
    ready = 0;
    __simt_cluster_barrier();
    if (__simt_cluster_rank() == 0) while (*__simt_cluster_map(&ready, 1) == 0) {}
    __simt_cluster_barrier();
    out[blockIdx.x] = 1;
}
KERNEL CLUSTER(2) two_barriers(int* out) {
    if (threadIdx.x < 16) __simt_cluster_barrier();
    else __syncthreads();
    out[threadIdx.x] = 1;
}
"""
ORDERS = ["forward", "reverse", ("shuffle", 5)]


@pytest.fixture(scope="module", params=[32, 64], ids=["warp32", "warp64"])
def module(request, compiler) -> RawModule:
    return RawModule(TEXT, name="clusters.cu", warp_size=request.param, compiler=compiler)


@pytest.fixture(scope="module", params=[True, False], ids=["checked", "plain"])
def either(request, compiler) -> RawModule:
    return RawModule(TEXT, name="clusters.cu", compiler=compiler, checked=request.param)


@pytest.fixture(params=ORDERS, ids=["forward", "reverse", "shuffle"])
def order(request):
    return request.param


def launch(module, order, name, grid, block, *args, **options):
    grid = grid if isinstance(grid, tuple) else (grid,)
    module.get_function(name)(grid, (block,), args, block_order=order, **options)


def zeros(*counts: int) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(n, np.int32) for n in counts)


@pytest.mark.parametrize(("name", "size"), [("sum_of_four", 4), ("sum_of_sixteen", 16), ("sum_of_one", 1)])
def test_sums(either, order, name, size):
    x, out = np.random.default_rng(0).integers(0, 1000, 48 * 64).astype(np.int32), np.zeros(48 // size, np.int32)
    launch(either, order, name, 48, 64, x, out)
    np.testing.assert_array_equal(out, x.reshape(-1, size * 64).sum(1))


def test_warps_of_both_sizes(module, order):
    x, out = np.arange(8 * 64, dtype=np.int32), np.zeros(2, np.int32)
    launch(module, order, "sum_of_four", 8, 64, x, out)
    np.testing.assert_array_equal(out, x.reshape(2, -1).sum(1))


def test_ranks_of_two_dimensions(either, order):
    out = np.zeros((6, 4, 6), np.uint32)
    launch(either, order, "ranks", (4, 6), 1, out)
    blocks = np.arange(24).reshape(6, 4)
    for y in range(6):
        for x in range(4):
            cluster = blocks[y // 3 * 3 : y // 3 * 3 + 3, x // 2 * 2 : x // 2 * 2 + 2]
            np.testing.assert_array_equal(out[y, x], cluster.ravel())


def test_remote_writes(either, order):
    x, out = np.random.default_rng(1).random((6, 32, 4), np.float32), np.zeros((6, 32, 4), np.float32)
    launch(either, order, "exchange", 6, 32, x, out, shared_mem=512)
    np.testing.assert_array_equal(out, x.reshape(3, 2, 32, 4)[:, ::-1, ::-1].reshape(6, 32, 4))


def test_remote_atomics(either, order):
    x, bins = np.random.default_rng(2).integers(0, 32, 3000).astype(np.int32), np.zeros(32, np.int32)
    launch(either, order, "histogram", 8, 64, x, bins, np.int32(3000))
    np.testing.assert_array_equal(bins, np.bincount(x, minlength=32))


def test_rounds(either, order):
    (out,) = zeros(128)
    launch(either, order, "rounds", 4, 32, out, np.int32(7))
    v = np.arange(128).reshape(2, 2, 32)
    for i in range(7):
        v = np.roll(v[:, ::-1], 1, axis=2) + i
    np.testing.assert_array_equal(out, v.ravel())


def test_flags_returns_and_global_memory(either, order):
    (out,) = zeros(4)
    launch(either, order, "flag_between_blocks", 4, 32, out)
    np.testing.assert_array_equal(out, [0, 17, 0, 17])
    (out,) = zeros(28)
    launch(either, order, "early_return", 4, 32, out)
    np.testing.assert_array_equal(out.reshape(4, 7)[:, 0], [1, 0, 0, 3])
    data, out = zeros(128, 128)
    launch(either, order, "through_global_memory", 4, 32, data, out)
    np.testing.assert_array_equal(out, np.repeat([1, 0, 3, 2], 32))
    count = np.zeros(1, np.uint32)
    data, out = zeros(8, 1)
    launch(either, order, "last_cluster", 8, 1, data, count, out)
    assert out[0] == 8


BROKEN = {
    "no_barrier_before_read": (RaceError, 4, 64, lambda: zeros(256, 1), "nothing says that block has started"),
    "no_barrier_before_exit": (RaceError, 4, 64, lambda: zeros(256, 1), "nothing keeps that block from returning"),
    "barrier_of_the_block_only": (RaceError, 4, 64, lambda: zeros(256, 1), "a barrier of the cluster would"),
    "write_before_start": (RaceError, 2, 32, lambda: zeros(32), "nothing says that block has started"),
    "both_write": (RaceError, 2, 32, lambda: zeros(64), r"shared 's'( of block \(1,0,0\))? \(byte"),
    "buffer_reused": (RaceError, 2, 32, lambda: (*zeros(64), np.int32(3)), "shared 'buffer'"),
    "global_without_barrier": (RaceError, 4, 32, lambda: zeros(128, 128), "a barrier of the cluster would"),
    "other_clusters": (RaceError, 4, 32, lambda: zeros(128, 128), "a fence and an atomic would"),
    "past_the_end": (OutOfBoundsError, 2, 32, lambda: zeros(64), "past the end of the 128 bytes of dynamic shared"),
    "misaligned": (MisalignedError, 2, 32, lambda: zeros(32), "misaligned"),
    "never_written": (UninitializedError, 2, 32, lambda: zeros(64), r"shared 's' of block \([01],0,0\) \(byte 124"),
    "no_such_rank": (OutOfBoundsError, 2, 1, lambda: zeros(32), "rank 2 of a cluster of 2"),
    "not_shared": (OutOfBoundsError, 2, 1, lambda: zeros(32), "not in the block's shared memory"),
    "polls_the_other_block": (HangError, 2, 1, lambda: zeros(2), "polls"),
    "two_barriers": (DivergenceError, 2, 32, lambda: zeros(32), r"__simt_cluster_barrier\(\)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_fault(module, order, name):
    error, grid, block, args, says = BROKEN[name]
    with pytest.raises(SimtError, match=says) as caught:
        launch(module, order, name, grid, block, *args(), shared_mem=128)
    assert type(caught.value) is error and caught.value.line, str(caught.value)


def test_grids_are_multiples_of_the_cluster(either):
    for name, grid, says in (
        ("sum_of_four", 6, r"its __cluster_dims__ are \(4, 1, 1\), and the grid is no multiple of them"),
        ("ranks", (4, 4), r"\(2, 3, 1\)"),
    ):
        with pytest.raises(LaunchError, match=says):
            launch(either, "forward", name, grid, 64, *zeros(512, 8)[: 1 if name == "ranks" else 2])
    with pytest.raises(LaunchError, match="resident_blocks must be at least 4, got 2"):
        launch(either, "forward", "sum_of_four", 4, 64, *zeros(256, 1), resident_blocks=2)
    text = 'extern "C" __global__ void __cluster_dims__(32) f() {}'
    with pytest.raises(LaunchError, match="a cluster has 1 to 16 blocks"):
        RawModule(text).get_function("f")((32,), (1,), ())
