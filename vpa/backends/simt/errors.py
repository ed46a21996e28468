"""What can go wrong when a kernel text is compiled, launched and run on the CPU: one tree of exceptions."""

from __future__ import annotations

from dataclasses import dataclass

Index = tuple[int, int, int]


@dataclass(frozen=True)
class Frame:
    """One level of a call chain: `function` at `file`:`line`, as the text's #line directives name them."""

    file: str
    line: int
    function: str = ""
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Site:
    """One side of a fault: the thread, the source lines (innermost first) and what it did there."""

    block: Index
    thread: Index
    frames: tuple[Frame, ...] = ()
    action: str = ""

    @property
    def file(self) -> str | None:
        return self.frames[0].file if self.frames else None

    @property
    def line(self) -> int | None:
        return self.frames[0].line if self.frames else None


class SimtError(Exception):
    """Root of the tree.

    Attributes (None where they do not apply): `kernel` name, `block` and `thread` as (x, y, z), `file` and `line` of
    the innermost place in the kernel text, `frames` (the call chain, innermost first), `other` (the other side of a
    race or of a divergence, a `Site`).
    """

    kernel: str | None = None
    block: Index | None = None
    thread: Index | None = None
    file: str | None = None
    line: int | None = None
    frames: tuple[Frame, ...] = ()
    other: Site | None = None

    def __init__(self, message: str, *, kernel: str | None = None, site: Site | None = None, other: Site | None = None):
        super().__init__(message)
        self.kernel = kernel
        self.other = other
        if site is not None:
            self.block, self.thread = site.block, site.thread
            self.file, self.line, self.frames = site.file, site.line, site.frames


class CompilerNotFoundError(SimtError):
    """None of g++, clang++ and ziglang is installed, or the one asked for is not, or it is too old."""


class CompileError(SimtError):
    """The compiler refused the kernel text; `log` is everything it said, `file` and `line` its first error's."""

    def __init__(self, message: str, log: str, file: str | None = None, line: int | None = None):
        super().__init__(message)
        self.log, self.file, self.line = log, file, line


class ArgumentError(SimtError, TypeError):
    """A wrong number of arguments, or one that does not fit its parameter's type."""


class LaunchError(SimtError, ValueError):
    """A grid, block or amount of shared memory that no GPU would take."""


class KernelFault(SimtError):
    """Something that the running kernel did; the classes below say what."""


class RaceError(KernelFault):
    """Two threads access one byte, one of them writes, and nothing orders the two."""


class OutOfBoundsError(KernelFault):
    """An access outside every argument, shared memory, the module's variables and the thread's own stack."""


class MisalignedError(KernelFault):
    """An address that is not a multiple of the accessed type's alignment."""


class UninitializedError(KernelFault):
    """A read of shared memory that no thread of the block has written."""


class ReadOnlyError(KernelFault):
    """A write to a read-only array or to a `__constant__` variable."""


class NullPointerError(KernelFault):
    """An access through a null pointer."""


class UndefinedArithmeticError(KernelFault):
    """Signed integer overflow, a shift out of range, or an integer division by zero."""


class DivergenceError(KernelFault):
    """Threads that should meet do not: at a barrier, a shuffle or a vote."""


class HangError(KernelFault):
    """The launch does not end: every thread polls in vain, or the time limit has passed."""


class TrapError(KernelFault):
    """`__trap()`, a failed `assert`, or a place that must not be reached."""


class StackOverflowError(KernelFault):
    """A thread's local memory does not fit its stack (128 KiB)."""


class CrashError(KernelFault):
    """The processor stopped the kernel, as it happens without checks; `checked=True` says more."""
