"""What a kernel is launched with, as pure functions of shapes and dtypes: defines, grid, block and arguments.

The ``raw`` backend runs these launches on a GPU, ``simt`` on the CPU: their functions are the two below, with what runs
a launch bound to them. ``numba`` takes defines, grid and block from here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa import plan
from vpa.order import LOGITS_DTYPES
from vpa.transform import Transform
from vpa.vocab import VocabShard, split_chunk

#: VPA_DTYPE of ``kernels/order.cuh``.
DTYPE_CODES = {LOGITS_DTYPES["bfloat16"]: 0, LOGITS_DTYPES["float16"]: 1, LOGITS_DTYPES["float32"]: 2}

#: Rows from which on a column-major array is read by columns: 32 bytes of fp32, half of that of 16-bit logits, at once.
SIDE_BY_SIDE = 8

#: 16-byte loads that a thread has in flight where logits are transformed: arithmetic takes the time there. Unrolled
#: over more, its code takes ten seconds to compile, and on AMD's targets more registers than there are.
TRANSFORMED_LOADS = 1

#: Columns that a thread of a scan by columns has in flight. On one H200, bf16 [16 .. 4096, 32768], 2 and 8 were nowhere
#: more than 3 % faster, and at 256 rows 40 % and 9 % slower.
COLUMN_LOADS = 4

#: Blocks of a cluster that every GPU with clusters takes.
MAX_CLUSTER = 8

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
    """How a scan is laid out: threads of a block; for contiguous columns, 16-byte loads that a thread has in flight,
    and whether that is all it ever loads."""

    threads: int
    loads: int
    once: bool


def scan_shape(
    columns: int, dtype: np.dtype, contiguous: bool, most_threads: int = plan.THREADS, most_loads: int = plan.LOADS
) -> ScanShape:
    """The shape for splits of ``columns`` columns: 256 threads, fewer where a split has no work for them, more where
    that many are allowed and a split does not fit into the registers of fewer.

    A split that fits into registers, up to 4 loads a thread, stays there, where the search then finds the column. A
    larger one is walked two loads at a time: on one H200 within 2 % of the best for bf16 [64 .. 1024, 128256].
    """
    work = -(-columns * dtype.itemsize // 16) if contiguous else columns
    threads = min(max(-(-work // 32) * 32, 32), plan.THREADS)
    if not contiguous:
        return ScanShape(threads, 1, False)
    while threads < most_threads and work > threads * most_loads:
        threads *= 2
    for loads in (1, 2, plan.LOADS):
        if loads <= most_loads and work <= threads * loads:
            return ScanShape(threads, loads, True)
    return ScanShape(threads, min(most_loads, 2), False)


def local_argmax_candidates(
    run: Run,
    logits: Any,
    shard: VocabShard,
    layout: str,
    splits: int,
    out: Any,
    transform: Transform | None = None,
) -> None:
    """Write the best candidate of each split of each row of ``logits`` [rows, width] to ``out`` (``layout``)."""
    if len(logits):
        run(scan(logits, shard, layout, splits, out, transform))


def pick_from_candidates(run: Run, gathered: Any, num_rows: int, out: Any) -> None:
    """Write the id of the best of each row's candidates to ``out`` int64 [num_rows]; -1 where there is none."""
    if num_rows:
        run(pick(gathered, num_rows, out))


def scan(
    logits: Any, shard: VocabShard, layout: str, splits: int, out: Any, transform: Transform | None = None
) -> Launch:
    """The launch of a scan over ``logits`` [rows >= 1, width]: by columns where rows lie side by side, else by rows."""
    row_stride, column_stride = map(abs, logits.strides)
    if 0 < row_stride < column_stride and len(logits) >= SIDE_BY_SIDE:
        return scan_by_columns(logits, shard, layout, splits, out, transform)
    return scan_by_rows(logits, shard, layout, splits, out, transform)


def tokens(logits: Any, shard: VocabShard, out: Any, transform: Transform | None = None) -> Launch:
    """The launch that does it all for a vocabulary on one rank, [rows >= 1, width]: a block takes a whole row, and
    writes its id to ``out`` int64 [rows]."""
    return scan_by_rows(logits, shard, "ids", 1, out, transform, most_threads=plan.MAX_THREADS)


def scan_by_rows(
    logits: Any,
    shard: VocabShard,
    layout: str,
    splits: int,
    out: Any,
    transform: Transform | None = None,
    *,
    most_threads: int = plan.THREADS,
    cluster: bool = False,
) -> Launch:
    """The launch of a scan whose neighbouring threads read neighbouring columns.

    cluster: the blocks of a row, at most ``MAX_CLUSTER``, agree on one candidate; compute capability 9.0.
    """
    chunk = split_chunk(shard.num_valid, splits)
    contiguous = logits.strides[1] == logits.dtype.itemsize
    most_loads = plan.LOADS if transform is None else TRANSFORMED_LOADS
    shape = scan_shape(min(chunk, shard.num_valid), logits.dtype, contiguous, most_threads, most_loads)
    defines = _scan_defines(logits, shard, layout, splits, transform)
    defines.update(contiguous=int(contiguous), threads=shape.threads, loads=shape.loads, once=int(shape.once))
    defines["cluster"] = int(cluster)
    blocks = checked_grid(len(logits) * splits, f"{len(logits)} rows of {splits} splits")
    args = (logits, *_strides(logits), np.int64(chunk), ranges_of(shard), out)
    return Launch("local_argmax_candidates", defines, blocks, shape.threads, args)


