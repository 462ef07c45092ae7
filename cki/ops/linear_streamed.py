"""Plan of linear layers of few rows by TMA (`cuda_src/gemm/skinny/streamed.cu`): tensor maps, constants, the launch.

`cki.ops.linear_skinny.plan_linear_skinny` comes here when its tile says `tma`.
"""

from __future__ import annotations

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.linear import ACTIVATIONS, WeightAccess, pair_access
from cki.heuristics.linear_skinny import (
    SkinnyTile,
    blocks_together,
    fits,
    persistent_blocks,
    predicted_time,
    skinny_blocks,
)
from cki.heuristics.rows import row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops.linear_hopper import hopper_obstacles
from cki.plan import ArgumentValue, NullPointer, Step, TensorMapArg

_ARCH = "sm_90a"
_PARAMS = "TTPPPiiiqqqqq"
_STAGE_DEPTH = 64
_MAX_BLOCKS_X, _MAX_BLOCKS_Y = 2**31 - 1, 2**16 - 1


def plan_linear_streamed(
    x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand, device: DeviceInfo,
    access: WeightAccess, tile: SkinnyTile, *, activation: str | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """The launch; none for an empty result.  access: how w is read.  UnsupportedError names every obstacle."""
    if y.size == 0:
        return ()
    depth, columns = x.shape[-1], y.shape[-1]
    batches = row_batches([t for t in (x, residual, y) if t is not None])
    obstacles = hopper_obstacles(x, w, columns, access, batches, device)
    if not obstacles and not fits(tile, x.dtype.itemsize, device, along_n=access.along_n):
        obstacles.append(f"{device.shared_memory_per_block} bytes of shared memory cannot hold tile {tile}")
    grid = persistent_blocks(tile, batches[0].rows, columns, device)
    across, down, _ = skinny_blocks(tile, batches[0].rows, columns)
    if across > _MAX_BLOCKS_X or down > _MAX_BLOCKS_Y:
        obstacles.append(f"{across} x {down} tiles: {_MAX_BLOCKS_X} x {_MAX_BLOCKS_Y} at most")
    if obstacles:
        raise UnsupportedError(f"linear: tile {tile}", obstacles, "a tile without TMA, or the generic kernel")
    (batch,) = batches
    x_stride, *residual_strides, y_stride = (strides[2] for strides in batch.strides)
    residual_stride = residual_strides[0] if residual_strides else 0
    y_step = 1 if columns == 1 else y.strides[-1]
    residual_step = 1 if residual is None or columns == 1 else residual.strides[-1]
    kernel = streamed_kernel(
        x.dtype, tile, bias=None if bias is None else bias.dtype, activation=activation,
        residual=residual is not None, along_n=access.along_n, min_blocks=blocks_together(tile, device),
        pair_y=pair_access(y, y_step, (y_stride,)),
        pair_residual=residual is not None and pair_access(residual, residual_step, (residual_stride,)),
    )  # fmt: skip
    inner, outer = (columns, depth) if access.along_n else (depth, columns)
    box = (_STAGE_DEPTH, _STAGE_DEPTH if access.along_n else tile.block_n)
    arguments: tuple[ArgumentValue, ...] = (
        _rows(x, depth, batch.rows, x_stride, (_STAGE_DEPTH, tile.block_m)), _rows(w, inner, outer, access.stride, box),
        bias or NullPointer(), residual or NullPointer(), y, batch.rows, columns, depth,
        1 if bias is None else bias.strides[0], residual_stride, residual_step, y_stride, y_step,
    )  # fmt: skip
    predicted = predicted_time(tile, batch.rows, columns, depth, x.dtype.itemsize, device)
    reason = (
        f"{batch.rows} x {depth} by {columns}: few rows, weights by TMA, tiles of {tile.block_m} x {tile.block_n}, "
        f"K in {tile.split} parts, {grid[0] * grid[1]} blocks, {predicted:.1f} us predicted"
    )
    step = Step(
        kernel, grid, (tile.threads, 1, 1), arguments, smem=tile.shared_memory, cluster=(tile.split, 1, 1),
        programmatic=tile.programmatic, reason=reason,
    )  # fmt: skip
    return (step,)


def _rows(tensor: Operand, inner: int, outer: int, stride: int, box: tuple[int, int]) -> TensorMapArg:
    """Map over `outer` rows of `inner` elements, `stride` elements apart.  One row may have any stride: any will do."""
    stride_bytes = stride * tensor.dtype.itemsize if outer > 1 else 16
    return TensorMapArg(tensor, (inner, outer), (stride_bytes,), box)


def streamed_kernel(
    dtype: DType, tile: SkinnyTile, *, bias: DType | None = None, activation: str | None = None,
    residual: bool = False, along_n: bool = True, min_blocks: int = 1, pair_y: bool = True,
    pair_residual: bool = True,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration."""
    return kernel_spec(
        "gemm/skinny/streamed.cu", "linear_streamed", _PARAMS, archs=(_ARCH,),
        max_registers=min(255, 65536 // (min_blocks * tile.threads) // 8 * 8),
        Element=dtype, Bias=bias or dtype, kHasBias=bias is not None, kHasResidual=residual,
        kActivation=ACTIVATIONS[activation], kBlockM=tile.block_m, kBlockN=tile.block_n, kWarps=tile.warps_k,
        kStages=tile.stages, kMinBlocks=min_blocks, kSplit=tile.split, kProgrammatic=tile.programmatic,
        kWeightAlongN=along_n, kVectorY=2 if pair_y else 1, kVectorResidual=2 if residual and pair_residual else 1,
    )  # fmt: skip


def representative_specs(device: DeviceInfo) -> list[KernelSpec]:
    """Kernels that stand for all: both weight orders, each width of tile, with a split and persistent, one serial."""
    f16, bf16, f32 = dtypes.f16, dtypes.bf16, dtypes.f32
    two, large = SkinnyTile(16, 64, 1, 4, 8, 2, tma=True), SkinnyTile(16, 64, 1, 4, 20, tma=True)
    wide = SkinnyTile(16, 128, 1, 4, 4, tma=True)
    serial, tall = SkinnyTile(16, 128, 1, 4, 8, 2, False, True), SkinnyTile(64, 64, 1, 4, 8, 2, tma=True)
    everything = {"activation": "gelu", "residual": True}
    return [
        streamed_kernel(dtype, tile, min_blocks=blocks_together(tile, device), **options)  # type: ignore[arg-type]
        for dtype, tile, options in (
            (bf16, two, {}),
            (f16, two, {"bias": f16, "along_n": False, **everything}),
            (bf16, large, {"bias": f32, **everything, "pair_y": False, "pair_residual": False}),
            (f16, wide, {"along_n": False, "bias": f16, "activation": "silu"}),
            (bf16, wide, {}),
            (f16, serial, {"bias": f16, "activation": "relu", "residual": True}),
            (bf16, tall, {"along_n": False, "bias": bf16, **everything}),
        )
    ]
