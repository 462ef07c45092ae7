"""OpSpec: one operation described once.

The table says what goes in, what comes out, what is checked and how it is planned.  The eager functions of
`cki.ops`, held plans, and every framework's registration are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.operand import Operand
from cki.ops.recent import Recent
from cki.plan import Plan


class Input(NamedTuple):
    """A tensor argument.

    written: the operation writes into it too (a cache), so a read-only one is refused, and memory shared with others.
    written_axes: it is written where it has so many axes (scales of tokens, not those of heads).
    """

    name: str
    optional: bool = False
    written: bool = False
    written_axes: int | None = None

    def is_written(self, axes: int) -> bool:
        """Whether the operation writes into a tensor of so many axes that is passed for it."""
        return self.written or axes == self.written_axes


class Attribute(NamedTuple):
    """A compile- or plan-time value; `type` is bool, int, float, str or tuple."""

    name: str
    type: type
    default: Any = None


class OutputSpec(NamedTuple):
    """Shape and element type of an output, always allocated row-major."""

    shape: tuple[int, ...]
    dtype: DType


@dataclass
class Problem:
    """The arguments of one call as a planner sees them: operands by name, attributes by name.

    `reject` collects violations: a check names every broken rule, not only the first.
    `hints` say what would pass.  has_wrong_type: one of the violations is of a dtype or type (`reject_type`).
    """

    operands: Mapping[str, Operand | None]
    attributes: Mapping[str, Any]
    violations: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    has_wrong_type: bool = False

    def __getitem__(self, name: str) -> Operand:
        """A tensor that is present."""
        operand = self.operands[name]
        assert operand is not None, f"{name} is absent"
        return operand

    def get(self, name: str) -> Operand | None:
        """A tensor, or None where an optional one was left out."""
        return self.operands.get(name)

    def attribute(self, name: str) -> Any:
        """An attribute's value."""
        return self.attributes[name]

    def reject(self, violation: str, hint: str = "") -> None:
        """Note one violated rule: `reject("weight has shape (3,), x's last axis is 4", "weight of shape (4,)")`."""
        if violation in self.violations:
            return
        self.violations.append(violation)
        if hint and hint not in self.hints:
            self.hints.append(hint)

    def reject_type(self, violation: str, hint: str = "") -> None:
        """Note a wrong dtype: `reject_type("x is i32", "x of f32")`.  The call ends in an InvalidTypeError."""
        self.reject(violation, hint)
        self.has_wrong_type = True

    def require_dtypes(self, allowed: tuple[DType, ...], wanted: str, *names: str) -> None:
        """Note each of those tensors, where given, that is of another dtype: needs no shape, so it comes before them.

        wanted: "int32 or int64".
        """
        for name in names:
            operand = self.get(name)
            if operand is not None and operand.dtype not in allowed:
                self.reject_type(f"{name} is {operand.dtype}", f"{name} of {wanted}")

    def require_like(self, like: Operand, *names: str, f32: bool = False) -> None:
        """Note each of those tensors, where given, that is not of another's type, one of numbers.  f32: or of f32.

        A type of that one's that is refused itself is no hint for others.
        """
        numbers = (dtypes.f32, dtypes.f16, dtypes.bf16)
        wanted = f"{like.dtype}" if like.dtype in numbers else f"{like.slot}'s type"
        if f32 and like.dtype != dtypes.f32:
            wanted = f"f32 or {wanted}"
        beside = "" if f32 else f", {like.slot} is {like.dtype}"
        for name in names:
            operand = self.get(name)
            if operand is None or (f32 and operand.dtype == dtypes.f32):
                continue
            if operand.dtype != like.dtype or operand.dtype not in numbers:
                self.reject_type(f"{name} is {operand.dtype}{beside}", f"{name} of {wanted}")

    def refusal(self, summary: str) -> InvalidTypeError | InvalidArgumentError:
        """The error that names all violations."""
        kind = InvalidTypeError if self.has_wrong_type else InvalidArgumentError
        return kind(summary, self.violations, "; ".join(self.hints))


@dataclass(frozen=True)
class OpSpec:
    """One operation.

    check: notes every violated rule on the problem; runs once a problem, before anything else.
    infer: the outputs in play, by name, in the order they are returned (shape rule; pure).
    plan: the launches; gets the problem, the outputs as operands (slots named like the outputs, row-major unless
        the caller gave `out=` of other strides) and the device.  Pure: no GPU needed.
    in_place: (output, input) pairs that may be one and the same view; any other overlap of an output with an
        input is refused.
    recent: the last few problems, with their functions (`cki.ops.steady`).
    """

    name: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[str, ...]
    check: Callable[[Problem], None]
    infer: Callable[[Problem], Mapping[str, OutputSpec]]
    plan: Callable[[Problem, Mapping[str, Operand], DeviceInfo], Plan]
    in_place: tuple[tuple[str, str], ...] = ()
    recent: Recent = field(default_factory=Recent, init=False, repr=False, compare=False)
