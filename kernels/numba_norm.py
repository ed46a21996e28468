"""Numba CUDA twin of ``rmsnorm.cu``: same entry name, same steps, same bits.

Numbers are the bits of fp32, uint32, in tuples: those of a thread's groups after one another. A group's part of a step
is one function that calls the next group's, so that each number is a name of its own: of an array, walked by loops,
some compilers leave a loop as it is, and then the numbers lie in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from numba import cuda

from vpa.kernels import numba_device as device
from vpa.kernels.numba_order import i64, u32

ONE = u32(0x3F800000)  # the bits of 1


@functools.cache
def residual_rmsnorm(
    dtype: str,
    ranks: int,
    residual: bool,
    rounding: int,
    weight32: bool,
    threads: int,
    groups: int,
    wide: bool,
    full: bool,
    norm: bool,
    keep: bool,
):
    """A kernel for a row in each block of ``threads``; the settings are ``rmsnorm.cu``'s defines.

    Its arguments: address of rank 0 row 0, strides of ranks and rows in words; address and row stride of the residual;
    addresses of weight, normed and new residual; elements of a row; the bits of eps and of 1 / elements.
    """
    row_of = _row(dtype, ranks, residual, rounding, threads, groups, wide, full, keep)
    squares_of_chunks, normed_row = _norm(dtype, rounding, weight32, threads, groups, wide, full) if norm else (0, 0)
    word_bytes = 4 if dtype == "float32" else 2
    warps = threads // 32
    chunks = warps * groups
    slots = 1 if chunks <= 32 else 2 if chunks <= 64 else 4

    @device.kernel(max_registers=64)  # 1024 threads fit, or two blocks of fewer
    def residual_rmsnorm(
        partials, rank_stride, row_stride, rest, rest_stride, weight, normed, new_residual, hidden, eps, per_column
    ):
        row, thread = i64(cuda.blockIdx.x), i64(cuda.threadIdx.x)
        out = row * hidden * word_bytes
        run = partials + row * row_stride * word_bytes
        rest_run = rest + row * rest_stride * word_bytes
        numbers = row_of(run, rank_stride * word_bytes, rest_run, new_residual + out, thread, hidden)
        if norm:
            chunk = cuda.shared.array(chunks, np.uint32)
            squares_of_chunks(numbers, thread, chunk)
            cuda.syncthreads()
            lane = thread % 32
            total = chunk[lane] if lane < chunks else u32(0)
            if slots == 2:
                total = device.add_float32(total, chunk[lane + 32] if lane + 32 < chunks else u32(0))
            elif slots == 4:
                third = chunk[lane + 64] if lane + 64 < chunks else u32(0)
                fourth = chunk[lane + 96] if lane + 96 < chunks else u32(0)
                upper = device.add_float32(chunk[lane + 32], fourth)
                total = device.add_float32(device.add_float32(total, third), upper)
            mean = device.multiply_float32(_warp_sum(total), u32(per_column))
            scale = device.reciprocal_root(device.add_float32(mean, u32(eps)))
            normed_row(numbers, scale, weight, normed + out, thread, hidden)

    return residual_rmsnorm


@device.function
def _warp_sum(number):
    """The sum over the 32 lanes of a warp, in every lane."""
    number = device.add_float32(number, device.shuffle_xor(number, u32(16)))
    number = device.add_float32(number, device.shuffle_xor(number, u32(8)))
    number = device.add_float32(number, device.shuffle_xor(number, u32(4)))
    number = device.add_float32(number, device.shuffle_xor(number, u32(2)))
    return device.add_float32(number, device.shuffle_xor(number, u32(1)))


@functools.cache
def _of_dtype(dtype: str) -> SimpleNamespace:
    """``numbers_of`` the four words of a group, and ``words_of`` its numbers, the nearest of the dtype."""
    if dtype == "float32":

        @device.function
        def same(words):
            return words

        return SimpleNamespace(per_group=4, numbers_of=same, words_of=same)
    word_of = getattr(device, f"word_of_{dtype}")
    if dtype == "bfloat16":

        @device.function
        def low(word):
            return u32(word << u32(16))

        @device.function
        def high(word):
            return u32(word & u32(0xFFFF0000))

    else:
        low = device.single_of_float16

        @device.function
        def high(word):
            return low(u32(word >> u32(16)))

    @device.function
    def numbers_of(w):
        return low(w[0]), high(w[0]), low(w[1]), high(w[1]), low(w[2]), high(w[2]), low(w[3]), high(w[3])

    @device.function
    def words_of(n):
        return word_of(n[0], n[1]), word_of(n[2], n[3]), word_of(n[4], n[5]), word_of(n[6], n[7])

    return SimpleNamespace(per_group=8, numbers_of=numbers_of, words_of=words_of)


@functools.cache
def _memory(dtype: str, wide: bool, full: bool) -> tuple[Callable, Callable]:
    """Device functions that read a group of a row, zeros beyond its end, and write one:

    load(run, group, hidden) -> words        store(run, group, hidden, words)
    """
    per_group = _of_dtype(dtype).per_group
    halves = dtype != "float32"
    zeros = (u32(0),) * 4

    if wide:

        @device.function
        def load(run, group, hidden):
            if full or group * per_group < hidden:
                return device.load_once(run + group * 16)
            return zeros

        @device.function
        def store(run, group, hidden, words):
            if full or group * per_group < hidden:
                device.store_words(run + group * 16, words)

        return load, store

    @device.function
    def load_word(run, column, hidden):
        """The word whose first element is in this column."""
        word = u32(0)
        if halves:
            if column < hidden:
                word = device.load_u16(run + column * 2)
            if column + 1 < hidden:
                word = u32(word | u32(device.load_u16(run + column * 2 + 2) << u32(16)))
        elif column < hidden:
            word = device.load_u32(run + column * 4)
        return word

    @device.function
    def store_word(run, column, hidden, word):
        if halves:
            if column < hidden:
                device.store_u16(run + column * 2, u32(word & u32(0xFFFF)))
            if column + 1 < hidden:
                device.store_u16(run + column * 2 + 2, u32(word >> u32(16)))
        elif column < hidden:
            device.store_u32(run + column * 4, word)

    per_word = per_group // 4

    @device.function
    def load(run, group, hidden):
        column = group * per_group
        return (
            load_word(run, column, hidden),
            load_word(run, column + per_word, hidden),
            load_word(run, column + 2 * per_word, hidden),
            load_word(run, column + 3 * per_word, hidden),
        )

    @device.function
    def store(run, group, hidden, words):
        column = group * per_group
        store_word(run, column, hidden, words[0])
        store_word(run, column + per_word, hidden, words[1])
        store_word(run, column + 2 * per_word, hidden, words[2])
        store_word(run, column + 3 * per_word, hidden, words[3])

    return load, store


@functools.cache
def _each(operate: Callable, count: int) -> Callable:
    """A device function that applies another, of two numbers, to each pair of two tuples of ``count`` numbers."""
    if count == 1:

        @device.function
        def one(a, b):
            return (operate(a[0], b[0]),)

        return one
    half = count // 2
    first, second = _each(operate, half), _each(operate, count - half)

    @device.function
    def both(a, b):
        return first(a[:half], b[:half]) + second(a[half:], b[half:])

    return both


@functools.cache
def _row(
    dtype: str,
    ranks: int,
    residual: bool,
    rounding: int,
    threads: int,
    groups: int,
    wide: bool,
    full: bool,
    keep: bool,
    k: int = 0,
) -> Callable:
    """A device function: what is normed, of a thread's groups from the k-th on; it writes the new residual."""
    settings = dtype, ranks, residual, rounding, threads, groups, wide, full, keep
    of, (load, store) = _of_dtype(dtype), _memory(dtype, wide, full)
    numbers_of, words_of = of.numbers_of, of.words_of
    add_each = _each(device.add_float32, of.per_group)
    rounds = rounding != 1
    more_ranks = ranks > 1

    @device.function
    def group_of(run, rank_bytes, rest, kept, thread, hidden):
        group = thread + k * threads
        numbers = numbers_of(load(run, group, hidden))
        for _ in range(1, ranks):
            run += rank_bytes
            numbers = add_each(numbers, numbers_of(load(run, group, hidden)))
        if more_ranks:
            numbers = numbers_of(words_of(numbers))
        if residual:
            numbers = add_each(numbers, numbers_of(load(rest, group, hidden)))
        words = words_of(numbers)
        if keep:
            store(kept, group, hidden, words)
        return numbers_of(words) if rounds else numbers

    if k + 1 == groups:
        return group_of
    later = _row(*settings, k + 1)

    @device.function
    def from_group(run, rank_bytes, rest, kept, thread, hidden):
        numbers = group_of(run, rank_bytes, rest, kept, thread, hidden)
        return numbers + later(run, rank_bytes, rest, kept, thread, hidden)

    return from_group


