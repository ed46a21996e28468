"""Compile every Numba twin to PTX for one compute capability, without a GPU. usage: numba_ptx.py MAJOR MINOR

In a process of its own: Numba keeps a device function compiled for one capability only. It asks the current device for
its capability where a kernel calls a device function; here that answer is given for it.
"""

from __future__ import annotations

import sys
import types

from numba import cuda
from numba import types as numba_types

from vpa.kernels import numba_argmax

CAPABILITY = (int(sys.argv[1]), int(sys.argv[2]))

dispatcher = sys.modules[type(cuda.jit(lambda: None)).__module__]
dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=CAPABILITY)

i64 = numba_types.int64
PAIRS = numba_types.uint32[:, ::1], numba_types.float32[:, ::1]


def ranges(count: int) -> numba_types.UniTuple:
    return numba_types.UniTuple(numba_types.UniTuple(i64, 3), count)


def ptx_of(kernel, signature) -> str:
    ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=CAPABILITY)
    return ptx


count = 0
for dtype, word in (
    ("bfloat16", numba_types.uint16),
    ("float16", numba_types.uint16),
    ("float32", numba_types.uint32),
):
    for pairs in (False, True):
        for number in (1, 2):
            kernel = numba_argmax.local_argmax_candidates(dtype, pairs, 8, number, 256)
            text = ptx_of(kernel, (word[::1], i64, i64, i64, i64, ranges(number), *PAIRS))
            assert f".target sm_{CAPABILITY[0]}{CAPABILITY[1]}" in text
            assert ".f64" not in text, f"{dtype}: 64-bit floats, where integers of two kinds were mixed"
            count += 1
for pairs in (False, True):
    text = ptx_of(numba_argmax.pick_from_candidates(pairs, 8), (*PAIRS, i64, i64, numba_types.int64[::1]))
    assert ".f64" not in text
    count += 1
print(count, "kernels")
