"""Turns the runtime's report into the exception that a user reads: who, what, where, and the lines themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import abi
from .errors import (
    CrashError,
    DivergenceError,
    Frame,
    HangError,
    Index,
    KernelFault,
    MisalignedError,
    NullPointerError,
    OutOfBoundsError,
    RaceError,
    ReadOnlyError,
    Site,
    StackOverflowError,
    TrapError,
    UndefinedArithmeticError,
    UninitializedError,
)
from .library import Variable
from .memory import Cluster, Span, address_of, bounds

_CLASSES = {
    1: RaceError,
    2: OutOfBoundsError,
    3: MisalignedError,
    4: UninitializedError,
    5: ReadOnlyError,
    6: NullPointerError,
    7: UndefinedArithmeticError,
    8: DivergenceError,
    9: HangError,
    10: TrapError,
    11: CrashError,
    12: StackOverflowError,
}


@dataclass(frozen=True)
class Scene:
    """What a report is read against. `frames`: addresses of a call chain -> places; `line`: a place -> its text."""

    kernel: str
    grid: Index
    block: Index
    frames: Callable[[Sequence[int]], tuple[Frame, ...]]
    line: Callable[[str, int], str | None]
    parts: Sequence[Cluster]
    shared: Sequence[Variable]
    variables: Sequence[Variable]
    dynamic_low: int
    dynamic_bytes: int
    checked: bool
    timeout: float


def fault(report: abi.Report, scene: Scene) -> KernelFault:
    site = _site(report.actor, scene)
    other = _site(report.other, scene) if report.has_other else None
    if not site.frames and report.file:  # no debug information: the sanitizer's own note of the place
        frame = Frame(report.file.decode("utf-8", "replace"), report.line, "", report.column)
        site = Site(site.block, site.thread, (frame,), site.action)
    kind = _CLASSES.get(report.fault, KernelFault)
    who = f"kernel {scene.kernel!r}, block {_index(site.block)}: "
    what = _DESCRIBERS.get(kind, _plain)(report, scene, site, other)
    return kind(who + what + _excerpt(scene, site, other), kernel=scene.kernel, site=site, other=other)


# --- Places ----------------------------------------------------------------------------------------------------------


def _unravel(number: int, dims: Index) -> Index:
    return number % dims[0], number // dims[0] % dims[1], number // (dims[0] * dims[1])


def _index(index: Index) -> str:
    return "({},{},{})".format(*index)


def _site(actor: abi.Actor, scene: Scene) -> Site:
    frames = scene.frames([actor.frames[i] for i in range(actor.frame_count)])
    doing = actor.doing.decode() if actor.doing else _verb(actor.flags)
    return Site(_unravel(actor.block, scene.grid), _unravel(actor.thread, scene.block), frames, doing)


def _verb(flags: int) -> str:
    if flags & abi.ATOMIC:
        return "atomically updates" if flags & abi.WRITE else "atomically reads"
    return "writes" if flags & abi.WRITE else "reads"


def _past(flags: int) -> str:
    if flags & abi.ATOMIC:
        return "atomically updated" if flags & abi.WRITE else "atomically read"
    return "wrote" if flags & abi.WRITE else "read"


def _at(site: Site) -> str:
    return f" at {site.frames[0]}" if site.frames else ""


def _excerpt(scene: Scene, *sites: Site | None) -> str:
    """The lines of the kernel text that the message names, call chains included."""
    lines, shown = [], set()
    for site in sites:
        for depth, frame in enumerate(site.frames if site is not None else ()):
            if (frame.file, frame.line, depth > 0) in shown:
                continue
            shown.add((frame.file, frame.line, depth > 0))
            text = scene.line(frame.file, frame.line)
            called = "  called from " if depth else "  "
            if text is not None or depth:
                lines.append(f"\n{called}{frame}" + (f": {text}" if text else ""))
    return "".join(lines)


# --- Memory ----------------------------------------------------------------------------------------------------------


def _memory(scene: Scene, address: int, size: int) -> str:
    """What lies at an address of the kernel's: an argument's element, a shared or module variable."""
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
                return f"{where}{v.name!r}{part}"
    if scene.dynamic_low <= address < scene.dynamic_low + scene.dynamic_bytes:
        return f"dynamic shared memory (byte {address - scene.dynamic_low} of {scene.dynamic_bytes})"
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


def _outside(scene: Scene, address: int, size: int, text: str) -> str:
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
    if text:
        return f"at {address:#x}: {text}"
    if near and min(near)[0] < 1 << 30:
        return min(near)[1]
    return f"at {address:#x}, which belongs to no argument, shared memory or variable"


# --- One sentence for each class -------------------------------------------------------------------------------------


def _text(report: abi.Report) -> str:
    return report.text.decode("utf-8", "replace")


def _race(report, scene, site, other) -> str:
    what = _memory(scene, report.address, report.size)
    if other.block != site.block:
        whose, why = (
            f" of block {_index(other.block)}",
            "and nothing orders the two blocks (a fence and an atomic would)",
        )
    else:
        whose, why = "", "with no barrier between"
    return (
        f"thread {_index(site.thread)} {_verb(report.actor.flags)} {what}{_at(site)} "
        f"that thread {_index(other.thread)}{whose} {_past(report.other.flags)}{_at(other)} {why}"
    )


def _out_of_bounds(report, scene, site, other) -> str:
    if not report.address:
        return f"thread {_index(site.thread)}{_at(site)}: {_text(report)}"
    where = _outside(scene, report.address, report.size, _text(report))
    return f"thread {_index(site.thread)} {_verb(report.actor.flags)} {report.size} bytes{_at(site)}, {where}"


def _misaligned(report, scene, site, other) -> str:
    what = _memory(scene, report.address, report.size)
    needs = _text(report) or f"an access of {report.size} bytes needs an address that is a multiple of it"
    return (
        f"thread {_index(site.thread)} uses a misaligned address{_at(site)}: {what} at {report.address:#x}, but {needs}"
    )


def _uninitialized(report, scene, site, other) -> str:
    what = _memory(scene, report.address, report.size)
    return f"thread {_index(site.thread)} reads {what}{_at(site)}, which no thread of this block has written"


def _read_only(report, scene, site, other) -> str:
    what = _text(report) or _memory(scene, report.address, report.size)
    return f"thread {_index(site.thread)} {_verb(report.actor.flags)} {what}{_at(site)}, which is read-only"


def _null(report, scene, site, other) -> str:
    return f"thread {_index(site.thread)} uses a null pointer{_at(site)} (address {report.address:#x})"


def _divergence(report, scene, site, other) -> str:
    text, name = _text(report), site.action
    waits = f"thread {_index(site.thread)} calls {name}{_at(site)}"
    if text == "width":
        return f"{waits} with a width that is not a power of two up to the warp size"
    if text == "own":
        return f"{waits} with a mask that does not name its own lane"
    if text == "absent":
        return f"{waits} and reads from a lane that this block does not have"
    if other is None:
        return waits
    if other.action == "returned":
        then = f"thread {_index(other.thread)} has returned"
    elif other.action == "runs":
        then = f"thread {_index(other.thread)} has not called it"
    else:
        then = f"thread {_index(other.thread)} waits in {other.action}{_at(other)}"
    if text == "inactive":
        return f"{waits} and reads from a lane that does not take part: {then}"
    if text == "mask":
        return f"{waits} with a mask that names a lane that does not take part: {then}"
    return f"{waits}, but {then}"


def _hang(report, scene, site, other) -> str:
    if _text(report) == "spin":
        return f"thread {_index(site.thread)} polls{_at(site)} for what no thread will write any more: everybody waits"
    if _text(report):
        return _text(report)
    state = "runs" if site.action in ("runs", "reads") else f"waits in {site.action}"
    return f"not finished after {scene.timeout:g} s; thread {_index(site.thread)} {state}{_at(site)}"


def _plain(report, scene, site, other) -> str:
    return f"thread {_index(site.thread)}{_at(site)}: {_text(report)}"


def _stack(report, scene, site, other) -> str:
    return f"thread {_index(site.thread)}{_at(site)}: its local memory and calls do not fit 128 KiB"


def _crash(report, scene, site, other) -> str:
    hint = "" if scene.checked else "; run it with checked=True to learn which argument it left"
    return f"thread {_index(site.thread)} crashed{_at(site)} at address {report.address:#x}{hint}"


_DESCRIBERS = {
    RaceError: _race,
    OutOfBoundsError: _out_of_bounds,
    MisalignedError: _misaligned,
    UninitializedError: _uninitialized,
    ReadOnlyError: _read_only,
    NullPointerError: _null,
    DivergenceError: _divergence,
    HangError: _hang,
    StackOverflowError: _stack,
    CrashError: _crash,
}
