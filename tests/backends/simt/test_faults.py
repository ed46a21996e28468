"""Planted faults: each kernel holds one, and the checker must name its class, its line, and the thread if certain.

The expected line carries `// @kernel`, the other side's line of a race or divergence `// @kernel:other`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pytest

from vpa.backends.simt import (
    DivergenceError,
    HangError,
    MisalignedError,
    NullPointerError,
    OutOfBoundsError,
    RaceError,
    RawModule,
    ReadOnlyError,
    SimtError,
    StackOverflowError,
    TrapError,
    UndefinedArithmeticError,
    UninitializedError,
)

TEXT = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void
__constant__ int table[4] = {1, 2, 3, 4};
__device__ int counter;

// --- Races ---
KERNEL race_no_barrier(int* out) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;              // @race_no_barrier
    out[threadIdx.x] = s[63 - threadIdx.x];    // @race_no_barrier:other
}
KERNEL race_write_write(int* out) {
    __shared__ int s[1];
    s[0] = threadIdx.x;                        // @race_write_write @race_write_write:other
    __syncthreads();
    out[threadIdx.x] = s[0];
}
KERNEL race_buffer_reuse(int* out) {
    __shared__ int s[64];
    int total = 0;
    for (int step = 0; step < 3; ++step) {
        s[threadIdx.x] = step;                 // @race_buffer_reuse
        __syncthreads();
        total += s[(threadIdx.x + 1) % 64];    // @race_buffer_reuse:other
    }
    out[threadIdx.x] = total;
}
KERNEL race_warp_tail(int* out) {
    __shared__ int s[32];
    s[threadIdx.x] = 1;
    __syncwarp();
    for (int d = 16; d; d >>= 1)
        if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];  // @race_warp_tail @race_warp_tail:other
    if (threadIdx.x == 0) out[0] = s[0];
}
KERNEL race_volatile_warp_tail(int* out) {
    __shared__ volatile int s[32];
    s[threadIdx.x] = 1;
    __syncwarp();
    for (int d = 16; d; d >>= 1)
        if (threadIdx.x < d) s[threadIdx.x] = s[threadIdx.x] + s[threadIdx.x + d];  // @race_volatile_warp_tail
    if (threadIdx.x == 0) out[0] = s[0];
}
KERNEL race_syncwarp_across_warps(int* out) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;              // @race_syncwarp_across_warps
    __syncwarp();
    out[threadIdx.x] = s[63 - threadIdx.x];    // @race_syncwarp_across_warps:other
}
KERNEL race_partial_mask(int* out) {
    __shared__ int s[32];
    s[threadIdx.x] = threadIdx.x;              // @race_partial_mask
    if (threadIdx.x < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000);
    out[threadIdx.x] = s[31 - threadIdx.x];    // @race_partial_mask:other
}
KERNEL race_global_in_block(int* out) {
    out[threadIdx.x / 2] = threadIdx.x;        // @race_global_in_block @race_global_in_block:other
}
KERNEL race_between_blocks(int* out) {
    if (threadIdx.x == 5) out[0] = blockIdx.x; // @race_between_blocks @race_between_blocks:other
}
KERNEL race_read_between_blocks(int* out) {
    if (threadIdx.x == 0) {
        if (blockIdx.x == 1) out[1] = out[0];  // @race_read_between_blocks
        else out[0] = 7;                       // @race_read_between_blocks:other
    }
}
KERNEL race_bytes(unsigned char* out) {
    unsigned short* wide = (unsigned short*)out;
    if (threadIdx.x == 0) wide[1] = 5;         // @race_bytes:other
    if (threadIdx.x == 1) out[3] = 6;          // @race_bytes
}
KERNEL race_atomic_and_plain(int* out) {
    __shared__ int bins[4];
    if (threadIdx.x < 4) bins[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&bins[threadIdx.x & 3], 1);      // @race_atomic_and_plain
    if (threadIdx.x < 4) out[threadIdx.x] = bins[threadIdx.x];  // @race_atomic_and_plain:other
}
KERNEL race_last_block_without_fence(int* partial, u32* count, int* out) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = blockIdx.x;      // @race_last_block_without_fence:other
        last = atomicAdd(count, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x < gridDim.x) out[threadIdx.x] = partial[threadIdx.x];  // @race_last_block_without_fence
}
KERNEL race_last_block_without_barrier(int* partial, u32* count, int* out) {
    __shared__ bool last;
    partial[blockIdx.x * blockDim.x + threadIdx.x] = 1;  // @race_last_block_without_barrier:other
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(count, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last) {
        int total = 0;
        for (u32 i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x)
            total += partial[(i + 1) % (gridDim.x * blockDim.x)];  // @race_last_block_without_barrier
        out[threadIdx.x] = total;
    }
}
KERNEL race_fence_of_the_block_only(int* partial, u32* count, int* out) {
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = blockIdx.x;      // @race_fence_of_the_block_only:other
        __threadfence_block();
        if (atomicAdd(count, 1u) == gridDim.x - 1) out[0] = partial[1 - blockIdx.x];  // @race_fence_of_the_block_only
    }
}
KERNEL race_on_device_variable(int* out) {
    if (threadIdx.x == 0) counter = counter + 1;  // @race_on_device_variable
}
// --- Out of bounds ---
KERNEL past_the_end(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) out[i] = x[i];                 // @past_the_end
}
KERNEL before_the_start(float* x) {
    x[(int)threadIdx.x - 1] = 0;               // @before_the_start
}
KERNEL far_away(float* x) {
    x[(long long)threadIdx.x << 33] = 0;       // @far_away
}
KERNEL wide_load_past_the_end(const u32* x, u32* out) {
    uint4 v = *(const uint4*)(x + 4 * threadIdx.x);  // @wide_load_past_the_end
    out[threadIdx.x] = v.x + v.w;
}
KERNEL static_shared_index(int* out, int i) {
    __shared__ int s[32];
    s[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x == 3) s[i] = 1;            // @static_shared_index
    out[threadIdx.x] = s[0];
}
KERNEL static_shared_pointer(int* out, int i) {
    __shared__ int s[32];
    int* p = s;
    p[threadIdx.x + i] = 1;                    // @static_shared_pointer
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
KERNEL dynamic_shared(int* out) {
    extern __shared__ int dynamic[];
    dynamic[threadIdx.x] = 1;                  // @dynamic_shared
    out[threadIdx.x] = dynamic[threadIdx.x];
}
KERNEL local_array(int* out, int i) {
    int a[4] = {1, 2, 3, 4};
    out[threadIdx.x] = a[i + threadIdx.x];     // @local_array
}
KERNEL hidden_columns(const float* x, float* out, int columns) {
    float total = 0;
    for (int c = 0; c < columns; ++c) total += x[threadIdx.x * columns + c];  // @hidden_columns
    out[threadIdx.x] = total;
}
__device__ int* leaked;
KERNEL local_of_another(int* out) {
    int mine = threadIdx.x;
    if (threadIdx.x == 0) leaked = &mine;
    __syncthreads();
    out[threadIdx.x] = *leaked;                // @local_of_another
    __syncthreads();
    out[threadIdx.x] += mine;
}
// --- Alignment, initialisation, permissions, null ---
KERNEL misaligned(const u32* x, u32* out) {
    uint4 v = *(const uint4*)(x + threadIdx.x);  // @misaligned
    out[threadIdx.x] = v.x;
}
KERNEL misaligned_scalar(const unsigned char* x, u32* out) {
    out[threadIdx.x] = *(const u32*)(x + 4 * threadIdx.x + 2);  // @misaligned_scalar
}
KERNEL uninitialised(int* out) {
    __shared__ int s[64];
    if (threadIdx.x < 63) s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];         // @uninitialised
}
KERNEL uninitialised_accumulator(int* out) {
    __shared__ int total;
    if (threadIdx.x == 0) total += 5;          // @uninitialised_accumulator
    __syncthreads();
    out[threadIdx.x] = total;
}
KERNEL uninitialised_in_the_next_block(int* out) {
    __shared__ int s[32];
    if (blockIdx.x == 0) s[threadIdx.x] = 1;
    __syncthreads();
    out[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];  // @uninitialised_in_the_next_block
}
KERNEL writes_input(float* x, float* out) {
    out[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = 0;                        // @writes_input
}
KERNEL writes_constant(int* out) {
    int* p = (int*)table;
    p[threadIdx.x & 3] = 0;                    // @writes_constant
    out[threadIdx.x] = table[0];
}
KERNEL null_pointer(const float* x, float* out) {
    out[threadIdx.x] = x[threadIdx.x];         // @null_pointer
}
// --- Arithmetic ---
KERNEL overflow(int* out, int big) {
    out[threadIdx.x] = big + (int)threadIdx.x; // @overflow
}
KERNEL overflowing_index(float* x, int rows, int width) {
    x[rows * width] = 0;                       // @overflowing_index
}
KERNEL shift_too_far(u32* out, int by) {
    out[threadIdx.x] = 1u << (by + threadIdx.x);  // @shift_too_far
}
KERNEL division_by_zero(int* out, int by) {
    out[threadIdx.x] = 7 / (by - (int)threadIdx.x);  // @division_by_zero
}
// --- Divergence ---
KERNEL barrier_in_branches(int* out) {
    if (threadIdx.x < 32) {
        __syncthreads();                       // @barrier_in_branches:other
        out[threadIdx.x] = 1;
    } else {
        __syncthreads();                       // @barrier_in_branches
    }
}
__device__ __noinline__ void meet() { __syncthreads(); }
KERNEL barrier_in_two_calls(int* out) {
    if (threadIdx.x & 1) { meet(); out[threadIdx.x] = 1; } else meet();
}
KERNEL barrier_and_shuffle(int* out) {
    int v = threadIdx.x;
    if (threadIdx.x < 16) __syncthreads();     // @barrier_and_shuffle:other
    v = __shfl_xor_sync(0xffffffff, v, 1);     // @barrier_and_shuffle
    out[threadIdx.x] = v;
}
KERNEL shuffle_names_absent_branch(int* out) {
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_xor_sync(0xffffffff, v, 1);  // @shuffle_names_absent_branch
    out[threadIdx.x] = v;
}
KERNEL shuffle_of_two_places(int* out) {
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_sync(0xffffffff, v, 0);  // @shuffle_of_two_places:other
    v = __shfl_sync(0xffffffff, v, 1);         // @shuffle_of_two_places
    out[threadIdx.x] = v;
}
KERNEL vote_names_returned_lane(int* out) {
    if (threadIdx.x == 7) return;
    out[threadIdx.x] = __any_sync(0xffffffff, threadIdx.x == 3);  // @vote_names_returned_lane
}
KERNEL mask_without_self(int* out) {
    out[threadIdx.x] = __ballot_sync(0xfffffffe, 1);  // @mask_without_self
}
KERNEL reads_lane_outside_mask(int* out) {
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_sync(0xffff, v, 20);  // @reads_lane_outside_mask
    out[threadIdx.x] = v;
}
KERNEL reads_lane_that_is_not_there(int* out) {
    out[threadIdx.x] = __shfl_down_sync(0xffffffff, (int)threadIdx.x, 4);  // @reads_lane_that_is_not_there
}
KERNEL bad_width(int* out) {
    out[threadIdx.x] = __shfl_sync(0xffffffff, (int)threadIdx.x, 0, 12);  // @bad_width
}
KERNEL syncwarp_never_completed(int* out) {
    __shared__ int s;
    if (threadIdx.x == 0) {
        s = 1;
        __syncwarp();                          // @syncwarp_never_completed
    } else {
        __syncthreads();                       // @syncwarp_never_completed:other
    }
    out[threadIdx.x] = s;
}
// --- Hangs, traps ---
KERNEL waits_for_nobody(volatile int* flag, int* out) {
    while (flag[0] == 0) {}                    // @waits_for_nobody
    out[threadIdx.x] = 1;
}
KERNEL spin_lock_never_freed(int* lock, int* out) {
    while (atomicCAS(lock, 0, 1) != 0) {}      // @spin_lock_never_freed
    out[0] += 1;
}
KERNEL polls_plain_memory(int* out) {
    while (out[0] == 0) {}                     // @polls_plain_memory
    out[1] = 1;
}
KERNEL polls_two_flags(volatile int* flags, int* out) {
    if (threadIdx.x == 5) while (flags[0] == 0 && flags[1] == 0) {}  // @polls_two_flags
    out[threadIdx.x] = 1;
}
KERNEL polls_with_pauses(int* flag, int* out) {
    u32 ns = 8;
    while (atomicAdd(flag, 0) == 0) {
        __nanosleep(ns);
        if (ns < 256) ns *= 2;
    }
    out[threadIdx.x] = 1;
}
KERNEL polls_and_counts(volatile int* flag, int* out) {
    int n = 0;
    while (flag[0] == 0 && n < 2000000000) ++n;
    out[threadIdx.x] = n;
}
KERNEL loops_for_ever(int* out) {
    u32 i = threadIdx.x;
    while (i != 0xffffffffu) i = i * 2u & 0xfffffffeu;
    out[0] = (int)i;
}
KERNEL traps(int* out) {
    if (threadIdx.x == 9) __trap();            // @traps
    out[threadIdx.x] = 1;
}
KERNEL fails_assert(int* out) {
    assert(threadIdx.x < 9);                   // @fails_assert
    out[threadIdx.x] = 1;
}
__device__ __noinline__ int deep(int n, int* out) {
    volatile int room[512];
    room[n & 511] = n;
    return n ? deep(n - 1, out) + room[n & 511] : out[0];
}
KERNEL recursion(int* out) { out[1] = deep(1000, out); }
"""


