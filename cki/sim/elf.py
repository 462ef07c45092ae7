"""Just enough of ELF to do without binutils: sections, symbols, the thread-local segment (64-bit, little-endian)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL_TABLE, _TLS_SYMBOL, _UNDEFINED, _TLS_SEGMENT, _NO_BITS = 2, 6, 0, 7, 8
_SIZE_FIELD = 32  # of a section header, in bytes


@dataclass(frozen=True)
class Section:
    """A section of the file: its name, type, bytes in the file, link to another section, and where its header lies."""

    name: str
    type: int
    offset: int
    size: int
    link: int
    header: int


@dataclass(frozen=True)
class Symbol:
    """A symbol; a thread-local one's value is its offset in the thread-local segment."""

    name: str
    value: int
    size: int
    is_thread_local: bool
    is_defined: bool


class ElfFile:
    """A relocatable object or shared object, read whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path.read_bytes()
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        (self._segments_at, sections_at) = struct.unpack_from("<QQ", self.data, 32)
        self._segment_count, section_size, section_count, names_index = struct.unpack_from(
            "<HHHH", self.data, 56
        )
        headers = [sections_at + i * section_size for i in range(section_count)]
        raw = [_SECTION.unpack_from(self.data, header) for header in headers]
        names_at = raw[names_index][4] if raw else 0
        self.sections = [
            Section(self._string(names_at + name), type_, offset, size, link, header)
            for header, (name, type_, _, _, offset, size, link, _, _, _) in zip(headers, raw)
        ]

    def _string(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def section(self, name: str) -> bytes:
        """The bytes of a section; empty when there is none."""
        for section in self.sections:
            if section.name == name:
                return self.data[section.offset : section.offset + section.size]
        return b""

    def lengthen(self, prefix: str, extra: int) -> None:
        """Make the sections without bytes in the file (.bss, .tbss) whose name begins so longer, in the file itself."""
        data = bytearray(self.data)
        for section in self.sections:
            if section.name.startswith(prefix) and section.type == _NO_BITS:
                struct.pack_into("<Q", data, section.header + _SIZE_FIELD, section.size + extra)
        self.path.write_bytes(data)

    def symbols(self) -> list[Symbol]:
        """The full symbol table (.symtab)."""
        found = []
        for section in self.sections:
            if section.type != _SYMBOL_TABLE:
                continue
            strings = self.sections[section.link].offset
            for at in range(section.offset, section.offset + section.size, _SYMBOL.size):
                name, info, _, index, value, size = _SYMBOL.unpack_from(self.data, at)
                found.append(
                    Symbol(
                        self._string(strings + name),
                        value,
                        size,
                        info & 15 == _TLS_SYMBOL,
                        index != _UNDEFINED,
                    )
                )
        return found

    def thread_local_size(self) -> int:
        """Bytes of the thread-local segment in memory."""
        for i in range(self._segment_count):
            segment = _SEGMENT.unpack_from(self.data, self._segments_at + i * _SEGMENT.size)
            if segment[0] == _TLS_SEGMENT:
                return int(segment[6])
        return 0


#: Gaps behind static `__shared__` arrays in instrumented kernels, so that an overflow of one does not meet the next.
#: With these flags each array (a thread-local variable) has a section of its own, which holds no bytes in the file, and
#: making it longer in the object file's section header is all it takes.  The linker then places the next array behind
#: the gap, and the runtime knows where the arrays end (`cki_sim_shared_array`).
RED_ZONE_FLAGS = ("-fdata-sections",)
#: Of each gap.  A multiple of every alignment that an array can ask for, so that all else stays as without gaps.
RED_ZONE_BYTES = 1024


def add_red_zones(object_file: Path) -> None:
    """Put a gap behind each static shared array of a relocatable object."""
    ElfFile(object_file).lengthen(".tbss.", RED_ZONE_BYTES)
