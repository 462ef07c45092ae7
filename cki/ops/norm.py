"""Layer norm and RMS norm, each with an optional residual addition in front.

    layer_norm   y = (v - mean(v)) / sqrt(mean((v - mean(v))^2) + eps) * weight + bias
    rms_norm     y = v / sqrt(mean(v^2) + eps) * (weight + weight_offset)
    v = x, or x + residual

over the last axis, for every index of the leading ones.  Inputs are f32, f16 or bf16; arithmetic is fp32; nothing is
rounded but the outputs.  Weights may be of another type than x (fp32 weights beside bf16 activations).  Strides are
honoured: slices, permuted leading axes and a stepped last axis need no copy.  Kernels: `cuda_src/norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.heuristics.norm import MAX_WIDTH, RowConfig, RowShape, candidates, choose, vector_size
from cki.heuristics.rows import last_stride, row_arguments, row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops.call import call
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import ArgumentValue, NullPointer, Plan, Step

Normalize = Literal["rounded", "unrounded"]

_TYPES = (dtypes.f32, dtypes.f16, dtypes.bf16)
_TYPE_NAMES = "f32, f16 or bf16"


def layer_norm(
    x: Any, weight: Any = None, bias: Any = None, *, residual: Any = None, eps: float = 1e-5,
    normalize: Normalize = "rounded", out: Any = None, residual_out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """Layer normalisation over the last axis (Ba, Kiros, Hinton 2016, arXiv:1607.06450).

    x: [..., width] of f32, f16 or bf16, any strides.  weight, bias: [width], f32, f16 or bf16 each.
    residual: as x.  With it the norm is of x + residual, and that sum is returned too, rounded to x's type.
    normalize: whether the norm reads that sum "rounded" (what an addition and a norm of two calls give, and Hugging
        Face models compute) or "unrounded" (in fp32).
    eps: added to the variance; finite, not negative.
    out, residual_out: where to write, of x's shape and type; out may be x or residual, residual_out the other.

    Returns y, or with a residual (y, x + residual).

    The mean is taken first and the variance from deviations, so a mean of 10000 beside a spread of 1 costs nothing.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    return call(LAYER_NORM, (x, weight, bias, residual), (eps, normalize), (out, residual_out), stream)