@dataclass(frozen=True)
class Case:
    kernel: str
    error: type[SimtError]
    args: tuple = ()
    block: int = 64
    grid: int = 1
    shared_mem: int = 0
    thread: int | None = None  # where the fault's thread is certain
    other_thread: int | None = None
    says: str = ""
    options: dict = field(default_factory=dict)


def ints(n: int = 64) -> np.ndarray:
    return np.zeros(n, np.int32)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def floats(n: int = 64) -> np.ndarray:
    return np.ones(n, np.float32)


i32 = np.int32
CASES = [
    Case("race_no_barrier", RaceError, (ints(),), thread=32, other_thread=31, says="with no barrier between"),
    Case("race_write_write", RaceError, (ints(),), thread=1, other_thread=0),
    Case("race_buffer_reuse", RaceError, (ints(),), says="shared 's'"),
    Case("race_warp_tail", RaceError, (ints(),), block=32),
    Case("race_volatile_warp_tail", RaceError, (ints(),), block=32),
    Case("race_syncwarp_across_warps", RaceError, (ints(),)),
    Case("race_partial_mask", RaceError, (ints(),), block=32),
    Case("race_global_in_block", RaceError, (ints(),), thread=1, other_thread=0, says="out[0]"),
    Case(
        "race_between_blocks",
        RaceError,
        (ints(),),
        grid=2,
        thread=5,
        other_thread=5,
        says="nothing orders the two blocks",
    ),
    Case("race_read_between_blocks", RaceError, (ints(),), grid=2, thread=0, says="of block (0,0,0)"),
    Case("race_bytes", RaceError, (np.zeros(8, np.uint8),), thread=1, other_thread=0, says="out[3]"),
    Case("race_atomic_and_plain", RaceError, (ints(),)),
    Case("race_last_block_without_fence", RaceError, (ints(), np.zeros(1, np.uint32), ints()), grid=4),
    Case("race_last_block_without_barrier", RaceError, (ints(128), np.zeros(1, np.uint32), ints()), grid=2),
    Case("race_fence_of_the_block_only", RaceError, (ints(), np.zeros(1, np.uint32), ints()), grid=2),
    Case("race_on_device_variable", RaceError, (ints(),), grid=2, says="'counter'"),
    Case(
        "past_the_end",
        OutOfBoundsError,
        (floats(100), floats(128), i32(100)),
        grid=2,
        thread=36,
        says="past the end of x",
    ),
    Case("before_the_start", OutOfBoundsError, (floats(),), thread=0, says="4 bytes before the start of x"),
    Case("far_away", OutOfBoundsError, (floats(),), thread=1),
    Case("wide_load_past_the_end", OutOfBoundsError, (np.zeros(255, np.uint32), np.zeros(64, np.uint32)), thread=63),
    Case("static_shared_index", OutOfBoundsError, (ints(), i32(32)), block=32, thread=3, says="index 32"),
    Case("static_shared_pointer", OutOfBoundsError, (ints(), i32(5000)), block=32, thread=0),
    Case(
        "dynamic_shared",
        OutOfBoundsError,
        (ints(),),
        shared_mem=100,
        thread=25,
        says="100 bytes of dynamic shared memory",
    ),
    Case("local_array", OutOfBoundsError, (ints(), i32(0)), thread=4, says="index 4"),
    Case(
        "hidden_columns",
        OutOfBoundsError,
        (np.ones((4, 8), np.float32)[:, :4], floats(), i32(4)),
        block=4,
        thread=1,
        says="between the elements of x",
    ),
    Case("local_of_another", OutOfBoundsError, (ints(),), thread=1, says="another thread's local memory"),
    Case("misaligned", MisalignedError, (np.zeros(128, np.uint32), np.zeros(64, np.uint32)), thread=1),
    Case("misaligned_scalar", MisalignedError, (np.zeros(512, np.uint8), np.zeros(64, np.uint32)), thread=0),
    Case("uninitialised", UninitializedError, (ints(),), thread=63, says="shared 's' (byte 252 of 256)"),
    Case("uninitialised_accumulator", UninitializedError, (ints(),), thread=0),
    Case("uninitialised_in_the_next_block", UninitializedError, (ints(),), block=32, grid=2, thread=0),
    Case("writes_input", ReadOnlyError, (frozen(floats()), floats()), thread=0, says="x[0]"),
    Case("writes_constant", ReadOnlyError, (ints(),), thread=0, says="'table'"),
    Case("null_pointer", NullPointerError, (None, floats()), thread=0),
    Case("overflow", UndefinedArithmeticError, (ints(), i32(2**31 - 4)), thread=4, says="does not fit in 'int'"),
    Case("overflowing_index", UndefinedArithmeticError, (floats(), i32(70000), i32(32768)), thread=0),
    Case("shift_too_far", UndefinedArithmeticError, (np.zeros(64, np.uint32), i32(20)), thread=12, says="by 32 bits"),
    Case("division_by_zero", UndefinedArithmeticError, (ints(), i32(6)), thread=6, says="division by zero"),
    Case("barrier_in_branches", DivergenceError, (ints(),)),
    Case("barrier_in_two_calls", DivergenceError, (ints(),), says="meet"),
    Case("barrier_and_shuffle", DivergenceError, (ints(),), block=32, thread=16, other_thread=0),
    Case(
        "shuffle_names_absent_branch", DivergenceError, (ints(),), block=32, other_thread=16, says="does not take part"
    ),
    Case("shuffle_of_two_places", DivergenceError, (ints(),), block=32),
    Case("vote_names_returned_lane", DivergenceError, (ints(),), block=32, other_thread=7, says="(7,0,0) has returned"),
    Case("mask_without_self", DivergenceError, (ints(),), block=32, thread=0),
    Case("reads_lane_outside_mask", DivergenceError, (ints(),), block=32, thread=0, other_thread=20),
    Case("reads_lane_that_is_not_there", DivergenceError, (ints(),), block=20, thread=16),
    Case("bad_width", DivergenceError, (ints(),), block=32, thread=0),
    Case("syncwarp_never_completed", DivergenceError, (ints(),), block=32, thread=0),
    Case("waits_for_nobody", HangError, (ints(), ints()), block=40, says="polls"),
    Case("spin_lock_never_freed", HangError, (np.ones(1, np.int32), ints()), block=1, says="polls"),
    Case("polls_plain_memory", HangError, (ints(),), block=2, options={"timeout": 5}),  # compilers may read it once
    Case("polls_two_flags", HangError, (ints(), ints()), says="polls", thread=5),
    Case("polls_with_pauses", HangError, (ints(), ints()), block=2, says="polls"),
    Case(
        "polls_and_counts",
        HangError,
        (ints(), ints()),
        block=2,
        options={"timeout": 1.5},
        says="not finished after 1.5 s",
    ),
    Case("loops_for_ever", HangError, (ints(),), block=2, options={"timeout": 0.3}, says="not finished after 0.3 s"),
    Case("traps", TrapError, (ints(),), thread=9),
    Case("fails_assert", TrapError, (ints(),), thread=9, says="assert(threadIdx.x < 9)"),
    Case("recursion", StackOverflowError, (ints(),), block=1),
]


