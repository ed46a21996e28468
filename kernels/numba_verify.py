"""Numba CUDA twins of ``local_argmax.cu`` with VPA_BLOCKS and of ``verify.cu``: same steps, same results."""

from __future__ import annotations

import functools

import numpy as np
from numba import cuda

from vpa.kernels import numba_argmax
from vpa.kernels import numba_device as device
from vpa.kernels import numba_order as order
from vpa.kernels.numba_order import i64, u32, u64

NO_TOKEN = i64(-1)
_LOW, _HALF = u64(0xFFFFFFFF), u64(32)
_STEP = u32(0x2FFFFFFF)  # the bits of the fp32 number just below 2^-31


@functools.cache
def _rows_of(most: int):
    """A device function: where a request's rows begin, and how many it owns, at most ``most``."""

    @device.function
    def rows_of(cu_num_rows, request, num_rows):
        begin = max(device.load_i32(cu_num_rows + request * 4), i64(0))
        end = min(device.load_i32(cu_num_rows + request * 4 + 4), num_rows)
        return begin, min(max(end - begin, i64(0)), i64(most))

    return rows_of


@device.function
def philox(key, position):
    """The first word, as uint64, of Philox4x32-10, of two uint64."""
    a, b, c, d = u64(position & _LOW), u64(position >> _HALF), u64(0), u64(0)
    key_low, key_high = u64(key & _LOW), u64(key >> _HALF)
    for _ in range(10):
        first, second = u64(a * u64(0xD2511F53)), u64(c * u64(0xCD9E8D57))
        a, b = u64(u64(second >> _HALF) ^ b ^ key_low), u64(second & _LOW)
        c, d = u64(u64(first >> _HALF) ^ d ^ key_high), u64(first & _LOW)
        key_low, key_high = u64(u64(key_low + u64(0x9E3779B9)) & _LOW), u64(u64(key_high + u64(0xBB67AE85)) & _LOW)
    return a


@device.function
def is_drawn(seed, position, rate):
    """Whether the draw of a seed and a position is below ``rate``, given by its fp32 bits.

    Both are compared by keys: Numba has no fp32 number made of bits.
    """
    word = u32(philox(seed, position))
    magnitude = u32(~word) if word & order.FLOAT_SIGN else word
    drawn = max(device.product_bits(magnitude, _STEP), _STEP)
    key = order.key_of_bits(rate, order.FLOAT_SIGN, order.FLOAT_INFINITY, u32(0))
    return order.key_of_bits(drawn, order.FLOAT_SIGN, order.FLOAT_INFINITY, u32(0)) < key


@functools.cache
def local_argmax_blocks(
    dtype: str,
    ranges: int,
    contiguous: bool,
    threads: int,
    loads: int,
    once: bool,
    nan_ignored: bool,
    drafts: int,
    width: int,
    bonus_width: int,
    draft_block: int,
    bonus_block: int,
):
    """Statistics of blocks of ids: a kernel for ``requests * (drafts * width + bonus_width)`` blocks of ``threads``.

    Its arguments: as those of the scan, without what a split is, then the addresses of the statistics and of
    ``cu_num_rows``, the number of rows, and the first ids of the rank's first blocks.
    """
    word_bytes = order.of_dtype(dtype).word_bytes
    best_of = numba_argmax.best_of_columns(dtype, ranges, contiguous, threads, loads, once, nan_ignored, True)
    line, rows_of = drafts * width + bonus_width, _rows_of(drafts + 1)

    @device.kernel(max_registers=64)
    def local_argmax_blocks(
        logits, row_stride, column_stride, shard_ranges, out, cu_num_rows, num_rows, draft_from, bonus_from
    ):
        block = i64(cuda.blockIdx.x)
        request, place = block // line, block % line
        begin, count = rows_of(cu_num_rows, request, num_rows)
        if place < drafts * width:
            i = place // width
            has_row = i + 1 < count
            first, size = draft_from + place % width * draft_block, i64(draft_block)
        else:
            i = count - 1
            has_row = count > 0
            first, size = bonus_from + (place - drafts * width) * bonus_block, i64(bonus_block)
        best = order.NO_CANDIDATE
        if has_row:  # all threads alike
            address = logits + (begin + i) * row_stride * word_bytes
            best = best_of(address, column_stride, first, size, shard_ranges)
        if cuda.threadIdx.x == 0:
            device.store_u64(out + (block << 3), best)

    return local_argmax_blocks


