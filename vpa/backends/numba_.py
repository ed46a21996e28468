"""Backend ``numba``: the Numba CUDA twins in ``kernels/`` on CuPy arrays."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import cupy
import numpy as np
from numba import cuda
from numba.core.errors import NumbaPerformanceWarning

from vpa.backends import launches
from vpa.kernels import numba_argmax
from vpa.vocab import VocabShard


def local_argmax_candidates(logits: Any, shard: VocabShard, layout: str, splits: int, out: Any) -> None:
    """Write the best candidate of each split of each row of ``logits`` [rows, width] to ``out`` (``layout``)."""
    if not len(logits):
        return
    launch = launches.scan_by_rows(logits, shard, layout, splits, out)
    _, row_stride, column_stride, chunk, _, _ = launch.args
    ranges = shard.ranges or ((0, 0, 0),)
    words, offset = _memory(logits)
    kernel = numba_argmax.local_argmax_candidates(
        logits.dtype.name, layout == "pairs", splits, len(ranges), launch.block
    )
    pairs = out.view(np.uint32).reshape(-1, 2)
    args = (words, offset, row_stride, column_stride, chunk, ranges, pairs, pairs.view(np.float32))
    _ready(kernel, launch.grid, launch.block)(*args)


def pick_from_candidates(gathered: Any, num_rows: int, out: Any) -> None:
    """Write the id of the best of each row's candidates to ``out`` int64 [num_rows]; -1 where there is none."""
    if not num_rows:
        return
    launch = launches.pick(gathered, num_rows, out)
    pairs = gathered.view(np.uint32).reshape(-1, 2)
    kernel = numba_argmax.pick_from_candidates(bool(launch.defines["pairs"]), launch.defines["width"])
    _ready(kernel, num_rows, 32)(pairs, pairs.view(np.float32), *launch.args[1:])


def _ready(kernel: Any, grid: int, block: int) -> Any:
    """A kernel ready to be called with its arguments, on CuPy's current device and stream."""
    device = cupy.cuda.runtime.getDevice()
    if cuda.get_current_device().id != device:  # Numba keeps a current GPU of its own
        cuda.select_device(device)
    return _configured(device, kernel, grid, block, cupy.cuda.get_current_stream().ptr)


@functools.lru_cache(maxsize=1024)
def _configured(device: int, kernel: Any, grid: int, block: int, stream: int) -> Any:
    """What ``_ready`` gives. The default streams of all devices have one number, so the device is in the key too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)  # "grid size 8": one row is a normal call here
        return kernel[grid, block, cuda.external_stream(stream)]


def _memory(logits: Any) -> tuple[Any, np.int64]:
    """The memory that the array's strides can reach, as words [n], and where element [0, 0] is in it.

    Numba takes no bf16 and no negative strides; words and an offset need neither.
    """
    itemsize = logits.dtype.itemsize
    steps = [(count - 1) * stride // itemsize for count, stride in zip(logits.shape, logits.strides, strict=True)]
    low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    size = 0 if logits.size == 0 else high - low + 1
    words = cupy.ndarray((size,), f"u{itemsize}", logits.data + low * itemsize)
    return words, np.int64(-low)
