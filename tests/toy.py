"""A small operation for the tests of the way of a call: y = factor * (factor * x + offset) + offset in two launches.

`affine` (f32, contiguous, any shape) goes through a workspace between its launches; with `steps=1` it is one launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cki import dtypes
from cki.device import DeviceInfo
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan, Step

SOURCE = Path(__file__).parent / "kernels" / "affine.cu"
THREADS = 128


def kernel(threads: int = THREADS) -> KernelSpec:
    """The kernel, specialised on its block size."""
    return kernel_spec(str(SOURCE), "affine", "PPffq", kThreads=threads)


def step(x: Operand, y: Operand, factor: float, offset: float) -> Step:
    """One launch."""
    grid = (-(-x.size // THREADS), 1, 1)
    return Step(kernel(), grid, (THREADS, 1, 1), (x, y, factor, offset, x.size), reason="the only kernel")


def _check(problem: Problem) -> None:
    x, other = problem["x"], problem.get("other")
    if x.dtype != dtypes.f32:
        problem.reject_type(f"x is {x.dtype}", "x of f32")
    if not x.is_contiguous():
        problem.reject(f"x has strides {x.strides}", "a contiguous x")
    if other is not None and other.shape != x.shape:
        problem.reject(f"other has shape {other.shape}, x has {x.shape}", "other of x's shape")


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    return {"y": OutputSpec(problem["x"].shape, problem["x"].dtype)}


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    x, y = problem["x"], outputs["y"]
    factor, offset = problem.attribute("factor"), problem.attribute("offset")
    if problem.attribute("steps") == 1:
        return Plan((step(x, y, factor, offset),))
    middle = dense("middle", x.shape, x.dtype)
    return Plan((step(x, middle, factor, offset), step(middle, y, factor, offset)), (("middle", x.nbytes),))


AFFINE = OpSpec(
    name="affine",
    inputs=(Input("x"), Input("other", optional=True)),
    attributes=(Attribute("factor", float, 1.0), Attribute("offset", float, 0.0), Attribute("steps", int, 2)),
    outputs=("y",),
    check=_check,
    infer=_infer,
    plan=_plan,
    in_place=(("y", "x"),),
)


def affine(
    x: Any, other: Any = None, *, factor: float = 1.0, offset: float = 0.0, steps: int = 2, out: Any = None,
    stream: Any = None,
) -> Any:  # fmt: skip
    """The operation as a public function."""
    return call(AFFINE, (x, other), (factor, offset, steps), (out,), stream)