@functools.cache
def greedy_verify(blocks: bool, drafts: int, width: int, bonus_width: int, synthetic: bool, threads: int):
    """The finish: a kernel for a block of ``threads`` per request.

    Its arguments: the address of the gathered candidates, how many lines a rank gave and how many ranks there are, the
    number of rows and of ids; then the addresses of draft_ids, cu_num_rows, positions, seq_lens, prefill_lens, seeds,
    acceptance (0 unless ``synthetic``), tokens, num_sampled and num_rejected.
    """
    most, warps = drafts + 1, threads // 32
    line = drafts * width + bonus_width if blocks else width
    rows_of, pick = _rows_of(most), numba_argmax.warp_pick(False)

    @cuda.jit
    def greedy_verify(
        gathered,
        lines,
        ranks,
        num_rows,
        vocab_size,
        draft_ids,
        cu_num_rows,
        positions,
        seq_lens,
        prefill_lens,
        seeds,
        acceptance,
        tokens,
        num_sampled,
        num_rejected,
    ):
        argmax = cuda.shared.array(most, np.int64)
        request = i64(cuda.blockIdx.x)
        warp, lane = i64(cuda.threadIdx.x) // 32, i64(cuda.threadIdx.x) % 32
        begin, count = rows_of(cu_num_rows, request, num_rows)
        prefill_len = device.load_i32(prefill_lens + request * 4)
        if device.load_i32(seq_lens + request * 4) < prefill_len:
            count = i64(0)
        for i in range(warp, count, warps):
            is_bonus = i + 1 == count
            first = request * line + i * width if blocks else (begin + i) * line
            if blocks and is_bonus:
                first = request * line + drafts * width
            candidates = i64(bonus_width) if is_bonus else i64(width)
            best = pick(gathered, first, candidates, lines * line, ranks)
            if lane == 0:
                argmax[i] = order.id_of_packed(best)
        cuda.syncthreads()
        if warp > 0:
            return

        refused = u32(0)  # the complement of the first draft that this lane refuses
        for i in range(lane, count - 1, 32):
            row = begin + i
            draft = i64(device.load_u64(draft_ids + (row + 1) * 8))
            is_prompt = i64(device.load_u64(positions + (row + 1) * 8)) - (i + 1) < prefill_len
            if synthetic:
                seed, position = device.load_u64(seeds + request * 8), device.load_u64(positions + row * 8)
                agreed = is_drawn(seed, position, device.load_u32(acceptance + i * 4))
            else:
                agreed = draft == argmax[i]
            if draft < 0 or draft >= vocab_size or is_prompt or not agreed:
                refused = u32(~u32(i))
                break
        refused = device.warp_max(refused)
        accepted = max(count - 1, i64(0)) if refused == 0 else i64(u32(~refused))
        sampled = accepted + 1 if count > 0 else i64(0)
        for i in range(lane, i64(most), 32):
            token = NO_TOKEN
            if i < accepted:
                token = i64(device.load_u64(draft_ids + (begin + i + 1) * 8))
            elif i < sampled:
                token = argmax[i]
            device.store_u64(tokens + (request * most + i) * 8, u64(token))
        if lane == 0:
            device.store_u32(num_sampled + request * 4, u32(sampled))
            device.store_u32(num_rejected + request * 4, u32(count - sampled))

    return greedy_verify
