"""Plain, volatile and atomic accesses to one place: what an access hides of an earlier one, and what it may not.

Each kernel is run in every order of its blocks, with warps of 32 and 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from vpa.backends.simt import RaceError, RawModule

TEXT = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void

// --- Races ---
KERNEL init_without_barrier(int* out) {
    __shared__ int s;
    if (threadIdx.x == 0) s = 0;
    atomicAdd(&s, 1);
    __syncthreads();
    out[threadIdx.x] = s;
}
KERNEL bins_without_barrier(const int* x, int* out) {
    __shared__ int bins[64];
    bins[threadIdx.x] = 0;
    atomicAdd(&bins[x[threadIdx.x]], 1);
    __syncthreads();
    out[threadIdx.x] = bins[threadIdx.x];
}
KERNEL total_added_to_after_the_fence(int* total, u32* count, int* out) {
    if (threadIdx.x) return;
    out[blockIdx.x] = 1;
    __threadfence();
    atomicAdd(total, 1);  // no fence behind this
    if (atomicAdd(count, 1u) == gridDim.x - 1) out[63] = *total + out[0];
}
KERNEL reset_by_one_block(int* count) {
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) count[0] = 0;
        atomicAdd(count, 1);
    }
}
KERNEL plain_then_volatile_write(int* flag, int* out) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        flag[0] = 5;
        __syncwarp(1);  // or a compiler may leave the write before out
        *(volatile int*)flag = 6;
    } else {
        out[blockIdx.x] = *(volatile int*)flag;
    }
}
KERNEL plain_then_volatile_read(int* flag, int* out) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        int plain = flag[0];
        out[0] = plain + *(volatile int*)flag;
    } else if (blockIdx.x == 1) {
        *(volatile int*)flag = 1;
    }
}
KERNEL plain_then_atomic_read(int* flag, int* out) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        int plain = flag[0];
        out[0] = plain + atomicAdd(flag, 0);
    } else {
        atomicAdd(flag, 1);
    }
}
KERNEL test_before_atomic_max(u64* best) {
    if (threadIdx.x == 0 && *best < blockIdx.x + 3) atomicMax(best, (u64)blockIdx.x + 3);
}
KERNEL total_without_fence(int* total, u32* count, int* out) {
    if (threadIdx.x) return;
    atomicAdd(total, 1);
    if (atomicAdd(count, 1u) == gridDim.x - 1) out[0] = *total;
}
KERNEL total_of_the_block_without_fence(int* total, u32* count, int* out) {
    __shared__ bool last;
    atomicAdd(total, 1);
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(count, 1u) == gridDim.x - 1;
    __syncthreads();
    if (last) out[threadIdx.x] = *total;
}
KERNEL best_without_fence(u64* best, u32* count, u64* out) {
    if (threadIdx.x) return;
    atomicMax(best, (u64)blockIdx.x + 1);
    if (atomicInc(count, gridDim.x - 1) == gridDim.x - 1) {
        out[0] = *best;
        *best = 0;
    }
}
KERNEL last_thread_reads(int* out) {
    __shared__ int s;
    if (threadIdx.x == 0) s = 0;
    __syncthreads();
    atomicAdd(&s, 1);
    if (threadIdx.x == blockDim.x - 1) out[0] = s;
}
KERNEL last_thread_writes(int* out) {
    __shared__ int s;
    if (threadIdx.x == 0) s = 0;
    __syncthreads();
    atomicMax(&s, (int)threadIdx.x);
    if (threadIdx.x == blockDim.x - 1) s = -1;
    __syncthreads();
    out[threadIdx.x] = s;
}
KERNEL reset_of_a_ticket_without_fence(u32* count, int* out) {
    if (threadIdx.x == 0 && atomicAdd(count, 1u) == gridDim.x - 1) {
        *count = 0;
        out[0] = 1;
    }
}
KERNEL one_block_without_fence(u32* count, int* out) {  // it is told from the others though they have theirs
    if (threadIdx.x) return;
    if (blockIdx.x != 1) __threadfence();
    if (atomicAdd(count, 1u) == gridDim.x - 1) {
        *count = 0;
        out[0] = 1;
    }
}

// --- No races ---
KERNEL counter_reset_behind_a_flag(u32* count, volatile u32* flag, int* part, int* out) {
    if (threadIdx.x) return;
    part[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    if (atomicAdd(count, 1u) == gridDim.x - 1) {
        __threadfence();
        *flag = 1;
    } else {
        while (*flag == 0) {
        }
        __threadfence();
    }
    int sum = 0;
    for (u32 i = 0; i < gridDim.x; i++) sum += part[i];
    out[blockIdx.x] = sum;
    if (blockIdx.x == 0) *count = 0;  // that all have counted is known from the flag
}
KERNEL init_with_barrier(int* out) {
    __shared__ int s;
    if (threadIdx.x == 0) s = 0;
    __syncthreads();
    atomicAdd(&s, 1);
    __syncthreads();
    if (threadIdx.x == 0) s += 1;
    __syncthreads();
    out[threadIdx.x] = s;
}
KERNEL init_by_exchange(int* out) {  // the first write is atomic
    __shared__ int s, t;
    if (threadIdx.x == 0) {
        atomicExch(&s, 1);
        __atomic_store_n(&t, 0, __ATOMIC_RELAXED);
    }
    __syncthreads();
    atomicAdd(&s, 1);
    atomicAdd(&t, 0);
    __syncthreads();
    out[threadIdx.x] = s + t;
}
KERNEL total_with_fence(int* total, u32* count, int* out) {
    if (threadIdx.x) return;
    atomicAdd(total, 1);
    __threadfence();
    if (atomicAdd(count, 1u) == gridDim.x - 1) {
        __threadfence();
        out[0] = *total;
        *total = 0;
        *count = 0;  // the counter itself is part of what was published
    }
}
KERNEL counter_reset_by_another_thread(u32* count, int* out) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(count, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 5) *count = 0, out[0] = 1;
}
KERNEL maximum_by_compare_and_swap(float* best) {
    int* place = (int*)best;
    float mine = (float)(threadIdx.x + blockIdx.x);
    int old = *(volatile int*)place;
    while (__int_as_float(old) < mine) {
        int assumed = old;
        old = atomicCAS(place, assumed, __float_as_int(mine));
        if (old == assumed) break;
    }
}
KERNEL warps_take_numbers(u32* next, int* out) {  // atomics of all blocks on one place, plain accesses to others
    u32 base = 0;
    if (threadIdx.x % 32 == 0) base = atomicAdd(next, 32u);
    base = __shfl_sync((decltype(__activemask()))~0ull, base, threadIdx.x % warpSize / 32 * 32);
    out[base + threadIdx.x % 32] = 1;
}
"""


