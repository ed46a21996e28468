"""Compilers and the cache: what is found, what is rebuilt, two processes at once, and errors of the kernel text."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from vpa.backends.simt import CompileError, CompilerNotFoundError, RawModule, toolchain
from vpa.backends.simt import build as build_module

TEXT = r"""
#ifndef FACTOR
#define FACTOR 2
#endif
extern "C" __global__ void scale(int* x) {
    __shared__ int s[32];
    s[threadIdx.x] = x[threadIdx.x] * FACTOR;
    __syncthreads();
    x[threadIdx.x] = s[31 - threadIdx.x];
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vpa" / "simt"


@pytest.fixture
def runs(monkeypatch):
    """The commands that are run."""
    commands = []
    real = build_module._run

    def record(command, name):
        commands.append(command)
        return real(command, name)

    monkeypatch.setattr(build_module, "_run", record)
    return commands


def scaled(compiler, **options) -> int:
    x = np.arange(32, dtype=np.int32)
    RawModule(TEXT, compiler=compiler, **options).get_function("scale")((1,), (32,), (x,))
    return int(x[30])


def test_second_build_comes_from_the_cache(cache, runs, compiler):
    assert scaled(compiler) == 2
    assert runs
    files = sorted(p.name for p in cache.iterdir())
    assert [f.split("-")[0] for f in files] == ["kernel", "runtime"]
    runs.clear()
    assert scaled(compiler) == 2
    assert not runs
    assert sorted(p.name for p in cache.iterdir()) == files


@pytest.mark.parametrize(
    "change",
    [{"options": ("-DFACTOR=3",)}, {"warp_size": 64}, {"checked": False}, {"name": "other.cu"}],
    ids=lambda c: next(iter(c)),
)
def test_whatever_matters_is_part_of_the_key(cache, runs, compiler, change):
    scaled(compiler)
    runs.clear()
    assert scaled(compiler, **change) == (3 if "options" in change else 2)
    assert runs


def test_included_files_are_part_of_the_key(cache, runs, compiler, tmp_path):
    header = tmp_path / "factor.h"
    text = '#include "factor.h"\nextern "C" __global__ void get(int* x) { *x = VALUE; }\n'
    for value in (4, 5):
        header.write_text(f"#define VALUE {value}\n")
        x = np.zeros(1, np.int32)
        RawModule(text, options=("-I", str(tmp_path)), compiler=compiler).get_function("get")((1,), (1,), (x,))
        assert x[0] == value


def test_two_processes_at_once(cache, compiler):
    program = (
        "import numpy as np\nfrom vpa.backends.simt import RawModule\n"
        f"x = np.arange(32, dtype=np.int32)\nm = RawModule({TEXT!r}, compiler={compiler!r})\n"
        "m.get_function('scale')((1,), (32,), (x,))\nprint(int(x[30]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert (out.strip(), process.returncode) == ("2", 0), err
    assert sorted(p.name.split("-")[0] for p in cache.iterdir()) == ["kernel", "runtime"]


def test_a_cache_that_cannot_be_written(monkeypatch, compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-place")
    assert scaled(compiler) == 2


def test_old_files_are_pruned(cache, compiler):
    cache.mkdir(parents=True)
    old, young = cache / "kernel-old.so", cache / "kernel-young.so"
    for path, age in ((old, 100), (young, 1)):
        path.write_bytes(b"")
        stamp = path.stat().st_mtime - age * 24 * 3600
        os.utime(path, (stamp, stamp))
    scaled(compiler)
    assert not old.exists() and young.exists()


def test_the_error_names_the_kernel_texts_line(compiler):
    text = 'extern "C" __global__ void f(int* x) {\n    *x = undeclared;\n}\n'
    with pytest.raises(CompileError, match=r"broken.cu:2: .*undeclared") as caught:
        RawModule(text, name="broken.cu", compiler=compiler).compile()
    assert (caught.value.file, caught.value.line) == ("broken.cu", 2) and "undeclared" in caught.value.log
    spliced = '#line 40 "inner.cuh"\nint wrong(;\n#line 2 "broken.cu"\n'
    with pytest.raises(CompileError) as caught:
        RawModule(spliced, name="broken.cu", compiler=compiler).compile()
    assert (caught.value.file, caught.value.line) == ("inner.cuh", 40)


def test_the_text_may_hold_any_characters(compiler):
    text = '// größer als 0 → 1, “quoted”\nextern "C" __global__ void f(int* x) { *x = 3; }\n'
    x = np.zeros(1, np.int32)
    RawModule(text, name='odd "name" ü.cu', compiler=compiler).get_function("f")((1,), (1,), (x,))
    assert x[0] == 3


def test_options_that_are_not_understood_are_refused(compiler):
    for option in ("-O3", "--use_fast_math", "-ffast-math", "-D"):
        with pytest.raises(ValueError, match="are accepted"):
            RawModule(TEXT, options=(option,), compiler=compiler).compile()
    RawModule(TEXT, options=("-D", "FACTOR=4", "--std=c++17", "-UNOTHING"), compiler=compiler).compile()


def test_no_compiler_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    toolchain._find.cache_clear()
    try:
        with pytest.raises(CompilerNotFoundError) as caught:
            RawModule(TEXT).compile()
        for word in ("g++", "clang++", "pip install ziglang", "apt install g++"):
            assert word in str(caught.value)
        with pytest.raises(CompilerNotFoundError, match="icpx is not installed"):
            RawModule(TEXT, compiler="icpx").compile()
    finally:
        toolchain._find.cache_clear()


def test_an_old_compiler_is_refused(monkeypatch, tmp_path):
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho 'g++ (Old) 9.4.0'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    toolchain._find.cache_clear()
    try:
        with pytest.raises(CompilerNotFoundError, match=r"too old \(g\+\+ \(Old\) 9.4.0\)"):
            toolchain.find_compiler("g++")
    finally:
        toolchain._find.cache_clear()


@pytest.mark.parametrize("checked", [True, False])
def test_every_compiler(any_compiler, checked):
    assert scaled(any_compiler, checked=checked) == 2
