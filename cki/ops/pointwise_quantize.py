"""Quantisation to e4m3 with a scale a row, a scale for each 128 neighbours, or one given scale.

value = code * scale.  Kernels: `cuda_src/pointwise/quantize_fp8*.cu`, from sm_89 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.norm import MAX_WIDTH as MAX_ROW_WIDTH
from cki.heuristics.norm import RowConfig, RowShape, choose, vector_size
from cki.heuristics.pointwise import MAX_WIDTH, TileConfig, tile_config
from cki.heuristics.rows import is_stepped, row_arguments, row_batches
from cki.kernel import ARCHITECTURES, KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.pointwise_rules import FLOATS, check_floats, check_rows
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan, Step

Granularity = Literal["row", "block128", "tensor"]

BLOCK = 128
_GRANULARITIES = ("row", "block128", "tensor")
CODE_DTYPES = {"e4m3": dtypes.e4m3, "uint8": dtypes.u8}
_PARAMS = "PPP" + "iiii" + "q" * 12
E4M3_ARCHS = tuple(arch for arch in ARCHITECTURES if arch != "sm_80")


def quantize_fp8(
    x: Any, *, scale: Any = None, granularity: Granularity = "row", out_dtype: Literal["e4m3", "uint8"] = "e4m3",
    out: Any = None, scale_out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """x as e4m3 codes and fp32 scales: x is about codes * scale.

    x: [..., width] of f32, f16 or bf16, any strides.
    granularity: "row": a scale for each row of the last axis; "block128": one for each 128 neighbours of a row (the
    last block of a row may be shorter), as DeepSeek-V3's activations have; "tensor": the one given as `scale`.
    scale: f32 of one element, in device memory; for "tensor" only, above 0.
    out_dtype: "uint8" gives the codes' bits, for frameworks without 8-bit floats (CuPy, TensorFlow).
    out, scale_out: where to write, any strides (a GEMM may want block scales transposed).

    Returns (codes [..., width], scale): scale is [..., 1] for rows, [..., ceil(width / 128)] for blocks.  With a given
    scale, the codes alone.

    A scale is the largest finite magnitude / 448, at least 2^-126, and 1 where there are only zeros.  Codes are
    x / scale to nearest even; beyond +-448, infinity included, they saturate; NaN stays NaN, and alone.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken, and
    UnsupportedError before sm_89.
    e4m3: Micikevicius et al. 2022, arXiv:2209.05433.  Scales of blocks: DeepSeek-V3, arXiv:2412.19437, section 3.3.
    """
    return call(QUANTIZE_FP8, (x, scale), (granularity, out_dtype), (out, scale_out), stream)


def _check(problem: Problem) -> None:
    x, scale, granularity = problem["x"], problem.get("scale"), problem.attribute("granularity")
    check_floats(problem, "x")
    check_rows(problem, x, MAX_ROW_WIDTH if granularity == "row" else MAX_WIDTH)
    if granularity not in _GRANULARITIES:
        names = ", ".join(map(repr, _GRANULARITIES))
        problem.reject(f"granularity is {granularity!r}", f"granularity of {names}")
    elif granularity == "tensor" and scale is None:
        problem.reject(
            'granularity is "tensor", and no scale is given',
            "a scale, from calibration or an earlier pass: the largest magnitude of x / 448",
        )
    elif granularity != "tensor" and scale is not None:
        problem.reject(f'a scale is given, and granularity is "{granularity}"', 'granularity "tensor"')
    if scale is not None and scale.dtype != dtypes.f32:
        problem.reject_type(f"scale is {scale.dtype}", "scale of f32")
    if scale is not None and scale.size != 1:
        problem.reject(f"scale has shape {scale.shape}", "scale of one element")
    check_code_dtype(problem)


def check_code_dtype(problem: Problem) -> None:
    """The attribute out_dtype."""
    if problem.attribute("out_dtype") not in CODE_DTYPES:
        problem.reject(f"out_dtype is {problem.attribute('out_dtype')!r}", 'out_dtype "e4m3" or "uint8"')


def require_e4m3(operation: str, device: DeviceInfo) -> None:
    """Raise UnsupportedError where the device cannot convert to e4m3."""
    if device.arch not in E4M3_ARCHS:
        raise UnsupportedError(
            f"{operation}: e4m3 on {device.arch}", ["conversions to e4m3 need sm_89"], "a newer GPU"
        )


def code_outputs(x: Operand, granularity: str, out_dtype: str) -> dict[str, OutputSpec]:
    """Codes of x's shape, and scales for "row" or "block128"."""
    blocks = 1 if granularity == "row" else -(-x.shape[-1] // BLOCK)
    return {
        "out": OutputSpec(x.shape, CODE_DTYPES[out_dtype]),
        "scale_out": OutputSpec((*x.shape[:-1], blocks), dtypes.f32),
    }


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    outputs = code_outputs(problem["x"], problem.attribute("granularity"), problem.attribute("out_dtype"))
    return outputs if problem.get("scale") is None else {"out": outputs["out"]}


def plan_quantize_fp8(
    x: Operand, codes: Operand, scale: Operand, device: DeviceInfo, *, granularity: str = "row",
    config: RowConfig | TileConfig | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one quantisation over operands (see `quantize_fp8`).

    scale: written, [..., 1] or [..., ceil(width / 128)]; for "tensor" read.  config: instead of the heuristic's choice,
    for measurements; a RowConfig for rows, else a TileConfig.
    """
    require_e4m3("quantize_fp8", device)
    width = x.shape[-1]
    size = vector_size([x, codes], width)
    scales = scale
    if granularity == "tensor":
        scales = scale.view((*x.shape[:-1], 1), (0,) * x.ndim)
    steps = []
    for batch in row_batches([x, codes, scales]):
        pointers, strides = row_arguments([x, codes, scales], batch)
        arguments = (*pointers, batch.rows, width, *batch.extents[1:], *strides)
        if granularity == "row":
            rows = RowShape(batch.rows, width, size, x.dtype.itemsize, weights=0)
            chosen = config if isinstance(config, RowConfig) else choose(rows, device)
            kernel = rows_kernel(x.dtype, chosen, row_axes=batch.axes, stepped=is_stepped(x, codes))
            grid = (-(-batch.rows // chosen.rows_per_block), 1, 1)
            reason = chosen.reason(batch.rows, width)
            steps.append(Step(kernel, grid, (chosen.threads, 1, 1), arguments, reason=reason))
            continue
        vector = 16 // x.dtype.itemsize
        lanes = 1 if granularity == "tensor" else BLOCK // vector
        tiles = config if isinstance(config, TileConfig) else tile_config(
            batch.rows, width, vector, 1, device, min_blocks=4, min_lanes=lanes
        )  # fmt: skip
        kernel = tiles_kernel(
            x.dtype, tiles, given_scale=granularity == "tensor", row_axes=batch.axes, vectors=size == vector
        )
        reason = tiles.reason(batch.rows, width)
        steps.append(
            Step(kernel, tiles.grid(batch.rows, width), (tiles.threads, 1, 1), arguments, reason=reason)
        )
    return tuple(steps)


def rows_kernel(dtype: DType, config: RowConfig, *, row_axes: int, stepped: bool) -> KernelSpec:
    """The kernel of a scale a row."""
    name = "quantize_fp8_rows" if config.vectors_per_thread else "quantize_fp8_rows_long"
    return _kernel(name, dtype, config, kRowAxes=row_axes, kStepped=stepped)


def tiles_kernel(
    dtype: DType, config: TileConfig, *, given_scale: bool, row_axes: int, vectors: bool
) -> KernelSpec:
    """The kernel of a scale for 128 neighbours, or of a given one."""
    return _kernel(
        "quantize_fp8", dtype, config, kRowAxes=row_axes, kStepped=not vectors, kVectorAccess=vectors,
        kGivenScale=given_scale, kOverlaps=False,
    )  # fmt: skip


def _kernel(name: str, dtype: DType, config: RowConfig | TileConfig, **constants: Any) -> KernelSpec:
    return kernel_spec(
        f"pointwise/{name}.cu", name, _PARAMS, archs=E4M3_ARCHS, max_registers=config.max_registers, Element=dtype,
        **constants, **config.constants(),
    )  # fmt: skip


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    given = problem.get("scale")
    scale = outputs["scale_out"] if given is None else given
    granularity = problem.attribute("granularity")
    return Plan(plan_quantize_fp8(problem["x"], outputs["out"], scale, device, granularity=granularity))


QUANTIZE_FP8 = OpSpec(
    name="quantize_fp8",
    inputs=(Input("x"), Input("scale", True)),
    attributes=(Attribute("granularity", str, "row"), Attribute("out_dtype", str, "e4m3")),
    outputs=("out", "scale_out"),
    check=_check,
    infer=_infer,
    plan=_plan,
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: each granularity and type, odd widths, rows beyond registers; none before sm_89."""
    if arch not in E4M3_ARCHS:
        return []
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}
    for dtype in FLOATS:
        for granularity in _GRANULARITIES:
            for width in (1024, 4096, 16384, 4097, 131072) if dtype == dtypes.bf16 else (4096, 4097):
                x, codes = dense("x", (4096, width), dtype), dense("codes", (4096, width), dtypes.e4m3)
                blocks = {"row": 1, "block128": -(-width // BLOCK), "tensor": 1}[granularity]
                scale = dense("scale", (1,) if granularity == "tensor" else (4096, blocks), dtypes.f32)
                for step in plan_quantize_fp8(x, codes, scale, device, granularity=granularity):
                    found[step.kernel] = None
    return list(found)
