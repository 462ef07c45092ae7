"""Whether an output would be written where a tensor is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cki.tensor import TensorView

#: Of one rule, whose verdicts are remembered.
_DISTANCES = 256


class _Memory:
    """A strided view for NumPy's overlap solver.  Only addresses are compared; nothing is read."""

    def __init__(self, view: TensorView, ptr: int) -> None:
        itemsize = view.dtype.itemsize
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{itemsize}", "shape": view.shape, "data": (ptr, False),
            "strides": tuple(stride * itemsize for stride in view.strides),
        }  # fmt: skip


@dataclass(frozen=True)
class OverlapRule:
    """An output and another tensor of one problem: by name, position among the call's pointers, and view.

    may_coincide: they may be one and the same view (an operation that works in place).
    """

    output_name: str
    other_name: str
    output: int
    other: int
    output_view: TensorView
    other_view: TensorView
    may_coincide: bool
    output_bytes: tuple[int, int]
    other_bytes: tuple[int, int]
    #: Distance of the addresses -> whether elements are shared, where the ranges overlap (interleaved caches).
    known: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)

    def broken(self, pointers: list[int]) -> bool:
        """Whether the two share an element at these addresses."""
        output, other = pointers[self.output], pointers[self.other]
        low, high = self.output_bytes
        other_low, other_high = self.other_bytes
        if output + high <= other + other_low or other + other_high <= output + low:
            return False
        if self.may_coincide and output == other:
            return False
        distance = other - output
        found = self.known.get(distance)
        if found is None:
            if len(self.known) >= _DISTANCES:
                self.known.clear()
            found = self.known[distance] = self._share_elements(output, other)
        return found

    def _share_elements(self, output: int, other: int) -> bool:
        first, second = (
            np.asarray(_Memory(self.output_view, output)),
            np.asarray(_Memory(self.other_view, other)),
        )
        try:
            return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
        except (
            np.exceptions.TooHardError
        ):  # interleaved beyond the solver's patience: strides say nothing against it
            return False


def overlap_rule(
    names: tuple[str, str], positions: tuple[int, int], views: tuple[TensorView, TensorView], in_place: bool
) -> OverlapRule:
    """The rule for (output, other tensor)."""
    output_view, other_view = views
    same_layout = (output_view.shape, output_view.strides, output_view.dtype) == (
        other_view.shape, other_view.strides, other_view.dtype,
    )  # fmt: skip
    return OverlapRule(
        *names, *positions, *views, in_place and same_layout, byte_range(output_view), byte_range(other_view)
    )


def byte_range(view: TensorView) -> tuple[int, int]:
    """Bytes that a view spans around its first element: (lowest, one past the highest)."""
    if view.size == 0:
        return 0, 0
    reach = [stride * (extent - 1) * view.dtype.itemsize for stride, extent in zip(view.strides, view.shape)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + view.dtype.itemsize
