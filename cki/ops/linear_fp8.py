"""Linear layers of e4m3 codes with block scales: `cuda_src/gemm/hopper/linear_fp8.cu`, on sm_90a.

    y[m, n] = sum over k of x[m, k] x_scale[m, k / 128] w[n, k] w_scale[n / 128, k / 128] + bias[n]

The form of DeepSeek-V3's and Qwen3's FP8 weights, and of what `quantize_fp8(granularity="block128")` makes of
activations; or w has a scale a row, w_scale[n].  Every 128 products are added in fp32, times their scales, which are
never multiplied into the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.linear import pair_access
from cki.heuristics.linear_hopper import LAUNCH_REGISTERS, HopperTile, tile_count
from cki.heuristics.rows import row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops.call import call
from cki.ops.linear import check_vector
from cki.ops.linear_hopper import row_obstacles, stores_by_tma, tensor_map
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import NullPointer, Plan, Step

#: Neighbours with one scale.
BLOCK = 128
_ARCH = "sm_90a"
_PARAMS = "TTTPPPPiiiqqqqqqq"
#: The same rows of 128 bytes as of 64 elements of 16 bits, so the tile's numbers are those.
_TILE = HopperTile(128, 128, 5)
_FEW_ROWS_TILE = HopperTile(64, 128, 8)
#: Blocks of a cluster that have a tile of few rows, each a part of K.  Of four, fewer clusters run at a time than the
#: 32 that 4096 columns make: 25 us where two take 19 (12288 x 4096, an H200).
_SPLITS = (1, 2)
#: Registers of (producer, consumer) threads: 128 * 56 + 256 * 224.
_REGISTER_SHARES = (56, 224)
_CODES = (dtypes.e4m3, dtypes.u8)
OUT_DTYPES = {"bf16": dtypes.bf16, "f16": dtypes.f16}


def linear_fp8(
    x: Any, x_scale: Any, w: Any, w_scale: Any, bias: Any = None, *, out_dtype: Literal["bf16", "f16"] = "bf16",
    out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """(x * x_scale) @ (w * w_scale).T + bias, of e4m3 codes with scales.

    x: [..., K], e4m3, or uint8 with the codes' bits; rows at multiples of 16 bytes.
    x_scale: f32, any strides: [..., ceil(K / 128)], one for each 128 of a row, as `quantize_fp8(x,
        granularity="block128")` returns; or [..., 1], one a row.
    w: [N, K] as x.  w_scale: f32, any strides: [ceil(N / 128), ceil(K / 128)], one for each 128 x 128 (DeepSeek-V3,
        Qwen3); [N, 1], one a row (as compressed-tensors and `torch._scaled_mm` have them); or [1, 1], one in all.
    bias: [N], f32 or of out_dtype.
    out: where to write, [..., N] of out_dtype.

    Returns [..., N] of out_dtype.  Sums are fp32.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken, and
    UnsupportedError on other GPUs than Hopper's, and for rows at odd places.
    """
    return call(LINEAR_FP8, (x, x_scale, w, w_scale, bias), (out_dtype,), (out,), stream)


def plan_linear_fp8(
    x: Operand,
    x_scale: Operand,
    w: Operand,
    w_scale: Operand,
    bias: Operand | None,
    y: Operand,
    device: DeviceInfo,
    *,
    tile: HopperTile | None = None,
    weights_early: bool = False,
) -> tuple[Step, ...]:
    """The launch; none for an empty result.  UnsupportedError names every obstacle.

    tile: not the chosen one.  weights_early: no launch that may still run writes w, whose first stages then need not
    wait for it.
    """
    if y.size == 0:
        return ()
    batches = row_batches([x, x_scale, y])
    obstacles = _obstacles(x, w, batches, device)
    if obstacles:
        raise UnsupportedError("linear_fp8", obstacles, "linear, on what the codes stand for")
    (batch,) = batches
    x_stride, x_scale_row, y_stride = (strides[2] for strides in batch.strides)
    rows, depth, columns = batch.rows, x.shape[-1], y.shape[-1]
    y_step = 1 if columns == 1 else y.strides[-1]
    by_tma = stores_by_tma(y)
    tile = tile or choose_fp8_tile(rows, depth, columns, device.sm_count)
    kernel = fp8_kernel(
        y.dtype, tile=tile, column_scales=_has_row_scales(w, w_scale),
        weights_early=weights_early and tile.block_m < _TILE.block_m, bias=None if bias is None else bias.dtype,
        tma_store=by_tma, pair_y=by_tma or pair_access(y, y_step, (y_stride,)),
        pair_bias=bias is not None and pair_access(bias, bias.strides[0], ()),
        scales_in_fours=(_in_fours(x_scale, tile.split), _in_fours(w_scale, tile.split)),
    )  # fmt: skip
    x_map = tensor_map(x, depth, rows, x_stride, (BLOCK, tile.block_m))
    w_map = tensor_map(w, depth, columns, w.strides[0], (BLOCK, tile.block_n))
    scale_steps = (
        x_scale_row,
        *_scale_strides(x_scale, -1),
        *_scale_strides(w_scale, 0),
        *_scale_strides(w_scale, 1),
    )
    tiles = tile_count(tile, rows, columns)
    blocks = tiles * tile.split if tile.split > 1 else min(tiles, device.sm_count)
    parts = f", K in {tile.split} parts" if tile.split > 1 else ""
    step = Step(
        kernel, (blocks, 1, 1), (tile.threads, 1, 1),
        (
            x_map, w_map, tensor_map(y, columns, rows, y_stride, (64, 16)) if by_tma else x_map, x_scale, w_scale,
            bias or NullPointer(), y, rows, columns, depth, *scale_steps, 1 if bias is None else bias.strides[0],
            y_stride, y_step,
        ),
        smem=tile.shared_memory, cluster=(tile.split, 1, 1), programmatic=True,
        reason=f"{rows} x {depth} by {columns}: e4m3 wgmma and TMA, {tiles} tiles of "
        f"{tile.block_m} x {tile.block_n}{parts}",
    )  # fmt: skip
    return (step,)


def choose_fp8_tile(rows: int, depth: int, columns: int, sm_count: int) -> HopperTile:
    """Up to 64 rows a tile that is no higher, of which a cluster splits K where there are few."""
    if rows > _FEW_ROWS_TILE.block_m:
        return _TILE
    stages, tiles = -(-depth // BLOCK), tile_count(_FEW_ROWS_TILE, rows, columns)
    splits = [split for split in _SPLITS if split <= stages]
    return replace(_FEW_ROWS_TILE, split=min(splits, key=lambda s: _few_rows_us(tiles, stages, s, sm_count)))


def _few_rows_us(tiles: int, stages: int, split: int, sm_count: int) -> float:
    """Microseconds of a launch, roughly: a stage takes what an SM can ask for, or its share of memory's rate; a tile
    its beginning and end, and more of them with parts to add.  Without parts a block goes on to its next tile at once.
    """
    stage_us, share_us, launch_us, parts_us = 0.27, 0.0042, 2.5, 2.4
    of_a_tile = 0.0 if split == 1 else parts_us
    rounds, rest = divmod(tiles * split, sm_count)
    of_blocks = [sm_count] * rounds + ([rest] if rest else [])
    part = -(-stages // split)
    return launch_us + sum(part * max(stage_us, share_us * blocks) + of_a_tile for blocks in of_blocks)


def _has_row_scales(w: Operand, w_scale: Operand) -> bool:
    """Whether each row of w has one scale for all of K."""
    return w_scale.shape == (w.shape[0], 1) and w.shape[0] > 1


def _in_fours(scale: Operand, split: int) -> bool:
    """Whether four neighbouring stages' scales lie in a unit of 16 bytes, for every row and in each part of K."""
    return (
        scale.shape[-1] % (4 * split) == 0
        and scale.strides[-1] == 1
        and scale.is_aligned(16)
        and all(stride % 4 == 0 for stride in scale.strides[:-1])
    )


