"""Reads *.safetensors without a copy.

The format: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, begin and end in what follows),
the numbers, little-endian and row-major.  The `safetensors` package copies every tensor it gives out; here an array is
a view of the mapped file, so that the copy to the device is the only one, and what is wrong is told by tensor.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from cki import dtypes
from cki.dtypes import DType
from cki.engine.mapped_file import MappedFile
from cki.engine.quantized import Array
from cki.errors import InvalidArgumentError
from cki.problems import Problems

_DTYPES: dict[str, DType] = {
    "F64": dtypes.f64, "F32": dtypes.f32, "F16": dtypes.f16, "BF16": dtypes.bf16, "F8_E4M3": dtypes.e4m3,
    "F8_E5M2": dtypes.e5m2, "I64": dtypes.i64, "I32": dtypes.i32, "I16": dtypes.i16, "I8": dtypes.i8,
    "U64": dtypes.u64, "U32": dtypes.u32, "U16": dtypes.u16, "U8": dtypes.u8, "BOOL": dtypes.bool_,
}  # fmt: skip
#: The format's own limit.
_LONGEST_HEADER = 100_000_000


class RawTensor(NamedTuple):
    """A tensor of a file.  offset: of its first byte in the file."""

    file: MappedFile
    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.name} of {self.file.path.name}"

    def array(self) -> Array:
        """A view of the file."""
        return self.file.array(self.dtype.numpy, math.prod(self.shape), self.offset).reshape(self.shape)


def read_header(path: Path) -> dict[str, RawTensor]:
    """All tensors of a file, by name.

    Raises InvalidArgumentError if the file is no safetensors or is cut short, with every tensor that is wrong.
    """
    file = MappedFile(path)
    if file.size < 8:
        raise InvalidArgumentError(f"{path} is no safetensors file: it has {file.size} bytes")
    length = int.from_bytes(file.bytes[:8], "little")
    if length > min(_LONGEST_HEADER, file.size - 8):
        raise InvalidArgumentError(
            f"{path} is no safetensors file, or cut short: of {file.size} bytes its header would have {length}"
        )
    try:
        header = json.loads(file.bytes[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{path} is no safetensors file: its header is no JSON ({error})"
        ) from error
    if not isinstance(header, dict):
        raise InvalidArgumentError(f"{path} is no safetensors file: its header is a {type(header).__name__}")
    problems = Problems(f"{path} is wrong or cut short")
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensor = _tensor(file, name, entry, 8 + length, problems)
            if tensor is not None:
                tensors[name] = tensor
    problems.refuse()
    return tensors


def _tensor(file: MappedFile, name: str, entry: Any, start: int, problems: Problems) -> RawTensor | None:
    """start: of the numbers in the file."""
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        numbers = False
    if not numbers:
        problems.note(f"{name} has no dtype, shape and data_offsets, or impossible ones: {entry!r:.200}")
        return None
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        problems.note(f"{name} {shape} is of unknown dtype {kind!r}")
        return None
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        problems.note(
            f"{name} {shape} {dtype} needs {needed} bytes, its offsets {begin} to {end} hold {end - begin}"
        )
        return None
    if start + end > file.size:
        problems.note(f"{name} {shape} {dtype} ends at byte {start + end}, the file at {file.size}")
        return None
    return RawTensor(file, name, dtype, shape, start + begin)
