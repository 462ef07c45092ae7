"""Plan of the Hopper GEMM (`cuda_src/gemm/hopper/linear.cu`): tensor maps, constants, the launch.

`cki.ops.linear.plan_linear` comes here when its `tile` is a `HopperTile`, and by itself where `preferred` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.linear import ACTIVATIONS, WeightAccess, pair_access
from cki.heuristics.linear_hopper import (
    FETCHING_TILES,
    LAUNCH_REGISTERS,
    REGISTER_SHARES,
    SMALL_TILES,
    SPARE_REGISTER_SHARES,
    STAGE_DEPTH,
    STATISTICS_COLUMNS,
    WIDE_TILES,
    HopperTile,
    beats_generic,
    choose_hopper_tile,
    narrow_from,
    norm_fits,
    preferred_hopper_tile,
    wide_fits,
    wide_rounds,
)
from cki.heuristics.rows import RowBatch, row_batches
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.plan import ArgumentValue, NullPointer, Step, TensorMapArg

_ARCH = "sm_90a"
_PARAMS = "TTTTPPPiiiiiqqqqqPfPPPPqqqP"
#: Rows of a store by TMA: a warp's.
_STORE_ROWS = 16
#: Tile numbers are 32-bit, and step past the last by two rounds of blocks.
_MAX_TILES = 2**31 - 2**20
#: Of fp32 sums that a consumer's thread has registers for.
_MOST_SUMS = 192
#: The numbers of RowNorm in cuda_src/gemm/hopper/row_norm.cuh, by what is normalised.
_ROW_NORMS = {None: 0, "layer": 1, "rms": 2, "residual": 3}
#: Of Activation in cuda_src/gemm/activation.cuh: GELU of two f16 at once (`HopperTile.pairs`).
_GELU_PAIRS = 5


class RowNorm(NamedTuple):
    """Rows that a product normalises as it reads them, by the statistics that another has stored.

    kind: "layer" or "rms", of x, whose weight a layer norm wants with columns that sum to zero (`cki.prepare`); or
    "residual", the layer norm of the residual, with gamma [N], it and the bias of y's type; beta is in the bias.
    statistics: [rows, ceil(columns / 64), 2], f32, dense.  A residual that is normalised is not the result's memory.
    """

    kind: str
    statistics: Operand
    epsilon: float
    gamma: Operand | None = None


def statistics_operand(slot: str, rows: int, columns: int, offset: int = 0, alignment: int = 256) -> Operand:
    """Statistics of rows x columns elements in a slot of memory: sum and sum of squares of each 64."""
    shape = (rows, -(-columns // STATISTICS_COLUMNS), 2)
    return dense(slot, shape, dtypes.f32, offset=offset, alignment=alignment)


class Gates(NamedTuple):
    """Columns of w at which gates and ups begin."""

    gate: int
    up: int


def hopper_obstacles(
    x: Operand, w: Operand, columns: int, access: WeightAccess, rows: list[RowBatch], device: DeviceInfo
) -> list[str]:
    """Every reason why the Hopper kernel cannot multiply these operands; empty when it can.

    columns: N.  access: how w is read.  rows: of x, residual and y together.
    """
    found = []
    if device.arch != _ARCH:
        found.append(f"it needs {_ARCH}, the device is {device.arch}")
    if x.dtype not in (dtypes.f16, dtypes.bf16):
        found.append(f"x is {x.dtype}: it takes f16 and bf16")
    depth = x.shape[-1]
    if depth == 0:
        found.append("K is 0")
        return found
    if len(rows) != 1 or rows[0].axes != 1:
        found.append("the rows of x, residual and result do not lie evenly in memory")
    else:
        row_stride = rows[0].strides[0][2] if rows[0].rows > 1 else depth
        found += row_obstacles("x", x, depth, 1 if depth == 1 else x.strides[-1], row_stride, rows[0].rows)
    inner, outer = (columns, depth) if access.along_n else (depth, columns)
    return found + row_obstacles("w", w, inner, access.column_stride, access.stride, outer)


def preferred(
    x: Operand, w: Operand, residual: Operand | None, y: Operand, device: DeviceInfo, access: WeightAccess,
    activation: str | None = None, *, gated: bool = False, norm: str | None = None, statistics: bool = False,
) -> HopperTile | None:  # fmt: skip
    """The tile when this kernel can and should compute the product, else None.  access: how w is read.
    gated: w has twice y's columns.  norm: a `RowNorm`'s kind.  statistics: those of y's rows are wanted.
    """
    if y.size == 0 or device.arch != _ARCH or (statistics and not stores_by_tma(y)):
        return None
    batches = row_batches([t for t in (x, residual, y) if t is not None])
    columns = y.shape[-1] * (2 if gated else 1)
    if hopper_obstacles(x, w, columns, access, batches, device) or (gated and _halves_obstacles(y, access)):
        return None
    fetched = residual is not None and stores_by_tma(y) and _is_for_tma(residual, batches)
    fits = wide_fits(
        activation, residual=residual is not None, fetched=fetched, norm=norm, statistics=statistics,
        tma_store=stores_by_tma(y),
    )  # fmt: skip
    wide_from = None
    if fits and not gated:
        wide_from = wide_rounds(activation, residual=fetched, norm=norm)
    return preferred_hopper_tile(
        batches[0].rows, columns, x.shape[-1], device, activation=activation is not None,
        residual=residual is not None, gated=gated, norm=norm, wide_from=wide_from,
    )  # fmt: skip


def stores_by_tma(y: Operand) -> bool:
    """Whether TMA, which writes whole units of 16 bytes, can store y's rows.  They lie evenly in memory."""
    row_stride = row_batches([y])[0].strides[0][2]
    columns = y.shape[-1]
    step = 1 if columns == 1 else y.strides[-1]
    rows = y.size // columns
    return columns * y.dtype.itemsize % 16 == 0 and not row_obstacles("y", y, columns, step, row_stride, rows)


