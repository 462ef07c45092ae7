"""Activations: gated ones on the output of a gate-and-up projection, and plain ones with bias and multiplication.

    gated_activation   y = activation(gate + gate_bias) * (up + up_bias)
    bias_activation    y = activation(x + bias) * multiplier

Inputs are f32, f16 or bf16; arithmetic is fp32, rounded once.  Strides are honoured.  Kernels: `cuda_src/pointwise`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.heuristics.norm import vector_size
from cki.heuristics.pointwise import ACTIVATIONS, LAYOUTS, MAX_WIDTH, TileConfig, tile_config
from cki.heuristics.rows import is_stepped, last_stride, row_arguments, row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.pointwise_rules import FLOATS, check_floats, check_like, check_rows, check_vector
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import NullPointer, Plan, Step

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "sigmoid", "tanh", "quick_gelu", "relu2"]
Layout = Literal["gate_first", "up_first", "interleaved"]


def gated_activation(
    x: Any, bias: Any = None, *, activation: Activation | None = "silu", layout: Layout = "gate_first", out: Any = None,
    stream: Any = None,
) -> Any:  # fmt: skip
    """Gated linear unit activation(gate) * up: SwiGLU ("silu"), GeGLU ("gelu", "gelu_tanh"), ReGLU ("relu"), GLU
    ("sigmoid"), bilinear (None); Shazeer 2020, arXiv:2002.05202.

    x: [..., 2 * width] of f32, f16 or bf16, any strides: what one projection by both weight matrices gives.
    layout: where gate and up lie: "gate_first" [gate | up], "up_first" [up | gate], "interleaved" [g0, u0, g1, u1 ...].
    bias: [2 * width] in the order of x, f32, f16 or bf16; added in fp32 before the activation.
    out: where to write, [..., width] of x's type.

    Returns [..., width].  For gate and up in tensors of their own: `bias_activation(gate, multiplier=up)`.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    return call(GATED_ACTIVATION, (x, bias), (activation, layout), (out,), stream)


def bias_activation(
    x: Any, bias: Any = None, *, activation: Activation | None = "gelu", multiplier: Any = None, out: Any = None,
    stream: Any = None,
) -> Any:  # fmt: skip
    """activation(x + bias) * multiplier, bias and multiplier where given.

    x: [..., width] of f32, f16 or bf16, any strides.  bias: [width], f32, f16 or bf16.  multiplier: as x.
    activation: "gelu" (erf), "gelu_tanh", "silu", "relu", "sigmoid", "tanh", "quick_gelu" (x sigmoid(1.702 x)),
    "relu2" (squared ReLU) or None.
    out: where to write, of x's shape and type; may be x or multiplier.

    Returns [..., width].  Nothing is rounded between bias, activation and multiplication.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    return call(BIAS_ACTIVATION, (x, bias, multiplier), (activation,), (out,), stream)


def check_activation(problem: Problem) -> None:
    """Note an activation that there is not."""
    activation = problem.attribute("activation")
    if activation not in ACTIVATIONS:
        names = ", ".join(repr(name) for name in ACTIVATIONS)
        problem.reject(f"activation is {activation!r}", f"activation of {names}")


def _check_gated(problem: Problem) -> None:
    x = problem["x"]
    check_floats(problem, "x", "bias")
    if check_rows(problem, x, 2 * MAX_WIDTH):
        if x.shape[-1] % 2:
            problem.reject(
                f"x has shape {x.shape}: a last axis of {x.shape[-1]} holds no gate and up of equal width",
                "an even last axis",
            )
        check_vector(problem, "bias", x)
    check_activation(problem)
    layout = problem.attribute("layout")
    if layout not in LAYOUTS:
        problem.reject(f"layout is {layout!r}", f"layout of {', '.join(map(repr, LAYOUTS))}")


def _check_bias(problem: Problem) -> None:
    x = problem["x"]
    check_floats(problem, "x", "bias")
    if check_rows(problem, x, MAX_WIDTH):
        check_vector(problem, "bias", x)
    check_like(problem, "multiplier", x)
    check_activation(problem)


def _infer_gated(problem: Problem) -> Mapping[str, OutputSpec]:
    x = problem["x"]
    return {"out": OutputSpec((*x.shape[:-1], x.shape[-1] // 2), x.dtype)}


def _infer_bias(problem: Problem) -> Mapping[str, OutputSpec]:
    return {"out": OutputSpec(problem["x"].shape, problem["x"].dtype)}


def plan_gated_activation(
    x: Operand, bias: Operand | None, y: Operand, device: DeviceInfo, *, activation: str | None = "silu",
    layout: str = "gate_first", config: TileConfig | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one gated activation over operands (see `gated_activation`).

    config: instead of the heuristic's choice (for measurements).
    """
    width = y.shape[-1]
    size = vector_size([t for t in (x, y, bias) if t is not None], width)
    stepped = is_stepped(x, y, bias)
    steps = []
    for batch in row_batches([x, y]):
        chosen = config or tile_config(
            batch.rows, width, size, 2, device, min_blocks=5 if bias is None else 4
        )
        kernel = _kernel(
            "gated_activation", "PPP" + "iiii" + "q" * 9, chosen, x.dtype, bias, activation, row_axes=batch.axes,
            stepped=stepped, kLayout=LAYOUTS[layout], kOverlaps=False,
        )  # fmt: skip
        (x_rows, y_rows), strides = row_arguments([x, y], batch)
        arguments = (
            x_rows, bias or NullPointer(), y_rows, batch.rows, width, *batch.extents[1:], *strides, last_stride(bias)
        )  # fmt: skip
        steps.append(Step(
            kernel, chosen.grid(batch.rows, width), (chosen.threads, 1, 1), arguments,
            reason=chosen.reason(batch.rows, width),
        ))  # fmt: skip
    return tuple(steps)


