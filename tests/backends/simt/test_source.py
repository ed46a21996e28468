"""Reading the kernel text and the compiled file: declarations, lines, symbol names."""

from __future__ import annotations

import pytest

from vpa.backends.simt.elf import Symbol
from vpa.backends.simt.source import SourceLines, declarations, has_includes


def names(text: str) -> dict[str, tuple[str, ...]]:
    return {d.name: d.parameters for d in declarations(text)}


def test_launch_bounds_and_cluster_sizes():
    text = """# 1 "a file of its own"
    extern "C" __global__ void __cluster_dims__(4, (2), 1) __launch_bounds__(64) f(int a) {}
    extern "C" __cluster_dims__(N) __global__ void g(int a) {}
    extern "C" __global__ void h(int a) {}
    """
    found = [(d.name, d.max_threads, d.cluster) for d in declarations(text)]
    assert found == [("f", "64", "4, (2), 1"), ("g", "0", "N"), ("h", "0", "1")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('extern "C" __global__ void f(const float* x, int n) {}', {"f": ("x", "n")}),
        ('extern "C" __global__ void __launch_bounds__(256, (2)) f(int* __restrict__ x) {}', {"f": ("x",)}),
        ('extern "C" __launch_bounds__(8) __global__ void f() {}', {"f": ()}),
        (
            'extern "C" __global__ void __launch_bounds__(A, 2) f() {} extern "C" __global__ void g(B b) {}',
            {"f": (), "g": ("b",)},
        ),
        ('extern "C" __global__ void f(void) {}', {"f": ()}),
        (
            'extern "C" { __global__ void f(int a); __device__ int g(int); __global__ void h(int b) { } }',
            {"f": ("a",), "h": ("b",)},
        ),
        (
            'extern "C" __global__ void f(Pair<int, float> p, int (*q), T x[3], int n = 4) {}',
            {"f": ("p", "q", "x", "n")},
        ),
        ('extern "C" __global__ void f(int*, float);', {"f": ("", "")}),
        ("__global__ void hidden(int a) {}", {}),
        ('template <class T> __global__ void f(T* x) {} extern "C" __global__ void g(int b) {}', {"g": ("b",)}),
        ('// extern "C" __global__ void f(int a) {}\nextern "C" __global__ void g(int b) {}', {"g": ("b",)}),
        ('/* extern "C" __global__ void f(int a) {} */ const char* s = "__global__ void q(";', {}),
    ],
)
def test_declarations(text, found):
    assert names(text) == found


def test_launch_bounds():
    text = 'extern "C" __global__ __launch_bounds__(f(1, 2) + 3, 4) void a() {} extern "C" __global__ void b() {}'
    assert [d.max_threads for d in declarations(text)] == ["f(1, 2) + 3", "0"]


def test_lines_follow_the_directives():
    lines = SourceLines('a\n#line 5 "x.cuh"\n  b  \nc\n# 9 "k.cu"\nd\n#line 20\ne\n', "k.cu")
    assert [lines("k.cu", 1), lines("x.cuh", 5), lines("x.cuh", 6), lines("k.cu", 9), lines("k.cu", 20)] == list(
        "abcde"
    )
    assert lines("k.cu", 2) is None


def test_includes_are_seen():
    assert has_includes(' #  include "a.h"') and not has_includes("// nothing of the kind: #define X")


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("counter", "counter"),
        ("_ZZ4scanE1s", "s"),
        ("_ZZ4scanE1s_0", "s"),
        ("_ZZ3redILi32EEffE3buf", "buf"),
        ("_ZN3vpa5countE", "count"),
        ("_ZZN3vpa4scanEvE6table1", "table1"),
        ("_ZL6lookup", "lookup"),
    ],
)
def test_short_names(mangled, name):
    assert Symbol(mangled, 0, 0, 0, None).short_name == name
