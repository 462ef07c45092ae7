"""Plan of linear layers of few rows (`cuda_src/gemm/skinny/linear.cu`): constants, arguments, the launch.

`cki.ops.linear.plan_linear` comes here when its `tile` is a `SkinnyTile`, and by itself where
`cki.heuristics.linear_skinny.preferred_tile` says so.
"""

from __future__ import annotations

from typing import Any

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.linear import ACTIVATIONS, WeightAccess, copy_bytes, pair_access
from cki.heuristics.linear_skinny import (
    FULL_TILE,
    NARROW_TILES,
    PAIR_TILE,
    ROUNDS_TILE,
    SkinnyTile,
    blocks_together,
    fits,
    predicted_time,
    preferred_tile,
    skinny_blocks,
)
from cki.heuristics.rows import RowBatch, row_batches
from cki.kernel import ARCHITECTURES, KernelSpec, kernel_spec
from cki.operand import Operand
from cki.plan import ArgumentValue, NullPointer, Step

_PARAMS = "P" * 5 + "i" * 5 + "q" * 15
_CLUSTER_ARCHS = ("sm_90a", "sm_100a", "sm_120a")
_MAX_BLOCKS_X, _MAX_BLOCKS_Y = 2**31 - 1, 2**16 - 1


def preferred(
    x: Operand, w: Operand, residual: Operand | None, y: Operand, device: DeviceInfo, access: WeightAccess
) -> SkinnyTile | None:
    """The tile when this kernel is the better choice for the product, else None.  access: how w is read."""
    rows = y.size // y.shape[-1] if y.size else 0
    if rows == 0:
        return None
    (batch, *more) = row_batches([t for t in (x, residual, y) if t is not None])
    if more:
        return None
    return preferred_tile(
        rows, y.shape[-1], x.shape[-1], x.dtype.itemsize, device, along_n=access.along_n,
        copy_width=min(_copy_x(x, batch), _copy_w(w, access)),
    )  # fmt: skip


def _copy_x(x: Operand, batch: RowBatch) -> int:
    return copy_bytes(x, 1 if x.shape[-1] <= 1 else x.strides[-1], batch.strides[0])


def _copy_w(w: Operand, access: WeightAccess) -> int:
    return copy_bytes(w, access.column_stride, (access.stride,))


