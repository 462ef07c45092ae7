"""TensorView: what CKI knows of a tensor of any framework.  Made once, at the edge of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from cki.dtypes import DType


class DeviceId(NamedTuple):
    """Where memory lies: ("cuda", index) or ("cpu", 0)."""

    kind: str
    index: int = 0  # type: ignore[assignment]  # shadows tuple.index on purpose

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a shape."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides (in elements) are row-major and dense; those of axes of extent 1 do not matter."""
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent != 1 and stride != expected:
            return 0 in shape
        expected *= extent
    return True


@dataclass(slots=True)
class TensorView:
    """A borrowed view of a tensor.

    ptr: address of element [0, 0, ...] (byte offsets included; 0 for an empty tensor).
    strides: in elements.  owner: the framework's tensor, kept so that the memory lives as long as the view.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: DeviceId
    readonly: bool = False
    owner: object = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        """Row-major and dense (strides of axes of extent 1 do not matter)."""
        return is_row_major(self.shape, self.strides)
