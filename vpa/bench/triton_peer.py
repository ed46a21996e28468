"""Peers in Triton: the scan by 8 programs per row and the pick by one, in three of the ways that an engine might take.

They are here to be measured against. The first two take a NaN as Triton does, which is not the rule of ``vpa.order``;
the third pays for that rule.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from vpa.bench.arms import Arm, in_torch
from vpa.vocab import VocabShard

SPLITS = 8
BLOCK = 1024


def by_block() -> Arm:
    """A program keeps one largest value and reduces each block to it. ``ImportError`` where torch has no GPU."""

    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        _launch(_scan_by_block, logits, shard, out)

    return in_torch("triton", _contribution, local, _finish)


def by_lane() -> Arm:
    """Each lane keeps a largest value of its own, and all are reduced once, at the end.

    Warps: on one H200, bf16 [1 .. 64, 32768] took 1.9 to 2.7 us with 8 and 2.2 to 2.7 with 4; [4096, 32768] 78 and 74.
    """
    return _by_lane("triton (by lane)", exact=False)


def exact() -> Arm:
    """As ``by_lane``, but over integer keys that order NaN and zeros as ``vpa.order`` does."""
    return _by_lane("triton (exact)", exact=True)


def _by_lane(name: str, exact: bool) -> Arm:
    def local(logits: Any, shard: VocabShard, out: Any) -> None:
        _launch(_scan_by_lane, logits, shard, out, EXACT=exact, num_warps=8 if len(logits) <= 64 else 4)

    return in_torch(name, _contribution, local, functools.partial(_finish, exact=exact))


def _contribution(rows: int) -> tuple[tuple[int, ...], np.dtype]:
    return (rows, 2 * SPLITS), np.dtype(np.float32)


def _launch(kernel: Any, logits: Any, shard: VocabShard, out: Any, **options: int) -> None:
    start, count, first_id = shard.ranges[0]
    valid = logits[:, start:] if start else logits
    chunk = triton.cdiv(count, SPLITS)
    kernel[len(logits), SPLITS](
        valid, out, *logits.stride(), count, chunk, first_id, SPLITS=SPLITS, BLOCK=BLOCK, **options
    )


def _finish(gathered: Any, rows: int, exact: bool = False) -> Any:
    tokens = torch.empty(rows, dtype=torch.int64, device=gathered.device)
    candidates = len(gathered) // rows * SPLITS
    width = triton.next_power_of_2(candidates)
    _pick[(rows,)](gathered, tokens, rows, EXACT=exact, CANDIDATES=candidates, WIDTH=width, SPLITS=SPLITS)
    return tokens


@triton.jit
def _scan_by_block(
    logits, out, row_stride, column_stride, count, chunk, first_id, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row, split) writes the split's largest value and its lowest global id, both as fp32."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    begin = split * chunk
    end = tl.minimum(begin + chunk, count)
    best = -float("inf")
    best_column = begin
    for block in range(begin, end, BLOCK):
        columns = block + tl.arange(0, BLOCK)
        at = logits + row * row_stride + columns.to(tl.int64) * column_stride
        values = tl.load(at, mask=columns < end, other=-float("inf")).to(tl.float32)
        value, index = tl.max(values, axis=0, return_indices=True)
        better = value > best
        best = tl.where(better, value, best)
        best_column = tl.where(better, block + index, best_column)
    at = out + (row * SPLITS + split) * 2
    tl.store(at, best)
    tl.store(at + 1, (first_id + best_column).to(tl.float32))


@triton.jit
def _key(values):
    """fp32 numbers as int32 that compare as ``vpa.order`` has it: NaN above all, one zero."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    signed = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, signed)


@triton.jit
def _scan_by_lane(
    logits, out, row_stride, column_stride, count, chunk, first_id, EXACT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """As ``_scan_by_block``. If EXACT, over keys, and a split without a column writes (-inf, +inf)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    begin = split * chunk
    end = tl.minimum(begin + chunk, count)
    lane = tl.arange(0, BLOCK)
    # The lowest value; the lowest key is below that of -inf.
    best = tl.full((BLOCK,), -0x7FFFFFFF, tl.int32) if EXACT else tl.full((BLOCK,), -float("inf"), tl.float32)
    best_column = begin + lane
    for block in range(begin, end, BLOCK):
        columns = block + lane
        at = logits + row * row_stride + columns.to(tl.int64) * column_stride
        values = tl.load(at, mask=columns < end, other=-float("inf")).to(tl.float32)
        if EXACT:
            values = tl.where(columns < end, _key(values), -0x7FFFFFFF)
        better = values > best
        best = tl.where(better, values, best)
        best_column = tl.where(better, columns, best_column)
    largest = tl.max(best, axis=0)
    column = tl.min(tl.where(best == largest, best_column, 2147483647), axis=0)
    value, id = largest, (first_id + column).to(tl.float32)
    if EXACT:
        none = largest == -0x7FFFFFFF
        bits = tl.where(largest < 0, -largest | -0x80000000, largest)
        value = tl.where(none, -float("inf"), bits.to(tl.float32, bitcast=True))
        id = tl.where(none, float("inf"), id)
    at = out + (row * SPLITS + split) * 2
    tl.store(at, value)
    tl.store(at + 1, id)


@triton.jit
def _pick(
    gathered, tokens, rows, EXACT: tl.constexpr, CANDIDATES: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    """Program ``row`` writes the lowest id among the row's candidates of the largest value; if EXACT, by keys."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    at = gathered + ((lane // SPLITS * rows + row) * SPLITS + lane % SPLITS) * 2
    values = tl.load(at, mask=lane < CANDIDATES, other=-float("inf"))
    if EXACT:
        values = _key(values)
    ids = tl.load(at + 1, mask=lane < CANDIDATES, other=float("inf"))
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(values == best, ids, float("inf")), axis=0)
    tl.store(tokens + row, token.to(tl.int64))
