"""Reads the outside of a GGUF file: its metadata, and where each tensor lies.

The format (ggml's gguf.md): "GGUF", version, number of tensors and of keys; the keys with typed values; name,
shape, type and offset of each tensor; from the next multiple of `general.alignment` on, the numbers.  All is
little-endian, strings have a 64-bit length before them.

The `gguf` package reads these files too.  It makes an array of every word of the vocabulary, which takes 3 s for 49 152
words (here 50 ms), and a file that is cut short ends in an error about array shapes.  Tests compare both readers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cki.engine.gguf_types import OTHER_TYPES, TYPES, BlockType
from cki.engine.mapped_file import MappedFile
from cki.engine.quantized import Array
from cki.errors import InvalidArgumentError, UnsupportedError
from cki.problems import Problems

_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_AXES = 4  # the most that ggml has
_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    """shape: row-major, as NumPy has it (the file lists the axes in the other order).  offset: in the file."""

    file: MappedFile
    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.name} of {self.file.path.name}"

    def blocks(self) -> Array:
        """The bytes of the tensor's blocks: u8 [rows, bytes of a row], a view of the file."""
        row = self.type.row_bytes(self.shape[-1])
        count = math.prod(self.shape[:-1])
        return self.file.array(np.uint8, count * row, self.offset).reshape(count, row)


class Gguf(NamedTuple):
    """metadata: by key; values of arrays are lists of str, or NumPy arrays."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> Gguf:
    """The metadata and the places of all tensors.

    Raises InvalidArgumentError for a file that is no GGUF or is cut short, with every tensor that is wrong;
    UnsupportedError for tensors of a type that the engine does not read.
    """
    file = MappedFile(path)
    reader = _Reader(file)
    if reader.take(4) != b"GGUF":
        raise InvalidArgumentError(f"{path} is no GGUF file: it begins with {bytes(file.bytes[:4])!r}")
    version = reader.number("<I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        raise UnsupportedError(
            f"{path} is GGUF " + ("of big-endian machines" if swapped else f"version {version}, not 2 or 3")
        )
    count, keys = reader.number("<Q"), reader.number("<Q")
    metadata: dict[str, Any] = {}
    for number in range(keys):
        key = reader.string(f"the name of key {number} of {keys}")
        metadata[key] = reader.value(reader.number("<I", key), key)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise InvalidArgumentError(f"{path} has general.alignment {alignment!r}, not a multiple of 8")
    entries = [_entry(reader, f"tensor {number} of {count}") for number in range(count)]
    start = -(-reader.position // alignment) * alignment
    return Gguf(path, metadata, _tensors(file, entries, start))


class _Reader:
    """Takes one thing after the other from a file, and tells which one lies beyond its end."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self.position = 0

    def take(self, size: int, what: str = "the header") -> bytes:
        begin, end = self.position, self.position + size
        if end > self._file.size:
            raise InvalidArgumentError(
                f"{self._file.path} is cut short or wrong: {what} needs the bytes {begin} to {end} of {self._file.size}"
            )
        self.position = end
        return self._file.bytes[begin:end]

    def number(self, form: str, what: str = "the header") -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form), what))[0])

    def string(self, what: str) -> str:
        return self.take(self.number("<Q", what), what).decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        """A key's value: int, float, bool, str, list of str, or NumPy array."""
        if kind == _STRING:
            return self.string(key)
        if kind in _NUMBERS:
            return np.frombuffer(self.take(np.dtype(_NUMBERS[kind]).itemsize, key), _NUMBERS[kind])[0].item()
        if kind != _ARRAY:
            raise self._bad(f"{key} is of unknown type {kind}")
        kind, count = self.number("<I", key), self.number("<Q", key)
        if kind == _STRING:
            return self._strings(count, key)
        if kind not in _NUMBERS:
            raise self._bad(f"{key} is an array of type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype)

    def _strings(self, count: int, key: str) -> list[str]:
        """A vocabulary has 10**5 of them, so each is taken in few steps."""
        data, size, position = self._file.bytes, self._file.size, self.position
        length_of: Callable[..., tuple[int, ...]] = struct.Struct("<Q").unpack_from
        found = []
        for number in range(count):
            if position + 8 > size or position + 8 + length_of(data, position)[0] > size:
                self.position = position
                self.string(f"{key}[{number}] of {count}")
            begin = position + 8
            position = begin + length_of(data, position)[0]
            found.append(data[begin:position].decode("utf-8", "replace"))
        self.position = position
        return found

    def _bad(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._file.path} is wrong: {problem} (at byte {self.position})")


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _entry(reader: _Reader, what: str) -> _Entry:
    name = reader.string(what)
    axes = reader.number("<I", name)
    if not 1 <= axes <= _AXES:
        raise InvalidArgumentError(f"{name} ({what}) has {axes} axes, not 1 to {_AXES}")
    shape = tuple(reader.number("<Q", name) for _ in range(axes))[::-1]
    return _Entry(name, shape, reader.number("<I", name), reader.number("<Q", name))


def _tensors(file: MappedFile, entries: list[_Entry], start: int) -> dict[str, GgufTensor]:
    problems = Problems(f"{file.path} is wrong or cut short")
    unsupported, tensors = [], {}
    for name, shape, number, offset in entries:
        kind = TYPES.get(number)
        if kind is None:
            unsupported.append(f"{name} {shape} is {OTHER_TYPES.get(number, f'of unknown type {number}')}")
            continue
        if name in tensors:
            problems.note(f"{name} is there twice")
        if shape[-1] % kind.elements:
            problems.note(f"{name} {shape} {kind.name} has rows that are no multiple of {kind.elements}")
            continue
        end = start + offset + math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
        if end > file.size:
            problems.note(f"{name} {shape} {kind.name} ends at byte {end}, the file at {file.size}")
            continue
        tensors[name] = GgufTensor(file, name, kind, shape, start + offset)
    problems.refuse()
    if unsupported:
        read = ", ".join(kind.name for kind in TYPES.values())
        more = [f"... and {len(unsupported) - 8} more"] if len(unsupported) > 8 else []
        raise UnsupportedError(
            f"{file.path} has tensors of types that the engine does not read", unsupported[:8] + more,
            f"a file of {read} (llama-quantize --allow-requantize converts)",
        )  # fmt: skip
    return tensors
