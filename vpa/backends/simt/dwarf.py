"""Addresses to source lines: reads .debug_line and the inlined calls of .debug_info (DWARF 4, as built)."""

from __future__ import annotations

import bisect
import contextlib
import struct
from dataclasses import dataclass, field

from .elf import ElfFile
from .errors import Frame

_INLINED, _SUBPROGRAM, _UNIT = 0x1D, 0x2E, 0x11
_NAME, _STMT_LIST, _LOW_PC, _HIGH_PC, _ORIGIN, _SPECIFICATION, _RANGES = 0x03, 0x10, 0x11, 0x12, 0x31, 0x47, 0x55
_CALL_COLUMN, _CALL_FILE, _CALL_LINE = 0x57, 0x58, 0x59


class _Reader:
    def __init__(self, data: bytes, position: int = 0):
        self.data, self.position = data, position

    def number(self, size: int, signed: bool = False) -> int:
        self.position += size
        return int.from_bytes(self.data[self.position - size : self.position], "little", signed=signed)

    def uleb(self) -> int:
        result = shift = 0
        while True:
            byte = self.data[self.position]
            self.position += 1
            result |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return result

    def sleb(self) -> int:
        start = self.position
        value = self.uleb()
        bits = 7 * (self.position - start)
        return value - (1 << bits) if self.data[self.position - 1] & 64 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.position)
        text = self.data[self.position : end].decode("utf-8", "replace")
        self.position = end + 1
        return text


@dataclass
class _Scope:
    """A function or one inlined copy of one: the addresses it covers and where it was called from."""

    inlined: bool
    depth: int
    ranges: list[tuple[int, int]]
    function: int  # offset of the entry that has (or leads to) the name
    call_file: int = 0
    call_line: int = 0
    call_column: int = 0
    files: list[str] = field(default_factory=list)


