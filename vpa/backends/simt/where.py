"""What lies at an address that a kernel used: an element of an argument, a shared or module variable, or near what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import abi
from .errors import Frame, Index
from .library import Variable
from .memory import Cluster, Span, address_of, bounds


@dataclass(frozen=True)
class Scene:
    """What a report is read against. `frames`: addresses of a call chain -> places; `line`: a place -> its text."""

    kernel: str
    grid: Index
    block: Index
    cluster: Index
    frames: Callable[[Sequence[int]], tuple[Frame, ...]]
    line: Callable[[str, int], str | None]
    parts: Sequence[Cluster]
    shared: Sequence[Variable]
    variables: Sequence[Variable]
    dynamic_low: int
    dynamic_bytes: int
    checked: bool
    timeout: float


def unravel(number: int, dims: Index) -> Index:
    return number % dims[0], number // dims[0] % dims[1], number // (dims[0] * dims[1])


def spelled(index: Index) -> str:
    return "({},{},{})".format(*index)


def memory_at(scene: Scene, report: abi.Report) -> str:
    """What lies at the address of the report: an argument's element, a shared or module variable."""
    address, size = report.address, report.size
    whose = f" of block {spelled(unravel(report.owner - 1, scene.grid))}" if report.owner else ""
    for c in scene.parts:
        if c.low <= address - c.shift < c.high:
            held = [s for s in c.spans if s.bounds[0] <= address - c.shift < s.bounds[1]]
            named = [(s, _element(s.extent, address - c.shift)) for s in held]
            found = [(s, e) for s, e in named if e is not None and s.extent is s.array] or [
                (s, e) for s, e in named if e is not None
            ]
            if found:
                return f"{found[0][0].name}{found[0][1]}"
            return held[0].name if held else c.spans[0].name
    for where, variables in (("shared ", scene.shared), ("", scene.variables)):
        for v in variables:
            if v.low <= address < v.low + v.size:
                part = f" (byte {address - v.low} of {v.size})" if v.size != size else ""
                return f"{where}{v.name!r}{whose}{part}"
    if scene.dynamic_low <= address < scene.dynamic_low + scene.dynamic_bytes:
        return f"dynamic shared memory{whose} (byte {address - scene.dynamic_low} of {scene.dynamic_bytes})"
    return f"address {address:#x}"


def _element(array: np.ndarray, address: int) -> str | None:
    """ "[i, j]" of the element that holds the byte at `address`; None if it lies between elements."""
    low, _ = bounds(array)
    rest = address - low
    index = [0] * array.ndim
    for axis in sorted(range(array.ndim), key=lambda a: -abs(array.strides[a])):
        length, stride = array.shape[axis], abs(array.strides[axis])
        position = min(rest // stride, length - 1) if stride else 0
        rest -= position * stride
        index[axis] = position if array.strides[axis] >= 0 else length - 1 - position
    if rest >= array.itemsize:
        return None
    return "[" + ", ".join(map(str, index)) + "]" if array.ndim else ""


def _array(span: Span) -> str:
    return f"{span.name} ({span.array.dtype}{list(span.array.shape)})"


def outside(scene: Scene, address: int, size: int, text: str) -> str:
    if text == "gap":
        for c in scene.parts:
            if c.low <= address - c.shift < c.high:
                held = [s for s in c.spans if s.bounds[0] <= address - c.shift < s.bounds[1]] or c.spans
                offset = address - c.shift - address_of(held[0].array)
                return f"between the elements of {_array(held[0])}: {offset} bytes from its first element"
    near: list[tuple[int, str]] = []
    for c in scene.parts:
        for s in c.spans:
            low, high = s.bounds[0] + c.shift, s.bounds[1] + c.shift
            if address + size > high:
                near.append((address - high, f"{max(0, address - high)} bytes past the end of {_array(s)}"))
            elif address < low:
                near.append((low - address, f"{low - address} bytes before the start of {_array(s)}"))
    for v in scene.shared:
        if address >= v.low + v.size > address - 4096 or v.low <= address < v.low + v.size < address + size:
            near.append(
                (
                    address - v.low - v.size,
                    f"{max(0, address - v.low - v.size)} bytes past the end of shared {v.name!r} ({v.size} bytes)",
                )
            )
    if 0 <= address - scene.dynamic_low < abi.DYNAMIC_BYTES:
        past = max(0, address - scene.dynamic_low - scene.dynamic_bytes)
        near.append(
            (0, f"{past} bytes past the end of the {scene.dynamic_bytes} bytes of dynamic shared memory of this launch")
        )
    for v in scene.variables:
        if address >= v.low + v.size > address - 4096:
            near.append((address - v.low - v.size, f"{address - v.low - v.size} bytes past the end of {v.name!r}"))
    if text and text != "gap":
        return f"at {address:#x}: {text}"
    if near and min(near)[0] < 1 << 30:
        return min(near)[1]
    return f"at {address:#x}, which belongs to no argument, shared memory or variable"
