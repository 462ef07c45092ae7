"""Softmax over the last axis, of any width, scaled and masked.  Kernels: `cuda_src/pointwise/softmax*.cu`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.heuristics.norm import MAX_WIDTH, RowConfig, RowShape, choose, vector_size
from cki.heuristics.rows import is_stepped, row_arguments, row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.pointwise_rules import FLOATS, broadcast_to, check_floats, check_rows
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan, Step

_LARGEST_SCALE = 1e38  # times log2(e) it is still a number of fp32
_LOG2_E = 1.0 / math.log(2.0)


def softmax(x: Any, mask: Any = None, *, scale: float = 1.0, out: Any = None, stream: Any = None) -> Any:
    """exp(scale * x) / sum(exp(scale * x)) over the last axis, without overflow.

    x: [..., width] of f32, f16 or bf16, any strides, any width.
    mask: bool, of a shape that broadcasts to x's; True keeps.  Hidden elements give 0 and may hold anything, NaN too.
    scale: above 0, at most 1e38.
    out: where to write, of x's shape and type; may be x.

    Returns y of x's shape and type.  Arithmetic is fp32, rounded once.  A row with nothing to see (all hidden or
    -infinity) gives zeros, as in `attention`; a row with NaN or +infinity gives NaN.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    return call(SOFTMAX, (x, mask), (scale,), (out,), stream)


def _check(problem: Problem) -> None:
    x, mask, scale = problem["x"], problem.get("mask"), problem.attribute("scale")
    check_floats(problem, "x")
    if check_rows(problem, x, MAX_WIDTH) and mask is not None and broadcast_to(mask, x.shape) is None:
        problem.reject(
            f"mask has shape {mask.shape}, which does not broadcast to x's {x.shape}",
            f"a mask of shape {x.shape}, or with axes of 1 in it",
        )
    if mask is not None and mask.dtype != dtypes.bool_:
        problem.reject_type(f"mask is {mask.dtype}", "mask of bool")
    if not 0 < scale <= _LARGEST_SCALE:
        problem.reject(f"scale is {scale}", f"scale above 0, at most {_LARGEST_SCALE:g}")


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    return {"out": OutputSpec(problem["x"].shape, problem["x"].dtype)}


def plan_softmax(
    x: Operand, mask: Operand | None, y: Operand, device: DeviceInfo, *, scale: float = 1.0,
    config: RowConfig | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one softmax over operands (see `softmax`).

    mask: of a shape that broadcasts to x's.  config: instead of the heuristic's choice (for measurements).
    """
    width = x.shape[-1]
    size = vector_size([x, y], width)
    keep = None if mask is None else broadcast_to(mask, x.shape)
    steps = []
    for batch in row_batches([t for t in (x, keep, y) if t is not None]):
        shape = RowShape(batch.rows, width, size, x.dtype.itemsize, weights=0, centred=keep is not None)
        chosen = config or choose(shape, device)
        kernel = softmax_kernel(
            x.dtype, chosen, mask=keep is not None, row_axes=batch.axes, stepped=is_stepped(x, y),
            vector_mask=keep is not None and size % 4 == 0 and keep.strides[-1] == 1 and keep.is_aligned(size),
        )  # fmt: skip
        pointers, strides = row_arguments([x, keep, y], batch)
        arguments = (*pointers, batch.rows, width, *batch.extents[1:], *strides, scale * _LOG2_E)
        grid = (-(-batch.rows // chosen.rows_per_block), 1, 1)
        reason = chosen.reason(batch.rows, width)
        steps.append(Step(kernel, grid, (chosen.threads, 1, 1), arguments, reason=reason))
    return tuple(steps)


def softmax_kernel(
    dtype: DType, config: RowConfig, *, mask: bool, vector_mask: bool, row_axes: int, stepped: bool
) -> KernelSpec:
    """The kernel of one configuration."""
    name = "softmax" if config.vectors_per_thread else "softmax_long"
    return kernel_spec(
        f"pointwise/{name}.cu", name, "PPP" + "iiii" + "q" * 12 + "f", max_registers=config.max_registers,
        Element=dtype, kHasMask=mask, kVectorMask=vector_mask, kRowAxes=row_axes, kStepped=stepped,
        **config.constants(),
    )  # fmt: skip


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    scale = problem.attribute("scale")
    return Plan(plan_softmax(problem["x"], problem.get("mask"), outputs["out"], device, scale=scale))


SOFTMAX = OpSpec(
    name="softmax",
    inputs=(Input("x"), Input("mask", True)),
    attributes=(Attribute("scale", float, 1.0),),
    outputs=("out",),
    check=_check,
    infer=_infer,
    plan=_plan,
    in_place=(("out", "x"),),
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: usual and odd widths of each type, rows beyond registers, masks."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}

    def add(
        width: int, dtype: DType, mask: tuple[int, ...] | None = None, strides: tuple[int, ...] = ()
    ) -> None:
        x = dense("x", (4096, width), dtype)
        if strides:
            x = Operand("x", x.shape, strides, dtype)
        keep = None if mask is None else dense("mask", mask, dtypes.bool_)
        for step in plan_softmax(x, keep, x, device):
            found[step.kernel] = None

    for dtype in FLOATS:
        for width in (1024, 4096):
            add(width, dtype)
        add(1000, dtype, (4096, 1000))
    for width in (64, 16384, 131072):
        add(width, dtypes.bf16)
    add(4097, dtypes.bf16, (1, 4097))
    add(8192, dtypes.bf16, (4096, 1))
    add(100000, dtypes.bf16, (4096, 100000))
    add(32768, dtypes.bf16)
    add(32768, dtypes.bf16, (4096, 32768))
    add(500, dtypes.f16, None, (1024, 2))
    return list(found)
