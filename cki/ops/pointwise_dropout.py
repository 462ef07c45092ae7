"""Dropout and the addition of a residual, reproducible from a seed and an offset in device memory.

Kernel: `cuda_src/pointwise/dropout_add.cu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.heuristics.norm import vector_size
from cki.heuristics.pointwise import MAX_WIDTH, TileConfig, tile_config
from cki.heuristics.rows import is_stepped, row_arguments, row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.pointwise_rules import FLOATS, check_floats, check_like, check_rows
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan, Step

_PARAMS = "PPPPP" + "iiii" + "q" * 12 + "qqqq" + "If"


def dropout_add(
    x: Any, residual: Any, p: float, seed: Any, offset: Any, *, out: Any = None, stream: Any = None
) -> Any:
    """dropout(x) + residual: each element of x is 0 with probability p, else x / (1 - p).

    x: [..., width] of f32, f16 or bf16, any strides.  residual: as x, or None for dropout alone.
    p: from 0 to below 1.
    seed, offset: one int64 or uint64 each, in device memory.  An element's fate is word i % 4 of Philox 4x32-10 with
    key seed and counter (i / 4, offset), i being its row-major index in x's shape: the same on every device, whatever
    the strides, type or tiling.  Calls that shall differ differ in the offset, by any amount; a captured graph that
    adds to the offset drops other elements at each replay.
    out: where to write, of x's shape and type; may be x or residual.

    Returns [..., width].  Arithmetic is fp32, rounded once; p = 0 gives x + residual.  A dropped NaN or infinity is 0.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    Philox: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    return call(DROPOUT_ADD, (x, residual, seed, offset), (p,), (out,), stream)


def _check(problem: Problem) -> None:
    x, p = problem["x"], problem.attribute("p")
    check_floats(problem, "x")
    check_rows(problem, x, MAX_WIDTH)
    check_like(problem, "residual", x)
    if not 0 <= p < 1:
        problem.reject(f"p is {p}", "p from 0 to below 1")
    check_counter(problem, "seed")
    check_counter(problem, "offset")


def check_counter(problem: Problem, name: str) -> None:
    """A seed or an offset: one integer of 64 bits, in device memory."""
    tensor = problem[name]
    if tensor.dtype not in (dtypes.i64, dtypes.u64):
        problem.reject_type(f"{name} is {tensor.dtype}", f"{name} of int64 or uint64")
    if tensor.size != 1:
        problem.reject(f"{name} has shape {tensor.shape}", f"{name} of one element")


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    return {"out": OutputSpec(problem["x"].shape, problem["x"].dtype)}


def threshold_of(p: float) -> int:
    """A random word below it drops its element."""
    return min(round(p * 2.0**32), 2**32 - 1)


def plan_dropout_add(
    x: Operand, residual: Operand | None, seed: Operand, offset: Operand, y: Operand, device: DeviceInfo, *, p: float,
    config: TileConfig | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one dropout over operands (see `dropout_add`).

    config: instead of the heuristic's choice (for measurements).
    """
    width = x.shape[-1]
    tensors = [t for t in (x, residual, y) if t is not None]
    size = vector_size(tensors, width)
    index = dense("index", x.shape, x.dtype)  # stands for no memory: its strides count elements
    steps = []
    for batch in row_batches([*tensors, index]):
        chosen = config or tile_config(
            batch.rows, width, size, 1 if residual is None else 2, device, min_blocks=4
        )
        kernel = _kernel(
            x.dtype, chosen, residual=residual is not None, row_axes=batch.axes, stepped=is_stepped(*tensors)
        )
        pointers, strides = row_arguments([x, residual, y], batch)
        arguments = (
            *pointers, seed, offset, batch.rows, width, *batch.extents[1:], *strides, *batch.strides[-1],
            batch.offsets[-1], threshold_of(p), 1.0 / (1.0 - p),
        )  # fmt: skip
        grid, reason = chosen.grid(batch.rows, width), chosen.reason(batch.rows, width)
        steps.append(Step(kernel, grid, (chosen.threads, 1, 1), arguments, reason=reason))
    return tuple(steps)


def _kernel(dtype: DType, config: TileConfig, *, residual: bool, row_axes: int, stepped: bool) -> KernelSpec:
    return kernel_spec(
        "pointwise/dropout_add.cu", "dropout_add", _PARAMS, max_registers=config.max_registers, Element=dtype,
        kHasResidual=residual, kRowAxes=row_axes, kStepped=stepped, **config.constants(),
    )  # fmt: skip


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_dropout_add(
        problem["x"], problem.get("residual"), problem["seed"], problem["offset"], outputs["out"], device,
        p=problem.attribute("p"),
    ))  # fmt: skip


DROPOUT_ADD = OpSpec(
    name="dropout_add",
    inputs=(Input("x"), Input("residual", True), Input("seed"), Input("offset")),
    attributes=(Attribute("p", float, 0.0),),
    outputs=("out",),
    check=_check,
    infer=_infer,
    plan=_plan,
    in_place=(("out", "x"), ("out", "residual")),
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: each type with and without a residual, widths of every vector size."""
    device = sim_device(arch)
    counter = dense("seed", (1,), dtypes.i64)
    found: dict[KernelSpec, None] = {}
    for dtype in FLOATS:
        for width, added in ((4096, True), (4096, False), (1026, True), (1001, True)):
            x = dense("x", (16384, width), dtype)
            for step in plan_dropout_add(x, x if added else None, counter, counter, x, device, p=0.1):
                found[step.kernel] = None
    permuted = Operand("x", (8, 4, 16, 96), (6144, 96, 384, 2), dtypes.f16)
    y = dense("y", permuted.shape, dtypes.f16)
    for step in plan_dropout_add(permuted, None, counter, counter, y, device, p=0.1):
        found[step.kernel] = None
    return list(found)