def _scale_strides(scale: Operand, axis: int) -> tuple[int]:
    """An axis of one scale serves all."""
    return (0 if scale.shape[axis] == 1 else scale.strides[axis],)


def _obstacles(x: Operand, w: Operand, batches: list[Any], device: DeviceInfo) -> list[str]:
    """Every reason why the kernel cannot multiply these operands."""
    depth = x.shape[-1]
    found = [] if device.arch == _ARCH else [f"it needs {_ARCH}, the device is {device.arch}"]
    if depth == 0:
        return [*found, "K is 0"]
    if len(batches) != 1 or batches[0].axes != 1:
        return [*found, "the rows of x, its scales and the result do not lie evenly in memory"]
    rows, step = batches[0].rows, 1 if depth == 1 else x.strides[-1]
    found += row_obstacles("x", x, depth, step, batches[0].strides[0][2] if rows > 1 else depth, rows)
    return found + row_obstacles("w", w, depth, 1 if depth == 1 else w.strides[1], w.strides[0], w.shape[0])


def fp8_kernel(
    dtype: DType,
    *,
    tile: HopperTile = _TILE,
    column_scales: bool = False,
    weights_early: bool = False,
    bias: DType | None = None,
    tma_store: bool = True,
    pair_y: bool = True,
    pair_bias: bool = True,
    scales_in_fours: tuple[bool, bool] = (True, True),
) -> KernelSpec:
    """The kernel of one configuration.  dtype: of y.  scales_in_fours: of x and of w, four stages' in one load."""
    producer, consumer = _REGISTER_SHARES
    return kernel_spec(
        "gemm/hopper/linear_fp8.cu", "linear_fp8", _PARAMS, archs=(_ARCH,), max_registers=LAUNCH_REGISTERS,
        Element=dtype, Bias=bias or dtype, kHasBias=bias is not None, kBlockM=tile.block_m, kBlockN=tile.block_n,
        kStages=tile.stages, kSplit=tile.split, kWeightsEarly=weights_early, kColumnScales=column_scales,
        kVectorScalesX=scales_in_fours[0], kVectorScalesW=scales_in_fours[1],
        kTmaStore=tma_store, kVectorY=2 if pair_y else 1, kVectorBias=2 if bias is not None and pair_bias else 1,
        kProducerRegisters=producer, kConsumerRegisters=consumer,
    )  # fmt: skip


