"""RawModule and Kernel: a kernel text compiled for the CPU, and the launch of one of its kernels on NumPy arrays."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from . import abi, geometry, report
from .arguments import Packed, Parameter, pack, parameters
from .build import build
from .errors import ArgumentError, LaunchError, SimtError
from .library import Library, Variable
from .memory import Arena, Span, clusters
from .source import SourceLines
from .toolchain import find_compiler
from .where import Scene

_SLICE_MS = 100  # how often a long launch returns to Python, to see Ctrl-C and the time limit
_launching = threading.RLock()  # the signal handlers and the stacks are one for the whole process
_arena = Arena()
_pool = ctypes.c_void_p()
_libraries: dict[Path, Library] = {}


class RawModule:
    """A kernel text compiled for the CPU, in the shape of `cupy.RawModule`.

    code: CUDA or HIP source. Its kernels are `extern "C" __global__ void` functions.
    options: `-DNAME=VALUE`, `-U`, `-I`, `-include`, `-std=`.
    warp_size: 32, or 64 to run it as on AMD's wave64 devices (then `__HIP_PLATFORM_AMD__` is defined).
    checked: find faults (see the package's description); False runs without checks, a little faster.
    name: the file name in messages; `#line` directives in the text are honoured.
    compiler: "g++", "clang++", "zig" or a path; by default the first that is installed.
    shuffles_order_memory: whether shuffles and votes order memory among their lanes as `__syncwarp()` does. CUDA does
        not promise that, and False reports code that relies on it.

    Raises CompilerNotFoundError or CompileError when first used (`compile()`, `get_function`), ValueError for an option
    or a warp size that is not accepted.
    """

    def __init__(
        self,
        code: str,
        *,
        options: Sequence[str] = (),
        warp_size: int = 32,
        checked: bool = True,
        name: str = "kernel.cu",
        compiler: str | None = None,
        shuffles_order_memory: bool = True,
    ):
        if warp_size not in (32, 64):
            raise ValueError(f"warp_size must be 32 or 64, got {warp_size!r}")
        if not isinstance(code, str):
            raise TypeError(f"code must be a string, got {type(code).__name__}")
        self.code, self.options, self.warp_size, self.checked = code, tuple(options), warp_size, checked
        self.name, self.shuffles_order_memory = name, shuffles_order_memory
        self._compiler = compiler

    @cached_property
    def _library(self) -> Library:
        if sys.platform != "linux":
            raise SimtError(f"the simt backend needs Linux (signals, ELF), not {sys.platform}; a container will do")
        path = build(self.code, self.name, self.options, self.warp_size, self.checked, find_compiler(self._compiler))
        with _launching:
            if path not in _libraries:
                _libraries[path] = Library(path)
            return _libraries[path]

    @cached_property
    def _source_lines(self) -> SourceLines:
        return SourceLines(self.code, self.name)

    def compile(self) -> None:
        """Compiles now (or finds the result in the cache) rather than at the first `get_function`."""
        self._library  # noqa: B018

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return tuple(self._library.kernels)

    def get_function(self, name: str) -> Kernel:
        """The kernel called `name`; a SimtError that lists the kernels there are if there is none."""
        entry = self._library.kernels.get(name)
        if entry is None:
            known = ", ".join(self._library.kernels) or 'none (is it declared extern "C" __global__?)'
            raise SimtError(f"{self.name} has no kernel {name!r}; it has: {known}")
        return Kernel(self, name, parameters(entry))

    def get_global(self, name: str) -> np.ndarray:
        """The bytes of the `__device__` or `__constant__` variable `name`, uint8[size], not a copy: view them as the
        dtype that is meant to read or set the variable between launches."""
        for variable in self._library.variables:
            if variable.name == name:
                array = np.ctypeslib.as_array((ctypes.c_uint8 * variable.size).from_address(variable.low))
                array.flags.writeable = variable.settable
                return array
        known = ", ".join(v.name for v in self._library.variables) or "none"
        raise SimtError(f"{self.name} has no variable {name!r}; it has: {known}")


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of a module: call it as `kernel(grid, block, args, shared_mem=0)`."""

    module: RawModule
    name: str
    parameters: tuple[Parameter, ...]

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence,
        *,
        shared_mem: int = 0,
        block_order: str | tuple[str, int] = "forward",
        memory: Sequence[np.ndarray] = (),
        timeout: float = 60.0,
        resident_blocks: int | None = None,
    ) -> None:
        """Runs every block to its end.

        grid, block: 1 to 3 ints. args: for a pointer parameter a NumPy array (the address of its element [0, ..., 0];
        the kernel may touch its elements and nothing else), a pair (array, extent) where `extent` is the array whose
        elements it may touch instead, or None; for any other parameter a NumPy scalar or a one-element array of exactly
        its size.
        shared_mem: bytes of dynamic shared memory, an int.
        block_order: "forward", "reverse", or ("shuffle", seed).
        memory: further arrays that the kernel reaches through addresses in its arguments (`array.ctypes.data` in a
            pointer table); they are used in place.
        timeout: seconds after which a launch that has not ended is given up with a HangError.
        resident_blocks: how many blocks may be under way at once, for kernels whose blocks wait for one another;
            1 makes every wait for a block that has not started a HangError.

        In checked mode a fault leaves all arrays but those of `memory` as they were. Launches of one process run one at
        a time.

        Raises ArgumentError, LaunchError, or the KernelFault that happened.
        """
        grid, block = geometry.dimensions("grid", grid), geometry.dimensions("block", block)
        cluster = tuple(self.module._library.kernels[self.name].cluster)
        self._refuse(grid, block, cluster, shared_mem, resident_blocks)
        packed = pack(self.name, self.parameters, args)
        order = geometry.order(block_order, grid, cluster)
        launch = abi.Launch(
            grid=grid,
            block=block,
            cluster=cluster,
            order=order.ctypes.data if order is not None else None,
            resident_blocks=resident_blocks or 0,
        )
        with _launching:
            try:
                self._launch(launch, packed, int(shared_mem), memory, timeout)
            finally:
                _arena.release_if_large()

    def _refuse(self, grid, block, cluster, shared_mem: object, resident_blocks: int | None) -> None:
        module, library = self.module, self.module._library
        bound = library.kernels[self.name].max_threads
        static = library.static_shared(self.name)
        problem = geometry.problem(grid, block, cluster, bound, static, shared_mem, module.warp_size)
        if not problem and resident_blocks is not None and resident_blocks < geometry.size(cluster):
            problem = f"resident_blocks must be at least {geometry.size(cluster)}, got {resident_blocks}"
        if problem:
            raise LaunchError(f"kernel {self.name!r}: {problem}; got grid {grid}, block {block}", kernel=self.name)

    def _launch(self, launch: abi.Launch, packed: Packed, shared_mem: int, memory, timeout: float) -> None:
        """`launch`: its shape; the rest is filled in here."""
        module, library = self.module, self.module._library
        spans = [s for s in packed.spans if s is not None]
        parts = []
        if module.checked:
            spans += [Span(f"memory[{i}]", a, a, pinned=True) for i, a in enumerate(memory)]
            parts = clusters(spans)
            for part in parts:
                part.add_permissions()
            _arena.place(parts)
            addresses = [_placed(s, parts) if s is not None else None for s in packed.spans]
        else:
            addresses = [s.array.ctypes.data if s is not None else None for s in packed.spans]
        table, keep = packed.pointers(addresses, self.parameters)
        regions, keep_marks = self._regions(library, parts, shared_mem)
        launch.warp_size = module.warp_size
        launch.call = library.kernels[self.name].call
        launch.arguments = ctypes.addressof(table)
        launch.regions, launch.region_count = ctypes.addressof(regions), len(regions)
        launch.slice_ms = _SLICE_MS
        launch.shuffles_order_memory = module.shuffles_order_memory
        launch.constant_low, launch.constant_high = library.constant_range
        launch.pool = ctypes.addressof(_pool)
        launch.compare_sites = abi.COMPARE_SITES(self._compare_sites)
        launch.shared_low, launch.dynamic_low = library.shared_low, library.dynamic_low
        dynamic = shared_mem if library.has_dynamic else 0
        images = [(library.shared_low, library.shared_bytes), (library.dynamic_low, dynamic)]
        images = [(low, low + size) for low, size in images if size]
        launch.image_low = min((low for low, _ in images), default=0)
        launch.image_size = max((high for _, high in images), default=0) - launch.image_low
        status = self._run(launch, timeout)
        del keep, keep_marks
        if status == abi.FAULT:
            raise report.fault(launch.report, self._scene(launch, parts, regions, shared_mem, timeout))
        for part in parts:
            if part.shift:
                _arena.copy_back(part)

    def _run(self, launch: abi.Launch, timeout: float) -> int:
        handle = self.module._library.handle
        deadline = time.monotonic() + timeout
        status = abi.DONE
        try:
            status = handle.simt_launch(ctypes.byref(launch))
            while status == abi.PAUSED:
                if time.monotonic() > deadline:
                    handle.simt_abandon()
                    return abi.FAULT
                status = handle.simt_resume()
        except BaseException:  # Ctrl-C: the runtime must not be left in the middle of a launch
            if status == abi.PAUSED:
                handle.simt_abandon()
            raise
        return status

    def _regions(self, library: Library, parts, shared_mem: int):
        known = [
            abi.Region(
                low=c.low + c.shift,
                size=c.high - c.low,
                space=abi.GLOBAL,
                permit=c.permit,
                permissions=c.permissions.ctypes.data if c.permissions is not None else None,
                shift=c.cell_shift,
            )
            for c in parts
        ]
        both = abi.PERMIT_READ | abi.PERMIT_WRITE
        for v in library.variables:
            permit = abi.PERMIT_READ if v.constant else both
            known.append(abi.Region(low=v.low, size=v.size, space=abi.VARIABLE, permit=permit, shift=2))
        known.sort(key=lambda r: r.low)
        marks = library.shared_marks
        known.append(
            abi.Region(
                size=library.shared_bytes,
                space=abi.STATIC_SHARED,
                permit=both,
                permissions=marks.ctypes.data if marks is not None else None,
            )
        )
        size = shared_mem if library.has_dynamic else 0
        known.append(abi.Region(size=size, space=abi.DYNAMIC_SHARED, permit=both))
        if len(known) > 250:
            raise ArgumentError(f"kernel {self.name!r}: more than 250 separate arrays and variables", kernel=self.name)
        return (abi.Region * len(known))(*known), marks

    def _compare_sites(self, one, two) -> int:
        try:
            places = [
                self.module._library.frames(list(a.contents.frames)[: a.contents.frame_count]) for a in (one, two)
            ]
            first, second = ([(f.file, f.line, f.column) for f in reversed(p)] for p in places)
            if first == second:
                return 0
            if not first or not second:  # no lines: only the addresses are left
                return -1 if list(one.contents.frames) < list(two.contents.frames) else 1
            for a, b in zip(first, second, strict=False):
                if a != b:
                    return -1 if (a[1], a[2]) < (b[1], b[2]) else 1
            return -1 if len(first) < len(second) else 1
        except (LookupError, OSError, ValueError):  # an exception could not pass through the C code that calls this
            return -1

    def _scene(self, launch: abi.Launch, parts, regions, shared_mem: int, timeout: float) -> Scene:
        library = self.module._library
        static, dynamic = regions[len(regions) - 2], regions[len(regions) - 1]
        moved = static.low - library.shared_low
        return Scene(
            kernel=self.name,
            grid=tuple(launch.grid),
            block=tuple(launch.block),
            cluster=tuple(launch.cluster),
            frames=library.frames,
            line=self.module._source_lines,
            parts=parts,
            shared=[Variable(v.name, v.low + moved, v.size) for v in library.shared],
            variables=library.variables,
            dynamic_low=dynamic.low if library.has_dynamic else 1 << 63,
            dynamic_bytes=shared_mem,
            checked=self.module.checked,
            timeout=timeout,
        )


def _placed(span: Span, parts) -> int:
    for part in parts:
        if any(s is span for s in part.spans):
            return span.array.ctypes.data + part.shift
    return _arena.empty
