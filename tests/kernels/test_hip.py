"""Every variant of every kernel compiled for AMD GPUs, without one: warnings are errors, nothing spills.

Debian's compilers do it: `apt-get install hipcc clang-19 lld-19`. Its device libraries know gfx90a; for newer targets
the one constant that they lack, the version of the instruction set, is made here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.variants import name_of, takes_nvidia, variants
from vpa import kernels

pytestmark = pytest.mark.hip

COMPILER = shutil.which("clang++-19")
BITCODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")

#: target -> version of its instruction set, as the device libraries number it.
TARGETS = {"gfx90a": 9010, "gfx942": 9402, "gfx1100": 11000}

#: Scalar registers that a kernel may keep in lanes of a vector register, which reads no memory. The head's, where bias,
#: ranges and a transform come together.
SCALARS_SPILT = {"head_candidates": 4}

if COMPILER is None or not BITCODE.is_dir():
    pytestmark = [pytestmark, pytest.mark.skip(reason="no HIP compiler: apt-get install hipcc clang-19 lld-19")]


@pytest.fixture(scope="session", params=TARGETS)
def target(request, tmp_path_factory) -> tuple[str, Path]:
    """A target's name, and a folder with device libraries for it."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    for file in BITCODE.iterdir():
        os.symlink(file, folder / file.name)
    version = folder / f"oclc_isa_version_{name.removeprefix('gfx')}.bc"
    if not version.exists():
        text = folder / "version.ll"
        constant = "linkonce_odr protected local_unnamed_addr addrspace(4) constant i32"
        text.write_text(f"@__oclc_ISA_version = {constant} {TARGETS[name]}, align 4\n")
        options = ["-x", "ir", "-c", "-emit-llvm", "-nogpulib", "--target=amdgcn-amd-amdhsa", "-Wno-override-module"]
        subprocess.run([COMPILER, *options, text, "-o", version], check=True)
    return name, folder


def compiled(text: str, target: tuple[str, Path], folder: Path) -> subprocess.CompletedProcess:
    source = folder / "kernel.hip"
    source.write_text(text)
    options = [
        "-x", "hip", "--cuda-device-only", f"--offload-arch={target[0]}", f"--rocm-device-lib-path={target[1]}",
        "--no-gpu-bundle-output", "-O3", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
        "-Rpass-analysis=kernel-resource-usage", "-include", "hip/hip_runtime.h", "-c", "-o", folder / "kernel.o",
    ]  # fmt: skip
    return subprocess.run([COMPILER, *options, source], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("variant", [one for one in variants() if not takes_nvidia(one)], ids=name_of)
def test_compiles_without_warnings_or_spills(target, variant, tmp_path):
    kernel, defines = variant
    done = compiled(kernels.source(kernel, **dict(defines)).text, target, tmp_path)
    assert done.returncode == 0, done.stderr
    spilt = SCALARS_SPILT.get(kernel, 0)
    for what, most in (("SGPRs Spill", spilt), ("VGPRs Spill", 0), (r"ScratchSize \[bytes/lane\]", 0)):
        assert int(re.search(rf"remark:\s+{what}: (\d+)", done.stderr).group(1)) <= most, done.stderr


def test_a_warning_is_an_error(target, tmp_path):
    done = compiled('extern "C" __global__ void k(int* p) { int unused; *p = 1; }', target, tmp_path)
    assert done.returncode != 0 and "unused" in done.stderr
