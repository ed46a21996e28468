"""A built shared object, loaded: its kernels, where its variables lie, and the source places of its addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from . import abi
from .build import ANCHOR_SYMBOL, DYNAMIC_SYMBOL, VARIABLES_SECTION
from .dwarf import LineTable
from .elf import STT_OBJECT, STT_TLS, ElfFile, Symbol
from .errors import Frame, SimtError


@dataclass(frozen=True)
class Variable:
    """A `__shared__`, `__device__` or `__constant__` variable: where a kernel finds it. Shared ones lie relative to the
    thread-local anchor until a launch knows the host thread. `settable`: Python may write it; `constant`: a kernel may
    not. `function`: the kernel in whose body it is declared, if in one's."""

    name: str
    low: int
    size: int
    constant: bool = False
    settable: bool = True
    function: str | None = None


class Library:
    """`path`: what `build` returned. Raises SimtError if it cannot be loaded, or belongs to another version of this
    package."""

    def __init__(self, path: Path):
        try:
            self.handle = ctypes.CDLL(str(path))
        except OSError as error:  # a cache on a file system from which nothing may be executed
            raise SimtError(f"{path} cannot be loaded ({error}); set XDG_CACHE_HOME to another folder") from error
        self.handle.simt_kernel_table.restype = ctypes.POINTER(abi.KernelEntry)
        self.handle.simt_launch.argtypes = [ctypes.POINTER(abi.Launch)]
        self.handle.simt_image.restype = ctypes.c_void_p
        self.handle.simt_launch_bytes.restype = self.handle.simt_region_bytes.restype = ctypes.c_uint64
        sizes = self.handle.simt_launch_bytes(), self.handle.simt_region_bytes()
        if sizes != (ctypes.sizeof(abi.Launch), ctypes.sizeof(abi.Region)):
            raise SimtError(f"{path} was built for another version of this package: {sizes}")
        self.image: int = self.handle.simt_image()
        self.elf = ElfFile(path)
        self.kernels: dict[str, abi.KernelEntry] = {}
        table = self.handle.simt_kernel_table()
        while table[len(self.kernels)].name:
            entry = table[len(self.kernels)]
            self.kernels[entry.name.decode()] = entry
        low, high = self.elf.read_only_range
        self.constant_range = self.image + low, self.image + high
        self._chains: dict[tuple[int, ...], tuple[Frame, ...]] = {}
        self._find_shared({s.name: s for s in self.elf.symbols if s.kind == STT_TLS and s.section is not None})
        self.variables = tuple(self._find_variables())

    def _find_shared(self, tls: dict[str, Symbol]) -> None:
        anchor, dynamic = tls[ANCHOR_SYMBOL].value, tls.get(DYNAMIC_SYMBOL)
        self.has_dynamic = dynamic is not None
        self.dynamic_low = dynamic.value - anchor if dynamic else 0
        beyond = dynamic.value + abi.DYNAMIC_BYTES if dynamic else 0
        self.shared = tuple(
            Variable(s.short_name, s.value - anchor, s.size, function=s.function)
            for s in tls.values()
            if s.name != ANCHOR_SYMBOL and not (dynamic and dynamic.value <= s.value < beyond)
        )
        self.shared_low = min((v.low for v in self.shared), default=0)
        self.shared_bytes = max((v.low + v.size for v in self.shared), default=0) - self.shared_low
        marks = np.zeros(self.shared_bytes, np.uint8)
        for v in self.shared:
            marks[v.low - self.shared_low :][: v.size] = abi.PERMIT_READ | abi.PERMIT_WRITE
        #: A byte for each byte of static shared memory, as Region.permissions; None where variables fill all of it.
        self.shared_marks = None if marks.all() else marks

    def static_shared(self, kernel: str) -> int:
        """Bytes of static shared memory that the kernel has at least: what other kernels or device functions declare
        may not be in it."""
        return sum(v.size for v in self.shared if v.function == kernel or len(self.kernels) == 1)

    def _find_variables(self):
        own = set(self.elf.section_bytes(VARIABLES_SECTION).decode().split("\0"))
        for s in self.elf.symbols:
            if s.kind == STT_OBJECT and s.section is not None and s.size and s.name in own:
                constant = s.section.name.startswith("simt_constant")
                if s.section.writable or constant:
                    yield Variable(s.short_name, self.image + s.value, s.size, constant, s.section.writable)

    @cached_property
    def _lines(self) -> LineTable:
        return LineTable(self.elf)

    def frames(self, addresses: Sequence[int]) -> tuple[Frame, ...]:
        """The places of a chain of return addresses, without the prelude's own and the trampoline's."""
        key = tuple(addresses)
        if key not in self._chains:
            places = [f for a in addresses for f in self._lines.frames(a - 1)]
            self._chains[key] = tuple(f for f in places if not _is_ours(f.file))
        return self._chains[key]


def _is_ours(file: str) -> bool:
    return file == "<simt>" or (file.rsplit("/", 1)[-1].startswith("prelude") and file.endswith(".h"))