def zeros(*counts: int, dtype=np.int32) -> tuple:
    return tuple(np.zeros(n, dtype) for n in counts)


def counted(out: int = 64) -> tuple:
    return (*zeros(1), *zeros(1, dtype=np.uint32), *zeros(out))


RACES = {
    "init_without_barrier": (1, 64, lambda: zeros(64)),
    "bins_without_barrier": (1, 64, lambda: zeros(64, 64)),
    "total_added_to_after_the_fence": (4, 32, counted),
    "reset_by_one_block": (4, 32, lambda: zeros(1)),
    "plain_then_volatile_write": (2, 32, lambda: zeros(1, 2)),
    "plain_then_volatile_read": (2, 32, lambda: zeros(1, 2)),
    "plain_then_atomic_read": (2, 32, lambda: zeros(1, 2)),
    "test_before_atomic_max": (4, 32, lambda: zeros(1, dtype=np.uint64)),
    "total_without_fence": (4, 32, counted),
    "total_of_the_block_without_fence": (4, 64, counted),
    "best_without_fence": (
        4,
        32,
        lambda: (np.zeros(1, np.uint64), np.zeros(1, np.uint32), np.zeros(1, np.uint64)),
    ),
    "last_thread_reads": (1, 64, lambda: zeros(4)),
    "last_thread_writes": (1, 64, lambda: zeros(64)),
    "reset_of_a_ticket_without_fence": (4, 32, lambda: counted()[1:]),
    "one_block_without_fence": (3, 32, lambda: counted()[1:]),
}


@dataclass(frozen=True)
class Clean:
    grid: int
    block: int
    args: object
    expected: dict


CLEAN = {
    "init_with_barrier": Clean(1, 64, lambda: zeros(64), {0: np.full(64, 65)}),
    "init_by_exchange": Clean(1, 64, lambda: zeros(64), {0: np.full(64, 65)}),
    "total_with_fence": Clean(4, 32, lambda: counted(1), {0: [0], 1: [0], 2: [4]}),
    "counter_reset_behind_a_flag": Clean(
        4, 32, lambda: (*zeros(1, 1, dtype=np.uint32), *zeros(4, 4)), {0: [0], 3: [10, 10, 10, 10]}
    ),
    "counter_reset_by_another_thread": Clean(4, 64, lambda: counted(1)[1:], {0: [0], 1: [1]}),
    "maximum_by_compare_and_swap": Clean(4, 32, lambda: zeros(1, dtype=np.float32), {0: [34]}),
    "warps_take_numbers": Clean(3, 64, lambda: (np.zeros(1, np.uint32), *zeros(192)), {1: np.ones(192)}),
}


@pytest.fixture(scope="module", params=[32, 64], ids=["warp32", "warp64"])
def module(request, compiler) -> RawModule:
    return RawModule(TEXT, name="order.cu", warp_size=request.param, compiler=compiler)


@pytest.fixture(params=["forward", "reverse", ("shuffle", 3)], ids=["forward", "reverse", "shuffle"])
def order(request):
    return request.param


@pytest.mark.parametrize("name", RACES)
def test_race(module, order, name):
    grid, block, args = RACES[name]
    with pytest.raises(RaceError):
        module.get_function(name)((grid,), (block,), args(), block_order=order)


@pytest.mark.parametrize("name", CLEAN)
def test_no_race(module, order, name):
    case = CLEAN[name]
    args = case.args()
    module.get_function(name)((case.grid,), (case.block,), args, block_order=order)
    for i, expected in case.expected.items():
        np.testing.assert_array_equal(args[i], expected)
