"""What a fault says: files and lines through #line and inlined functions, and the lines themselves."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from vpa.backends.simt import (
    DivergenceError,
    Frame,
    OutOfBoundsError,
    RaceError,
    RawModule,
    SimtError,
    UninitializedError,
)

PAGE = Path(__file__).resolve().parents[3] / "docs/without-a-gpu.md"

TEXT = r"""
#line 10 "helpers.cuh"
template <class T> __device__ __forceinline__ T load(const T* x, int i) {
    return x[i];
}
__device__ __noinline__ float outer(const float* x, int i) {
    float v = load(x, i);
    return v + 1;
}
__device__ inline int exchange(int v, unsigned mask) {
    return __shfl_sync(mask, v, 0);
}
#line 100 "main.cu"
extern "C" __global__ void calls(const float* x, float* out, int n) {
    out[threadIdx.x] =
        outer(x, threadIdx.x * n);
}
extern "C" __global__ void shuffle(int* out) {
    if (threadIdx.x < 4)
        out[threadIdx.x] = exchange(1, 0xffffffff);
}
extern "C" __global__ void race(int* out) {
    __shared__ int s[2][32];
    s[0][threadIdx.x] = 1;
    s[1][threadIdx.x] = 2; __syncthreads();
    out[threadIdx.x] = s[1][threadIdx.x];
    s[0][threadIdx.x / 2] = 3;
}
extern "C" __global__ void three_dimensions(int* out) {
    int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    if (blockIdx.y == 2 && i == 23) out[1000] = 1;
}
extern "C" __global__ void unrolled_barriers(int* out) {
    __shared__ int s[32];
    int odd = threadIdx.x & 1;
    for (int i = 0; i < 4; ++i) {
        if (odd) s[threadIdx.x] = i; else s[threadIdx.x] = -i;
        __syncthreads();
        out[threadIdx.x] += s[31 - threadIdx.x];
        __syncthreads();
    }
}
extern "C" __global__ void uninitialised_then_wild(int* out) {
    __shared__ int index;
    out[index + 1000000] = 1;
}
"""


@pytest.fixture(scope="module", params=["any"])
def module(any_compiler) -> RawModule:
    return RawModule(TEXT, name="main.cu", compiler=any_compiler)


def fault(module, error, name, *args, grid=(1,), block=(32,)):
    with pytest.raises(error) as caught:
        module.get_function(name)(grid, block, args)
    return caught.value


def test_call_chain_through_inlined_and_called_functions(module):
    error = fault(module, OutOfBoundsError, "calls", np.zeros(64, np.float32), np.zeros(32, np.float32), np.int32(4))
    assert (error.file, error.line, error.thread) == ("helpers.cuh", 11, (16, 0, 0))
    assert [(f.file, f.line) for f in error.frames] == [("helpers.cuh", 11), ("helpers.cuh", 14), ("main.cu", 102)]
    assert error.frames[1].function == "outer"
    assert "helpers.cuh:11: return x[i];" in str(error)
    assert "called from main.cu:102: outer(x, threadIdx.x * n);" in str(error)
    assert "0 bytes past the end of x (float32[64])" in str(error)


def test_call_chain_of_a_divergence(module):
    error = fault(module, DivergenceError, "shuffle", np.zeros(32, np.int32))
    assert [(f.file, f.line) for f in error.frames] == [("helpers.cuh", 18), ("main.cu", 106)]
    assert "__shfl_sync()" in str(error)


def test_both_sides_of_a_race(module):
    error = fault(module, RaceError, "race", np.zeros(32, np.int32))
    assert (error.line, error.other.line) == (113, 113)
    assert (error.thread, error.other.thread, error.block, error.other.block) == (
        (1, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
    )
    assert error.other.frames == (Frame("main.cu", 113, "race", error.other.frames[0].column),)
    assert str(error).splitlines()[0] == (
        "kernel 'race', block (0,0,0): thread (1,0,0) writes shared 's' (byte 0 of 256) at main.cu:113 "
        "that thread (0,0,0) wrote at main.cu:113 with no barrier between"
    )


def test_indices_in_three_dimensions(module):
    error = fault(module, OutOfBoundsError, "three_dimensions", np.zeros(24, np.int32), grid=(2, 3, 2), block=(4, 3, 2))
    assert (error.block, error.thread) == ((0, 2, 0), (3, 2, 1))
    assert "block (0,2,0): thread (3,2,1) writes" in str(error)


def test_a_barrier_that_the_compiler_duplicates_is_one_barrier(module):
    out = np.zeros(32, np.int32)
    module.get_function("unrolled_barriers")((1,), (32,), (out,))
    np.testing.assert_array_equal(out, np.where(np.arange(32) % 2, -6, 6))


def test_the_cause_is_named_not_its_consequence(module):
    error = fault(module, UninitializedError, "uninitialised_then_wild", np.zeros(4, np.int32))
    assert "shared 'index'" in str(error) and error.line == 131


def test_after_a_fault_everything_works(module):
    out = np.zeros(32, np.int32)
    for _ in range(3):
        fault(module, RaceError, "race", out)
        module.get_function("unrolled_barriers")((1,), (32,), (out,))
    np.testing.assert_array_equal(out, 3 * np.where(np.arange(32) % 2, -6, 6))


def test_one_root(module):
    assert issubclass(RaceError, SimtError)
    error = fault(module, SimtError, "race", np.zeros(32, np.int32))
    assert error.kernel == "race"


def test_the_example_of_the_documentation_runs_and_says_what_stands_below_it(capsys):
    pattern = r"```python\n(import numpy as np\n.*?)```\n\n```output\n(.*?)```"
    program, said = re.search(pattern, PAGE.read_text(), re.DOTALL).groups()
    exec(program, {})
    assert capsys.readouterr().out == said