def scan_by_columns(
    logits: Any, shard: VocabShard, layout: str, splits: int, out: Any, transform: Transform | None = None
) -> Launch:
    """The launch of a scan whose neighbouring threads read neighbouring rows."""
    rows, chunk, itemsize = len(logits), split_chunk(shard.num_valid, splits), logits.dtype.itemsize
    # As for TRANSFORMED_LOADS: 16 bytes of rows a thread do not fit its registers.
    wide = transform is None and _in_whole_loads(logits)
    lanes, most_threads = _columns_shape(rows) if wide else (SIDE_BY_SIDE, 512)
    groups = -(-max(min(chunk, shard.num_valid), 1) // COLUMN_LOADS)
    threads = min(-(-groups * lanes // 32) * 32, most_threads)
    defines = _scan_defines(logits, shard, layout, splits, transform)
    narrow = int(wide and itemsize == 2 and groups <= 2**16)
    defines.update(threads=threads, wide=int(wide), lanes=lanes, loads=COLUMN_LOADS, narrow=narrow)
    tile = lanes * (16 // itemsize if wide else 1)
    blocks = checked_grid(-(-rows // tile) * splits, f"{rows} rows of {splits} splits")
    args = (logits, np.int64(rows), *_strides(logits), np.int64(chunk), ranges_of(shard), out)
    return Launch("local_argmax_columns", defines, blocks, threads, args)


def _columns_shape(rows: int) -> tuple[int, int]:
    """Threads side by side, 16 bytes of rows each, and the most threads of a block: as many rows in one access as leave
    enough blocks for the GPU. Best of 1, 2, 4, 8 lanes and 256, 512, 1024 threads on one H200, bf16 [rows, 32768]: 4.5
    us at 64 rows, 7.0 at 256 (9.4 with one lane), 21 at 1024, 68 at 4096 (83 with four)."""
    if rows >= 4096:
        return 8, 512
    return (4 if rows >= 1024 else 2 if rows >= 256 else 1), plan.MAX_THREADS


def _in_whole_loads(logits: Any) -> bool:
    """Whether the rows of every column lie in whole 16-byte loads, aligned to them."""
    itemsize = logits.dtype.itemsize
    address = logits.ctypes.data if isinstance(logits, np.ndarray) else logits.data.ptr
    side_by_side = logits.strides[0] == itemsize and logits.shape[0] * itemsize % 16 == 0
    return side_by_side and address % 16 == 0 and logits.strides[1] % 16 == 0


def _scan_defines(
    logits: Any, shard: VocabShard, layout: str, splits: int, transform: Transform | None
) -> dict[str, int]:
    """What a scan of any walk is compiled with."""
    return {
        **transform_defines(transform),
        "dtype": DTYPE_CODES[logits.dtype],
        "write": ("packed", "pairs", "ids").index(layout),  # VPA_WRITE of split.cuh
        "splits": splits,
        "ranges": max(len(shard.ranges), 1),
    }


def transform_defines(transform: Transform | None) -> dict[str, int]:
    """A transform as a part of what a kernel is compiled with: a model has one for all its calls."""
    if transform is None:
        return {}
    scale, soft_cap = (int(np.float32(number or 0).view(np.uint32)) for number in (transform.scale, transform.soft_cap))
    return {"transform": 1, "scale": scale, "soft_cap": soft_cap}


def _strides(logits: Any) -> tuple[np.int64, ...]:
    """Row and column stride in words."""
    return tuple(np.int64(stride // logits.dtype.itemsize) for stride in logits.strides)


def pick(gathered: Any, num_rows: int, out: Any) -> Launch:
    """The launch of ``pick_from_candidates`` over ``gathered`` [ranks * num_rows, ...], num_rows >= 1. An ``out`` that
    is uint64 takes each row's best candidate, packed, in place of its id."""
    pairs = gathered.dtype != np.uint64
    threads = min(32 * num_rows, 128)
    blocks = checked_grid(-(-num_rows // (threads // 32)), f"{num_rows} rows")
    width = gathered.shape[1] // 2 if pairs else gathered.shape[1]
    defines = {"pairs": int(pairs), "width": width, "ranks": len(gathered) // num_rows, "threads": threads}
    defines["keep"] = int(out is not None and out.dtype == np.uint64)
    return Launch("pick_from_candidates", defines, blocks, threads, (gathered, np.int64(num_rows), out))


@functools.lru_cache(maxsize=256)
def ranges_of(shard: VocabShard) -> np.ndarray:
    """``struct Ranges`` of ``kernels/local_argmax.cu``; an array of one element is passed by value."""
    ranges = shard.ranges or ((0, 0, 0),)
    fields = [(name, np.int64, (len(ranges),)) for name in ("start", "count", "first_id")]
    return np.array([tuple(zip(*ranges, strict=True))], dtype=fields)


def checked_grid(blocks: int, what: str) -> int:
    """``blocks``, unless they are more than a launch has: then a ``ValueError`` that says ``what`` takes them."""
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"{what} take {blocks} thread blocks; a launch has at most {MAX_BLOCKS}: pass fewer rows at once"
        )
    return blocks
