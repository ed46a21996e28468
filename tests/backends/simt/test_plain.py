"""Plain mode: memory is not checked, but divergence, hangs and crashes still end in an exception."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from vpa.backends.simt import (
    CrashError,
    DivergenceError,
    HangError,
    KernelFault,
    NullPointerError,
    RawModule,
    StackOverflowError,
    TrapError,
    UndefinedArithmeticError,
)

TEXT = r"""
#define KERNEL extern "C" __global__ void
KERNEL fill(int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = i;
}
KERNEL wild(int* out, long long i) {
    if (threadIdx.x == 3) out[i] = 1;       // @wild
}
KERNEL null(int* out) { out[threadIdx.x] = 1; }  // @null
KERNEL divide(int* out, int by) {
    out[threadIdx.x] = 7 / (by - (int)threadIdx.x);  // @divide
}
KERNEL trap(int* out) {
    if (threadIdx.x == 5) __trap();         // @trap
}
KERNEL stuck(int* out) {
    if (threadIdx.x == 0) __syncthreads();  // @stuck
    else __syncwarp();
    out[threadIdx.x] = __shfl_sync(~0u, 1, 0);
}
KERNEL endless(int* out) {
    while (true) out[threadIdx.x] += 1;
}
KERNEL polls(volatile int* flag, int* out) {  // thread 0 waits for thread 1, with nothing but plain loads
    if (threadIdx.x == 0) {
        while (flag[0] == 0) {}
        out[0] = 5;
    } else if (threadIdx.x == 1) flag[0] = 1;
}
KERNEL blocks_poll(volatile int* flag, int* out) {
    if (blockIdx.x == 0) {
        while (flag[0] == 0) {}
        out[threadIdx.x] = 6;
    } else if (threadIdx.x == 0) flag[0] = 1;
}
KERNEL lock(int* lock, int* value) {
    for (bool done = false; !done;)
        if (atomicCAS(lock, 0, 1) == 0) {
            *value += 1;
            atomicExch(lock, 0);
            done = true;
        }
}
__device__ __noinline__ int deep(int n, int* out) {
    volatile int room[256];
    room[n & 255] = n;
    return n ? deep(n - 1, out) + room[n & 255] : out[0];
}
KERNEL recursion(int* out) { out[0] = deep(100000, out); }
KERNEL large_frame(int* out, int n) {
    int room[200000];
    for (int i = 0; i < 200000; i += 1000) room[i] = i + n;
    out[threadIdx.x] = room[n * 1000];
}
KERNEL keeps_shared(int* out, volatile int* flag) {  // two resident blocks, each with its own shared memory
    __shared__ int s[32];
    extern __shared__ int d[];
    s[threadIdx.x] = blockIdx.x * 100 + threadIdx.x;
    d[threadIdx.x] = -s[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        flag[blockIdx.x] = 1;
        while (flag[1 - blockIdx.x] == 0) __nanosleep(100);
    }
    __syncthreads();
    out[blockIdx.x * 32 + threadIdx.x] = s[31 - threadIdx.x] + 2 * d[31 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def module(compiler) -> RawModule:
    return RawModule(TEXT, name="plain.cu", compiler=compiler, checked=False)


def run(module, name, *args, grid=1, block=32, **options):
    module.get_function(name)((grid,), (block,), args, **options)


def healthy(module):
    out = np.zeros(100, np.int32)
    run(module, "fill", out, np.int32(100), grid=4)
    np.testing.assert_array_equal(out, np.arange(100))


def line_of(marker: str) -> int:
    return 1 + TEXT[: TEXT.index("@" + marker)].count("\n")


@pytest.mark.parametrize(
    ("name", "error", "args", "thread"),
    [
        ("wild", CrashError, (np.zeros(32, np.int32), np.int64(1 << 44)), 3),
        ("null", NullPointerError, (None,), 0),
        ("divide", UndefinedArithmeticError, (np.zeros(32, np.int32), np.int32(4)), 4),
        ("trap", TrapError, (np.zeros(32, np.int32),), 5),
        ("stuck", DivergenceError, (np.zeros(32, np.int32),), None),
        ("recursion", StackOverflowError, (np.zeros(32, np.int32),), None),
        ("large_frame", StackOverflowError, (np.zeros(32, np.int32), np.int32(3)), 0),
    ],
)
def test_crashes_become_exceptions(module, name, error, args, thread):
    before = [signal.getsignal(s) for s in (signal.SIGSEGV, signal.SIGFPE, signal.SIGURG)]
    for _ in range(2):
        with pytest.raises(KernelFault) as caught:
            run(module, name, *args)
        assert type(caught.value) is error
        if thread is not None:
            assert caught.value.thread == (thread, 0, 0)
            if "@" + name in TEXT:
                assert (caught.value.file, caught.value.line) == ("plain.cu", line_of(name))
        healthy(module)
    assert before == [signal.getsignal(s) for s in (signal.SIGSEGV, signal.SIGFPE, signal.SIGURG)]


def test_a_large_frame_in_checked_mode(compiler):
    with pytest.raises(StackOverflowError):
        run(RawModule(TEXT, compiler=compiler), "large_frame", np.zeros(32, np.int32), np.int32(3))


def test_an_endless_loop_ends(module):
    start = time.monotonic()
    with pytest.raises(HangError, match=r"not finished after 0\.2 s") as caught:
        run(module, "endless", np.zeros(32, np.int32), timeout=0.2)
    assert time.monotonic() - start < 5
    assert caught.value.block == (0, 0, 0)
    healthy(module)


def test_polling_threads_and_blocks_see_each_other(module):
    out = np.zeros(32, np.int32)
    run(module, "polls", np.zeros(1, np.int32), out)
    assert out[0] == 5
    run(module, "blocks_poll", np.zeros(1, np.int32), out, grid=2)
    assert (out == 6).all()


def test_lock_by_atomics(module):
    lock, value = np.zeros(1, np.int32), np.zeros(1, np.int32)
    run(module, "lock", lock, value, grid=3, block=64)
    assert value[0] == 192


def test_every_resident_block_has_its_own_shared_memory(compiler):
    for checked in (False, True):
        module = RawModule(TEXT, name="plain.cu", compiler=compiler, checked=checked)
        out = np.zeros((2, 32), np.int32)
        run(module, "keeps_shared", out, np.zeros(2, np.int32), grid=2, shared_mem=128)
        np.testing.assert_array_equal(out, -(np.arange(2)[:, None] * 100 + np.arange(31, -1, -1)))


def test_resident_blocks_can_be_limited(compiler):
    module = RawModule(TEXT, name="plain.cu", compiler=compiler)
    with pytest.raises(HangError):
        run(module, "blocks_poll", np.zeros(1, np.int32), np.zeros(32, np.int32), grid=2, resident_blocks=1)


def test_interrupting_a_launch(module):
    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(module, "endless", np.zeros(32, np.int32), timeout=20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    healthy(module)
