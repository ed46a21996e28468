"""Numba CUDA twins of ``local_argmax.cu`` and ``pick.cu``: same entry names, same candidates and ids.

What the CUDA source has as ``#define``s is here an argument of the function that makes a kernel. Blocks reduce through
shared memory alone, so that Numba's simulator, which has no shuffles, runs the very code that a GPU runs.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import cuda

from vpa.kernels import numba_order as order
from vpa.kernels.numba_order import i64, u32

#: Per logits dtype: the sign bit, the bits of infinity, and the widening to fp32.
_WORDS = {
    "bfloat16": (0x8000, 0x7F80, order.widen_bfloat16),
    "float16": (0x8000, 0x7C00, order.widen_float16),
    "float32": (0x80000000, 0x7F800000, order.widen_float32),
}


@functools.cache
def local_argmax_candidates(dtype: str, pairs: bool, splits: int, ranges: int, threads: int):
    """The scan for logits of ``dtype``: a kernel for ``rows * splits`` blocks of ``threads`` (a multiple of 32).

    Its arguments: words (uint16 or uint32 [n], the memory that the strides can reach), offset of row 0 column 0 in it,
    row and column stride in words, valid columns of a split, the shard's ranges as a tuple of ``ranges`` tuples
    (start, count, first_id), and the candidates as [rows * splits, 2] uint32 and as the same memory in fp32.
    """
    sign, infinity, widen = u32(_WORDS[dtype][0]), u32(_WORDS[dtype][1]), _WORDS[dtype][2]
    block_max = _block_max(threads)

    @cuda.jit
    def local_argmax_candidates(words, offset, row_stride, column_stride, chunk, shard_ranges, out, out_float):
        row = i64(cuda.blockIdx.x) // splits
        split = i64(cuda.blockIdx.x) % splits
        thread = i64(cuda.threadIdx.x)
        first = split * chunk
        best_key, best_id = u32(0), u32(0)
        before = i64(0)
        for r in range(ranges):
            skip = max(first - before, i64(0))
            count = min(first + chunk - before, shard_ranges[r][1]) - skip
            before += shard_ranges[r][1]
            if count <= 0:
                continue
            start = offset + row * row_stride + (shard_ranges[r][0] + skip) * column_stride
            mine, where = u32(0), i64(0)
            for column in range(thread, count, threads):
                key = order.key_of_bits(u32(words[start + column * column_stride]), sign, infinity)
                if key > mine:
                    mine, where = key, column
            key = block_max(mine)
            id_complement = u32(0)
            if mine == key:
                id_complement = u32(0xFFFFFFFF - (shard_ranges[r][2] + skip + where))
            id_complement = block_max(id_complement)
            key = order.key_of_bits(widen(order.bits_of_key(key, sign)), order.FLOAT_SIGN, order.FLOAT_INFINITY)
            if order.precedes(key, id_complement, best_key, best_id):
                best_key, best_id = key, id_complement
        if thread == 0:
            block = i64(cuda.blockIdx.x)
            if not pairs:
                out[block, 0] = best_id  # little-endian uint64: the low word first
                out[block, 1] = best_key
            elif best_key == 0:
                out[block, 0] = order.FLOAT_SIGN | order.FLOAT_INFINITY
                out[block, 1] = order.FLOAT_INFINITY
            else:
                if best_key == order.ALL_ONES:
                    out[block, 0] = order.FLOAT_NAN
                else:
                    out[block, 0] = order.bits_of_key(best_key, order.FLOAT_SIGN)
                out_float[block, 1] = np.float32(0xFFFFFFFF - i64(best_id))

    return local_argmax_candidates


@functools.cache
def pick_from_candidates(pairs: bool, width: int):
    """The pick: a kernel for one block of 32 threads a row, ``width`` candidates from each rank.

    Its arguments: the gathered candidates as [ranks * num_rows * width, 2] uint32 and as the same memory in fp32, the
    number of rows and of ranks, and the ids, int64 [num_rows].
    """
    block_max = _block_max(32)

    @cuda.jit
    def pick_from_candidates(gathered, gathered_float, num_rows, ranks, ids):
        row = i64(cuda.blockIdx.x)
        best_key, best_id = u32(0), u32(0)
        for i in range(i64(cuda.threadIdx.x), ranks * width, 32):
            index = (i // width * num_rows + row) * width + i % width
            key, id_complement = u32(0), u32(0)
            if not pairs:
                id_complement, key = gathered[index, 0], gathered[index, 1]
            elif gathered[index, 1] != order.FLOAT_INFINITY:
                key = order.key_of_bits(gathered[index, 0], order.FLOAT_SIGN, order.FLOAT_INFINITY)
                id_complement = u32(0xFFFFFFFF - i64(gathered_float[index, 1]))
            if order.precedes(key, id_complement, best_key, best_id):
                best_key, best_id = key, id_complement
        key = block_max(best_key)
        id_complement = block_max(best_id if best_key == key else u32(0))
        if cuda.threadIdx.x == 0:
            ids[row] = i64(-1) if key == 0 else 0xFFFFFFFF - i64(id_complement)

    return pick_from_candidates


@functools.cache
def _block_max(threads: int):
    """A device function: the largest uint32 over a block, in every thread."""
    lanes = min(threads, 32)

    @cuda.jit(device=True)
    def block_max(value):
        values = cuda.shared.array(threads, np.uint32)
        thread = cuda.threadIdx.x
        cuda.syncthreads()  # the last call's readers are done
        values[thread] = value
        cuda.syncthreads()
        if thread < lanes:
            top = values[thread]
            for other in range(thread + lanes, threads, lanes):
                top = max(top, values[other])
            values[thread] = top
        cuda.syncthreads()
        top = values[0]
        for other in range(1, lanes):
            top = max(top, values[other])
        return top

    return block_max
