"""Kernel arguments that describe the rows of tensors (`cuda_src/common/row_address.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence

from cki.heuristics.rows import RowBatch
from cki.operand import Operand
from cki.plan import ArgumentValue, NullPointer


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
