"""Plan of fp32's GEMM on Hopper (`cuda_src/gemm/hopper/linear_fp32.cu`): 3xTF32 by wgmma.

`cki.ops.linear.plan_linear` comes here when its `tile` is an `Fp32Tile`, and by itself where `preferred` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cki import dtypes
from cki.device import DeviceInfo
from cki.errors import UnsupportedError
from cki.heuristics.linear import (
    ACTIVATIONS,
    WeightAccess,
    block_count,
    choose_tile,
    modelled_time,
    pair_access,
)
from cki.heuristics.rows import RowBatch, row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops.linear_hopper import row_obstacles, tensor_map
from cki.plan import NullPointer, Step

_ARCH = "sm_90a"
_PARAMS = "TTPPPPPiiiqqqqqqqq"
#: Rows and columns of a tile; elements of K of a stage; bytes of its high and low parts, and of its three barriers.
_BLOCK, _STAGE_DEPTH = 128, 32
_STAGE_BYTES = 4 * _BLOCK * _STAGE_DEPTH * 4 + 3 * 8
_THREADS = 512
#: Registers of a thread at launch, and of (producer, splitter, consumer) threads: 128 * (24 + 72 + 2 * 208) of 65536.
LAUNCH_REGISTERS = 65536 // _THREADS
REGISTER_SHARES = (24, 72, 208)
# Microseconds on an H200: of a launch, of a stage of a tile, of a tile's first bytes and finish; of the generic launch.
_LAUNCH_US, _STAGE_US, _TILE_US, _GENERIC_LAUNCH_US = 2.0, 1.5, 7.0, 1.5


@dataclass(frozen=True)
class Fp32Tile:
    """Tiles of 128 x 128.  stages: of the ring."""

    stages: int = 3

    @property
    def shared_memory(self) -> int:
        """Bytes."""
        return self.stages * _STAGE_BYTES

    def __str__(self) -> str:
        return f"{_BLOCK}x{_BLOCK}s{self.stages}"


def predicted_time(rows: int, columns: int, depth: int, device: DeviceInfo) -> float:
    """Microseconds, if the device's SMs are those of an H200."""
    rounds = math.ceil(-(-rows // _BLOCK) * -(-columns // _BLOCK) / max(device.sm_count, 1))
    return _LAUNCH_US + rounds * (math.ceil(depth / _STAGE_DEPTH) * _STAGE_US + _TILE_US)


def preferred(
    x: Operand, w: Operand, residual: Operand | None, y: Operand, device: DeviceInfo, access: WeightAccess
) -> Fp32Tile | None:
    """The tile when the kernel can compute the product, and is the faster one; else None.  access: how w is read."""
    tile = Fp32Tile()
    if x.dtype != dtypes.f32 or y.size == 0:
        return None
    batches = row_batches([t for t in (x, residual, y) if t is not None])
    if _obstacles(x, w, y, batches, device, access, tile):
        return None
    rows, columns, depth = batches[0].rows, y.shape[-1], x.shape[-1]
    generic = choose_tile(rows, [columns], depth, 4, device)
    other = modelled_time(generic, block_count(generic, rows, [columns]), depth, 4, device)
    return tile if predicted_time(rows, columns, depth, device) < _GENERIC_LAUNCH_US + other else None


def _obstacles(
    x: Operand, w: Operand, y: Operand, batches: Sequence[RowBatch], device: DeviceInfo, access: WeightAccess,
    tile: Fp32Tile,
) -> list[str]:  # fmt: skip
    """Every reason why the kernel cannot multiply these operands.  batches: rows of x, residual and y together."""
    depth, columns = x.shape[-1], y.shape[-1]
    found = []
    if device.arch != _ARCH:
        found.append(f"it needs {_ARCH}, the device is {device.arch}")
    if x.dtype != dtypes.f32:
        found.append(f"x is {x.dtype}: it takes f32")
    if tile.shared_memory > device.shared_memory_per_block:
        found.append(f"tiles {tile} need {tile.shared_memory} bytes of shared memory")
    if depth == 0:
        return [*found, "K is 0"]
    if len(batches) != 1 or batches[0].axes != 1:
        return [*found, "the rows of x, residual and result do not lie evenly in memory"]
    inner, outer = (columns, depth) if access.along_n else (depth, columns)
    rows = batches[0].rows
    x_stride = batches[0].strides[0][2] if rows > 1 else depth
    found += row_obstacles("x", x, depth, 1 if depth == 1 else x.strides[-1], x_stride, rows)
    return found + row_obstacles("w", w, inner, access.column_stride, access.stride, outer)


def plan_linear_fp32(
    x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand, device: DeviceInfo,
    access: WeightAccess, tile: Fp32Tile, *, activation: str | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """The launch; none for an empty result.  access: how w is read.  UnsupportedError names every obstacle."""
    if y.size == 0:
        return ()
    depth, columns = x.shape[-1], y.shape[-1]
    batches = row_batches([t for t in (x, residual, y) if t is not None])
    found = _obstacles(x, w, y, batches, device, access, tile)
    if found:
        raise UnsupportedError("linear: the Hopper kernel of fp32", found, "the generic kernel")
    (batch,) = batches
    x_stride, *residual_strides, y_stride = (strides[2] for strides in batch.strides)
    residual_stride = residual_strides[0] if residual_strides else 0
    y_step = 1 if columns == 1 else y.strides[-1]
    residual_step = 1 if residual is None or columns == 1 else residual.strides[-1]
    kernel = fp32_kernel(
        tile, bias=bias is not None, activation=activation, residual=residual is not None, along_n=access.along_n,
        pair_y=pair_access(y, y_step, (y_stride,)),
        pair_residual=residual is not None and pair_access(residual, residual_step, (residual_stride,)),
    )  # fmt: skip
    x_map = tensor_map(x, depth, batch.rows, x_stride, (_STAGE_DEPTH, _BLOCK))
    if access.along_n:
        w_map = tensor_map(w, columns, depth, access.stride, (32, _STAGE_DEPTH))
    else:
        w_map = tensor_map(w, depth, columns, access.stride, (_STAGE_DEPTH, _BLOCK))
    tiles = -(-batch.rows // _BLOCK) * -(-columns // _BLOCK)
    step = Step(
        kernel, (min(tiles, max(device.sm_count, 1)), 1, 1), (_THREADS, 1, 1),
        (
            x_map, w_map, x, w, bias or NullPointer(), residual or NullPointer(), y, batch.rows, columns, depth,
            x_stride,
            *((access.stride, access.column_stride) if access.along_n else (access.column_stride, access.stride)),
            1 if bias is None else bias.strides[0], residual_stride, residual_step, y_stride, y_step,
        ),
        smem=tile.shared_memory, programmatic=True,
        reason=f"{batch.rows} x {depth} by {columns}: 3xTF32 by wgmma and TMA, {tiles} tiles of {_BLOCK} x {_BLOCK}",
    )  # fmt: skip
    return (step,)


def fp32_kernel(
    tile: Fp32Tile, *, bias: bool = False, activation: str | None = None, residual: bool = False, along_n: bool = True,
    pair_y: bool = True, pair_residual: bool = True,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration."""
    producer, splitter, consumer = REGISTER_SHARES
    return kernel_spec(
        "gemm/hopper/linear_fp32.cu", "linear_fp32", _PARAMS, archs=(_ARCH,), max_registers=LAUNCH_REGISTERS,
        kStages=tile.stages, kWeightAlongN=along_n, kHasBias=bias, kHasResidual=residual,
        kActivation=ACTIVATIONS[activation], kVectorY=2 if pair_y else 1,
        kVectorResidual=2 if residual and pair_residual else 1,
        kProducerRegisters=producer, kSplitterRegisters=splitter, kConsumerRegisters=consumer,
    )  # fmt: skip


def representative_specs() -> list[KernelSpec]:
    """Kernels that stand for all: both weight orders, both ways to store, each epilogue."""
    tile = Fp32Tile()
    lanes = {"pair_y": False, "pair_residual": False}
    return [
        fp32_kernel(tile),
        fp32_kernel(tile, along_n=False),
        fp32_kernel(tile, bias=True, activation="gelu", residual=True),
        fp32_kernel(tile, bias=True, activation="silu", residual=True, along_n=False, **lanes),
    ]
