"""Compile every Numba twin to PTX for one compute capability, without a GPU. usage: numba_ptx.py MAJOR MINOR

In a process of its own: Numba keeps a device function compiled for one capability only. It asks the current device for
its capability where a kernel calls a device function; here that answer is given for it.
"""

from __future__ import annotations

import sys
import types

from numba import cuda
from numba import types as numba_types

from vpa.kernels import numba_argmax, numba_norm, numba_verify

CAPABILITY = (int(sys.argv[1]), int(sys.argv[2]))

dispatcher = sys.modules[type(cuda.jit(lambda: None)).__module__]
dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=CAPABILITY)

i64 = numba_types.int64


def ranges(count: int) -> numba_types.UniTuple:
    return numba_types.UniTuple(numba_types.UniTuple(i64, 3), count)


def ptx_of(kernel, signature) -> str:
    text, _ = cuda.compile_ptx(kernel.py_func, signature, cc=CAPABILITY)
    assert f".target sm_{CAPABILITY[0]}{CAPABILITY[1]}" in text
    assert ".f64" not in text, "64-bit floats, where integers of two kinds were mixed"
    assert ".local" not in text, "a group of loads that does not lie in registers"
    return text


count = 0
for dtype, larger in (("bfloat16", "max.NaN.bf16x2"), ("float16", "max.NaN.f16x2"), ("float32", "max.NaN.f32")):
    for number, (pairs, contiguous, loads, once, in_ranges) in enumerate(
        ((False, True, 4, True, 1), (True, True, 2, False, 1), (True, True, 1, True, 2), (False, False, 1, False, 2))
    ):
        kernel = numba_argmax.local_argmax_candidates(dtype, pairs, 8, in_ranges, contiguous, 256, loads, once)
        text = ptx_of(kernel, (i64, i64, i64, i64, ranges(in_ranges), i64))
        wide, halves = text.count("ld.global.nc.L1::no_allocate.v4.u32"), text.count(larger)
        if number == 0:  # nothing was copied: four loads, and a maximum for each word but the first
            assert (wide, halves) == (4, 15 + (dtype != "float32")), (dtype, wide, halves)
            assert text.count("redux.sync.max.u32") == 4
        assert (wide > 0) == contiguous
        count += 1
for pairs in (False, True):
    text = ptx_of(numba_argmax.pick_from_candidates(pairs, 8, 128), (i64, i64, i64, i64))
    assert text.count("redux.sync.max.u32") == 2
    count += 1
for dtype, halves, ranks, rounding, weight32, wide, keep in (
    ("bfloat16", 2, 4, 0, 0, 1, 1), ("float16", 2, 1, 1, 1, 1, 0), ("float32", 1, 3, 2, 0, 0, 1),
):  # fmt: skip
    groups = 4 // halves
    settings = {"residual": 1, "rounding": rounding, "weight32": weight32, "norm": 1, "keep": keep}
    kernel = numba_norm.residual_rmsnorm(dtype, ranks, threads=448, groups=groups, wide=wide, full=wide, **settings)
    text = ptx_of(kernel, (i64,) * 11)
    assert "fma" not in text and ".ftz" not in text, "arithmetic of another rounding"
    assert text.count("sqrt.rn.f32") == text.count("rcp.rn.f32") == 1
    if wide:  # partial sums, residual, weight; what is normed, and kept
        loads = ranks + 1 + (halves if weight32 else 1)
        assert text.count("ld.global.nc.L1::no_allocate.v4.u32") == loads * groups
        assert text.count("st.global.v4.u32") == (1 + keep) * groups
    count += 1
kernel = numba_norm.residual_rmsnorm("bfloat16", 4, 0, 0, 0, 448, 2, 1, 1, norm=0, keep=1)  # a sum over ranks
assert "shared" not in ptx_of(kernel, (i64,) * 11)
count += 1
for dtype, larger in (("bfloat16", "max.bf16x2"), ("float16", "max.f16x2"), ("float32", "max.f32")):
    kernel = numba_argmax.local_argmax_candidates(dtype, False, 8, 1, True, 256, 4, True, nan_ignored=True)
    assert ptx_of(kernel, (i64, i64, i64, i64, ranges(1), i64)).count(larger) == 15 + (dtype != "float32")
    count += 1
for dtype, contiguous, in_ranges, nan_ignored in (("bfloat16", True, 1, False), ("float32", False, 2, True)):
    kernel = numba_verify.local_argmax_blocks(
        dtype, in_ranges, contiguous, 256, 4, contiguous, nan_ignored, 3, 7, 50, 8192, 1024
    )
    ptx_of(kernel, (i64, i64, i64, ranges(in_ranges), *(i64,) * 5))
    count += 1
for blocks, synthetic, drafts in ((False, False, 3), (True, True, 3), (True, False, 128), (False, True, 0)):
    text = ptx_of(numba_verify.greedy_verify(blocks, drafts, 7, 50, synthetic, 128), (i64,) * 15)
    assert text.count("redux.sync.max.u32") == 3
    count += 1
print(count, "kernels")
