"""Norms whose result is quantised to e4m3: what an fp8 GEMM reads next, in one launch.

    rms_norm_quantize, layer_norm_quantize   quantize_fp8(norm(x)), the norm unrounded in between

Kernel: `cuda_src/norm/norm_quantize.cu`, from sm_89 on, for rows that fit in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.norm import RowConfig, RowShape, candidates, vector_size
from cki.heuristics.rows import is_stepped, last_stride, row_arguments, row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.norm import Normalize, check_norm, check_rms_norm
from cki.ops.pointwise_quantize import (
    BLOCK,
    E4M3_ARCHS,
    check_code_dtype,
    code_outputs,
    require_e4m3,
)  # fmt: skip
from cki.ops.pointwise_rules import FLOATS
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import NullPointer, Plan, Step

Granularity = Literal["row", "block128"]

_PARAMS = "PPPPPPP" + "iiii" + "q" * 20 + "qq" + "ff"


def rms_norm_quantize(
    x: Any, weight: Any = None, *, residual: Any = None, granularity: Granularity = "row", eps: float = 1e-6,
    weight_offset: float = 0.0, normalize: Normalize = "rounded", out_dtype: Literal["e4m3", "uint8"] = "e4m3",
    out: Any = None, scale_out: Any = None, residual_out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """RMS norm as e4m3 codes and fp32 scales: `quantize_fp8(rms_norm(x, weight))` without the rounding in between.

    x, weight, residual, eps, weight_offset, normalize, residual_out: as for `rms_norm`.
    granularity, out_dtype, out, scale_out: as for `quantize_fp8`.

    Returns (codes, scale), with a residual (codes, scale, x + residual).
    Raises as those two do, and UnsupportedError for rows that do not fit in registers (over 32768 elements of 16 bits,
    with a residual 24576, of fp32 or where elements are read one by one half as many) and, with "block128", for rows
    that cannot be read four elements at a time (their width, addresses and steps).
    """
    attributes = (granularity, out_dtype, eps, normalize, weight_offset)
    return call(RMS_NORM_QUANTIZE, (x, weight, residual), attributes, (out, scale_out, residual_out), stream)


def layer_norm_quantize(
    x: Any, weight: Any = None, bias: Any = None, *, residual: Any = None, granularity: Granularity = "row",
    eps: float = 1e-5, normalize: Normalize = "rounded", out_dtype: Literal["e4m3", "uint8"] = "e4m3",
    out: Any = None, scale_out: Any = None, residual_out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """Layer norm as e4m3 codes and fp32 scales; everything else as for `rms_norm_quantize` and `layer_norm`."""
    attributes = (granularity, out_dtype, eps, normalize)
    outs = (out, scale_out, residual_out)
    return call(LAYER_NORM_QUANTIZE, (x, weight, bias, residual), attributes, outs, stream)


def _check_quantized(problem: Problem) -> None:
    granularity = problem.attribute("granularity")
    if granularity not in ("row", "block128"):
        problem.reject(f"granularity is {granularity!r}", "granularity of 'row', 'block128'")
    check_code_dtype(problem)


def _check_rms(problem: Problem) -> None:
    check_rms_norm(problem)
    _check_quantized(problem)


def _check_layer(problem: Problem) -> None:
    check_norm(problem)
    _check_quantized(problem)


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    x = problem["x"]
    outputs = code_outputs(x, problem.attribute("granularity"), problem.attribute("out_dtype"))
    if problem.get("residual") is not None:
        outputs["residual_out"] = OutputSpec(x.shape, x.dtype)
    return outputs


def plan_norm_quantize(
    x: Operand, weights: tuple[Operand | None, Operand | None], codes: Operand, scale: Operand, device: DeviceInfo, *,
    centred: bool, residual: Operand | None = None, residual_out: Operand | None = None, granularity: str = "row",
    eps: float = 1e-6, weight_offset: float = 0.0, normalize: str = "rounded", config: RowConfig | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one quantised norm over operands.

    weights: weight and bias.  centred: layer norm instead of RMS norm.  residual_out receives x + residual.
    config: instead of the heuristic's choice (for measurements).
    """
    require_e4m3("layer_norm_quantize" if centred else "rms_norm_quantize", device)
    width = x.shape[-1]
    rows = [x, residual, codes, scale, residual_out]
    vectors = [t for t in (x, residual, codes, residual_out, *weights) if t is not None]
    size = vector_size(vectors, width)
    blocks = granularity == "block128"
    steps = []
    for batch in row_batches([t for t in rows if t is not None]):
        shape = RowShape(
            batch.rows, width, size, x.dtype.itemsize, inputs=1 if residual is None else 2, centred=True
        )
        chosen = config or _choose(shape, device, blocks, centred)
        kernel = norm_quantize_kernel(
            x.dtype, (weights[0], weights[1]), chosen, centred=centred, blocks=blocks, residual=residual is not None,
            normalize=normalize, row_axes=batch.axes, stepped=is_stepped(*vectors),
        )  # fmt: skip
        pointers, strides = row_arguments(rows, batch)
        arguments = (
            *pointers[:2], *(w or NullPointer() for w in weights), *pointers[2:], batch.rows, width,
            *batch.extents[1:], *strides, *(last_stride(w) for w in weights), eps, weight_offset,
        )  # fmt: skip
        grid = (-(-batch.rows // chosen.rows_per_block), 1, 1)
        reason = chosen.reason(batch.rows, width)
        steps.append(Step(kernel, grid, (chosen.threads, 1, 1), arguments, reason=reason))
    return tuple(steps)


def _choose(shape: RowShape, device: DeviceInfo, blocks: bool, centred: bool) -> RowConfig:
    """The norm's configuration; for blocks of 128 with whole warps a row, which their shuffles need.

    A layer norm of a sum computes most between its loads and its stores: twice the threads with half of the values keep
    0.96 of a copy's rate on an H200 where few threads had 0.91 (block scales; 0.97 and 0.95 with a scale a row).
    """
    found = candidates(shape, device)
    chosen = found[0]
    if centred and shape.inputs == 2 and chosen.rows_per_block == 1:
        narrow = (c for c in found if not c.prefetch and c.threads == 2 * chosen.threads <= 256)
        chosen = next(narrow, chosen)
    if not chosen.vectors_per_thread:
        raise UnsupportedError(
            f"no quantised norm for rows of {shape.width}", ["such rows do not fit in registers"],
            "the norm and quantize_fp8 in two calls",
        )  # fmt: skip
    if not blocks:
        return chosen
    if shape.size < 4:
        raise UnsupportedError(
            f"no block scales for rows of {shape.width}, read {shape.size} elements at a time",
            ["128 neighbours must lie in one warp"],
            "rows of a multiple of 4 elements, aligned to that; or granularity 'row'",
        )
    if chosen.threads_per_row >= 32:
        return chosen
    exact = shape.vectors % 32 == 0
    each = -(-shape.vectors // 32)
    each = each if exact else 1 << (each - 1).bit_length()
    rows = 4 if chosen.threads > 32 else 1
    return replace(
        chosen, threads_per_row=32, rows_per_block=rows, vectors_per_thread=each, full_row=exact, min_blocks=4
    )


def norm_quantize_kernel(
    dtype: DType, weights: tuple[Operand | None, Operand | None], config: RowConfig, *, centred: bool, blocks: bool,
    residual: bool, normalize: str, row_axes: int, stepped: bool,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration."""
    weight, bias = weights
    return kernel_spec(
        "norm/norm_quantize.cu", "norm_quantize", _PARAMS, archs=E4M3_ARCHS, max_registers=config.max_registers,
        Element=dtype, Weight=dtype if weight is None else weight.dtype, Bias=dtype if bias is None else bias.dtype,
        kHasWeight=weight is not None, kHasBias=bias is not None, kCentred=centred, kBlockScales=blocks,
        kHasResidual=residual, kNormalizeRounded=residual and normalize == "rounded", kRowAxes=row_axes,
        kStepped=stepped, kOverlaps=False, **config.constants(),
    )  # fmt: skip


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    centred = "weight_offset" not in problem.attributes
    return Plan(plan_norm_quantize(
        problem["x"], (problem.get("weight"), problem.get("bias")), outputs["out"], outputs["scale_out"], device,
        centred=centred, residual=problem.get("residual"), residual_out=outputs.get("residual_out"),
        granularity=problem.attribute("granularity"), eps=problem.attribute("eps"),
        weight_offset=0.0 if centred else problem.attribute("weight_offset"), normalize=problem.attribute("normalize"),
    ))  # fmt: skip


_ATTRIBUTES = (Attribute("granularity", str, "row"), Attribute("out_dtype", str, "e4m3"))
_OUTPUTS = ("out", "scale_out", "residual_out")
_IN_PLACE = (("residual_out", "x"), ("residual_out", "residual"))

RMS_NORM_QUANTIZE = OpSpec(
    name="rms_norm_quantize",
    inputs=(Input("x"), Input("weight", True), Input("residual", True)),
    attributes=(
        *_ATTRIBUTES, Attribute("eps", float, 1e-6), Attribute("normalize", str, "rounded"),
        Attribute("weight_offset", float, 0.0),
    ),
    outputs=_OUTPUTS,
    check=_check_rms,
    infer=_infer,
    plan=_plan,
    in_place=_IN_PLACE,
)  # fmt: skip

LAYER_NORM_QUANTIZE = OpSpec(
    name="layer_norm_quantize",
    inputs=(Input("x"), Input("weight", True), Input("bias", True), Input("residual", True)),
    attributes=(*_ATTRIBUTES, Attribute("eps", float, 1e-5), Attribute("normalize", str, "rounded")),
    outputs=_OUTPUTS,
    check=_check_layer,
    infer=_infer,
    plan=_plan,
    in_place=_IN_PLACE,
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: both norms and granularities, usual and odd widths; none before sm_89."""
    if arch not in E4M3_ARCHS:
        return []
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}

    def add(width: int, dtype: DType, granularity: str, *, centred: bool, residual: bool) -> None:
        x, codes = dense("x", (4096, width), dtype), dense("codes", (4096, width), dtypes.e4m3)
        weight = dense("weight", (width,), dtype)
        scale = dense("scale", (4096, 1 if granularity == "row" else -(-width // BLOCK)), dtypes.f32)
        added = x if residual else None
        for step in plan_norm_quantize(
            x, (weight, weight if centred else None), codes, scale, device, centred=centred, residual=added,
            residual_out=added, granularity=granularity,
        ):  # fmt: skip
            found[step.kernel] = None

    for dtype in FLOATS:
        add(4096, dtype, "row", centred=False, residual=True)
        add(4096, dtype, "block128", centred=True, residual=True)
        add(1001, dtype, "row", centred=True, residual=True)
    for width, granularity in ((384, "block128"), (1024, "row"), (4096, "row"), (4096, "block128")):
        add(width, dtypes.bf16, granularity, centred=False, residual=False)
        add(width, dtypes.bf16, granularity, centred=True, residual=True)
    add(24576, dtypes.bf16, "block128", centred=True, residual=True)
    add(32768, dtypes.bf16, "row", centred=False, residual=False)
    return list(found)