def _is_for_tma(residual: Operand, batches: list[RowBatch]) -> bool:
    """Whether TMA can bring a residual, whose rows are the second tensor's of the batch."""
    if len(batches) != 1 or batches[0].axes != 1:
        return False
    columns, rows = residual.shape[-1], batches[0].rows
    step = 1 if columns == 1 else residual.strides[-1]
    return not row_obstacles("residual", residual, columns, step, batches[0].strides[1][2], rows)


def _halves_obstacles(y: Operand, access: WeightAccess) -> list[str]:
    """Why TMA cannot read both halves of a weight's columns, each of y's width."""
    if access.along_n and y.shape[-1] * y.dtype.itemsize % 16:
        return [f"w's second half of {y.shape[-1]} columns does not begin at a multiple of 16 bytes"]
    return []


def preferred_for_parts(
    products: Sequence[tuple[Operand, Operand, Operand, WeightAccess]], device: DeviceInfo
) -> list[HopperTile]:
    """A tile for each (x, w, y, access), of one x, when their launches beat one of the generic kernel; else none."""
    found: list[HopperTile] = []
    for x, w, y, access in products:
        batches = row_batches([x, y])
        if y.size == 0 or hopper_obstacles(x, w, y.shape[-1], access, batches, device):
            return []
        found.append(choose_hopper_tile(batches[0].rows, y.shape[-1], x.shape[-1], device))
    columns = [y.shape[-1] for _, _, y, _ in products]
    if not found or not beats_generic(found, batches[0].rows, columns, x.shape[-1], device):
        return []
    return found


def row_obstacles(name: str, tensor: Operand, inner: int, step: int, stride: int, count: int) -> list[str]:
    """What a tensor map does not take of `count` rows of `inner` elements, `step` apart, rows `stride` apart."""
    itemsize = tensor.dtype.itemsize
    found = []
    if step != 1:
        found.append(f"{name} has elements {step} apart, not 1, along its rows")
    if tensor.alignment % 16 or tensor.offset % 16 or (count > 1 and stride * itemsize % 16):
        found.append(f"{name}'s rows do not begin at multiples of 16 bytes")
    if count > 1 and not inner <= stride < (1 << 40) // itemsize:
        found.append(f"{name}'s rows of {inner} elements are {stride} apart: they overlap or reverse")
    return found


def tensor_map(tensor: Operand, inner: int, outer: int, stride: int, box: tuple[int, int]) -> TensorMapArg:
    """Over `outer` rows of `inner` elements, `stride` elements apart.  One row may have any stride: any will do."""
    stride_bytes = stride * tensor.dtype.itemsize if outer > 1 else 16
    return TensorMapArg(tensor, (inner, outer), (stride_bytes,), box)


