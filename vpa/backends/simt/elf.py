"""Reads the little of a 64-bit little-endian ELF file that the executor needs: sections, segments and symbols."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

STT_OBJECT, STT_FUNC, STT_TLS = 1, 2, 6
_PT_LOAD, _PT_RELRO = 1, 0x6474E552
_WRITABLE, _COMPRESSED = 1, 0x800


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int

    @property
    def writable(self) -> bool:
        return bool(self.flags & _WRITABLE)


@dataclass(frozen=True)
class Symbol:
    """`value` is relative to the image (to the thread-local block for STT_TLS); `section` is None where undefined."""

    name: str
    value: int
    size: int
    kind: int
    section: Section | None

    @property
    def short_name(self) -> str:
        """The source's name: `s` for `_ZZ4scanE1s` (a function's static); the name itself where it is not mangled."""
        # A mangled name ends in <length><name>; a nested one then in E, a static's second namesake in _0.
        mangled = re.sub(r"(_\d+_?|E)$", "", self.name)
        if mangled.startswith("_Z"):
            for match in re.finditer(r"(?<!\d)\d+", mangled):
                if match.end() + int(match[0]) == len(mangled):
                    return mangled[match.end() :]
        return self.name

    @property
    def function(self) -> str | None:
        """The `extern "C"` function whose static this is: `scan` for `_ZZ4scanE1s`; None for any other."""
        match = re.match(r"_ZZ(\d+)", self.name)
        return self.name[match.end() :][: int(match[1])] if match else None


class ElfFile:
    """`path`: a shared object or an object file. Raises ValueError for anything but 64-bit little-endian ELF."""

    def __init__(self, path: str | Path):
        self.data = Path(path).read_bytes()
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")

    @cached_property
    def sections(self) -> list[Section]:
        offset, entry, count, names = (
            *struct.unpack_from("<Q", self.data, 40),
            *struct.unpack_from("<HHH", self.data, 58),
        )
        raw = [struct.unpack_from("<IIQQQQIIQQ", self.data, offset + i * entry) for i in range(count)]
        table = raw[names][4]
        return [Section(self._string(table + r[0]), r[1], r[2], r[3], r[4], r[5]) for r in raw]

    def _string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode("utf-8", "replace")

    def section_bytes(self, name: str) -> bytes:
        """The section's contents, decompressed; empty where there is no such section."""
        for section in self.sections:
            if section.name == name:
                data = self.data[section.offset : section.offset + section.size]
                return zlib.decompress(data[24:]) if section.flags & _COMPRESSED else data
        return b""

    @cached_property
    def symbols(self) -> list[Symbol]:
        symtab = next((s for s in self.sections if s.name == ".symtab"), None)
        strtab = next((s for s in self.sections if s.name == ".strtab"), None)
        if symtab is None or strtab is None:
            return []
        table = self.data[symtab.offset : symtab.offset + symtab.size]
        result = []
        for name, info, _, shndx, value, size in struct.iter_unpack("<IBBHQQ", table):
            section = self.sections[shndx] if 0 < shndx < len(self.sections) else None
            result.append(Symbol(self._string(strtab.offset + name), value, size, info & 15, section))
        return result

    @cached_property
    def read_only_range(self) -> tuple[int, int]:
        """[low, high) of what is mapped read-only, relocated constants included, relative to the image."""
        offset, entry, count = *struct.unpack_from("<Q", self.data, 32), *struct.unpack_from("<HH", self.data, 54)
        low, high = 0, 0
        for i in range(count):
            kind, flags, _, address, _, _, size, _ = struct.unpack_from("<IIQQQQQQ", self.data, offset + i * entry)
            if (kind == _PT_LOAD and not flags & 2) or kind == _PT_RELRO:
                high = max(high, address + size)
        return low, high
