"""Backend ``numba``: the Numba CUDA twins in ``kernels/`` on CuPy arrays."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import cupy
from numba import cuda

from vpa.backends import launches
from vpa.kernels import numba_argmax
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
    return Prepared(numba_argmax.pick_from_candidates(**defines), launch, (gathered, num_rows, ranks, out))


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
