"""What the norm's kernel is launched with, as pure functions of shapes and dtypes; see ``vpa.backends.launches``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.backends.launches import DTYPE_CODES, MAX_BLOCKS, Launch, Run
from vpa.plan import MAX_THREADS
from vpa.rmsnorm import GROUP_BYTES, ROUNDINGS

#: Numbers of a row that a thread holds at most. With twice as many, and their loads in flight, registers are spilled.
MAX_NUMBERS = 16

#: (rows, parts): up to so many rows, the blocks of a cluster share each. On an H200, 4 x [1, 7168] bf16, a cluster of 8
#: took 1.6 us, of 4 1.7, one block 2.1; at 16 rows 2.0, 1.9, 2.1; at 32 one block was the fastest.
IN_CLUSTERS = ((8, 8), (16, 4))

#: Groups of a part that are worth a block of their own: the share of a shorter row is less than what a cluster costs.
PART_GROUPS = 96


@dataclass(frozen=True)
class NormShape:
    """How a row is laid out over threads, in groups of 16 bytes. No bit of a result depends on it.

    threads: of a block. groups: of a thread. parts: blocks of a row.
    """

    threads: int
    groups: int
    parts: int = 1

    @classmethod
    def of(cls, hidden: int, itemsize: int, rows: int, clusters: bool) -> NormShape:
        """The most parts, then the fewest groups a thread (1, 2 or 4). clusters: whether the device has them.

        One group: on an H200 896 threads took 2.9 us for 64 rows of 7168 bf16, 448 with two 3.0; no more did for 4096.
        """
        total, most = -(-hidden * itemsize // GROUP_BYTES), MAX_NUMBERS * itemsize // GROUP_BYTES
        parts = next(
            (parts for limit, parts in IN_CLUSTERS if clusters and rows <= limit and total >= parts * PART_GROUPS), 1
        )
        for groups in (1, 2, 4):
            threads = -(-total // (32 * groups * parts)) * 32
            if threads <= MAX_THREADS and groups <= most:
                return cls(threads, groups, parts)
        raise ValueError(f"a row has {hidden} elements; a block holds at most {MAX_THREADS * MAX_NUMBERS} in registers")


def residual_rmsnorm(run: Run, clusters: Callable[[], bool], partials: Any, *arguments: Any) -> None:
    """Write ``normed`` and ``new_residual``; arguments and rules are those of ``vpa.rmsnorm.residual_rmsnorm``."""
    if partials.shape[1]:
        run(norm(partials, *arguments, clusters=clusters()))


def norm(
    partials: Any,
    residual: Any,
    weight: Any,
    eps: float,
    rounding: str,
    normed: Any,
    new_residual: Any,
    clusters: bool = False,
) -> Launch:
    """The launch over ``partials`` [ranks, rows >= 1, H], whose rows' elements lie side by side, as do the others'.

    normed, new_residual: [rows, H], C-contiguous. What is None is not read, or not written. clusters: whether the GPU
    has them. In ``args`` five arrays stand where ``Prepared`` takes them in order: partials, residual, weight,
    normed, new_residual.
    """
    ranks, rows, hidden = partials.shape
    if rows > MAX_BLOCKS:
        raise ValueError(f"{rows} rows; a launch takes at most {MAX_BLOCKS}, one in each block: pass fewer at once")
    itemsize = partials.dtype.itemsize
    shape = NormShape.of(hidden, itemsize, rows, clusters)
    there = [array for array in (partials, residual, weight, normed, new_residual) if array is not None]
    defines = {
        "dtype": DTYPE_CODES[partials.dtype],
        "ranks": ranks,
        "residual": int(residual is not None),
        "rounding": ROUNDINGS.index(rounding),  # VPA_ROUNDING of kernels/rmsnorm.cu
        "weight32": int(weight is not None and weight.dtype != partials.dtype),
        "threads": shape.threads,
        "groups": shape.groups,
        "parts": shape.parts,
        "cluster": int(shape.parts > 1 and normed is not None),
        "wide": int(hidden * itemsize % GROUP_BYTES == 0 and all(map(_in_whole_groups, there))),
        "full": int(shape.threads * shape.groups * shape.parts * GROUP_BYTES == hidden * itemsize),
        "norm": int(normed is not None),
        "keep": int(new_residual is not None),
    }
    rank_stride, row_stride = (np.int64(stride // itemsize) for stride in partials.strides[:2])
    residual_stride = np.int64(0 if residual is None else residual.strides[0] // itemsize)
    held, gain, first, second = (
        partials if array is None else array for array in (residual, weight, normed, new_residual)
    )
    numbers = np.uint32(hidden), np.float32(eps), np.float32(1 / hidden)
    args = (partials, rank_stride, row_stride, held, residual_stride, gain, first, second, *numbers)
    return Launch("residual_rmsnorm", defines, rows * shape.parts, shape.threads, args)


def _in_whole_groups(array: Any) -> bool:
    """Whether every row starts at a 16-byte boundary."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    steps = (stride for count, stride in zip(array.shape[:-1], array.strides[:-1], strict=True) if count > 1)
    return address % GROUP_BYTES == 0 and not any(stride % GROUP_BYTES for stride in steps)
