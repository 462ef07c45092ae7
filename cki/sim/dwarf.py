"""From a code address to file and line, with the calls that were inlined there: DWARF 4 read without binutils.

Only what the reports need: the line table of .debug_line, and the tree of inlined calls of .debug_info
(DW_TAG_subprogram, DW_TAG_inlined_subroutine).  Kernels are compiled with `-g1 -gdwarf-4`.  Specification: DWARF
Debugging Information Format, version 4.
"""

from __future__ import annotations

import bisect
import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cki.sim.elf import ElfFile

Frame = tuple[str, int]  # file, line

_SUBPROGRAM, _INLINED = 0x2E, 0x1D
_LOW_PC, _HIGH_PC, _RANGES, _STMT_LIST, _CALL_FILE, _CALL_LINE = 0x11, 0x12, 0x55, 0x10, 0x58, 0x59
_ADDRESS_FORM = 0x01
_FIXED_FORMS = {
    0x0B: 1, 0x11: 1, 0x0C: 1, 0x05: 2, 0x12: 2, 0x06: 4, 0x13: 4, 0x0E: 4, 0x17: 4, 0x07: 8, 0x14: 8, 0x20: 8,
}  # fmt: skip
_ULEB_FORMS, _SLEB, _STRING, _FLAG_PRESENT = (0x0F, 0x15), 0x0D, 0x08, 0x19
_BLOCK_SIZES = {0x0A: 1, 0x03: 2, 0x04: 4}
_ULEB_BLOCKS = (0x09, 0x18)


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def unsigned(self, size: int) -> int:
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) & 1 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text


# ---- .debug_line ----


@dataclass
class _Program:
    """One unit's line program: its files, and rows (address, file, line, ends_sequence)."""

    files: list[str]
    rows: list[tuple[int, int, int, bool]] = field(default_factory=list)


def _read_line_program(data: bytes, at: int) -> tuple[_Program, int]:
    r = _Reader(data, at)
    end = r.unsigned(4) + r.at
    version = r.unsigned(2)
    if version not in (2, 3, 4):
        raise ValueError(f"line table of DWARF version {version}")
    body = r.unsigned(4) + r.at
    minimum_length = r.unsigned(1)
    if version == 4:
        r.unsigned(1)
    r.unsigned(1)
    (line_base,) = struct.unpack_from("<b", data, r.at)
    r.at += 1
    line_range, opcode_base = r.unsigned(1), r.unsigned(1)
    lengths = [0] + [r.unsigned(1) for _ in range(opcode_base - 1)]
    directories = [""]
    while text := r.string():
        directories.append(text)
    files = [""]
    while name := r.string():
        directory = directories[r.uleb()]
        r.uleb(), r.uleb()
        files.append(f"{directory}/{name}" if directory else name)
    program = _Program(files)
    r.at = body
    address, file, line = 0, 1, 1
    while r.at < end:
        opcode = r.unsigned(1)
        if opcode >= opcode_base:
            advance, step = divmod(opcode - opcode_base, line_range)
            address += advance * minimum_length
            line += line_base + step
            program.rows.append((address, file, line, False))
        elif opcode == 0:
            length = r.uleb()
            after = r.at + length
            extended = r.unsigned(1)
            if extended == 1:
                program.rows.append((address, file, line, True))
                address, file, line = 0, 1, 1
            elif extended == 2:
                address = r.unsigned(8)
            r.at = after
        elif opcode == 1:
            program.rows.append((address, file, line, False))
        elif opcode == 2:
            address += r.uleb() * minimum_length
        elif opcode == 3:
            line += r.sleb()
        elif opcode == 4:
            file = r.uleb()
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * minimum_length
        elif opcode == 9:
            address += r.unsigned(2)
        else:
            for _ in range(lengths[opcode]):
                r.uleb()
    return program, end


# ---- .debug_info ----


@dataclass
class _Call:
    """A function's code, or that of a call inlined into it (file 0: not inlined)."""

    ranges: list[tuple[int, int]]
    file: int
    line: int
    calls: list[_Call] = field(default_factory=list)

    def contains(self, address: int) -> bool:
        return any(low <= address < high for low, high in self.ranges)


_Abbreviation = tuple[int, bool, list[tuple[int, int]]]  # tag, has children, (attribute, form)


def _read_abbreviations(data: bytes, at: int) -> dict[int, _Abbreviation]:
    r = _Reader(data, at)
    found: dict[int, _Abbreviation] = {}
    while code := r.uleb():
        tag, has_children = r.uleb(), bool(r.unsigned(1))
        attributes = []
        while (pair := (r.uleb(), r.uleb())) != (0, 0):
            attributes.append(pair)
        found[code] = (tag, has_children, attributes)
    return found