@functools.cache
def _norm(
    dtype: str, rounding: int, weight32: bool, threads: int, groups: int, wide: bool, full: bool, k: int = 0
) -> tuple[Callable, Callable]:
    """Device functions of a thread's groups from the k-th on:

    squares_of_chunks(numbers, thread, chunk)                            the sums of its warp's chunks, to shared memory
    normed_row(numbers, scale, weight, normed, thread, hidden)           writes what is normed
    """
    settings = dtype, rounding, weight32, threads, groups, wide, full
    of, (load, store) = _of_dtype(dtype), _memory(dtype, wide, full)
    numbers_of, words_of, per_group = of.numbers_of, of.words_of, of.per_group
    add_each, multiply_each = _each(device.add_float32, per_group), _each(device.multiply_float32, per_group)
    halves = [_each(device.add_float32, half) for half in (4, 2, 1) if half < per_group]
    fold_first, fold_2, fold_1 = (halves[0], halves[-2], halves[-1])
    eight = per_group == 8
    half = per_group // 2
    load_wide = _memory("float32", wide, full)[0]
    ones = (ONE,) * per_group
    gemma, twice = rounding == 2, rounding == 1 and not weight32
    warps = threads // 32
    is_last = k + 1 == groups

    @device.function
    def squares_of_group(numbers):
        squares = multiply_each(numbers, numbers)
        four = fold_first(squares[:half], squares[half:]) if eight else squares
        two = fold_2(four[:2], four[2:])
        return fold_1(two[:1], two[1:])[0]

    @device.function
    def chunk_of(numbers, thread, chunk):
        total = _warp_sum(squares_of_group(numbers))
        if thread % 32 == 0:
            chunk[thread // 32 + k * warps] = total

    @device.function
    def weights_of(weight, group, hidden):
        if weight32 and eight:
            return load_wide(weight, 2 * group, hidden) + load_wide(weight, 2 * group + 1, hidden)
        return numbers_of(load(weight, group, hidden))

    @device.function
    def norm_group(numbers, scale, weight, normed, thread, hidden):
        group = thread + k * threads
        scales = (scale, scale, scale, scale, scale, scale, scale, scale)
        scaled = multiply_each(numbers, scales[:per_group])
        if twice:
            scaled = numbers_of(words_of(scaled))
        gain = weights_of(weight, group, hidden)
        if gemma:
            gain = add_each(ones, gain)
        store(normed, group, hidden, words_of(multiply_each(scaled, gain)))

    if is_last:
        return chunk_of, norm_group
    later_chunks, later_norm = _norm(*settings, k + 1)

    @device.function
    def chunks_from(numbers, thread, chunk):
        chunk_of(numbers[:per_group], thread, chunk)
        later_chunks(numbers[per_group:], thread, chunk)

    @device.function
    def norm_from(numbers, scale, weight, normed, thread, hidden):
        norm_group(numbers[:per_group], scale, weight, normed, thread, hidden)
        later_norm(numbers[per_group:], scale, weight, normed, thread, hidden)

    return chunks_from, norm_from
