"""Run the norm's Numba twin under Numba's CUDA simulator on small shapes; started with NUMBA_ENABLE_CUDASIM=1."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
from numba import config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from norm_oracle import inputs, same
from oracle import DTYPES

from vpa import rmsnorm
from vpa.backends import norm_launches
from vpa.kernels import numba_norm

assert config.ENABLE_CUDASIM
warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, where uint32 wraps around and numbers overflow as on a GPU


def bits(number: np.float32) -> int:
    return int(number.view(np.uint32))


def check(dtype: str, ranks: int, hidden: int, rounding: str, kind: str, wide_weight: bool, residual: bool) -> None:
    parts, held, weight = inputs(dtype, ranks, 1 if hidden > 1000 else 2, hidden, hidden, kind)
    weight = weight.astype(np.float32) if wide_weight else weight
    held = held if residual else None
    normed, kept = np.zeros_like(parts[0]), np.zeros_like(parts[0])
    launch = norm_launches.norm(parts, held, weight, 1e-6, rounding, normed, kept)
    defines = {key: value for key, value in launch.defines.items() if key not in ("dtype", "parts", "cluster")}
    kernel = numba_norm.residual_rmsnorm(dtype, **defines)
    *given, elements, eps, per_column = launch.args
    given = [one.ctypes.data if isinstance(one, np.ndarray) else int(one) for one in given]
    kernel[launch.grid, launch.block](*given, int(elements), bits(eps), bits(per_column))
    expected = np.empty_like(normed), np.empty_like(kept)
    rmsnorm.residual_rmsnorm(parts, held, weight, 1e-6, rounding, *expected)
    assert same(kept, expected[1]), (dtype, hidden, rounding, kind)
    assert same(normed, expected[0]), (dtype, hidden, rounding, kind)


for number, dtype in enumerate(DTYPES):
    check(dtype, 3, 256, "once", "random", False, True)
    check(dtype, 1, 77, "unrounded_residual", "infinite", bool(number % 2), True)
    check(dtype, 4, 264, "gemma", "subnormal", not number % 2, False)
    check(dtype, 2, 264, "unrounded_residual", "nan", True, True)
check("bfloat16", 2, 4104, "once", "order", False, True)  # two groups a thread
check("float32", 2, 4200, "gemma", "random", False, True)  # four groups a thread, two chunks a lane
print("simulated")
