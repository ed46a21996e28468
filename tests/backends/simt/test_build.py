"""Compilers and the cache: what is found, what is rebuilt, two processes at once, and errors of the kernel text."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from vpa.backends.simt import CompileError, CompilerNotFoundError, OutOfBoundsError, RawModule, toolchain
from vpa.backends.simt import build as build_module
from vpa.backends.simt import cache as cache_module

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


def test_a_header_that_shifts_its_lines_is_another_header(cache, compiler, tmp_path):
    text = '#include "put.h"\nextern "C" __global__ void k(int* x) { put(x); }\n'
    for shift in (0, 10):
        (tmp_path / "put.h").write_text("\n" * shift + "__device__ void put(int* x) {\n    x[5] = 1;\n}\n")
        with pytest.raises(OutOfBoundsError) as caught:
            module = RawModule(text, options=("-I", str(tmp_path)), compiler=compiler)
            module.get_function("k")((1,), (1,), (np.zeros(4, np.int32),))
        assert caught.value.file.endswith("put.h") and caught.value.line == shift + 2


def spoil(path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()  # a new file: this process may have the old one mapped
    if how == "a folder":
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "zeros": bytes(len(data))}[how])


PROGRAM = (
    "import numpy as np\nfrom vpa.backends.simt import RawModule\n"
    f"x = np.arange(32, dtype=np.int32)\nm = RawModule({TEXT!r}, compiler=%r)\n"
    "m.get_function('scale')((1,), (32,), (x,))\nprint(int(x[30]))\n"
)


def started(compiler, **changes) -> subprocess.Popen:
    """PROGRAM in a process of its own: prints 2."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **changes}
    command = [sys.executable, "-c", PROGRAM % compiler]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("how", ["empty", "cut", "zeros", "a folder"])
def test_what_is_damaged_is_not_found(cache, how):
    for _ in range(2):
        with cache_module.workspace() as folder:
            (folder / "made").write_bytes(b"object" * 100)
            path = cache_module.keep(folder / "made", cache / "kernel-1.so")
        assert cache_module.find("kernel-1.so") == path and path.read_bytes().startswith(b"objectobject")
        spoil(path, how)
        assert cache_module.find("kernel-1.so") is None


def test_what_is_damaged_is_made_again(cache, compiler):
    scaled(compiler)
    for path in cache.iterdir():
        spoil(path, "cut")
    process = started(compiler)
    out, err = process.communicate(timeout=120)
    assert (out.strip(), process.returncode) == ("2", 0), err


def test_two_processes_at_once(cache, compiler):
    for process in [started(compiler) for _ in range(3)]:
        out, err = process.communicate(timeout=120)
        assert (out.strip(), process.returncode) == ("2", 0), err
    assert sorted(p.name.split("-")[0] for p in cache.iterdir()) == ["kernel", "runtime"]


def test_a_cache_that_cannot_be_written(monkeypatch, compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-place")
    assert scaled(compiler) == 2


def test_a_cache_that_can_only_be_read(cache, runs, monkeypatch, compiler):
    scaled(compiler)
    runs.clear()
    monkeypatch.setattr(cache_module.os, "access", lambda path, mode: False)
    assert build_module.build(TEXT, "kernel.cu", (), 32, True, toolchain.find_compiler(compiler)).parent == cache
    assert not runs
    assert scaled(compiler, options=("-DFACTOR=7",)) == 7  # made elsewhere
    assert runs and len(list(cache.iterdir())) == 2


def test_no_folder_is_left_behind(compiler, tmp_path):
    process = started(compiler, XDG_CACHE_HOME="/proc/no-such-place", TMPDIR=str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert (out.strip(), process.returncode) == ("2", 0), err
    assert not list(tmp_path.glob("vpa-simt-*"))


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
        for word in ("g++", "clang++", "pip install ziglang", "python -m ziglang c++", "apt install g++"):
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


def test_a_clang_that_copies_structures_unchecked_is_refused(monkeypatch, tmp_path):
    """Whatever its version says."""
    fake = tmp_path / "clang++"
    fake.write_text("#!/bin/sh\n[ $1 = --version ] && echo 'clang version 99.0' || touch $7\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    toolchain._find.cache_clear()
    try:
        with pytest.raises(CompilerNotFoundError, match=r"too old \(clang version 99.0\)"):
            toolchain.find_compiler(str(fake))
    finally:
        toolchain._find.cache_clear()


@pytest.mark.parametrize("checked", [True, False])
def test_every_compiler(any_compiler, checked):
    assert scaled(any_compiler, checked=checked) == 2
