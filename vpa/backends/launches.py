"""What a kernel is launched with, as pure functions of shapes and dtypes: defines, grid, block and arguments.

The ``raw`` backend runs these launches on a GPU, ``simt`` on the CPU: their functions are the two below, with what runs
a launch bound to them. ``numba`` takes grid and block from here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.order import LOGITS_DTYPES
from vpa.vocab import VocabShard, split_chunk

#: VPA_DTYPE of ``kernels/order.cuh``.
DTYPE_CODES = {LOGITS_DTYPES["bfloat16"]: 0, LOGITS_DTYPES["float16"]: 1, LOGITS_DTYPES["float32"]: 2}

#: The largest grid.x of a launch. Rows lie on grid.x, since grid.y ends at 65535.
MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """One launch of ``kernels.source(kernel, **defines)``. Arrays in ``args`` stand for their element [0, ..., 0]."""

    kernel: str
    defines: dict[str, int]
    grid: int
    block: int
    args: tuple[Any, ...]


#: Runs a launch, on the current device and stream.
Run = Callable[[Launch], None]


@dataclass(frozen=True)
class ScanShape:
    """How a scan is laid out: threads of a block; for contiguous columns, 16-byte loads that a lane has in flight, and
    whether that is all it ever loads."""

    threads: int
    loads: int
    once: bool


def scan_shape(columns: int, dtype: np.dtype, contiguous: bool) -> ScanShape:
    """The shape for splits of ``columns`` columns: 256 threads, fewer where a split has no work for them."""
    work = -(-columns * dtype.itemsize // 16) if contiguous else columns
    threads = min(max(-(-work // 32) * 32, 32), 256)
    loads = 1 if work <= threads or not contiguous else 2
    return ScanShape(threads, loads, contiguous and work <= threads * loads)


def local_argmax_candidates(run: Run, logits: Any, shard: VocabShard, layout: str, splits: int, out: Any) -> None:
    """Write the best candidate of each split of each row of ``logits`` [rows, width] to ``out`` (``layout``)."""
    if len(logits):
        run(scan(logits, shard, layout, splits, out))


def pick_from_candidates(run: Run, gathered: Any, num_rows: int, out: Any) -> None:
    """Write the id of the best of each row's candidates to ``out`` int64 [num_rows]; -1 where there is none."""
    if num_rows:
        run(pick(gathered, num_rows, out))


def scan(logits: Any, shard: VocabShard, layout: str, splits: int, out: Any) -> Launch:
    """The launch of ``local_argmax_candidates`` over ``logits`` [rows >= 1, width]."""
    rows = logits.shape[0]
    _check_grid(rows * splits, f"{rows} rows of {splits} splits")
    itemsize = logits.dtype.itemsize
    row_stride, column_stride = (stride // itemsize for stride in logits.strides)
    chunk = split_chunk(shard.num_valid, splits)
    shape = scan_shape(min(chunk, shard.num_valid), logits.dtype, column_stride == 1)
    defines = {
        "dtype": DTYPE_CODES[logits.dtype],
        "pairs": int(layout == "pairs"),
        "splits": splits,
        "ranges": max(len(shard.ranges), 1),
        "contiguous": int(column_stride == 1),
        "threads": shape.threads,
        "loads": shape.loads,
        "once": int(shape.once),
    }
    args = (logits, np.int64(row_stride), np.int64(column_stride), np.int64(chunk), _ranges(shard), out)
    return Launch("local_argmax_candidates", defines, rows * splits, shape.threads, args)


def pick(gathered: Any, num_rows: int, out: Any) -> Launch:
    """The launch of ``pick_from_candidates`` over ``gathered`` [ranks * num_rows, ...], num_rows >= 1."""
    pairs = gathered.dtype != np.uint64
    threads = 128
    blocks = -(-num_rows // (threads // 32))
    _check_grid(blocks, f"{num_rows} rows")
    width = gathered.shape[1] // 2 if pairs else gathered.shape[1]
    defines = {"pairs": int(pairs), "width": width, "threads": threads}
    args = (gathered, np.int64(num_rows), np.int64(gathered.shape[0] // num_rows), out)
    return Launch("pick_from_candidates", defines, blocks, threads, args)


@functools.lru_cache(maxsize=256)
def _ranges(shard: VocabShard) -> np.ndarray:
    """``struct Ranges`` of ``kernels/local_argmax.cu``; an array of one element is passed by value."""
    ranges = shard.ranges or ((0, 0, 0),)
    fields = [(name, np.int64, (len(ranges),)) for name in ("start", "count", "first_id")]
    return np.array([tuple(zip(*ranges, strict=True))], dtype=fields)


def _check_grid(blocks: int, what: str) -> None:
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"{what} take {blocks} thread blocks; a launch has at most {MAX_BLOCKS}: pass fewer rows at once"
        )
