"""Backend ``numba``: the Numba CUDA twins in ``kernels/`` on CuPy arrays."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import cupy
import numpy as np
from numba import cuda

from vpa.backends import launches, norm_launches
from vpa.kernels import numba_argmax, numba_norm
from vpa.vocab import VocabShard


def local_argmax_candidates(logits: Any, shard: VocabShard, layout: str, splits: int, out: Any) -> None:
    """Write the best candidate of each split of each row of ``logits`` [rows, width] to ``out`` (``layout``)."""
    if len(logits):
        prepare_scan(logits, shard, layout, splits, out)()


def pick_from_candidates(gathered: Any, num_rows: int, out: Any) -> None:
    """Write the id of the best of each row's candidates to ``out`` int64 [num_rows]; -1 where there is none."""
    if num_rows:
        prepare_pick(gathered, num_rows, out)()


def prepare_scan(logits: Any, shard: VocabShard, layout: str, splits: int, out: Any, nan: str = "first") -> Prepared:
    """``local_argmax_candidates`` packed once, for calls with other ``(logits, out)`` of the same kind; rows >= 1."""
    launch = launches.scan_by_rows(logits, shard, layout, splits, out)
    defines = {**launch.defines, "dtype": logits.dtype.name, "pairs": layout == "pairs"}
    del defines["write"], defines["cluster"]
    kernel = numba_argmax.local_argmax_candidates(**defines, nan_ignored=nan == "ignore")
    _, row_stride, column_stride, chunk, _, _ = launch.args
    ranges = shard.ranges or ((0, 0, 0),)
    return Prepared(kernel, launch, (logits, int(row_stride), int(column_stride), int(chunk), ranges, out))


def prepare_pick(gathered: Any, num_rows: int, out: Any) -> Prepared:
    """``pick_from_candidates`` packed once, for calls with other ``(gathered, out)`` of the same kind; rows >= 1."""
    launch = launches.pick(gathered, num_rows, out)
    defines = dict(launch.defines)
    ranks = defines.pop("ranks")
    del defines["keep"]
    return Prepared(numba_argmax.pick_from_candidates(**defines), launch, (gathered, num_rows, ranks, out))


def residual_rmsnorm(partials: Any, *arguments: Any) -> None:
    """Write ``normed`` and ``new_residual``; arguments and rules are those of ``vpa.rmsnorm.residual_rmsnorm``."""
    if partials.shape[1]:
        prepare_rmsnorm(partials, *arguments)()


def prepare_rmsnorm(
    partials: Any, residual: Any, weight: Any, eps: float, rounding: str, normed: Any, new_residual: Any
) -> Prepared:
    """``residual_rmsnorm`` packed once, for its own arrays, which have to live as long; rows >= 1."""
    launch = norm_launches.norm(partials, residual, weight, eps, rounding, normed, new_residual)
    defines = {key: value for key, value in launch.defines.items() if key not in ("dtype", "parts", "cluster")}
    kernel = numba_norm.residual_rmsnorm(partials.dtype.name, **defines)
    *arrays_and_strides, hidden, single_eps, per_column = launch.args
    numbers = int(hidden), int(single_eps.view(np.uint32)), int(per_column.view(np.uint32))
    given = (one if isinstance(one, cupy.ndarray) else int(one) for one in arrays_and_strides)
    return Prepared(kernel, launch, (*given, *numbers))


class Prepared:
    """A launch that can be made again, on CuPy's current device and stream.

    Arrays given to a call, all of them or none, take the places of the arrays among ``arguments``, in order; they must
    be alike but for their addresses, which are all that a kernel is given. One thread at a time calls it.
    """

    def __init__(self, kernel: Any, launch: launches.Launch, arguments: tuple[Any, ...]) -> None:
        self._kernel, self._grid, self._block = kernel, launch.grid, launch.block
        self._places = [place for place, argument in enumerate(arguments) if isinstance(argument, cupy.ndarray)]
        self._arguments = list(arguments)
        for place in self._places:
            self._arguments[place] = arguments[place].data.ptr

    def __call__(self, *arrays: Any) -> None:
        for place, array in zip(self._places, arrays, strict=False):
            self._arguments[place] = array.data.ptr
        _ready(self._kernel, self._grid, self._block)(*self._arguments)


def _ready(kernel: Any, grid: int, block: int) -> Any:
    """A kernel ready to be called with its arguments, on CuPy's current device and stream."""
    device = cupy.cuda.runtime.getDevice()
    if cuda.get_current_device().id != device:  # Numba keeps a current GPU of its own
        cuda.select_device(device)
    return _configured(device, kernel, grid, block, cupy.cuda.get_current_stream().ptr)


@functools.lru_cache(maxsize=1024)
def _configured(device: int, kernel: Any, grid: int, block: int, stream: int) -> Any:
    """What ``_ready`` gives. The default streams of all devices have one number, so the device is in the key too."""
    capability = cuda.get_current_device().compute_capability
    if capability < (8, 0):
        raise RuntimeError(
            f"device {device} has compute capability {capability[0]}.{capability[1]}; backend 'numba' takes 8.0 and "
            "above: pass backend='raw'"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Grid size 8 will likely result in ...": one row is a normal call here
        return kernel[grid, block, cuda.external_stream(stream)]