def plan_linear_skinny(
    x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand, device: DeviceInfo,
    access: WeightAccess, tile: SkinnyTile, *, activation: str | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """The launches: one, or one for each batch of rows that do not lie evenly; none for an empty result.

    Any number of rows, any extents, strides and alignment.  UnsupportedError when the tile is none for this device.
    """
    if y.size == 0:
        return ()
    if not fits(tile, x.dtype.itemsize, device, along_n=access.along_n):
        raise UnsupportedError(
            f"linear: tile {tile} for {x.dtype}",
            [f"{device.arch} with {device.shared_memory_per_block} bytes of shared memory cannot run it"],
            "another tile, or the generic kernel",
        )
    depth, columns = x.shape[-1], y.shape[-1]
    x_step = 1 if depth <= 1 else x.strides[-1]
    y_step = 1 if columns <= 1 else y.strides[-1]
    residual_step = 1 if residual is None or columns <= 1 else residual.strides[-1]
    steps = []
    for batch in row_batches([t for t in (x, residual, y) if t is not None]):
        x_strides, *residual_strides, y_strides = batch.strides
        x_offset, *residual_offsets, y_offset = batch.offsets
        x_here, y_here = x.view(x.shape, x.strides, x_offset), y.view(y.shape, y.strides, y_offset)
        added = residual and residual.view(residual.shape, residual.strides, residual_offsets[0])
        copy_x, copy_w = _copy_x(x_here, batch), _copy_w(w, access)
        kernel = skinny_kernel(
            x.dtype, tile, device.arch, bias=None if bias is None else bias.dtype, activation=activation,
            residual=residual is not None, access=access, unit_x=x_step == 1, copy_x=copy_x, copy_w=copy_w,
            row_axes=batch.axes, min_blocks=blocks_together(tile, device),
            pair_y=pair_access(y_here, y_step, y_strides),
            pair_residual=added is not None and pair_access(added, residual_step, *residual_strides),
        )  # fmt: skip
        arguments: tuple[ArgumentValue, ...] = (
            x_here, w, bias or NullPointer(), added or NullPointer(), y_here,
            batch.rows, *batch.extents[1:], columns, depth,
            *x_strides, *(residual_strides[0] if residual_strides else (0, 0, 0)), *y_strides, access.stride,
            x_step, residual_step, y_step, access.column_stride, 1 if bias is None else bias.strides[0],
        )  # fmt: skip
        grid = skinny_blocks(tile, batch.rows, columns)
        if grid[0] > _MAX_BLOCKS_X or grid[1] > _MAX_BLOCKS_Y:
            raise UnsupportedError(
                f"linear: {grid[0]} x {grid[1]} blocks of tile {tile}",
                [f"a grid holds {_MAX_BLOCKS_X} x {_MAX_BLOCKS_Y}"],
                "the generic kernel",
            )
        predicted = predicted_time(tile, batch.rows, columns, depth, x.dtype.itemsize, device)
        reason = (
            f"{batch.rows} x {depth} by {columns}: few rows, tiles of {tile.block_m} x {tile.block_n}, "
            f"K in {tile.split} parts, {grid[0] * grid[1]} blocks, {copy_x} and {copy_w} bytes a copy, "
            f"{predicted:.1f} us predicted"
        )
        steps.append(
            Step(
                kernel,
                grid,
                (tile.threads, 1, 1),
                arguments,
                smem=tile.shared_memory,
                cluster=(tile.split, 1, 1),
                programmatic=bool(kernel.constant("kProgrammatic")),
                reason=reason,
            )
        )
    return tuple(steps)


def skinny_kernel(
    dtype: DType, tile: SkinnyTile, arch: str, *, bias: DType | None = None, activation: str | None = None,
    residual: bool = False, access: WeightAccess = WeightAccess(True, 0, 1), unit_x: bool = True,  # noqa: B008
    copy_x: int = 16, copy_w: int = 16, row_axes: int = 1, min_blocks: int = 2, pair_y: bool = True,
    pair_residual: bool = True,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration.  arch: programmatic launches and clusters are sm_90's and later ones'."""
    programmatic = tile.programmatic and arch in _CLUSTER_ARCHS
    return kernel_spec(
        "gemm/skinny/linear.cu", "linear_skinny", _PARAMS,
        archs=_CLUSTER_ARCHS if programmatic or tile.split > 1 else ARCHITECTURES,
        max_registers=min(255, 65536 // (min_blocks * tile.threads)),
        Element=dtype, Bias=bias or dtype, kHasBias=bias is not None, kHasResidual=residual,
        kActivation=ACTIVATIONS[activation], kBlockM=tile.block_m, kBlockN=tile.block_n, kWarpsN=tile.warps_n,
        kWarpsK=tile.warps_k, kStages=tile.stages, kOwnRings=tile.own_rings, kMinBlocks=min_blocks, kSplit=tile.split,
        kProgrammatic=programmatic, kStagesAhead=tile.ahead or tile.stages - 1, kLeft=tile.left,
        kRefill=tile.refill,
        kCopyBytesX=copy_x, kCopyBytesW=copy_w,
        kUnitStrideX=unit_x, kUnitStrideW=access.column_stride == 1, kWeightAlongN=access.along_n, kRowAxes=row_axes,
        kVectorY=2 if pair_y else 1, kVectorResidual=2 if residual and pair_residual else 1,
    )  # fmt: skip


def representative_specs(arch: str, device: DeviceInfo) -> list[KernelSpec]:
    """Kernels that stand for all: every tile shape with a split, both weight orders, types, the narrow copies."""
    f16, bf16, f32 = dtypes.f16, dtypes.bf16, dtypes.f32
    along_k, strided = WeightAccess(False, 1024, 1), WeightAccess(False, 1024, 2)
    split = 4 if arch in _CLUSTER_ARCHS else 1
    small, narrow = SkinnyTile(16, 64, 1, 4, 8, split), SkinnyTile(16, 32, 1, 4, 12)
    wide, middle = SkinnyTile(16, 128, 1, 4, 6, split), SkinnyTile(32, 128, 2, 2, 5, split)
    low, large = SkinnyTile(64, 64, 2, 2, 6, split), SkinnyTile(64, 128, 2, 2, 4, split)
    widest = SkinnyTile(64, 256, 4, 2, 5, split)
    serial = SkinnyTile(32, 64, 2, 2, 4, 1, False)
    own = SkinnyTile(16, 64, 1, 4, 5, 2 if split > 1 else 1, own_rings=True)
    everything = {"activation": "gelu", "residual": True}
    choices: list[tuple[DType, SkinnyTile, dict[str, Any]]] = [
        (f16, small, {"bias": f16, **everything}),
        (bf16, small, {"access": along_k}),
        (f32, small, {"bias": f32, "access": along_k, **everything}),
        (f32, small, {}),
        (f16, small, {"bias": f32, "activation": "silu", "copy_x": 4, "copy_w": 4, "row_axes": 3, "pair_y": False}),
        (f16, small, {"copy_x": 2, "copy_w": 2, "unit_x": False, "access": strided}),
        (bf16, narrow, {"bias": bf16, "access": along_k, "activation": "gelu_tanh"}),
        (bf16, wide, {"access": along_k}),
        (f16, middle, {"bias": f16, **everything}),
        (bf16, low, {"bias": bf16, "access": along_k, **everything}),
        (f32, low, {"bias": f32, **everything}),
        (f16, large, {"bias": f16, **everything}),
        (bf16, large, {"access": along_k}),
        (bf16, widest, {"bias": bf16, "access": along_k, **everything}),
        (f16, widest, {}),
        (bf16, own, {}),
        (bf16, NARROW_TILES[0], {"access": along_k, "bias": bf16, "residual": True}),
        (f16, FULL_TILE, {"access": along_k, "bias": f16, **everything}),
        (f16, own, {"access": along_k, "bias": f16, **everything}),
        (bf16, ROUNDS_TILE, {"access": along_k}),
        (bf16, PAIR_TILE, {"bias": bf16, **everything}),
        (f16, serial, {"bias": f16, "activation": "relu", "residual": True, "pair_residual": False}),
    ]  # fmt: skip
    return [
        skinny_kernel(dtype, tile, arch, min_blocks=blocks_together(tile, device), **options)
        for dtype, tile, options in choices
        if fits(tile, dtype.itemsize, device, along_n=options.get("access") is None)
    ]