def plan_bias_activation(
    x: Operand, bias: Operand | None, y: Operand, device: DeviceInfo, *, activation: str | None = "gelu",
    multiplier: Operand | None = None, config: TileConfig | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one activation over operands (see `bias_activation`).

    config: instead of the heuristic's choice (for measurements).
    """
    width = x.shape[-1]
    size = vector_size([t for t in (x, multiplier, y, bias) if t is not None], width)
    stepped = is_stepped(x, multiplier, y, bias)
    inputs = 1 if multiplier is None else 2
    steps = []
    for batch in row_batches([t for t in (x, multiplier, y) if t is not None]):
        chosen = config or tile_config(
            batch.rows, width, size, inputs, device, min_blocks=5 if bias is None else 4
        )
        kernel = _kernel(
            "bias_activation", "PPPP" + "iiii" + "q" * 13, chosen, x.dtype, bias, activation, row_axes=batch.axes,
            stepped=stepped, kHasMultiplier=multiplier is not None,
        )  # fmt: skip
        (x_rows, multiplier_rows, y_rows), strides = row_arguments([x, multiplier, y], batch)
        arguments = (
            x_rows, bias or NullPointer(), multiplier_rows, y_rows, batch.rows, width, *batch.extents[1:], *strides,
            last_stride(bias),
        )  # fmt: skip
        steps.append(Step(
            kernel, chosen.grid(batch.rows, width), (chosen.threads, 1, 1), arguments,
            reason=chosen.reason(batch.rows, width),
        ))  # fmt: skip
    return tuple(steps)


def _kernel(
    entry: str, params: str, config: TileConfig, dtype: DType, bias: Operand | None, activation: str | None, *,
    row_axes: int, stepped: bool, **extra: Any,
) -> KernelSpec:  # fmt: skip
    return kernel_spec(
        f"pointwise/{entry}.cu", entry, params, max_registers=config.max_registers, Element=dtype,
        Bias=dtype if bias is None else bias.dtype, kHasBias=bias is not None, kActivation=ACTIVATIONS[activation],
        kRowAxes=row_axes, kStepped=stepped, **config.constants(), **extra,
    )  # fmt: skip


def _plan_gated(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_gated_activation(
        problem["x"], problem.get("bias"), outputs["out"], device, activation=problem.attribute("activation"),
        layout=problem.attribute("layout"),
    ))  # fmt: skip


def _plan_bias(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_bias_activation(
        problem["x"], problem.get("bias"), outputs["out"], device, activation=problem.attribute("activation"),
        multiplier=problem.get("multiplier"),
    ))  # fmt: skip


GATED_ACTIVATION = OpSpec(
    name="gated_activation",
    inputs=(Input("x"), Input("bias", True)),
    attributes=(Attribute("activation", str), Attribute("layout", str, "gate_first")),
    outputs=("out",),
    check=_check_gated,
    infer=_infer_gated,
    plan=_plan_gated,
)

BIAS_ACTIVATION = OpSpec(
    name="bias_activation",
    inputs=(Input("x"), Input("bias", True), Input("multiplier", True)),
    attributes=(Attribute("activation", str),),
    outputs=("out",),
    check=_check_bias,
    infer=_infer_bias,
    plan=_plan_bias,
    in_place=(("out", "x"), ("out", "multiplier")),
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: every activation, layout and type once, biases, odd widths and strides."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}

    def gated(width: int, dtype: DType, activation: str | None, layout: str, *, bias: bool = False) -> None:
        x, y = dense("x", (16384, 2 * width), dtype), dense("y", (16384, width), dtype)
        vector = dense("bias", (2 * width,), dtype) if bias else None
        for step in plan_gated_activation(x, vector, y, device, activation=activation, layout=layout):
            found[step.kernel] = None

    def biased(width: int, dtype: DType, activation: str | None, *, bias: bool, multiplier: bool) -> None:
        x = dense("x", (16384, width), dtype)
        vector = dense("bias", (width,), dtypes.f32 if dtype == dtypes.bf16 else dtype) if bias else None
        for step in plan_bias_activation(
            x, vector, x, device, activation=activation, multiplier=x if multiplier else None
        ):
            found[step.kernel] = None

    for index, dtype in enumerate(FLOATS):
        for layout in LAYOUTS:
            gated(4096, dtype, "silu", layout)
        gated(4096, dtype, ("gelu", "gelu_tanh", "relu")[index], "gate_first", bias=True)
        gated(333, dtype, "gelu", "interleaved", bias=True)
        biased(4096, dtype, "gelu", bias=True, multiplier=False)
        biased(4096, dtype, "silu", bias=False, multiplier=True)
        biased(1001, dtype, "gelu_tanh", bias=True, multiplier=True)
    for activation in ACTIVATIONS:
        biased(1024, dtypes.bf16, activation, bias=False, multiplier=False)
    permuted = Operand("x", (8, 4, 16, 96), (6144, 96, 384, 2), dtypes.f16)
    for step in plan_bias_activation(permuted, None, dense("y", permuted.shape, dtypes.f16), device):
        found[step.kernel] = None
    return list(found)
