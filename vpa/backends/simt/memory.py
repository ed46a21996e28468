"""The memory that a checked kernel sees: copies of its arrays, set apart, and which bytes it may read and write.

A copy keeps its array's address modulo 4,096 and its strides, and arrays that overlap stay overlapping, so alignment
and aliasing are what they are in place. Between the copies lie gaps as large as the arrays: running over an end meets
no neighbour by accident. Results are copied back when the launch has succeeded, so a fault leaves the arrays untouched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided

from . import abi

_PAGE = 4096
_GAP = 65536


def address_of(array: np.ndarray) -> int:
    """Of element [0, ..., 0], which for negative strides is not the lowest."""
    return array.__array_interface__["data"][0]


def bounds(array: np.ndarray) -> tuple[int, int]:
    """[low, high) of the bytes that the array's strides can reach; empty for an array without elements."""
    low = high = address_of(array)
    if not array.size:
        return low, high
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + array.itemsize


@dataclass(frozen=True, eq=False)
class Span:
    """A pointer argument: the kernel gets `array`'s first element's address and may touch the elements of `extent`."""

    name: str
    array: np.ndarray
    extent: np.ndarray
    pinned: bool = False  # stays where it is: its address is known to somebody else

    @cached_property
    def bounds(self) -> tuple[int, int]:
        return bounds(self.extent)

    @property
    def writable(self) -> bool:
        return bool(self.array.flags.writeable)

    @property
    def dense(self) -> bool:
        return bool(self.extent.flags.c_contiguous or self.extent.flags.f_contiguous)

    def inside(self) -> bool:
        low, high = bounds(self.array)
        return self.bounds[0] <= low and high <= self.bounds[1]


@dataclass(eq=False)
class Cluster:
    """Spans that overlap, as one piece of memory. `shift`: from the arrays' addresses to those that the kernel sees."""

    low: int
    high: int
    spans: list[Span] = field(default_factory=list)
    shift: int = 0
    permissions: np.ndarray | None = None
    permit: int = 0

    def add_permissions(self) -> None:
        reads, writes = abi.PERMIT_READ, abi.PERMIT_READ | abi.PERMIT_WRITE
        if len(self.spans) == 1 and self.spans[0].dense:
            self.permit = writes if self.spans[0].writable else reads
            return
        size = self.high - self.low
        marks = np.zeros(size, np.uint8)
        for span in sorted(self.spans, key=lambda s: s.writable):  # a byte may be written if any span says so
            view = self.view(span.extent, marks, -self.low)
            view[...] = writes if span.writable else reads
        self.permit = int(np.bitwise_or.reduce(marks))
        if not np.all(marks == self.permit):
            self.permissions = marks

    @property
    def cell_shift(self) -> int:
        """A first guess at the size of an access, as log2: 4 bytes (into which compilers split wide loads) or 8."""
        return 3 if all(s.extent.itemsize % 8 == 0 for s in self.spans) else 2

    @staticmethod
    def view(array: np.ndarray, memory: np.ndarray, shift: int) -> np.ndarray:
        """The bytes of `array`'s elements, shape [..., itemsize], in `memory` (whose first byte is address -shift)."""
        start = address_of(array) + shift
        return as_strided(memory[start:], (*array.shape, array.itemsize), (*array.strides, 1))


def clusters(spans: Sequence[Span]) -> list[Cluster]:
    result: list[Cluster] = []
    for span in sorted((s for s in spans if s.extent.size), key=lambda s: s.bounds):
        low, high = span.bounds
        if result and low < result[-1].high:
            result[-1].high = max(result[-1].high, high)
        else:
            result.append(Cluster(low, high))
        result[-1].spans.append(span)
    return result


class Arena:
    """The copies of one launch. Kept for the next one by its owner, since fresh pages cost more than the copying."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self.empty = 0  # an address where nothing lies, for arrays without elements

    def place(self, parts: Sequence[Cluster]) -> None:
        """Chooses the copies' addresses and fills them; pinned clusters stay."""
        moved = [c for c in parts if not any(s.pinned for s in c.spans)]
        offsets, end = [], _GAP
        for c in moved:
            end = (end + _PAGE - 1) // _PAGE * _PAGE + c.low % _PAGE
            offsets.append(end)
            end += (c.high - c.low) + max(_GAP, c.high - c.low)
        if self._memory.size < end + 2 * _PAGE:
            self._memory = np.empty(end + 2 * _PAGE, np.uint8)  # untouched pages cost nothing
        base = -(-address_of(self._memory) // _PAGE) * _PAGE
        self.empty = base + _GAP // 2
        for c, offset in zip(moved, offsets, strict=True):
            c.shift = base + offset - c.low
            ctypes.memmove(base + offset, c.low, c.high - c.low)

    def copy_back(self, c: Cluster) -> None:
        base = address_of(self._memory)
        for span in c.spans:
            target = span.extent if span.extent.flags.writeable else span.array
            if span.writable:
                copy = Cluster.view(target, self._memory, c.shift - base)
                Cluster.view(target, _bytes_at(*bounds(target)), -bounds(target)[0])[...] = copy

    def release_if_large(self, limit: int = 256 << 20) -> None:
        if self._memory.size > limit:
            self._memory = np.empty(0, np.uint8)


def _bytes_at(low: int, high: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
