"""Linear layers: a matrix product with bias, activation and residual in one launch.

    y = activation(x @ w + bias) + residual

The residual is added after the activation.  Inputs are f16, bf16 or f32; sums are fp32 (for f32 inputs the tensor
cores work on operands split in two, 3xTF32, so that fp32 accuracy holds); nothing is rounded but y.  Any extents, zero
included, any strides and alignment: a transposed or sliced view is read where it lies.  Kernels:
`cuda_src/gemm/linear.cu`, and for few rows and large weights `cuda_src/gemm/skinny/linear.cu`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.linear import (
    ACTIVATIONS,
    MAX_EXTENT,
    TILES_16BIT,
    TILES_FP32,
    Tile,
    WeightAccess,
    block_count,
    choose_tile,
    copy_bytes,
    pair_access,
    weight_access,
)
from cki.heuristics.linear_hopper import HopperTile
from cki.heuristics.linear_skinny import SkinnyTile
from cki.heuristics.rows import RowBatch, row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops import linear_fp32, linear_hopper, linear_skinny
from cki.ops.call import call
from cki.ops.linear_hopper import RowNorm
from cki.ops.linear_norm import fused_norm_tile
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import ArgumentValue, NullPointer, Plan, Step

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
WeightLayout = Literal["in_out", "out_in"]

#: Parts of a weight that one launch multiplies with.
MAX_PARTS = 3
_TYPES = (dtypes.f32, dtypes.f16, dtypes.bf16)
_TYPE_NAMES = "f32, f16 or bf16"


def linear(
    x: Any, w: Any, bias: Any = None, *, activation: Activation | None = None, residual: Any = None,
    weight_layout: WeightLayout = "in_out", out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """activation(x @ w + bias) + residual over the last axis of x.

    x: [..., K] of f32, f16 or bf16, any strides.
    w: of x's type, any strides: [K, N] for weight_layout "in_out" (Keras and TensorFlow kernels), [N, K] for "out_in"
        (torch `nn.Linear.weight`).  `linear(x, w.T)` is `linear(x, w, weight_layout="out_in")`, without a copy.
    bias: [N], f32 or x's type.
    activation: None; "gelu", by the error function: v/2 (1 + erf(v/sqrt(2))); "gelu_tanh", its approximation
        v/2 (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))) (both Hendrycks, Gimpel 2016, arXiv:1606.08415); "silu",
        v/(1 + exp(-v)); "relu".  It acts on the fp32 sum.
    residual: of y's shape and x's type; added after the activation, before y is rounded.
    out: where to write y; may be the residual itself.

    Returns y [..., N] of x's type.

    With K = 0 the product is zero, and y = activation(bias) + residual.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    return call(LINEAR, (x, w, bias, residual), (activation, weight_layout), (out,), stream)


class Part(NamedTuple):
    """A part of a weight: [K, N] or [N, K], and its bias [N] or None."""

    w: Operand
    bias: Operand | None