def marked(marker: str) -> int | None:
    for number, line in enumerate(TEXT.splitlines(), 1):
        if re.search(rf"@{marker}(?![:\w])", line):
            return number
    return None


@pytest.fixture(scope="module")
def module(compiler) -> RawModule:
    return RawModule(TEXT, name="faults.cu", compiler=compiler)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.kernel)
def test_fault_is_reported(module, case):
    kernel = module.get_function(case.kernel)
    before = [a.copy() if isinstance(a, np.ndarray) else a for a in case.args]
    with pytest.raises(case.error) as caught:
        kernel((case.grid,), (case.block,), case.args, shared_mem=case.shared_mem, **case.options)
    fault = caught.value
    assert type(fault) is case.error
    assert fault.kernel == case.kernel
    assert case.kernel in str(fault) and case.says in str(fault)
    if (line := marked(case.kernel)) is not None:
        assert (fault.file, fault.line) == ("faults.cu", line), str(fault)
        assert f"faults.cu:{line}" in str(fault)
    if (line := marked(case.kernel + ":other")) is not None:
        assert fault.other.line == line, str(fault)
    if case.thread is not None:
        assert fault.thread == (case.thread, 0, 0), str(fault)
    if case.other_thread is not None:
        assert fault.other.thread == (case.other_thread, 0, 0), str(fault)
    for array, old in zip(case.args, before, strict=True):
        if isinstance(array, np.ndarray):
            np.testing.assert_array_equal(array, old)  # a fault leaves the arrays as they were
