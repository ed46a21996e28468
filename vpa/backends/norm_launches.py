"""What the norm's kernel is launched with, as pure functions of shapes and dtypes; see ``vpa.backends.launches``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.backends.launches import DTYPE_CODES, MAX_BLOCKS, Launch, Run
from vpa.plan import MAX_THREADS
from vpa.rmsnorm import GROUP_BYTES, ROUNDINGS

#: Threads of a block, where so many can hold a row: then two blocks share a multiprocessor, and one reads while the
#: other adds up. By the registers that compilers report; not measured.
THREADS = 512

#: Numbers of a row that a thread holds at most. With twice as many, and their loads in flight, registers are spilled.
MAX_NUMBERS = 16


@dataclass(frozen=True)
class NormShape:
    """How a row is laid out over a block's threads, in groups of 16 bytes. No bit of a result depends on it."""

    threads: int
    groups: int

    @classmethod
    def of(cls, hidden: int, itemsize: int) -> NormShape:
        """The fewest groups a thread, 1, 2 or 4, with which ``THREADS`` threads are enough, or ``MAX_THREADS``."""
        total, most = -(-hidden * itemsize // GROUP_BYTES), MAX_NUMBERS * itemsize // GROUP_BYTES
        for limit in (THREADS, MAX_THREADS):
            for groups in (1, 2, 4):
                threads = -(-total // (32 * groups)) * 32
                if threads <= limit and groups <= most:
                    return cls(threads, groups)
        raise ValueError(f"a row has {hidden} elements; a block holds at most {MAX_THREADS * MAX_NUMBERS} in registers")


def residual_rmsnorm(run: Run, partials: Any, *arguments: Any) -> None:
    """Write ``normed`` and ``new_residual``; arguments and rules are those of ``vpa.rmsnorm.residual_rmsnorm``."""
    if partials.shape[1]:
        run(norm(partials, *arguments))


def norm(
    partials: Any, residual: Any, weight: Any, eps: float, rounding: str, normed: Any, new_residual: Any
) -> Launch:
    """The launch over ``partials`` [ranks, rows >= 1, H], whose rows' elements lie side by side, as do the others'.

    normed, new_residual: [rows, H], C-contiguous. What is None is not read, or not written. In ``args`` five arrays
    stand where ``Prepared`` takes them in order: partials, residual, weight, normed, new_residual.
    """
    ranks, rows, hidden = partials.shape
    if rows > MAX_BLOCKS:
        raise ValueError(f"{rows} rows; a launch takes at most {MAX_BLOCKS}, one in each block: pass fewer at once")
    itemsize = partials.dtype.itemsize
    shape = NormShape.of(hidden, itemsize)
    there = [array for array in (partials, residual, weight, normed, new_residual) if array is not None]
    defines = {
        "dtype": DTYPE_CODES[partials.dtype],
        "ranks": ranks,
        "residual": int(residual is not None),
        "rounding": ROUNDINGS.index(rounding),  # VPA_ROUNDING of kernels/rmsnorm.cu
        "weight32": int(weight is not None and weight.dtype != partials.dtype),
        "threads": shape.threads,
        "groups": shape.groups,
        "wide": int(hidden * itemsize % GROUP_BYTES == 0 and all(map(_in_whole_groups, there))),
        "full": int(shape.threads * shape.groups * GROUP_BYTES == hidden * itemsize),
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
    return Launch("residual_rmsnorm", defines, rows, shape.threads, args)


def _in_whole_groups(array: Any) -> bool:
    """Whether every row starts at a 16-byte boundary."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    steps = (stride for count, stride in zip(array.shape[:-1], array.strides[:-1], strict=True) if count > 1)
    return address % GROUP_BYTES == 0 and not any(stride % GROUP_BYTES for stride in steps)
