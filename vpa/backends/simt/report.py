"""Turns the runtime's report into the exception that a user reads: who, what, where, and the lines themselves."""

from __future__ import annotations

from . import abi
from .errors import (
    CrashError,
    DivergenceError,
    Frame,
    HangError,
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
from .where import Scene, memory_at, outside, spelled, unravel

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


def fault(report: abi.Report, scene: Scene) -> KernelFault:
    site = _site(report.actor, scene)
    other = _site(report.other, scene) if report.has_other else None
    if not site.frames and report.file:  # no debug information: the sanitizer's own note of the place
        frame = Frame(report.file.decode("utf-8", "replace"), report.line, "", report.column)
        site = Site(site.block, site.thread, (frame,), site.action)
    kind = _CLASSES.get(report.fault, KernelFault)
    who = f"kernel {scene.kernel!r}, block {spelled(site.block)}: "
    what = _DESCRIBERS.get(kind, _plain)(report, scene, site, other)
    return kind(who + what + _excerpt(scene, site, other), kernel=scene.kernel, site=site, other=other)


# --- Places ----------------------------------------------------------------------------------------------------------


def _site(actor: abi.Actor, scene: Scene) -> Site:
    frames = scene.frames([actor.frames[i] for i in range(actor.frame_count)])
    doing = actor.doing.decode() if actor.doing else _verb(actor.flags)
    return Site(unravel(actor.block, scene.grid), unravel(actor.thread, scene.block), frames, doing)


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


# --- One sentence for each class -------------------------------------------------------------------------------------


def _text(report: abi.Report) -> str:
    return report.text.decode("utf-8", "replace")


def _race(report, scene, site, other) -> str:
    what = memory_at(scene, report)
    if text := _text(report):
        unsure = "nothing says that block has started" if text == "start" else "nothing keeps that block from returning"
        return (
            f"thread {spelled(site.thread)} {_verb(report.actor.flags)} {what}{_at(site)}, "
            f"and {unsure} (a barrier of the cluster would)"
        )
    whose, why = "", "with no barrier between"
    if other.block != site.block:
        same = all(a // c == b // c for a, b, c in zip(site.block, other.block, scene.cluster, strict=True))
        orders = "a barrier of the cluster" if same else "a fence and an atomic"
        whose, why = f" of block {spelled(other.block)}", f"and nothing orders the two blocks ({orders} would)"
    return (
        f"thread {spelled(site.thread)} {_verb(report.actor.flags)} {what}{_at(site)} "
        f"that thread {spelled(other.thread)}{whose} {_past(report.other.flags)}{_at(other)} {why}"
    )


def _out_of_bounds(report, scene, site, other) -> str:
    if not report.address:
        return f"thread {spelled(site.thread)}{_at(site)}: {_text(report)}"
    where = outside(scene, report.address, report.size, _text(report))
    return f"thread {spelled(site.thread)} {_verb(report.actor.flags)} {report.size} bytes{_at(site)}, {where}"


def _misaligned(report, scene, site, other) -> str:
    what = memory_at(scene, report)
    needs = _text(report) or f"an access of {report.size} bytes needs an address that is a multiple of it"
    where = f"{what} at {report.address:#x}"
    return f"thread {spelled(site.thread)} uses a misaligned address{_at(site)}: {where}, but {needs}"


def _uninitialized(report, scene, site, other) -> str:
    what = memory_at(scene, report)
    return f"thread {spelled(site.thread)} reads {what}{_at(site)}, which no thread has written"


def _read_only(report, scene, site, other) -> str:
    what = _text(report) or memory_at(scene, report)
    return f"thread {spelled(site.thread)} {_verb(report.actor.flags)} {what}{_at(site)}, which is read-only"


def _null(report, scene, site, other) -> str:
    return f"thread {spelled(site.thread)} uses a null pointer{_at(site)} (address {report.address:#x})"


def _divergence(report, scene, site, other) -> str:
    text, name = _text(report), site.action
    waits = f"thread {spelled(site.thread)} calls {name}{_at(site)}"
    if text == "width":
        return f"{waits} with a width that is not a power of two up to the warp size"
    if text == "own":
        return f"{waits} with a mask that does not name its own lane"
    if text == "absent":
        return f"{waits} and reads from a lane that this block does not have"
    if other is None:
        return waits
    if other.action == "returned":
        then = f"thread {spelled(other.thread)} has returned"
    elif other.action == "runs":
        then = f"thread {spelled(other.thread)} has not called it"
    else:
        then = f"thread {spelled(other.thread)} waits in {other.action}{_at(other)}"
    if text == "inactive":
        return f"{waits} and reads from a lane that does not take part: {then}"
    if text == "mask":
        return f"{waits} with a mask that names a lane that does not take part: {then}"
    return f"{waits}, but {then}"


def _hang(report, scene, site, other) -> str:
    if _text(report) == "spin":
        return f"thread {spelled(site.thread)} polls{_at(site)} for what no thread will write any more: everybody waits"
    if _text(report) == "loop":
        return f"thread {spelled(site.thread)} goes round in a loop for ever{_at(site)}, and nobody else goes on"
    if _text(report):
        return _text(report)
    state = "runs" if site.action in ("runs", "reads") else f"waits in {site.action}"
    return f"not finished after {scene.timeout:g} s; thread {spelled(site.thread)} {state}{_at(site)}"


def _plain(report, scene, site, other) -> str:
    return f"thread {spelled(site.thread)}{_at(site)}: {_text(report)}"


def _stack(report, scene, site, other) -> str:
    return f"thread {spelled(site.thread)}{_at(site)}: its local memory and calls do not fit 128 KiB"


def _crash(report, scene, site, other) -> str:
    hint = "" if scene.checked else "; run it with checked=True to learn which argument it left"
    return f"thread {spelled(site.thread)} crashed{_at(site)} at address {report.address:#x}{hint}"


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
