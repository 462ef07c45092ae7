"""The rows of strided tensors: which leading axes walk evenly through memory, and what is left for a kernel to index.

A row operation treats the last axis of several tensors of equal leading shape.  Leading axes that lie evenly in all
tensors merge into one; the kernels (`cuda_src/common/row_address.cuh`) index one axis, or up to three.  More than three
(a tensor of five or more axes, permuted) are peeled off into launches of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cki.operand import Operand
from cki.plan import ArgumentValue, NullPointer

#: Rows of one launch: the kernels count them in 32 bits, with room for one step of the grid.
MAX_ROWS = 1 << 30
_KERNEL_AXES = 3


@dataclass(frozen=True)
class RowBatch:
    """Rows that one launch covers.

    extents: three, outermost first, padded with 1.  strides: for each tensor three, in elements.
    offsets: for each tensor, elements from its start to the first row.
    """

    extents: tuple[int, int, int]
    strides: tuple[tuple[int, int, int], ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.extents)

    @property
    def axes(self) -> int:
        """Axes that the kernel must index: 1 or 3."""
        return 1 if self.extents[:2] == (1, 1) else _KERNEL_AXES


def row_batches(tensors: Sequence[Operand]) -> list[RowBatch]:
    """The launches that cover all rows of tensors whose shapes agree but for the last axis; none without rows."""
    leading = tensors[0].shape[:-1]
    if 0 in leading:
        return []
    axes = _merged([(extent, tuple(t.strides[axis] for t in tensors)) for axis, extent in enumerate(leading)])
    peeled = sorted(range(len(axes)), key=lambda axis: axes[axis][0])[: max(0, len(axes) - _KERNEL_AXES)]
    outer = [axes[axis] for axis in peeled]
    inner = [axis for index, axis in enumerate(axes) if index not in peeled]
    batches: list[RowBatch] = []
    for indices in itertools.product(*(range(extent) for extent, _ in outer)):
        offsets = [sum(i * axis[1][t] for i, axis in zip(indices, outer)) for t in range(len(tensors))]
        batches += _launches(inner, offsets)
    return batches


Axis = tuple[int, tuple[int, ...]]  # extent; stride in each tensor


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """Axes of extent 1 dropped, neighbours merged where all tensors walk through both with one stride."""
    merged: list[Axis] = []
    for extent, strides in axes:
        if extent == 1:
            continue
        if merged and all(outer == extent * inner for outer, inner in zip(merged[-1][1], strides)):
            merged[-1] = (merged[-1][0] * extent, strides)
        else:
            merged.append((extent, strides))
    return merged


def _launches(axes: Sequence[Axis], offsets: Sequence[int]) -> Iterator[RowBatch]:
    """Up to three axes in launches of at most MAX_ROWS rows: the outermost is cut."""
    zeros = (0,) * len(offsets)
    padded = [(1, zeros)] * (_KERNEL_AXES - len(axes)) + list(axes)
    first = _KERNEL_AXES - max(1, len(axes))  # the outermost axis in use
    inner = math.prod(extent for extent, _ in padded[first + 1 :])
    extent, strides = padded[first]
    chunk = max(1, MAX_ROWS // inner)
    for start in range(0, extent, chunk):
        padded[first] = (min(chunk, extent - start), strides)
        yield RowBatch(
            (padded[0][0], padded[1][0], padded[2][0]),
            tuple((padded[0][1][t], padded[1][1][t], padded[2][1][t]) for t in range(len(offsets))),
            tuple(offset + start * strides[t] for t, offset in enumerate(offsets)),
        )


def row_arguments(
    tensors: Sequence[Operand | None], batch: RowBatch
) -> tuple[list[ArgumentValue], list[int]]:
    """Pointers to each tensor's first row, and its three row strides and column step: null and zeros where it is None.

    batch: of the tensors that are present, in the same order.
    """
    pointers: list[ArgumentValue] = []
    strides: list[int] = []
    present = 0
    for tensor in tensors:
        if tensor is None:
            pointers.append(NullPointer())
            strides += [0, 0, 0, 0]
            continue
        pointers.append(tensor.view(tensor.shape, tensor.strides, batch.offsets[present]))
        strides += [*batch.strides[present], last_stride(tensor)]
        present += 1
    return pointers, strides


def last_stride(tensor: Operand | None) -> int:
    """Elements between neighbours of the last axis; 0 for an absent tensor."""
    return 0 if tensor is None else tensor.strides[-1]


def is_stepped(*tensors: Operand | None) -> bool:
    """Whether elements of a row lie apart in any tensor."""
    return any(t is not None and t.shape[-1] > 1 and t.strides[-1] != 1 for t in tensors)