class LineTable:
    """Source places of a shared object's code; empty where it has no DWARF 4."""

    def __init__(self, elf: ElfFile):
        self._strings = elf.section_bytes(".debug_str")
        self._line_section = elf.section_bytes(".debug_line")
        self._range_section = elf.section_bytes(".debug_ranges")
        self._rows: list[tuple[int, int, int, int, bool]] = []  # address, file, line, column, end of sequence
        self._row_files: list[list[str]] = []
        self._names: dict[int, tuple[str, int]] = {}  # entry offset -> name, offset of the entry to look at next
        self._scopes: list[_Scope] = []
        # An unknown producer: faults are then reported without lines rather than not at all.
        with contextlib.suppress(IndexError, ValueError, KeyError, struct.error):
            self._read_info(elf.section_bytes(".debug_info"), elf.section_bytes(".debug_abbrev"))
        order = sorted(range(len(self._rows)), key=lambda i: (self._rows[i][0], not self._rows[i][4]))
        self._rows = [self._rows[i] for i in order]
        self._row_files = [self._row_files[i] for i in order]
        self._addresses = [row[0] for row in self._rows]

    def frames(self, address: int) -> tuple[Frame, ...]:
        """The places that `address` (relative to the image) belongs to: innermost inlined function first."""
        i = bisect.bisect_right(self._addresses, address) - 1
        while i >= 0 and not self._rows[i][2] and not self._rows[i][4]:
            i -= 1  # line 0: code that belongs to no one line; the last that does is the best answer
        if i < 0 or self._rows[i][4]:
            return ()
        _, file, line, column, _ = self._rows[i]
        place = (_pick(self._row_files[i], file), line, column)
        result = []
        scopes = [s for s in self._scopes if any(low <= address < high for low, high in s.ranges)]
        for scope in sorted(scopes, key=lambda s: -s.depth):
            result.append(Frame(place[0], place[1], self._function_name(scope.function), place[2]))
            if not scope.inlined:
                return tuple(result)
            place = (_pick(scope.files, scope.call_file), scope.call_line, scope.call_column)
        result.append(Frame(place[0], place[1], "", place[2]))
        return tuple(result)

    def _function_name(self, offset: int) -> str:
        for _ in range(4):
            name, after = self._names.get(offset, ("", 0))
            if name or not after:
                return name
            offset = after
        return ""

    # --- .debug_info -------------------------------------------------------------------------------------------------

    def _read_info(self, info: bytes, abbreviations: bytes) -> None:
        position = 0
        while position < len(info):
            r = _Reader(info, position)
            length, version, abbrev, address_size = r.number(4), r.number(2), r.number(4), r.number(1)
            if version != 4 or address_size != 8:
                raise ValueError("not DWARF 4")
            self._read_unit(r, position, position + 4 + length, _abbreviations(abbreviations, abbrev))
            position += 4 + length

    def _read_unit(self, r: _Reader, unit: int, end: int, abbreviations: dict) -> None:
        depth, base, files = 0, 0, [""]
        while r.position < end:
            offset = r.position
            code = r.uleb()
            if not code:
                depth -= 1
                continue
            tag, children, specification = abbreviations[code]
            values = {attribute: self._value(r, form, unit) for attribute, form in specification}
            if tag == _UNIT:
                base = values.get(_LOW_PC, 0)
                if _STMT_LIST in values:
                    files = self._read_lines(values[_STMT_LIST])
            elif tag in (_SUBPROGRAM, _INLINED):
                origin = values.get(_ORIGIN, values.get(_SPECIFICATION, 0))
                self._names[offset] = (values.get(_NAME, ""), origin)
                ranges = self._ranges(values, base)
                if ranges:
                    call = values.get(_CALL_FILE, 0), values.get(_CALL_LINE, 0), values.get(_CALL_COLUMN, 0)
                    function = origin if tag == _INLINED else offset
                    self._scopes.append(_Scope(tag == _INLINED, depth, ranges, function, *call, files))
            depth += children

    def _ranges(self, values: dict, base: int) -> list[tuple[int, int]]:
        if _LOW_PC in values and _HIGH_PC in values:
            low = values[_LOW_PC]
            return [(low, low + values[_HIGH_PC])]
        if _RANGES not in values:
            return []
        result, position = [], values[_RANGES]
        while True:
            low, high = struct.unpack_from("<QQ", self._range_section, position)
            position += 16
            if low == high == 0:
                return result
            if low == 0xFFFFFFFFFFFFFFFF:
                base = high
            else:
                result.append((base + low, base + high))

    def _value(self, r: _Reader, form: int, unit: int):
        if form in _FIXED:
            return r.number(_FIXED[form])
        if form == 0x08:
            return r.string()
        if form == 0x0E:
            return _Reader(self._strings, r.number(4)).string()
        if form in (0x11, 0x12, 0x13, 0x14):  # references within the unit
            return unit + r.number({0x11: 1, 0x12: 2, 0x13: 4, 0x14: 8}[form])
        if form == 0x15:
            return unit + r.uleb()
        if form == 0x0D:
            return r.sleb()
        if form == 0x0F:
            return r.uleb()
        if form == 0x19:
            return 1
        length = r.number(_BLOCKS[form]) if form in _BLOCKS else r.uleb()  # blocks and expressions
        r.position += length
        return None

    # --- .debug_line -------------------------------------------------------------------------------------------------

    def _read_lines(self, offset: int) -> list[str]:
        r = _Reader(self._line_section, offset)
        end = r.number(4) + r.position
        version, header = r.number(2), r.number(4)
        program = r.position + header
        if version != 4:
            raise ValueError("not DWARF 4")
        step, _, _, line_base, line_range, opcode_base = (
            r.number(1),
            r.number(1),
            r.number(1),
            r.number(1, signed=True),
            r.number(1),
            r.number(1),
        )
        operands = [r.number(1) for _ in range(opcode_base - 1)]
        folders, files = [""], [""]
        while self._line_section[r.position]:
            folders.append(r.string())
        r.position += 1
        while self._line_section[r.position]:
            name, folder = r.string(), r.uleb()
            r.uleb(), r.uleb()
            files.append(f"{folders[folder]}/{name}" if folders[folder] else name)
        r.position = program
        address, file, line, column = 0, 1, 1, 0

        def row(last: bool = False) -> None:
            self._rows.append((address, file, line, column, last))
            self._row_files.append(files)

        while r.position < end:
            code = r.number(1)
            if code >= opcode_base:
                address += (code - opcode_base) // line_range * step
                line += line_base + (code - opcode_base) % line_range
                row()
            elif code == 0:
                size = r.uleb()
                after = r.position + size
                extended = r.number(1)
                if extended == 1:
                    row(last=True)
                    address, file, line, column = 0, 1, 1, 0
                elif extended == 2:
                    address = r.number(size - 1)
                r.position = after
            elif code == 1:
                row()
            elif code == 2:
                address += r.uleb() * step
            elif code == 3:
                line += r.sleb()
            elif code == 4:
                file = r.uleb()
            elif code == 5:
                column = r.uleb()
            elif code == 8:
                address += (255 - opcode_base) // line_range * step
            elif code == 9:
                address += r.number(2)
            else:
                for _ in range(operands[code - 1]):
                    r.uleb()
        return files


_BLOCKS = {0x0A: 1, 0x03: 2, 0x04: 4}
_FIXED = {0x01: 8, 0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1, 0x10: 4, 0x17: 4, 0x20: 8}


def _pick(files: list[str], index: int) -> str:
    return files[index] if 0 <= index < len(files) else ""


def _abbreviations(section: bytes, offset: int) -> dict[int, tuple[int, int, list[tuple[int, int]]]]:
    result = {}
    r = _Reader(section, offset)
    while code := r.uleb():
        tag, children, specification = r.uleb(), r.number(1), []
        while True:
            attribute, form = r.uleb(), r.uleb()
            if not attribute and not form:
                break
            specification.append((attribute, form))
        result[code] = (tag, children, specification)
    return result