def _read_form(r: _Reader, form: int) -> int:
    """The value of an attribute when it is a number, else 0."""
    if form == _ADDRESS_FORM:
        return r.unsigned(8)
    if form in _FIXED_FORMS:
        return r.unsigned(_FIXED_FORMS[form])
    if form in _ULEB_FORMS:
        return r.uleb()
    if form == _SLEB:
        return r.sleb()
    if form == _STRING:
        r.string()
    elif form in _BLOCK_SIZES:
        length = r.unsigned(_BLOCK_SIZES[form])
        r.at += length
    elif form in _ULEB_BLOCKS:
        length = r.uleb()
        r.at += length
    elif form != _FLAG_PRESENT:
        raise ValueError(f"DWARF form 0x{form:x}")
    return 0


class LineTable:
    """The line information of one shared object."""

    def __init__(self, path: Path) -> None:
        elf = ElfFile(path)
        self._ranges = elf.section(".debug_ranges")
        self._programs: dict[int, _Program] = {}
        self._rows: list[tuple[int, str, int, bool]] = []
        self._functions: list[tuple[_Call, list[str]]] = []
        lines, at = elf.section(".debug_line"), 0
        while at < len(lines):
            program, end = _read_line_program(lines, at)
            self._programs[at] = program
            self._rows += [(a, program.files[f], line, last) for a, f, line, last in program.rows]
            at = end
        self._rows.sort(key=lambda row: (row[0], not row[3]))
        self._starts = [row[0] for row in self._rows]
        for unit in _units(elf.section(".debug_info")):
            self._read_unit(unit, elf.section(".debug_abbrev"))

    def frames(self, address: int) -> list[Frame]:
        """(file, line) of the address, then of each call that was inlined around it, innermost first."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or self._rows[index][3]:
            return []
        _, file, line, _ = self._rows[index]
        inlined: list[Frame] = []
        for function, files in self._functions:
            if not function.contains(address):
                continue
            call: _Call | None = function
            while call:
                call = next((inner for inner in call.calls if inner.contains(address)), None)
                if call:
                    inlined.append((files[call.file], call.line))
            break
        return [(file, line), *reversed(inlined)]

    def _read_unit(self, unit: _Reader, abbreviations_section: bytes) -> None:
        end = unit.unsigned(4) + unit.at
        if (version := unit.unsigned(2)) != 4:
            raise ValueError(f"DWARF version {version}")
        abbreviations = _read_abbreviations(abbreviations_section, unit.unsigned(4))
        unit.unsigned(1)
        base, files = 0, [""]
        open_entries: list[_Call | None] = []
        while unit.at < end:
            code = unit.uleb()
            if code == 0:
                if open_entries:
                    open_entries.pop()
                continue
            tag, has_children, attributes = abbreviations[code]
            values = {name: (_read_form(unit, form), form) for name, form in attributes}
            if _STMT_LIST in values:  # the unit itself
                base = values.get(_LOW_PC, (0, 0))[0]
                files = self._programs[values[_STMT_LIST][0]].files
            call = None
            if tag in (_SUBPROGRAM, _INLINED):
                file, line = values.get(_CALL_FILE, (0, 0))[0], values.get(_CALL_LINE, (0, 0))[0]
                call = _Call(self._code_ranges(values, base), file, line)
                parent = next((c for c in reversed(open_entries) if c), None)
                if tag == _SUBPROGRAM:
                    self._functions.append((call, files))
                elif parent:
                    parent.calls.append(call)
            if has_children:
                open_entries.append(call)

    def _code_ranges(self, values: dict[int, tuple[int, int]], base: int) -> list[tuple[int, int]]:
        if _RANGES in values:
            r = _Reader(self._ranges, values[_RANGES][0])
            ranges = []
            while (pair := (r.unsigned(8), r.unsigned(8))) != (0, 0):
                if pair[0] == 2**64 - 1:
                    base = pair[1]
                else:
                    ranges.append((base + pair[0], base + pair[1]))
            return ranges
        if _LOW_PC not in values or _HIGH_PC not in values:
            return []
        low, (high, form) = values[_LOW_PC][0], values[_HIGH_PC]
        return [(low, high if form == _ADDRESS_FORM else low + high)]


def _units(data: bytes) -> Iterator[_Reader]:
    at = 0
    while at < len(data):
        yield _Reader(data, at)
        at += int.from_bytes(data[at : at + 4], "little") + 4


_SITE = re.compile(r" @(\S+)\+(0x[0-9a-f]+)")

#: Parts of the simulation itself: a call inlined from there is shown as its caller in the kernel.
_OWN = ("cuda_src/sim/", "cki_sim_entry")


@functools.lru_cache(maxsize=32)
def _lines(module: str) -> LineTable:
    return LineTable(Path(module))


def _is_own(file: str) -> bool:
    return any(part in file for part in _OWN)


def _place(match: re.Match[str]) -> str:
    try:
        frames = _lines(match[1]).frames(int(match[2], 16))
    except (OSError, ValueError, LookupError):
        return match[0]
    shown = [frame for frame in frames if not _is_own(frame[0])] or frames
    if not shown:
        return match[0]
    return " at " + ", inlined at ".join(f"{Path(file).name}:{line}" for file, line in shown)


def resolve(text: str) -> str:
    """The report with ` @module+address` replaced by ` at file:line, inlined at file:line`, innermost first."""
    return _SITE.sub(_place, text)
