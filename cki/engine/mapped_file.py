"""A file in memory by `mmap`: its pages come from the disk when they are read, and go when memory is short."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from cki.engine.quantized import Array
from cki.errors import InvalidArgumentError


class MappedFile:
    """The bytes of a file.  Arrays made of it keep it mapped; it must not be cut short while they live."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidArgumentError for a file that is empty or cannot be read."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        except OSError as error:
            raise InvalidArgumentError(f"{path} cannot be read: {error.strerror or error}") from error
        if not self.size:
            raise InvalidArgumentError(f"{path} is empty")

    def array(self, dtype: Any, count: int, offset: int) -> Array:
        """`count` elements from byte `offset` on: a view that cannot be written."""
        return np.frombuffer(self.bytes, dtype, count, offset)
