"""Rules that the row operations of `cki.ops.pointwise*` share: every one that a call breaks is named."""

from __future__ import annotations

from cki import dtypes
from cki.operand import Operand
from cki.ops.spec import Problem

FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)


def check_floats(problem: Problem, *names: str) -> None:
    """Tensors of those names, where given, are f32, f16 or bf16."""
    for name in names:
        tensor = problem.get(name)
        if tensor is not None and tensor.dtype not in FLOATS:
            problem.reject_type(f"{name} is {tensor.dtype}", f"{name} of f32, f16 or bf16")


def check_rows(problem: Problem, x: Operand, widest: int) -> bool:
    """x has a last axis of 1 to `widest` elements; whether it has an axis at all."""
    if x.ndim == 0:
        problem.reject("x has no last axis (shape ())", "x of shape [..., width]")
        return False
    if not 1 <= x.shape[-1] <= widest:
        problem.reject(
            f"x has shape {x.shape}: its last axis is {x.shape[-1]}", f"a last axis of 1 to {widest}"
        )
    return True


def check_vector(problem: Problem, name: str, x: Operand) -> None:
    """A vector along x's last axis, where given."""
    vector = problem.get(name)
    if vector is not None and vector.shape != x.shape[-1:]:
        problem.reject(
            f"{name} has shape {vector.shape}, x has shape {x.shape}", f"{name} of shape {x.shape[-1:]}"
        )


def check_like(problem: Problem, name: str, x: Operand) -> None:
    """A tensor of x's shape and type, where given."""
    tensor = problem.get(name)
    if tensor is None:
        return
    if tensor.shape != x.shape:
        problem.reject(
            f"{name} has shape {tensor.shape}, x has shape {x.shape}", f"{name} of shape {x.shape}"
        )
    problem.require_like(x, name)


def broadcast_to(tensor: Operand, shape: tuple[int, ...]) -> Operand | None:
    """The tensor under NumPy's broadcasting, with stride 0 along repeated axes; None where its shape does not fit."""
    missing = len(shape) - tensor.ndim
    if missing < 0:
        return None
    strides = [0] * missing
    for extent, own, stride in zip(shape[missing:], tensor.shape, tensor.strides):
        if own not in (1, extent):
            return None
        strides.append(stride if own == extent and extent > 1 else 0)
    return tensor.view(shape, tuple(strides))