def rms_norm(
    x: Any, weight: Any = None, *, residual: Any = None, eps: float = 1e-6, weight_offset: float = 0.0,
    normalize: Normalize = "rounded", out: Any = None, residual_out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """Root-mean-square normalisation over the last axis (Zhang, Sennrich 2019, arXiv:1910.07467).

    x: [..., width] of f32, f16 or bf16, any strides.  weight: [width], f32, f16 or bf16; None multiplies by 1.
    weight_offset: added to each weight in fp32 (1.0 for Gemma's `1 + weight`).
    residual, normalize, eps, out, residual_out: as for `layer_norm`.

    Returns y, or with a residual (y, x + residual).

    A row of fp32 whose squares overflow or vanish (1e19, 1e-25) is scaled by a power of two and comes out right.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    return call(RMS_NORM, (x, weight, residual), (eps, weight_offset, normalize), (out, residual_out), stream)


def check_norm(problem: Problem) -> None:
    """Rules of `layer_norm`, and of what builds on it."""
    x = problem["x"]
    if x.dtype not in _TYPES:
        problem.reject_type(f"x is {x.dtype}", f"x of {_TYPE_NAMES}")
    if x.ndim == 0:
        problem.reject("x has no axis to normalise (shape ())", "x of shape [..., width]")
    elif not 1 <= x.shape[-1] <= MAX_WIDTH:
        problem.reject(
            f"x has shape {x.shape}: its last axis is {x.shape[-1]}", f"a last axis of 1 to {MAX_WIDTH}"
        )
    width = x.shape[-1:]
    for name in ("weight", "bias"):
        tensor = problem.get(name)
        if tensor is not None and tensor.dtype not in _TYPES:
            problem.reject_type(f"{name} is {tensor.dtype}", f"{name} of {_TYPE_NAMES}")
        if tensor is not None and tensor.shape != width:
            problem.reject(
                f"{name} has shape {tensor.shape}, x has shape {x.shape}", f"{name} of shape {width}"
            )
    residual = problem.get("residual")
    if residual is not None and residual.shape != x.shape:
        problem.reject(
            f"residual has shape {residual.shape}, x has shape {x.shape}", f"residual of shape {x.shape}"
        )
    problem.require_like(x, "residual")
    if problem.attribute("eps") < 0:
        problem.reject(f"eps is {problem.attribute('eps')}", "eps of 0 or more")
    if problem.attribute("normalize") not in ("rounded", "unrounded"):
        problem.reject(
            f"normalize is {problem.attribute('normalize')!r}", 'normalize "rounded" or "unrounded"'
        )


def check_rms_norm(problem: Problem) -> None:
    """Rules of `rms_norm`, and of what builds on it."""
    check_norm(problem)
    offset = problem.attribute("weight_offset")
    if problem.get("weight") is None and offset:
        problem.reject(f"weight_offset is {offset}, but there is no weight", "a weight, or weight_offset=0.0")


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    x = problem["x"]
    result = OutputSpec(x.shape, x.dtype)
    return {"out": result} if problem.get("residual") is None else {"out": result, "residual_out": result}


def plan_layer_norm(
    x: Operand, weight: Operand | None, bias: Operand | None, y: Operand, device: DeviceInfo, *,
    residual: Operand | None = None, residual_out: Operand | None = None, eps: float = 1e-5, normalize: str = "rounded",
    config: RowConfig | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one layer norm over operands (see `layer_norm`); `residual_out` receives x + residual.

    config: instead of the heuristic's choice (for measurements).
    """
    return _plan(
        "layer_norm", x, residual, (weight, bias), y, residual_out, (eps,), normalize, device, config
    )


def plan_rms_norm(
    x: Operand, weight: Operand | None, y: Operand, device: DeviceInfo, *, residual: Operand | None = None,
    residual_out: Operand | None = None, eps: float = 1e-6, weight_offset: float = 0.0, normalize: str = "rounded",
    config: RowConfig | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one RMS norm over operands (see `rms_norm`); `residual_out` receives x + residual.

    config: instead of the heuristic's choice (for measurements).
    """
    return _plan(
        "rms_norm", x, residual, (weight,), y, residual_out, (eps, weight_offset), normalize, device, config
    )


def row_shape(
    x: Operand, residual: Operand | None, weights: tuple[Operand | None, ...], y: Operand, residual_out: Operand | None,
    rows: int,
) -> RowShape:  # fmt: skip
    """What the heuristic is asked.  weights: (weight, bias) of a layer norm, (weight,) of an RMS norm."""
    present = [weight for weight in weights if weight is not None]
    tensors = [t for t in (x, residual, y, residual_out, *present) if t is not None]
    width = x.shape[-1]
    return RowShape(
        rows, width, vector_size(tensors, width), x.dtype.itemsize,
        weight_itemsize=max((weight.dtype.itemsize for weight in present), default=4),
        inputs=1 if residual is None else 2, weights=len(present), centred=len(weights) == 2,
    )  # fmt: skip


def _plan(
    op: str, x: Operand, residual: Operand | None, weights: tuple[Operand | None, ...], y: Operand,
    residual_out: Operand | None, numbers: tuple[float, ...], normalize: str, device: DeviceInfo,
    config: RowConfig | None,
) -> tuple[Step, ...]:  # fmt: skip
    rows = [x, residual, y, residual_out]
    steps = []
    for batch in row_batches([t for t in rows if t is not None]):
        shape = row_shape(x, residual, weights, y, residual_out, batch.rows)
        chosen = config or choose(shape, device)
        stepped = x.shape[-1] > 1 and any(t.strides[-1] != 1 for t in (*rows, *weights) if t is not None)
        kernel = norm_kernel(
            op, x.dtype, tuple(None if w is None else w.dtype for w in weights), chosen,
            residual=residual is not None, normalize=normalize, row_axes=batch.axes, stepped=stepped,
        )  # fmt: skip
        pointers, strides = row_arguments(rows, batch)
        arguments: tuple[ArgumentValue, ...] = (
            *pointers[:2], *(w or NullPointer() for w in weights), *pointers[2:],
            batch.rows, x.shape[-1], *batch.extents[1:], *strides, *(last_stride(w) for w in weights), *numbers,
        )  # fmt: skip
        grid, reason = (chosen.grid(batch.rows, device), 1, 1), chosen.reason(batch.rows, shape.width)
        steps.append(Step(kernel, grid, (chosen.threads, 1, 1), arguments, reason=reason))
    return tuple(steps)


def norm_kernel(
    op: str, dtype: DType, weights: tuple[DType | None, ...], config: RowConfig, *, residual: bool, normalize: str,
    row_axes: int, stepped: bool,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration.  op: "layer_norm" (weights: of weight and bias) or "rms_norm" (of weight)."""
    constants: dict[str, Any] = {
        "Element": dtype, "Weight": weights[0] or dtype, "kHasWeight": weights[0] is not None,
        "kHasResidual": residual, "kNormalizeRounded": residual and normalize == "rounded", "kRowAxes": row_axes,
        "kStepped": stepped, **config.constants(),
    }  # fmt: skip
    if op == "layer_norm":
        constants |= {"Bias": weights[1] or dtype, "kHasBias": weights[1] is not None}
    long = config.vectors_per_thread == 0
    if not long:
        constants |= {"kPrefetch": config.prefetch, "kHoldWeight": config.hold_weight}
        if op == "rms_norm":
            constants["kOverlaps"] = False
    name = f"{op}_long" if long else op
    pointers, steps, numbers = ("PPPPPP", "qq", "f") if op == "layer_norm" else ("PPPPP", "q", "ff")
    params = pointers + "iiii" + "q" * 16 + steps + numbers
    return kernel_spec(f"norm/{name}.cu", name, params, max_registers=config.max_registers, **constants)


def _plan_layer_norm(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_layer_norm(
        problem["x"], problem.get("weight"), problem.get("bias"), outputs["out"], device,
        residual=problem.get("residual"), residual_out=outputs.get("residual_out"), eps=problem.attribute("eps"),
        normalize=problem.attribute("normalize"),
    ))  # fmt: skip


def _plan_rms_norm(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_rms_norm(
        problem["x"], problem.get("weight"), outputs["out"], device, residual=problem.get("residual"),
        residual_out=outputs.get("residual_out"), eps=problem.attribute("eps"),
        weight_offset=problem.attribute("weight_offset"), normalize=problem.attribute("normalize"),
    ))  # fmt: skip


_IN_PLACE = (("out", "x"), ("out", "residual"), ("residual_out", "x"), ("residual_out", "residual"))

LAYER_NORM = OpSpec(
    name="layer_norm",
    inputs=(Input("x"), Input("weight", True), Input("bias", True), Input("residual", True)),
    attributes=(Attribute("eps", float, 1e-5), Attribute("normalize", str, "rounded")),
    outputs=("out", "residual_out"),
    check=check_norm,
    infer=_infer,
    plan=_plan_layer_norm,
    in_place=_IN_PLACE,
)

RMS_NORM = OpSpec(
    name="rms_norm",
    inputs=(Input("x"), Input("weight", True), Input("residual", True)),
    attributes=(
        Attribute("eps", float, 1e-6), Attribute("weight_offset", float, 0.0), Attribute("normalize", str, "rounded"),
    ),
    outputs=("out", "residual_out"),
    check=check_rms_norm,
    infer=_infer,
    plan=_plan_rms_norm,
    in_place=_IN_PLACE,
)  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all, for the compile test and list-kernels: the choices for usual widths and types, and
    for bf16 the other candidates that benchmarks measure."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}

    def add(
        op: str, dtype: DType, weight: DType | None, shape: RowShape, config: RowConfig, **rest: Any
    ) -> None:
        fields = {
            "residual": shape.inputs == 2,
            "normalize": "rounded",
            "row_axes": 1,
            "stepped": False,
            **rest,
        }
        weights = (weight, weight) if op == "layer_norm" else (weight,)
        found[norm_kernel(op, dtype, weights, config, **fields)] = None

    for op in ("layer_norm", "rms_norm"):
        centred = op == "layer_norm"
        common: dict[str, Any] = {"centred": centred, "weights": 2 if centred else 1}
        for dtype in _TYPES:
            size, itemsize = 16 // dtype.itemsize, dtype.itemsize
            for width, inputs in ((384, 1), (384, 2), (1024, 1), (4096, 1), (4096, 2), (65536, 2)):
                shape = RowShape(4096, width, size, itemsize, itemsize, inputs, **common)
                add(op, dtype, dtype, shape, choose(shape, device))
        for width in (1024, 4096):
            shape = RowShape(4096, width, 8, 2, 2, **common)
            for config in candidates(shape, device):
                add(op, dtypes.bf16, dtypes.bf16, shape, config)
        for width, inputs in ((32768, 1), (24576, 2)):
            widest = RowShape(4096, width, 8, 2, 2, inputs, **common)
            add(op, dtypes.bf16, dtypes.bf16, widest, choose(widest, device))
        scalar = RowShape(4096, 4097, 1, 2, 2, 2, **common)
        add(op, dtypes.bf16, dtypes.bf16, scalar, choose(scalar, device))
        mixed = RowShape(64, 1000, 8, 2, 4, 2, **common)
        add(op, dtypes.bf16, dtypes.f32, mixed, choose(mixed, device), normalize="unrounded", row_axes=3)
        stepped = RowShape(4096, 500, 1, 2, **{**common, "weights": 0})
        add(op, dtypes.f16, None, stepped, choose(stepped, device), row_axes=3, stepped=True)
    return list(found)