def plan_linear(
    x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand, device: DeviceInfo, *,
    activation: str | None = None, weight_layout: str = "in_out",
    tile: Tile | HopperTile | SkinnyTile | linear_fp32.Fp32Tile | None = None, norm: RowNorm | None = None,
    statistics: Operand | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one linear layer over operands (see `linear`).

    tile: instead of the heuristic's choice.  A SkinnyTile selects the kernel for few rows; a HopperTile the one for
    sm_90a, an Fp32Tile that of fp32.  norm, statistics: see `plan_linear_hopper`; UnsupportedError where
    `fused_norm_tile` finds no tile.  Nothing is launched for an empty y.
    """
    if y.size == 0:
        return ()
    access = _access(w, weight_layout)
    if norm is not None or statistics is not None:
        tile = tile or fused_norm_tile(
            x, w, residual, y, device, activation=activation, weight_layout=weight_layout,
            norm=None if norm is None else norm.kind, statistics=statistics is not None,
        )  # fmt: skip
        if not isinstance(tile, HopperTile):
            raise UnsupportedError(
                "linear: norms of rows", ["only the Hopper kernel computes them"], "a norm of its own"
            )
        return linear_hopper.plan_linear_hopper(
            x, w, bias, residual, y, device, access, tile, activation=activation, norm=norm, statistics=statistics
        )  # fmt: skip
    if tile is None:
        tile = (
            linear_skinny.preferred(x, w, residual, y, device, access)
            or linear_hopper.preferred(x, w, residual, y, device, access, activation)
            or linear_fp32.preferred(x, w, residual, y, device, access)
        )
    operands = x, w, bias, residual, y, device, access
    if isinstance(tile, SkinnyTile):
        return linear_skinny.plan_linear_skinny(*operands, tile, activation=activation)
    if isinstance(tile, HopperTile):
        return linear_hopper.plan_linear_hopper(*operands, tile, activation=activation)
    if isinstance(tile, linear_fp32.Fp32Tile):
        return linear_fp32.plan_linear_fp32(*operands, tile, activation=activation)
    return _plan(x, [Part(w, bias)], residual, y, device, activation, weight_layout, tile)


def plan_linear_parts(
    x: Operand, parts: Sequence[Part], y: Operand, device: DeviceInfo, *, weight_layout: str = "in_out",
    tile: Tile | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Several linear layers of one x, their results side by side in y's last axis (Q, K and V projections).

    On sm_90a one launch of the Hopper kernel a part where that is the faster way.  Else one launch for up to MAX_PARTS
    parts when their weights have the same strides and either all have a bias of one type or none has, or one a part.
    """
    filled = [part for part in parts if _columns(part.w, weight_layout) > 0]
    results = []
    first = 0
    for part in filled:
        columns = _columns(part.w, weight_layout)
        results.append(y.view((*y.shape[:-1], columns), y.strides, first * y.strides[-1]))
        first += columns
    if tile is None:
        accesses = [_access(part.w, weight_layout) for part in filled]
        products = [(x, part.w, result, access) for part, result, access in zip(filled, results, accesses)]
        tiles = linear_hopper.preferred_for_parts(products, device)
        if tiles:
            return tuple(
                step
                for part, result, access, chosen in zip(filled, results, accesses, tiles)
                for step in linear_hopper.plan_linear_hopper(
                    x, part.w, part.bias, None, result, device, access, chosen
                )
            )
    if _launch_together(filled, weight_layout):
        whole = y.view((*y.shape[:-1], first), y.strides, 0)
        return _plan(x, filled, None, whole, device, None, weight_layout, tile)
    return tuple(
        step
        for part, result in zip(filled, results)
        for step in _plan(x, [part], None, result, device, None, weight_layout, tile)
    )


def _access(w: Operand, weight_layout: str) -> WeightAccess:
    """How w is read; its axes are (K, N) for "in_out", (N, K) for "out_in"."""
    k, n = (0, 1) if weight_layout == "in_out" else (1, 0)
    return weight_access(w.shape[k], w.shape[n], w.strides[k], w.strides[n])


def _columns(w: Operand, weight_layout: str) -> int:
    return w.shape[1 if weight_layout == "in_out" else 0]


def _launch_together(parts: Sequence[Part], weight_layout: str) -> bool:
    accesses = {_access(part.w, weight_layout) for part in parts}
    biases = {None if part.bias is None else part.bias.dtype for part in parts}
    bias_steps = {part.bias.strides for part in parts if part.bias is not None and part.bias.shape[0] > 1}
    return len(parts) <= MAX_PARTS and len(accesses) <= 1 and len(biases) <= 1 and len(bias_steps) <= 1


def _plan(
    x: Operand, parts: Sequence[Part], residual: Operand | None, y: Operand, device: DeviceInfo,
    activation: str | None, weight_layout: str, tile: Tile | None,
) -> tuple[Step, ...]:  # fmt: skip
    access = _access(parts[0].w, weight_layout)
    columns = [_columns(part.w, weight_layout) for part in parts]
    depth = x.shape[-1]
    x_column_stride = 1 if depth <= 1 else x.strides[-1]
    y_column_stride = 1 if y.shape[-1] <= 1 else y.strides[-1]
    residual_column_stride = 1 if residual is None or y.shape[-1] <= 1 else residual.strides[-1]
    copy_w = min(copy_bytes(part.w, access.column_stride, (access.stride,)) for part in parts)
    # Where the parts begin decides, with y's own alignment, whether pairs of columns are aligned.
    even_parts = all(n % 2 == 0 for n in columns[:-1])

    steps = []
    for batch in row_batches([t for t in (x, residual, y) if t is not None]):
        x_batch, residual_batch, y_batch = _at_batch((x, residual, y), batch)
        assert x_batch is not None
        assert y_batch is not None
        strides = _strides_of((x, residual, y), batch)
        copy_x = copy_bytes(x_batch, x_column_stride, strides[0])
        gathered = min(copy_x, copy_w) < 4 or x_column_stride != 1 or access.column_stride != 1
        chosen = tile or choose_tile(batch.rows, columns, depth, x.dtype.itemsize, device, gathered=gathered)
        kernel = linear_kernel(
            x.dtype, chosen, bias=None if parts[0].bias is None else parts[0].bias.dtype, activation=activation,
            residual=residual is not None, access=access, unit_x=x_column_stride == 1, copy_x=copy_x, copy_w=copy_w,
            row_axes=batch.axes, parts=len(parts),
            pair_y=even_parts and pair_access(y_batch, y_column_stride, strides[2]),
            pair_residual=residual_batch is not None
            and pair_access(residual_batch, residual_column_stride, strides[1]),
        )  # fmt: skip
        absent = MAX_PARTS - len(parts)
        arguments: tuple[ArgumentValue, ...] = (
            x_batch, *(part.w for part in parts), *(NullPointer(),) * absent,
            *(part.bias or NullPointer() for part in parts), *(NullPointer(),) * absent,
            residual_batch or NullPointer(), y_batch,
            batch.rows, *batch.extents[1:], *columns, *(0,) * absent, depth,
            *(stride for tensor in strides for stride in tensor), access.stride,
            x_column_stride, residual_column_stride, y_column_stride, access.column_stride,
            1 if parts[0].bias is None else parts[0].bias.strides[0],
        )  # fmt: skip
        blocks = block_count(chosen, batch.rows, columns)
        reason = (
            f"{batch.rows} x {depth} by {' + '.join(map(str, columns))}: tiles of {chosen.block_m} x {chosen.block_n}, "
            f"{blocks} blocks, {copy_x} and {copy_w} bytes a copy"
        )
        steps.append(
            Step(
                kernel,
                (blocks, 1, 1),
                (chosen.threads, 1, 1),
                arguments,
                smem=chosen.shared_memory,
                reason=reason,
            )
        )
    return tuple(steps)


def _at_batch(tensors: Sequence[Operand | None], batch: RowBatch) -> list[Operand | None]:
    """The tensors from their first row of the batch on."""
    offsets = iter(batch.offsets)
    return [None if t is None else t.view(t.shape, t.strides, next(offsets)) for t in tensors]


def _strides_of(tensors: Sequence[Operand | None], batch: RowBatch) -> list[tuple[int, int, int]]:
    strides = iter(batch.strides)
    return [(0, 0, 0) if t is None else next(strides) for t in tensors]


def linear_kernel(
    dtype: DType, tile: Tile, *, bias: DType | None = None, activation: str | None = None, residual: bool = False,
    access: WeightAccess = WeightAccess(True, 0, 1), unit_x: bool = True, copy_x: int = 16, copy_w: int = 16,  # noqa: B008
    row_axes: int = 1, parts: int = 1, pair_y: bool = True, pair_residual: bool = True,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration."""
    return kernel_spec(
        "gemm/linear.cu", "linear", "P" * 9 + "i" * 7 + "q" * 15, max_registers=tile.max_registers,
        Element=dtype, Bias=bias or dtype, kHasBias=bias is not None, kHasResidual=residual,
        kActivation=ACTIVATIONS[activation], kBlockM=tile.block_m, kBlockN=tile.block_n, kWarpsM=tile.warps_m,
        kWarpsN=tile.warps_n, kStages=tile.stages, kMinBlocks=tile.min_blocks, kCopyBytesX=copy_x, kCopyBytesW=copy_w,
        kUnitStrideX=unit_x, kUnitStrideW=access.column_stride == 1, kWeightAlongN=access.along_n, kRowAxes=row_axes,
        kSegments=parts, kVectorY=2 if pair_y else 1, kVectorResidual=2 if residual and pair_residual else 1,
    )  # fmt: skip


def check_linear(
    problem: Problem, depth: int, columns: int, names: tuple[str, str, str] = ("x", "w", "bias"),
    weight_layout: str = "in_out",
) -> None:  # fmt: skip
    """Note what is wrong with a weight, and its bias, for a depth x columns product with x.  -1: any extent."""
    x_name, w_name, bias_name = names
    x, w, bias = problem[x_name], problem[w_name], problem.get(bias_name)
    problem.require_like(x, w_name)
    axes = ("K", "N") if weight_layout == "in_out" else ("N", "K")
    wanted = dict(zip(("K", "N"), (depth, columns)))
    shape = tuple(axis if wanted[axis] < 0 else wanted[axis] for axis in axes)
    if w.ndim != 2 or any(isinstance(e, int) and e != got for e, got in zip(shape, w.shape)):
        problem.reject(
            f"{w_name} has shape {w.shape}, {x_name} has shape {x.shape}",
            f"{w_name} of shape ({shape[0]}, {shape[1]})",
        )
        if bias is not None:
            check_vector(problem, bias_name, None, x)
        return
    if max(w.shape) > MAX_EXTENT:
        problem.reject(f"{w_name} has shape {w.shape}", f"axes of at most {MAX_EXTENT}")
    if bias is not None:
        check_vector(problem, bias_name, w.shape[axes.index("N")], x)


def check_vector(problem: Problem, name: str, extent: int | None, x: Operand) -> None:
    """Note what is wrong with a vector of that extent (None: not known), of f32 or x's type."""
    vector = problem[name]
    problem.require_like(x, name, f32=True)
    if extent is not None and vector.shape != (extent,):
        problem.reject(f"{name} has shape {vector.shape}", f"{name} of shape ({extent},)")


def check_type_and_layout(problem: Problem) -> str:
    """Note what is wrong with x's type and weight_layout; returns the layout to go on with."""
    x, layout = problem["x"], problem.attribute("weight_layout")
    if x.dtype not in _TYPES:
        problem.reject_type(f"x is {x.dtype}", f"x of {_TYPE_NAMES}")
    if layout not in ("in_out", "out_in"):
        problem.reject(f"weight_layout is {layout!r}", 'weight_layout "in_out" or "out_in"')
        return "in_out"
    return str(layout)


def _check(problem: Problem) -> None:
    x, layout = problem["x"], check_type_and_layout(problem)
    if problem.attribute("activation") not in ACTIVATIONS:
        known = ", ".join(repr(name) for name in ACTIVATIONS if name) + " or None"
        problem.reject(f"activation is {problem.attribute('activation')!r}", f"activation {known}")
    if x.ndim == 0:
        problem.reject("x has no axis to multiply (shape ())", "x of shape [..., K]")
        check_linear(problem, -1, -1, weight_layout=layout)
        return
    if x.shape[-1] > MAX_EXTENT:
        problem.reject(f"x has shape {x.shape}", f"a last axis of at most {MAX_EXTENT}")
    check_linear(problem, x.shape[-1], -1, weight_layout=layout)
    w, residual = problem["w"], problem.get("residual")
    if residual is not None:
        problem.require_like(x, "residual")
        if w.ndim == 2 and residual.shape != (*x.shape[:-1], _columns(w, layout)):
            problem.reject(
                f"residual has shape {residual.shape}, the result has shape {(*x.shape[:-1], _columns(w, layout))}",
                f"residual of shape {(*x.shape[:-1], _columns(w, layout))}",
            )


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    x = problem["x"]
    columns = _columns(problem["w"], problem.attribute("weight_layout"))
    return {"out": OutputSpec((*x.shape[:-1], columns), x.dtype)}


def _plan_problem(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_linear(
        problem["x"], problem["w"], problem.get("bias"), problem.get("residual"), outputs["out"], device,
        activation=problem.attribute("activation"), weight_layout=problem.attribute("weight_layout"),
    ))  # fmt: skip


LINEAR = OpSpec(
    name="linear",
    inputs=(Input("x"), Input("w"), Input("bias", True), Input("residual", True)),
    attributes=(Attribute("activation", str), Attribute("weight_layout", str, "in_out")),
    outputs=("out",),
    check=_check,
    infer=_infer,
    plan=_plan_problem,
    in_place=(("out", "residual"),),
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: every tile with both weight orders, and the ways in which copies can be narrow.

    bf16 differs from f16 in the instructions of the products alone, so one kernel a tile stands for it.
    """
    device = sim_device(arch)
    along_k, strided = WeightAccess(False, 1024, 1), WeightAccess(False, 1024, 2)
    found: dict[KernelSpec, None] = {}

    def add(dtype: DType, tile: Tile, **choices: Any) -> None:
        found[linear_kernel(dtype, tile, **choices)] = None

    for dtype in _TYPES:
        for tile in TILES_FP32 if dtype == dtypes.f32 else TILES_16BIT:
            if tile.shared_memory > device.shared_memory_per_block:
                continue
            full: dict[str, Any] = {"bias": dtype, "residual": True, "activation": "gelu"}
            narrow: dict[str, Any] = {"row_axes": 3, "pair_y": False, "pair_residual": False, **full}
            add(dtype, tile, access=along_k, **full)
            if dtype == dtypes.bf16:
                continue
            add(dtype, tile, **full)
            add(dtype, tile, bias=dtypes.f32, parts=MAX_PARTS, row_axes=3, copy_x=8)
            add(dtype, tile, copy_x=4, copy_w=4, **narrow)
            if tile.block_m * tile.block_n <= 64 * 64:  # what may be gathered: choose_tile
                size = dtype.itemsize
                add(dtype, tile, copy_x=size, copy_w=size, unit_x=False, access=strided, **narrow)
    for activation in ACTIVATIONS:
        add(dtypes.f16, TILES_16BIT[0], activation=activation)
    hopper: list[KernelSpec] = []
    if arch == "sm_90a":
        from cki.ops import linear_fp8  # it takes rules from here

        modules = (linear_hopper, linear_fp8, linear_fp32)
        hopper = [spec for module in modules for spec in module.representative_specs()]
    return [*found, *linear_skinny.representative_specs(arch, device), *hopper]
