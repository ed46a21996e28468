"""CUDA/HIP kernel texts run and checked on the CPU: a `RawModule` on NumPy arrays, where a race is a Python exception.

    from vpa.backends.simt import RawModule

    module = RawModule(text, name="scan.cu")
    module.get_function("scan")((rows,), (256,), (logits, out, numpy.int64(stride)), shared_mem=0)

The text is the very one that GPUs get. It is compiled by g++, clang++ or ziglang behind a small prelude and really
runs: each CUDA thread is a fiber, barriers, shuffles and votes exchange control and values between them, blocks run one
after another in the order asked for. Linux on x86-64 or AArch64 (other processors: slower switches, and hangs end by
the time limit only). `VPA_SIMT` is defined, and `__HIP_PLATFORM_AMD__` for warps of 64; `__CUDACC__` and
`__CUDA_ARCH__` never are. No inline PTX, no fp16/bf16 headers, no cooperative groups, no dynamic parallelism.

Clusters: `__cluster_dims__(x, y, z)` makes blocks run together. The text reaches the others by names of this package
alone: `__simt_cluster_barrier()` (all threads of the cluster; release and acquire), `__simt_cluster_rank()`,
`__simt_cluster_size()` and `__simt_cluster_map(pointer, rank)`, the object in the shared memory of another block that
lies where `pointer` does in this block's. What it points to is checked as all else.

In checked mode (the default) every memory access passes the checker first, and these end the launch with the exception
that names them, the kernel, the block, the thread and the line of the text, both lines for a race:

RaceError
    Two threads touch a byte, one writes, and nothing orders them: no `__syncthreads()`, no `__syncwarp()` among lanes
    of a warp, no fence followed by an atomic or volatile write that the other thread has read. The order is computed
    from the synchronisation itself (happens-before), not from what one schedule happened to do, so what is reported is
    a race in every schedule of that path, and blocks running one after another hide none. Two atomics do not race, nor
    do two volatile accesses; lanes of one warp that use volatile shared memory without `__syncwarp()` do. Writes of
    equal values race too. A fence of the block (`__threadfence_block()`) does not order other blocks. An atomic and a
    plain access race unless ordered, so a total that all blocks add to needs a fence before the counter that tells the
    last of them; the counter itself may then be reset plainly. To the other blocks of a cluster a block's start and
    its exit are writes to its shared memory: a cluster's barrier has to come before the first and after the last
    access.
OutOfBoundsError
    An access outside the elements of every argument, shared memory, the module's variables, and the thread's own stack.
    Gaps between the elements of a strided array are outside; pass (array, extent) where they are meant to be inside.
    Arrays lie far apart while the kernel runs, so running over an end meets no other argument by accident.
MisalignedError, NullPointerError, ReadOnlyError (an array with flags.writeable == False, `__constant__`)
    as they say.
UninitializedError
    Shared memory read before a thread has written it. Of a copy of 8 bytes or more a part may be unwritten that could
    be a structure's padding.
UndefinedArithmeticError
    Signed overflow, shifts by the width or more, integer division by zero.
DivergenceError
    Threads that wait at different barriers, or some at a barrier and some in a warp operation. A thread that has
    returned counts as arrived at every later `__syncthreads()` and `__syncwarp()`, as CUDA defines it. A shuffle, vote
    or reduction whose mask names a lane that waits elsewhere, has called another one or from another place, or has
    returned; and a shuffle that reads from a lane outside the mask, or that the block does not have. (CUDA forgives
    returned lanes in a mask and calls from two places, but whether it works then is luck.) Without a mask, in HIP's
    spelling, the lanes that are active take part: those that wait at one place when no lane of the warp can go on, the
    place that comes first in the source first; reading from any other lane is reported.
HangError
    Every thread polls, each comes back to a state that it was in before, and nothing has been written since: it will
    stay so. Or `timeout` seconds have passed: a poll that counts or looks at the clock has until then.
TrapError, StackOverflowError
    `__trap()` and `assert`; more than 128 KiB of local memory.

What a run without an exception proves: on the path that these inputs and this block order took, none of the above
happened; for races that holds in every schedule that takes the same path. What it cannot show:

- Faults on paths that these inputs do not take; other inputs, orders and `warp_size=64` are other runs.
- Shuffles and votes order memory here as `__syncwarp()` does, which CUDA does not promise:
  `RawModule(..., shuffles_order_memory=False)` reports code that relies on it.
- A fence that is missing on the reading side of a flag or counter: hardware forgives it, and so does the checker.
- Running from one shared array into the next through a pointer (indices of a declared array are checked), from one
  `__device__` variable into its neighbour, or past a `__constant__` table into other constants of the module;
  uninitialised local variables and uninitialised global arrays.
- Writing through a read-only array that shares its memory with an argument that may be written.
- Of many threads that read a byte, or update it atomically, two are remembered beside the last write: races are missed
  only if `__syncwarp` with partial masks, or flags between threads, order a later access after those and not after
  another.
- Overlapping atomics of different sizes (they do not race here), and atomics of the block (`atomicAdd_block`) on which
  another block relies (taken for atomics of the device).
- What `atomicExch` returns from shared memory that nobody has written.
- What the compiler leaves out: an unused part of a vector that is loaded, a write that the next one replaces.
- memcmp, strlen and the like; memcpy, memmove and memset are checked.
- g++: a structure passed by value to a `__noinline__` function, or returned through one, is not read under check.
- clang and zig: the alignment of a structure that is copied as a whole (`uint4 v = *p`); g++ checks it.
- The hardware's memory: caches, bank conflicts, weak ordering of correctly fenced code, time. Floating-point functions
  are the C library's: exact operations equal the GPU's, tanhf and its like differ in the last places.

`checked=False` leaves the checker out and is a little faster; divergence, hangs and crashes still become exceptions.
"""

from .errors import (
    ArgumentError,
    CompileError,
    CompilerNotFoundError,
    CrashError,
    DivergenceError,
    Frame,
    HangError,
    KernelFault,
    LaunchError,
    MisalignedError,
    NullPointerError,
    OutOfBoundsError,
    RaceError,
    ReadOnlyError,
    SimtError,
    Site,
    StackOverflowError,
    TrapError,
    UndefinedArithmeticError,
    UninitializedError,
)
from .executor import Kernel, RawModule

__all__ = [
    "ArgumentError",
    "CompileError",
    "CompilerNotFoundError",
    "CrashError",
    "DivergenceError",
    "Frame",
    "HangError",
    "Kernel",
    "KernelFault",
    "LaunchError",
    "MisalignedError",
    "NullPointerError",
    "OutOfBoundsError",
    "RaceError",
    "RawModule",
    "ReadOnlyError",
    "SimtError",
    "Site",
    "StackOverflowError",
    "TrapError",
    "UndefinedArithmeticError",
    "UninitializedError",
]
