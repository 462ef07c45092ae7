"""Gated linear layers: a projection by gate and up weights and their gated activation (SwiGLU, GeGLU, ReGLU, GLU).

    y = activation(x @ w_gate + bias_gate) * (x @ w_up + bias_up)

The two weights are the halves of one, as models store them.  On sm_90a one launch of the Hopper GEMM computes tiles of
both halves side by side, reads the weight where it lies and rounds once (`cuda_src/gemm/hopper`).  Elsewhere, and for
few rows, a linear layer and `gated_activation`: two launches, with the projection rounded to x's type between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cki.device import DeviceInfo
from cki.heuristics.linear import ACTIVATIONS as FUSED_ACTIVATIONS
from cki.heuristics.linear import weight_access
from cki.heuristics.linear_hopper import HopperTile
from cki.heuristics.pointwise import LAYOUTS, MAX_WIDTH
from cki.operand import Operand, dense
from cki.ops import linear_hopper, linear_skinny
from cki.ops.call import call
from cki.ops.linear import WeightLayout, check_linear, check_type_and_layout, plan_linear
from cki.ops.linear_hopper import Gates
from cki.ops.pointwise import Activation, Layout, check_activation, plan_gated_activation
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan, Step

_PROJECTED = "projected"


def gated_linear(
    x: Any, w: Any, bias: Any = None, *, activation: Activation | None = "silu", layout: Layout = "gate_first",
    weight_layout: WeightLayout = "in_out", out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """activation(gate) * up with [gate | up] = x @ w + bias: SwiGLU ("silu"), GeGLU ("gelu", "gelu_tanh"), ReGLU
    ("relu"), GLU ("sigmoid"), bilinear (None); Shazeer 2020, arXiv:2002.05202.

    x: [..., K] of f32, f16 or bf16, any strides.
    w: of x's type, any strides: [K, 2 * width] for weight_layout "in_out", [2 * width, K] for "out_in".
    bias: [2 * width], f32 or x's type.
    layout: how gate and up share w's columns: "gate_first" [gate | up], "up_first" [up | gate], or "interleaved"
        [g0, u0, g1, u1 ...], which takes two launches everywhere.
    out: where to write, [..., width] of x's type.

    Returns [..., width] of x's type.  Sums are fp32.  Activations as for `gated_activation`.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    return call(GATED_LINEAR, (x, w, bias), (activation, layout, weight_layout), (out,), stream)


def plan_gated_linear(
    x: Operand, w: Operand, bias: Operand | None, y: Operand, device: DeviceInfo, *, activation: str | None = "silu",
    layout: str = "gate_first", weight_layout: str = "in_out", tile: HopperTile | None = None,
) -> Plan:  # fmt: skip
    """The launch, or two and the projection between them.  tile: of the fused kernel, instead of the model's choice."""
    if y.size == 0:
        return Plan(())
    width = y.shape[-1]
    projected = dense(_PROJECTED, (*y.shape[:-1], 2 * width), x.dtype)
    k, n = (0, 1) if weight_layout == "in_out" else (1, 0)
    access = weight_access(w.shape[k], w.shape[n], w.strides[k], w.strides[n])
    halves = layout != "interleaved" and activation in FUSED_ACTIVATIONS
    if halves and tile is None and linear_skinny.preferred(x, w, None, projected, device, access) is None:
        tile = linear_hopper.preferred(x, w, None, y, device, access, activation, gated=True)
    if halves and tile is not None:
        gates = Gates(width, 0) if layout == "up_first" else Gates(0, width)
        return Plan(linear_hopper.plan_linear_hopper(
            x, w, bias, None, y, device, access, tile, activation=activation, gates=gates
        ))  # fmt: skip
    steps: tuple[Step, ...] = (
        *plan_linear(x, w, bias, None, projected, device, weight_layout=weight_layout),
        *plan_gated_activation(projected, None, y, device, activation=activation, layout=layout),
    )
    return Plan(steps, workspace=((_PROJECTED, projected.size * x.dtype.itemsize),))


def _check(problem: Problem) -> None:
    x = problem["x"]
    weight_layout = check_type_and_layout(problem)
    check_activation(problem)
    if problem.attribute("layout") not in LAYOUTS:
        problem.reject(
            f"layout is {problem.attribute('layout')!r}", f"layout of {', '.join(map(repr, LAYOUTS))}"
        )
    if x.ndim == 0:
        problem.reject("x has no axis to multiply (shape ())", "x of shape [..., K]")
        check_linear(problem, -1, -1, weight_layout=weight_layout)
        return
    check_linear(problem, x.shape[-1], -1, weight_layout=weight_layout)
    w = problem["w"]
    if w.ndim == 2:
        columns = w.shape[1 if weight_layout == "in_out" else 0]
        if columns % 2 or columns > 2 * MAX_WIDTH:
            problem.reject(
                f"w has shape {w.shape}: {columns} columns hold no gates and ups of equal width",
                f"an even number of columns, at most {2 * MAX_WIDTH}",
            )


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    x, w = problem["x"], problem["w"]
    columns = w.shape[1 if problem.attribute("weight_layout") == "in_out" else 0]
    return {"out": OutputSpec((*x.shape[:-1], columns // 2), x.dtype)}


def _plan_problem(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return plan_gated_linear(
        problem["x"], problem["w"], problem.get("bias"), outputs["out"], device,
        activation=problem.attribute("activation"), layout=problem.attribute("layout"),
        weight_layout=problem.attribute("weight_layout"),
    )  # fmt: skip


GATED_LINEAR = OpSpec(
    name="gated_linear",
    inputs=(Input("x"), Input("w"), Input("bias", True)),
    attributes=(
        Attribute("activation", str), Attribute("layout", str, "gate_first"), Attribute("weight_layout", str, "in_out"),
    ),
    outputs=("out",),
    check=_check,
    infer=_infer,
    plan=_plan_problem,
)  # fmt: skip
