"""Launches of the head's product and what surrounds it, as pure functions: see ``vpa.backends.launches``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vpa.arrays import namespace
from vpa.backends.launches import DTYPE_CODES, Launch, checked_grid, ranges_of, transform_defines
from vpa.transform import Transform
from vpa.vocab import VocabShard

#: Threads of a block of the head's kernel.
HEAD_THREADS = 256

#: Rows of hidden states that a warp multiplies at once without tensor cores: more do not fit AMD's scalar registers.
PORTABLE_BATCH = 4

#: Threads of a block where each thread has one logit.
ELEMENTWISE_THREADS = 256


@dataclass(frozen=True)
class HeadShape:
    """How the fused product is laid out: rows of hidden states that a block takes; 16-byte loads of the weight that a
    thread has in flight; warps that share rows of the weight; blocks, each of which gives a row one candidate."""

    batch: int
    loads: int
    sharers: int
    blocks: int


def head_shape(rows: int, size: int, valid: int, tensor: bool, multiprocessors: int) -> HeadShape:
    """The shape for hidden states [rows, size] and ``valid`` rows of the weight.

    Best on one H200, bf16, of 4 to 14 loads, 1 to 16 sharers, 1 to 6 blocks a multiprocessor. Hidden size 7168 and
    32320 rows of the weight: 110 us up to 8 rows, 113 for 16 (8 loads and half the blocks); with 8 sharers and 14 loads
    108 up to 4 rows. 2048 and 32768: 34 us; there sharers cost more than they save.
    """
    warps = HEAD_THREADS // 32
    if not tensor:
        return HeadShape(PORTABLE_BATCH, 1, 1, max(min(-(-valid // warps), 4 * multiprocessors), 1))
    batch, loads, sharers, resident = (8, 4, 1, 4) if rows <= 8 else (16, 8, 1, 2)
    if rows <= 4 and size >= 7168 and size % (14 * 32 * warps) == 0:  # no warp has columns left over
        loads, sharers = 14, warps
    tiles = -(-valid // 8)
    return HeadShape(batch, loads, sharers, max(min(-(-tiles * sharers // warps), resident * multiprocessors), 1))


def head(
    hidden: Any,
    weight: Any,
    shard: VocabShard,
    bias: Any,
    out: Any,
    transform: Transform | None,
    shape: HeadShape,
    tensor: bool,
) -> Launch:
    """The launch of the fused product and scan. hidden: [rows >= 1, size], C-contiguous; weight: [shard.width, size],
    neighbouring columns side by side, of the same dtype; bias: fp32 [width], C-contiguous, or None.

    out: packed candidates uint64 [rows, shape.blocks]. tensor: by tensor cores, see ``on_tensor``.
    """
    rows, size = hidden.shape
    defines = {
        **transform_defines(transform),
        "dtype": DTYPE_CODES[hidden.dtype],
        "product": 1,
        "ranges": max(len(shard.ranges), 1),
        "splits": 1,
        "write": 0,
        "threads": HEAD_THREADS,
        "batch": shape.batch,
        "bias": int(bias is not None),
        "tensor": int(tensor),
    }
    if tensor:
        # Beside a transform, 16 rows and 8 loads do not fit the registers.
        loads = min(shape.loads, 4) if transform is not None and shape.batch > 8 else shape.loads
        defines.update(loads=loads, sharers=shape.sharers)
    grid = checked_grid(-(-rows // shape.batch) * shape.blocks, f"{rows} rows")
    stride = np.int64(weight.strides[0] // weight.itemsize)
    added = namespace(hidden).empty(1, np.float32) if bias is None else bias  # not read where there is none
    args = (
        hidden, np.int64(rows), np.int64(size), weight, stride, added, ranges_of(shard), np.int64(shard.num_valid),
        np.uint32(shape.blocks), out,
    )  # fmt: skip
    return Launch("head_candidates", defines, grid, HEAD_THREADS, args)


def on_tensor(hidden: Any, weight: Any) -> bool:
    """Whether arrays are of a kind that tensor cores take: 16 bits, rows of whole 16-byte loads, aligned to them."""
    return (
        hidden.itemsize == 2
        and hidden.shape[1] % 8 == 0
        and weight.strides[0] % 16 == 0
        and all(array.data.ptr % 16 == 0 for array in (hidden, weight))
    )


def transform_logits(logits: Any, out: Any, transform: Transform) -> Launch:
    """The launch that writes the transformed ``logits``, C-contiguous, at least one, to ``out`` of the same kind."""
    blocks = checked_grid(-(-logits.size // ELEMENTWISE_THREADS), f"{logits.size} logits")
    defines = {
        **transform_defines(transform), "dtype": DTYPE_CODES[logits.dtype], "threads": ELEMENTWISE_THREADS,
    }  # fmt: skip
    return Launch("transform_logits", defines, blocks, ELEMENTWISE_THREADS, (logits, np.int64(logits.size), out))