def _check(problem: Problem) -> None:
    x, w, x_scale, w_scale = (problem[name] for name in ("x", "w", "x_scale", "w_scale"))
    problem.require_dtypes(_CODES, "e4m3, or uint8 with its bits", "x", "w")
    problem.require_dtypes((dtypes.f32,), "f32", "x_scale", "w_scale")
    columns = w.shape[0] if w.ndim == 2 else None
    if problem.get("bias") is not None:
        out = OUT_DTYPES.get(problem.attribute("out_dtype"), dtypes.bf16)
        check_vector(problem, "bias", columns, Operand("out", (), (), out))
    if problem.attribute("out_dtype") not in OUT_DTYPES:
        problem.reject(f"out_dtype is {problem.attribute('out_dtype')!r}", 'out_dtype "bf16" or "f16"')
    if x.ndim == 0 or w.ndim != 2 or w.shape[1] != x.shape[-1]:
        problem.reject(
            f"x has shape {x.shape}, w has shape {w.shape}", "x of shape [..., K], w of shape [N, K]"
        )
        if x_scale.ndim != x.ndim or not x_scale.ndim:
            problem.reject(
                f"x_scale has shape {x_scale.shape}", "x_scale of shape [..., 1] or one a block of 128"
            )
        if w_scale.ndim != 2:
            problem.reject(
                f"w_scale has shape {w_scale.shape}",
                "w_scale of shape (1, 1), one a row or one a block of 128 x 128",
            )
        return
    blocks, w_blocks = -(-x.shape[-1] // BLOCK), -(-w.shape[0] // BLOCK)
    if x_scale.shape not in ((*x.shape[:-1], blocks), (*x.shape[:-1], 1)):
        problem.reject(
            f"x_scale has shape {x_scale.shape}, x has shape {x.shape}",
            " or ".join(dict.fromkeys(f"x_scale of shape {(*x.shape[:-1], n)}" for n in (blocks, 1))),
        )
    scales = ((w_blocks, blocks), (w.shape[0], 1), (1, 1))
    if w_scale.shape not in scales:
        problem.reject(
            f"w_scale has shape {w_scale.shape}, w has shape {w.shape}",
            " or ".join(dict.fromkeys(f"w_scale of shape {shape}" for shape in scales)),
        )


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    shape = (*problem["x"].shape[:-1], problem["w"].shape[0])
    return {"out": OutputSpec(shape, OUT_DTYPES[problem.attribute("out_dtype")])}


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    x, x_scale, w, w_scale = (problem[name] for name in ("x", "x_scale", "w", "w_scale"))
    return Plan(plan_linear_fp8(x, x_scale, w, w_scale, problem.get("bias"), outputs["out"], device))


LINEAR_FP8 = OpSpec(
    name="linear_fp8",
    inputs=(Input("x"), Input("x_scale"), Input("w"), Input("w_scale"), Input("bias", True)),
    attributes=(Attribute("out_dtype", str, "bf16"),),
    outputs=("out",),
    check=_check,
    infer=_infer,
    plan=_plan,
)


def representative_specs() -> list[KernelSpec]:
    """Kernels that stand for all: both ways to store, bias of both types, scales one by one and in fours, few rows with
    K whole and in parts."""
    parts = replace(_FEW_ROWS_TILE, split=2)
    odd: dict[str, Any] = {"tma_store": False, "pair_y": False, "pair_bias": False}
    return [
        fp8_kernel(dtypes.bf16, tile=_FEW_ROWS_TILE, weights_early=True),
        fp8_kernel(dtypes.bf16, tile=parts, weights_early=True),
        fp8_kernel(dtypes.f16, tile=parts, bias=dtypes.f16, scales_in_fours=(False, True), **odd),
        fp8_kernel(dtypes.bf16, tile=parts, column_scales=True),
        fp8_kernel(dtypes.f16, bias=dtypes.f16, column_scales=True),
        fp8_kernel(dtypes.bf16),
        fp8_kernel(dtypes.f16, bias=dtypes.f32),
        fp8_kernel(dtypes.bf16, bias=dtypes.bf16, scales_in_fours=(False, False), **odd),
    ]