def plan_linear_hopper(
    x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand, device: DeviceInfo,
    access: WeightAccess, tile: HopperTile, *, activation: str | None = None, gates: Gates | None = None,
    norm: RowNorm | None = None, statistics: Operand | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """The launch; none for an empty result.  access: how w is read.  UnsupportedError names every obstacle.

    gates: y is a gated activation of a product with w, which has twice y's columns.
    norm: rows of x or residual are normalised on the way.  statistics: where those of y's rows go.
    """
    if y.size == 0:
        return ()
    batches = row_batches([t for t in (x, residual, y) if t is not None])
    w_columns = y.shape[-1] * (1 if gates is None else 2)
    obstacles = hopper_obstacles(x, w, w_columns, access, batches, device)
    fetches = tile.fetches and residual is not None and _is_for_tma(residual, batches) and stores_by_tma(y)
    shared_memory = tile.shared_memory + (tile.fetched_bytes if fetches else 0)
    norm_kind = None if norm is None else norm.kind
    shared_memory += tile.board_bytes if uses_spare_warps(tile, norm_kind) else 0
    shared_memory += tile.parked_bytes if tile.parks and norm_kind in ("layer", "rms") else 0
    if shared_memory > device.shared_memory_per_block:
        obstacles.append(f"tiles {tile} need {shared_memory} bytes of shared memory")
    if tile.split > max(1, -(-x.shape[-1] // STAGE_DEPTH)):
        obstacles.append(f"K of {x.shape[-1]} has no {tile.split} parts of {STAGE_DEPTH}")
    if tile.sharers > 1 and (
        tile.split > 1 or STAGE_DEPTH % (8 * tile.sharers) or tile.block_n % (8 * tile.sharers)
    ):
        obstacles.append(f"tiles {tile}: a cluster splits K, or shares the weight in multiples of eight rows")
    if tile.split > 1 and (tile.split > 2 or tile.ping_pong or tile.accumulators > 32):
        obstacles.append(f"tiles {tile}: two blocks share one tile, with at most 32 sums a thread")
    if tile.rows_x and (
        sum(batch.rows for batch in batches) > tile.rows_x or tile.rows_x % 8 or tile.rows_x > tile.block_m
    ):
        obstacles.append(f"tiles {tile}: rows in multiples of eight, and x has no more")
    if tile.consumers == 1 and (tile.ping_pong or tile.block_m > 64 or norm is not None or gates is not None):
        obstacles.append(f"tiles {tile}: small blocks have 64 rows, and no norms or gates")
    fits = wide_fits(
        activation, residual=residual is not None, fetched=fetches, norm=norm_kind, statistics=statistics is not None,
        tma_store=stores_by_tma(y),
    )  # fmt: skip
    if tile.group_rows % 64 or tile.accumulators > _MOST_SUMS:
        obstacles.append(
            f"tiles {tile}: a consumer has rows in multiples of 64, and at most {_MOST_SUMS} sums a thread"
        )
    if tile.parks and not fits:
        obstacles.append(
            f"tiles {tile}: no registers for statistics and norms of a residual, nor for a residual but by TMA and"
            " alone; norms of x want y stored by TMA"
        )
    if tile.parks and uses_spare_warps(tile, norm_kind):
        obstacles.append(f"tiles {tile}: their consumers read statistics themselves, not spare warps")
    if tile.narrow:
        obstacles += _narrow_obstacles(tile, y, norm_kind, statistics is not None or gates is not None)
    if tile.split > 1 and fetches:
        obstacles.append(f"tiles {tile}: TMA brings a residual where no cluster splits K")
    if gates is not None:
        obstacles += _halves_obstacles(y, access)
    if gates is not None and (tile.split > 1 or tile.shares_columns or tile.block_n % 128):
        obstacles.append(f"tiles {tile}: a consumer needs gates and ups of whole 64 columns, over all of K")
    obstacles += _norm_obstacles(tile, bias, residual, y, norm, gates)
    if statistics is not None and not stores_by_tma(y):
        obstacles.append("statistics of rows that are not whole units of 16 bytes")
    if obstacles:
        raise UnsupportedError("linear: the Hopper kernel", obstacles, "the generic kernel")
    (batch,) = batches
    rows, depth, columns = batch.rows, x.shape[-1], y.shape[-1]
    out_columns = tile.block_n if gates is None else tile.block_n // 2  # of a tile
    tiles = -(-rows // tile.block_m) * -(-columns // out_columns)
    narrow = 0
    if tile.narrow:
        narrow, _ = narrow_from(tile, rows, columns, device)
        tiles = -(-rows // tile.block_m) * (narrow // tile.block_n + -(-(columns - narrow) // tile.narrow))
    if tiles > _MAX_TILES:
        raise UnsupportedError(f"linear: {tiles} tiles", [f"{_MAX_TILES} at most"], "the generic kernel")
    x_stride, *residual_strides, y_stride = (strides[2] for strides in batch.strides)
    residual_stride = residual_strides[0] if residual_strides else 0
    y_step = 1 if columns == 1 else y.strides[-1]
    residual_step = 1 if residual is None or columns == 1 else residual.strides[-1]
    tma_store = stores_by_tma(y)
    kernel = hopper_kernel(
        x.dtype, tile, bias=None if bias is None else bias.dtype, activation=activation, residual=residual is not None,
        along_n=access.along_n, tma_store=tma_store,
        pair_y=tma_store or pair_access(y, y_step, (y_stride,)),
        pair_bias=bias is None or pair_access(bias, bias.strides[0], () if gates is None else (columns,)),
        gated=gates is not None,
        pair_residual=residual is not None and pair_access(residual, residual_step, (residual_stride,)),
        norm=None if norm is None else norm.kind, statistics=statistics is not None, fetches=fetches,
        pairs=tile.pairs and x.dtype is dtypes.f16 and residual is None and gates is None and tma_store,
    )  # fmt: skip
    x_map = tensor_map(x, depth, rows, x_stride, (STAGE_DEPTH, tile.rows_x or tile.block_m))
    if access.along_n:
        shares_rows = tile.block_n // 64 % tile.sharers != 0  # of K, where there are fewer slabs of columns
        box_depth = STAGE_DEPTH // tile.sharers if shares_rows else STAGE_DEPTH
        w_map = tensor_map(w, w_columns, depth, access.stride, (64, box_depth))
    else:
        boxes = tile.sharers if gates is None else max(2, tile.sharers)
        boxes = tile.block_n // 64 if tile.narrow else boxes
        w_map = tensor_map(w, depth, w_columns, access.stride, (STAGE_DEPTH, tile.block_n // boxes))
    y_map = tensor_map(y, columns, rows, y_stride, (64, _STORE_ROWS)) if tma_store else x_map
    residual_map = x_map
    if fetches and residual is not None:
        residual_map = tensor_map(residual, columns, rows, residual_stride, (64, _STORE_ROWS))
    arguments: tuple[ArgumentValue, ...] = (
        x_map, w_map, y_map, residual_map, bias or NullPointer(), residual or NullPointer(), y, rows, columns, depth,
        *(gates or (0, narrow)),
        1 if bias is None else bias.strides[0], residual_stride, residual_step, y_stride, y_step,
        *_norm_arguments(norm, statistics), x, w, x_stride,
        *((access.stride, access.column_stride) if access.along_n else (access.column_stride, access.stride)),
        NullPointer(),
    )  # fmt: skip
    if tile.split > 1:  # its blocks have one tile
        blocks = tiles * tile.split
    else:
        clusters = (
            tiles if tile.narrow else -(-rows // (tile.block_m * tile.sharers)) * -(-columns // out_columns)
        )
        blocks = tile.sharers * max(1, min(clusters, device.sm_count * tile.blocks_together // tile.sharers))
    reason = (
        f"{rows} x {depth} by {columns}: wgmma and TMA, tiles of {tile.block_m} x {tile.block_n}, "
        f"{tile.stages} stages, {'ping-pong' if tile.ping_pong else 'cooperative'}, K in {tile.split} parts, "
        f"{tiles} tiles on {blocks} blocks"
    )
    step = Step(
        kernel, (blocks, 1, 1), (tile.threads, 1, 1), arguments, smem=shared_memory,
        cluster=(tile.split * tile.sharers, 1, 1), programmatic=tile.programmatic, reason=reason,
    )  # fmt: skip
    return (step,)


def _narrow_obstacles(tile: HopperTile, y: Operand, norm: str | None, others: bool) -> list[str]:
    """Why narrower tiles cannot come last.  others: statistics or gates are wanted."""
    found = []
    if norm == "residual" or others or not tile.ping_pong or tile.split > 1 or tile.sharers > 1:
        found.append(
            f"tiles {tile}: narrower ones of consumers in turn, behind wide ones, without clusters, statistics, gates"
            " and norms of a residual"
        )
    if tile.narrow % 64 or not 0 < tile.narrow < tile.block_n:
        found.append(f"tiles {tile}: narrower ones have fewer columns, in multiples of 64")
    if y.shape[-1] < tile.block_n:
        found.append(f"tiles {tile}: {y.shape[-1]} columns have no wide tile")
    return found


def uses_spare_warps(tile: HopperTile, norm: str | None) -> bool:
    """Whether they read the rows' statistics: of x.  A residual's norm leaves its consumers no register to give."""
    return tile.spare_warps and norm in ("layer", "rms")


def also_zeroing(step: Step, counter: ArgumentValue) -> Step:
    """The launch of a product, which sets a u32 to zero besides, for the launch behind it."""
    return replace(step, args=(*step.args[:-1], counter))


def hopper_kernel(
    dtype: DType, tile: HopperTile, *, bias: DType | None = None, activation: str | None = None,
    residual: bool = False, along_n: bool = True, tma_store: bool = True, pair_y: bool = True,
    pair_bias: bool = True, pair_residual: bool = True, gated: bool = False, norm: str | None = None,
    statistics: bool = False, fetches: bool = False, pairs: bool = False,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration."""
    spare_warps = uses_spare_warps(tile, norm)
    producer, consumer = SPARE_REGISTER_SHARES if spare_warps else REGISTER_SHARES
    return kernel_spec(
        "gemm/hopper/linear.cu", "linear_hopper", _PARAMS, archs=(_ARCH,),
        max_registers=LAUNCH_REGISTERS if tile.consumers == 2 else 65536 // (256 * tile.blocks_together),
        kConsumers=tile.consumers, kMinBlocks=tile.blocks_together,
        Element=dtype, Bias=bias or dtype, kHasBias=bias is not None, kHasResidual=residual,
        kActivation=_GELU_PAIRS if pairs and activation == "gelu" else ACTIVATIONS[activation],
        kBlockM=tile.block_m, kRowsX=tile.rows_x or tile.block_m,
        kBlockN=tile.block_n, kStages=tile.stages, kStagesAhead=tile.stages_ahead, kLeft=tile.left,
        kPingPong=tile.ping_pong, kNarrowN=tile.narrow, kSplit=tile.split, kSharers=tile.sharers, kGated=gated,
        kWeightAlongN=along_n, kRowNorm=_ROW_NORMS[norm], kSpareWarps=spare_warps, kStatistics=statistics,
        kTmaStore=tma_store, kTmaResidual=fetches, kVectorY=2 if pair_y else 1,
        kVectorBias=2 if (bias is not None or norm == "residual") and pair_bias else 1,
        kVectorResidual=2 if residual and pair_residual else 1,
        kProducerRegisters=producer, kConsumerRegisters=consumer,
    )  # fmt: skip


def _norm_obstacles(
    tile: HopperTile, bias: Operand | None, residual: Operand | None, y: Operand, norm: RowNorm | None,
    gates: Gates | None,
) -> list[str]:  # fmt: skip
    """Why the rows cannot be normalised on the way."""
    if norm is None:
        return []
    found = []
    if not norm_fits(tile, norm.kind):
        found.append(
            f"tiles {tile}: rows are normalised by two consumers of <= 128 rows with all of K; of x for a layer norm in"
            " tiles of <= 128 columns, or of more than 128 sums a thread; of the residual in those of no more"
        )
    if gates is not None and norm.kind != "rms":
        found.append("a gated layer normalises no rows but by their root mean square")
    if norm.kind != "residual":
        return found
    if residual is None or norm.gamma is None or not normalises_residual_by(norm.gamma, bias, y):
        found.append("a residual to normalise needs gamma, dense, in whole pairs, of y's type as the bias")
    elif residual.slot == y.slot and residual.offset == y.offset:
        found.append("a residual to normalise is read whole: it cannot be the result")
    elif residual.shape[-1] > 1 and residual.strides[-1] != 1:
        found.append("a residual to normalise has its elements side by side")
    return found


def normalises_residual_by(gamma: Operand, bias: Operand | None, y: Operand) -> bool:
    """Whether the kernel can read a norm's weight beside the product's bias: of 16 bits, for want of registers."""
    is_like_bias = gamma.dtype == y.dtype and (bias is None or bias.dtype == y.dtype)
    return is_like_bias and gamma.is_contiguous() and pair_access(gamma, 1, ())


def _norm_arguments(norm: RowNorm | None, statistics: Operand | None) -> tuple[ArgumentValue, ...]:
    """Statistics that are read, epsilon, gamma, statistics that are written."""
    absent = NullPointer()
    if norm is None:
        return (absent, 0.0, absent, statistics or absent)
    return (norm.statistics, norm.epsilon, norm.gamma or absent, statistics or absent)


def representative_specs() -> list[KernelSpec]:
    """Kernels that stand for all: every kind of tile, both weight orders, both ways to store, each activation."""
    f16, bf16, f32 = dtypes.f16, dtypes.bf16, dtypes.f32
    wide, square = HopperTile(128, 256), HopperTile(128, 128)
    turns, flat = HopperTile(128, 128, ping_pong=True), HopperTile(64, 256, ping_pong=True)
    return [
        hopper_kernel(bf16, wide, along_n=False), hopper_kernel(f16, wide, bias=f16, activation="gelu", residual=True),
        hopper_kernel(f16, wide, bias=f32, activation="silu", residual=True, along_n=False, tma_store=False,
                      pair_y=False, pair_bias=False, pair_residual=False),
        hopper_kernel(bf16, square, bias=bf16, activation="gelu_tanh"),
        hopper_kernel(f16, turns, bias=f16, activation="gelu", residual=True, along_n=False),
        hopper_kernel(bf16, turns, bias=bf16, activation="relu", residual=True, tma_store=False),
        hopper_kernel(f16, flat, bias=f16, activation="gelu", residual=True),
        hopper_kernel(bf16, HopperTile(128, 128, 6, True, sharers=2), bias=bf16, activation="gelu", residual=True),
        hopper_kernel(bf16, HopperTile(128, 256, 4, sharers=2), bias=bf16, residual=True, along_n=False),
        hopper_kernel(bf16, HopperTile(128, 128, 6, True), activation="silu", gated=True),
        hopper_kernel(f16, HopperTile(128, 256, 4), bias=f16, activation="gelu", along_n=False, gated=True),
        hopper_kernel(bf16, HopperTile(64, 128, 8, split=2), bias=bf16, residual=True),
        hopper_kernel(f16, HopperTile(128, 64, 8, split=2), bias=f16, activation="gelu", along_n=False),
        *(hopper_kernel(bf16, tile, bias=bf16, residual=True, activation="silu") for tile in SMALL_TILES),
        *(
            hopper_kernel(f16, tile, bias=f16, residual=True, statistics=True, norm=norm, fetches=True)
            for tile in FETCHING_TILES for norm in (None, "residual")
        ),
        hopper_kernel(bf16, WIDE_TILES[0], residual=True, fetches=True),
        hopper_kernel(f16, WIDE_TILES[1], bias=f32, activation="gelu", along_n=False),
        hopper_kernel(bf16, replace(WIDE_TILES[0], narrow=128), bias=bf16, residual=True, fetches=True, along_n=False),
        hopper_kernel(f16, replace(WIDE_TILES[1], narrow=128), bias=f32, activation="gelu"),
        hopper_kernel(f16, HopperTile(128, 128, 6, True), bias=f32, activation="gelu", norm="layer", pairs=True),
        hopper_kernel(f16, HopperTile(128, 128, 6, True, sharers=2, spare_warps=True), bias=f32, activation="gelu",
                      norm="layer", along_n=False, pairs=True),
        hopper_kernel(f16, replace(WIDE_TILES[1], narrow=128), bias=f32, activation="gelu", norm="layer", pairs=True),
        hopper_kernel(bf16, WIDE_TILES[1], bias=f32, activation="gelu", norm="layer", along_n=False),
        hopper_kernel(bf16, WIDE_TILES[1], bias=bf16, activation="silu", norm="rms"),
        hopper_kernel(bf16, HopperTile(256, 128, 4), bias=f32, activation="gelu", norm="layer"),
        hopper_kernel(f16, HopperTile(128, 128, 6, True), bias=f16, residual=True, statistics=True, norm="residual"),
        hopper_kernel(f16, HopperTile(128, 256, 4), bias=f16, residual=True, statistics=True, along_n=False),
        hopper_kernel(bf16, HopperTile(128, 128, 6, True), activation="silu", gated=True, norm="rms"),
        hopper_kernel(f16, HopperTile(128, 128, 6, True, spare_warps=True), bias=f32, activation="gelu", norm="layer"),
        hopper_kernel(f16, HopperTile(256, 128, 4, spare_warps=True), bias=f32, norm="layer", along_n=False),
    ]  # fmt: skip
