"""Operand: a tensor as a planner sees it, by name instead of by address.

A planner is a pure function from operands to launch steps.  An operand stands for an input, an output or a
piece of workspace: its memory is `slot` (a name that gets an address at run time) plus a byte offset.  So the
plan of one operation can be reused inside a larger one (attention block, encoder layer) whose operands are
slices of its workspace, and plans are testable with no GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cki.dtypes import DType
from cki.tensor import contiguous_strides, is_row_major


@dataclass(frozen=True)
class Operand:
    """slot: name of the memory.  offset: bytes from its start.  strides: in elements.
    alignment: bytes (a power of two, at most 256) that divide the slot's run-time address."""

    slot: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    offset: int = 0
    alignment: int = 16

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, gaps between strides not counted."""
        return self.size * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        return is_row_major(self.shape, self.strides)

    def is_aligned(self, nbytes: int, *, axes_from: int = 0) -> bool:
        """Whether element addresses that differ in any axis but the last are multiples of `nbytes`:
        what a kernel needs to load the last axis in vectors of `nbytes`."""
        if self.alignment % nbytes or self.offset % nbytes:
            return False
        outer = zip(self.shape[axes_from:-1], self.strides[axes_from:-1])
        return all(extent == 1 or stride * self.dtype.itemsize % nbytes == 0 for extent, stride in outer)

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], offset_elements: int = 0) -> Operand:
        """Another shape over the same memory."""
        offset = self.offset + offset_elements * self.dtype.itemsize
        return replace(self, shape=shape, strides=strides, offset=offset)


def dense(
    slot: str, shape: tuple[int, ...], dtype: DType, *, offset: int = 0, alignment: int = 256
) -> Operand:
    """A row-major operand, as freshly allocated outputs and workspaces are."""
    return Operand(slot, shape, contiguous_strides(shape), dtype, offset, alignment)
