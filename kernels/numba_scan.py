"""``scan.cuh`` for Numba CUDA: a thread walks its columns of one row, and later names the lowest with the best key.

Same names and steps as there, where it is said why. Both walks are a pair of device functions over columns [0, count)
of one row at address ``run``:

    walk(run, stride, count, thread) -> spot            spot[0]: the largest key among the thread's columns, or 0
    column_in(run, count, thread, key, spot) -> column  the lowest that has the key, if walk returned that key
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

from vpa.kernels import numba_device as device
from vpa.kernels import numba_order as order
from vpa.kernels.numba_order import i64, u32


@functools.cache
def contiguous(
    dtype: str, threads: int, loads: int, once: bool, nan_ignored: bool = False
) -> tuple[Callable, Callable]:
    """``walk`` and ``column_in`` by 16-byte loads, ``loads`` in flight; ``once``: no thread walks more than those."""
    of = order.of_dtype(dtype, nan_ignored)
    word_bytes, load_word, logit_key, patterns_of = of.word_bytes, of.load_word, of.logit_key, of.patterns_of
    per_load = 16 // word_bytes
    shift = u32(per_load.bit_length() - 1)
    step = u32(loads * threads)
    no_group = (u32(0),) * (4 * loads)
    words_of_group, top_of_group, place_in_group = _group(of, threads, loads)
    key_of_top = of.key_of_top

    @device.function
    def head_of(run, count):
        """How many columns come before the first 16-byte boundary."""
        return min(u32(u32(-run & i64(15)) // u32(word_bytes)), count)

    @device.function
    def edge_column(thread, head, in_run):
        return thread if thread < head else u32(thread + u32(in_run << shift))

    @device.function
    def walk(run, stride, count, thread):
        head = head_of(run, count)
        in_run = u32(u32(count - head) >> shift)
        middle = run + i64(head) * word_bytes
        edge_key, group_key, first_of_group = u32(0), u32(0), u32(0)
        if thread < u32(count - u32(in_run << shift)):
            edge_key = logit_key(load_word(run + i64(edge_column(thread, head, in_run)) * word_bytes))
        group = no_group
        first = thread
        while first < in_run:
            group = words_of_group(middle, first, in_run)
            key = key_of_top(top_of_group(group, group[0]))
            if key > group_key:
                group_key, first_of_group = key, first
            if once:
                break
            first = u32(first + step)
        return max(edge_key, group_key), edge_key, group_key, first_of_group, group

    @device.function
    def column_in(run, count, thread, key, spot):
        _, edge_key, group_key, first, group = spot
        head = head_of(run, count)
        in_run = u32(u32(count - head) >> shift)
        if edge_key == key and (thread < head or group_key != key):
            return edge_column(thread, head, in_run)
        if not once:
            group = words_of_group(run + i64(head) * word_bytes, first, in_run)
        load, place = place_in_group(group, patterns_of(key))
        return u32(head + u32(_load_number(first, u32(load * u32(threads)), in_run) << shift) + place)

    return walk, column_in


@device.function
def _load_number(first, later, in_run):
    """Past the end, the last load again: that changes no maximum and keeps all reads inside the run."""
    return min(u32(first + later), u32(in_run - u32(1)))


def _group(of: types.SimpleNamespace, threads: int, loads: int, i: int = 0) -> tuple[Callable, Callable, Callable]:
    """Device functions of loads ``i`` and later of a group, a tuple of ``4 * loads`` words:

        words_of_group(middle, first, in_run) -> words
        top_of_group(group, top) -> top, the words' largest, where the given one comes from before or is the first word
        place_in_group(group, patterns) -> load, place: of the first logit among the patterns

    One load is one function that calls the next, so that each word is a name of its own. Of an array, walked by loops,
    some compilers leave a loop as it is, and then the words lie in memory.
    """
    larger_top, is_among, halves, per_load = of.larger_top, of.is_among, of.word_bytes == 2, 16 // of.word_bytes
    is_last = i + 1 == loads
    load_later, top_later, place_later = (None,) * 3 if is_last else _group(of, threads, loads, i + 1)
    a, b, c, d = range(4 * i, 4 * i + 4)

    @device.function
    def load(middle, first, in_run):
        return device.load_once(middle + (i64(_load_number(first, u32(i * threads), in_run)) << 4))

    @device.function
    def load_on(middle, first, in_run):
        return load(middle, first, in_run) + load_later(middle, first, in_run)

    @device.function
    def top_of_load(group, top):
        if i > 0:
            top = larger_top(top, group[a])
        return larger_top(larger_top(larger_top(top, group[b]), group[c]), group[d])

    @device.function
    def top_on(group, top):
        return top_later(group, top_of_load(group, top))

    @device.function
    def place_in_word(word, number, patterns, found):
        if halves:
            if is_among(word, u32(16), patterns):
                found = u32(2 * number + 1)
            if is_among(word, u32(0), patterns):
                found = u32(2 * number)
        elif is_among(word, u32(0), patterns):
            found = u32(number)
        return found

    @device.function
    def place_in_load(group, patterns):
        """From the last logit to the first, so that the first one stays; ``per_load`` if there is none."""
        found = place_in_word(group[d], 3, patterns, u32(per_load))
        found = place_in_word(group[c], 2, patterns, found)
        found = place_in_word(group[b], 1, patterns, found)
        return place_in_word(group[a], 0, patterns, found)

    @device.function
    def place(group, patterns):
        return u32(i), place_in_load(group, patterns)

    @device.function
    def place_on(group, patterns):
        found = place_in_load(group, patterns)
        later = place_later(group, patterns)
        return (u32(i), found) if found != u32(per_load) else later

    return (load, top_of_load, place) if is_last else (load_on, top_on, place_on)


@functools.cache
def strided(dtype: str, threads: int, nan_ignored: bool = False) -> tuple[Callable, Callable]:
    """``walk`` and ``column_in`` for columns ``stride`` words apart."""
    of = order.of_dtype(dtype, nan_ignored)
    word_bytes, load_word, logit_key = of.word_bytes, of.load_word, of.logit_key

    @device.function
    def walk(run, stride, count, thread):
        best, best_column = u32(0), u32(0)
        for column in range(i64(thread), i64(count), threads):
            key = logit_key(load_word(run + column * stride * word_bytes))
            if key > best:
                best, best_column = key, u32(column)
        return best, best_column

    @device.function
    def column_in(run, count, thread, key, spot):
        return spot[1]

    return walk, column_in
