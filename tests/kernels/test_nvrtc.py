"""Every variant of every kernel compiled for NVIDIA GPUs, without one: no warning, no spill, registers in limits."""

from __future__ import annotations

import functools
import re

import pytest

from kernels.variants import name_of, takes_cluster, variants
from vpa import kernels

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")

#: Most registers a thread of each kernel may take: 64 let 1024 threads live on a multiprocessor. Blocks of 32 threads,
#: of which no device holds more than 32, take more in one kernel.
REGISTERS = {
    "local_argmax_candidates": 64,
    "local_argmax_columns": 72,
    "pick_from_candidates": 64,
    "head_candidates": 128,
    "transform_logits": 64,
    "residual_rmsnorm": 80,
    "greedy_verify": 64,
    "empty": 16,
    "plain_read": 48,
    "plain_move": 64,
}


@functools.cache
def nvrtc():
    return pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed; it is in the extra `dev`")


def compiled(text: str, name: str, architecture: str) -> str:
    """The log of a compilation with the options that CuPy uses, ptxas's report included; fails the test on an error."""
    library = nvrtc()
    error, program = library.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], [])
    assert error == library.nvrtcResult.NVRTC_SUCCESS
    options = [f"-arch={architecture}", "-std=c++17", "-ftz=true", "--ptxas-options=-v"]
    (result,) = library.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = library.nvrtcGetProgramLogSize(program)
    log = b" " * size
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(program)
    text = log.rstrip(b"\0 ").decode()
    assert result == library.nvrtcResult.NVRTC_SUCCESS, text
    return text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", variants(), ids=name_of)
def test_compiles_without_warnings_or_spills_within_its_registers(variant, architecture):
    if takes_cluster(variant) and architecture == "sm_80":
        pytest.skip("clusters begin with sm_90; there other variants are launched")
    kernel, defines = variant
    log = compiled(kernels.source(kernel, **dict(defines)).text, f"{kernel}.cu", architecture)
    assert "warning" not in log.lower(), log
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", log), log
    registers = int(re.search(r"Used (\d+) registers", log).group(1))
    assert registers <= REGISTERS[kernel], f"{registers} registers"


def test_a_warning_would_be_seen():
    log = compiled('extern "C" __global__ void k(int* p) { int unused; *p = 1; }', "k.cu", "sm_90")
    assert "warning" in log.lower()


def test_a_spill_would_be_seen():
    text = """
    extern "C" __global__ void __launch_bounds__(1024, 2) k(float* p) {
        float v[96];
        #pragma unroll
        for (int i = 0; i < 96; i++) v[i] = p[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = v[95 - i] * v[i];
    }"""
    assert not re.search(r"0 bytes spill stores", compiled(text, "k.cu", "sm_90"))
