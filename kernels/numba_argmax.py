"""Numba CUDA twins of ``local_argmax.cu`` and ``pick.cu``: same entry names, same steps, same candidates and ids.

What the CUDA source has as ``#define``s is here an argument of the function that makes a kernel. Memory is passed as
addresses, int64: Numba takes tens of microseconds to look at an array argument, and knows no bf16.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import cuda

from vpa.kernels import numba_device as device
from vpa.kernels import numba_order as order
from vpa.kernels import numba_scan as scan
from vpa.kernels.numba_order import i64, u32, u64


@functools.cache
def best_of_columns(
    dtype: str, ranges: int, contiguous: bool, threads: int, loads: int, once: bool, nan_ignored: bool, by_id: bool
):
    """A device function that gives a row's best candidate, in the lanes of warp 0, among the columns with numbers
    ``first .. first + chunk - 1``; all threads of the block call it.

    A column's number is its id if ``by_id``, else valid columns are numbered through all ranges. Its arguments: address
    of the row's column 0, column stride in words, first, chunk, and the ranges, ``ranges`` tuples (start, count,
    first_id).
    """
    of = order.of_dtype(dtype, nan_ignored)
    word_bytes, candidate_key = of.word_bytes, of.candidate_key
    walk, column_in = (
        scan.contiguous(dtype, threads, loads, once, nan_ignored)
        if contiguous
        else scan.strided(dtype, threads, nan_ignored)
    )
    warps = threads // 32

    @device.function
    def best_of_columns(row, column_stride, first, chunk, shard_ranges):
        warp_key = cuda.shared.array(warps, np.uint32)
        warp_id = cuda.shared.array(warps, np.uint32)
        thread = u32(cuda.threadIdx.x)
        warp, lane = u32(thread >> u32(5)), u32(thread & u32(31))
        best = order.NO_CANDIDATE
        before = i64(0)  # the number of the range's first column
        for r in range(ranges):
            start, in_range, first_id = shard_ranges[r]
            if by_id:
                before = first_id
            skip = max(first - before, i64(0))
            count = min(first + chunk - before, in_range) - skip
            before += in_range
            if count <= 0:
                continue
            run = row + (start + skip) * column_stride * word_bytes
            spot = walk(run, column_stride, u32(count), thread)
            mine = spot[0]
            of_warp = device.warp_max(mine)
            if lane == 0:
                warp_key[warp] = of_warp
            cuda.syncthreads()
            key = device.warp_max(warp_key[lane] if lane < warps else u32(0))
            id_complement = u32(0)
            if of_warp == key:
                if mine == key:
                    column = column_in(run, u32(count), thread, key, spot)
                    id_complement = u32(i64(0xFFFFFFFF) - (first_id + skip + i64(column)))
                id_complement = device.warp_max(id_complement)
            if lane == 0:
                warp_id[warp] = id_complement
            cuda.syncthreads()
            if warp == 0:
                id_complement = device.warp_max(warp_id[lane] if lane < warps else u32(0))
                best = max(best, order.pack(candidate_key(key), id_complement))
        return best

    return best_of_columns


@functools.cache
def local_argmax_candidates(
    dtype: str,
    pairs: bool,
    splits: int,
    ranges: int,
    contiguous: bool,
    threads: int,
    loads: int,
    once: bool,
    nan_ignored: bool = False,
):
    """The scan for logits of ``dtype``: a kernel for ``rows * splits`` blocks of ``threads`` (a multiple of 32).

    Its arguments: address of row 0 column 0, row and column stride in words, valid columns of a split, the shard's
    ranges as a tuple of ``ranges`` tuples (start, count, first_id), and the address of the candidates.
    """
    word_bytes = order.of_dtype(dtype).word_bytes
    best_of = best_of_columns(dtype, ranges, contiguous, threads, loads, once, nan_ignored, False)
    # Blocks that all fit at once hide memory's latency: of 65536 registers, 32 for each of 2048 threads. A loop, or
    # longer groups of loads, need more than that.
    registers = 32 if ranges == 1 and once and loads <= 4 else 64

    @device.kernel(max_registers=registers)
    def local_argmax_candidates(logits, row_stride, column_stride, chunk, shard_ranges, out):
        block = u32(cuda.blockIdx.x)
        row, split = i64(block // u32(splits)), i64(block % u32(splits))
        address = logits + row * row_stride * word_bytes
        best = best_of(address, column_stride, split * chunk, chunk, shard_ranges)
        if cuda.threadIdx.x == 0:
            to = out + (i64(block) << 3)
            if pairs:
                value, number = order.pair_of_packed(best)
                device.store_u32(to, value)
                device.store_u32(to + 4, number)
            else:
                device.store_u64(to, best)

    return local_argmax_candidates


@functools.cache
def warp_pick(pairs: bool):
    """A device function that gives the best, in every lane, of the candidates that all ranks gave for one row.

    Its arguments: the address of the gathered candidates, the number of the row's first one, how many a rank gave, how
    far the next rank's lie from there, and the number of ranks.
    """

    @device.function
    def warp_pick(gathered, first, width, apart, ranks):
        best = order.NO_CANDIDATE
        for i in range(i64(cuda.threadIdx.x) % 32, ranks * width, 32):
            address = gathered + (first + i // width * apart + i % width) * 8
            if pairs:
                candidate = order.packed_of_pair(device.load_u32(address), device.load_u32(address + 4))
            else:
                candidate = device.load_u64(address)
            best = max(best, candidate)
        return order.warp_best_of(best)

    return warp_pick


@functools.cache
def pick_from_candidates(pairs: bool, width: int, threads: int):
    """The pick: a kernel for one warp a row in blocks of ``threads``, ``width`` candidates from each rank.

    Its arguments: the address of the gathered candidates, the number of rows and of ranks, and that of the ids.
    """
    warps, pick = threads // 32, warp_pick(pairs)

    @cuda.jit
    def pick_from_candidates(gathered, num_rows, ranks, ids):
        row = i64(cuda.blockIdx.x) * warps + i64(cuda.threadIdx.x) // 32
        if row >= num_rows:
            return  # a whole warp at a time
        best = pick(gathered, row * width, width, num_rows * width, ranks)
        if i64(cuda.threadIdx.x) % 32 == 0:
            device.store_u64(ids + row * 8, u64(order.id_of_packed(best)))

    return pick_from_candidates
