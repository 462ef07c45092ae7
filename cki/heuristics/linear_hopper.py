"""Tiles of the Hopper GEMM (`cuda_src/gemm/hopper/linear.cu`): pure functions of shapes and device.

What weighs:
* Tiles in rounds over the SMs: the last round takes as long as the others, however few its tiles are.  Where there are
  fewer tiles than SMs, smaller ones, or K split over two blocks, use more of them.
* Products of a stage: the tensor core's share, slower under load on all SMs, or the stage's bytes at the rate at which
  L2 serves all SMs together, whichever is longer.  Tiles of 128 x 128 and more are bound by the first.
* The finish of a tile (bias, activation, residual, stores).  Consumers that share a tile do it while the tensor core
  idles, once a round; consumers in turn (ping-pong) do it beside the other's products, and once at the end.  That of a
  residual is the longest: all SMs read and write at the same time.
* Shared memory: `stages` times 64 elements of K of both operands, and 32 KB for results on their way out; 227 KB at
  most.

The model's figures were fitted to an H200 (bench/results/gemm_hopper.csv); tests/heuristics/test_linear_hopper.py
holds the choice against it.

Without `split` no choice changes products: every sum runs over K in one order.  With a bias consumers that share a tile
start from it; those in turn add it at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cki.device import DeviceInfo
from cki.heuristics.linear import block_count, choose_tile, modelled_time

#: Elements of K in a stage, and bytes of a row of it: one swizzled row of 16-bit elements.
STAGE_DEPTH = 64
_ROW_BYTES = 128
#: Columns to which a row's statistics belong (cuda_src/gemm/hopper/row_norm.cuh): a warp's slab.
STATISTICS_COLUMNS = 64
#: Two buffers of 16 rows x 64 columns for each of a consumer's four warps.
_OUTPUT_BYTES = 4 * 2 * 16 * _ROW_BYTES
_BARRIER_BYTES = 16  # of a stage
#: Registers of (producer, consumer) threads after setmaxnreg: 128 * 24 + 256 * 240 of 65536.
REGISTER_SHARES = (24, 240)
#: The same where spare warps of the producer's warpgroup compute something: 128 * 56 + 256 * 224.
SPARE_REGISTER_SHARES = (56, 224)
#: Registers a thread at launch: 65536 / 384, a multiple of 8.
LAUNCH_REGISTERS = 168


@dataclass(frozen=True)
class HopperTile:
    """block_m x block_n: a tile of the result.  stages: of the ring.  ping_pong: two consumers take tiles in turn, else
    they share each.  split: blocks of a cluster, 1 or 2, each with half of K; the consumers then share the tile.
    sharers: blocks of a cluster whose tiles lie below each other, and who bring their weight for each other.
    programmatic: the launch may begin while the one before it in the stream ends.
    consumers: 2, or 1 in a small block, of which an SM holds several.
    ahead: stages of its weight that a launch asks for in L2 while the one before it ends; 0: see `stages_ahead`.
    left: of its copies, when it lets the next launch begin: late, that one asks for its weight when memory has nothing
        else to do; -1: from the beginning on.
    rows_x: of x that are copied, where it has no more; 0: all of the tile's.
    fetches: a residual is brought by TMA, beside the products, into the buffers from which the result is stored.
    pairs: GELU of an f16 result in pairs, in half of the instructions, less exact in its tail (`gelu_pair` of
        cuda_src/gemm/activation.cuh).
    spare_warps: where x's rows are normalised, idle warps read their statistics, a tile ahead of the consumers.
    narrow: columns of tiles that come last, narrower than the others: see `narrow_from`."""

    block_m: int
    block_n: int
    stages: int = 4
    ping_pong: bool = False
    split: int = 1
    sharers: int = 1
    programmatic: bool = True
    spare_warps: bool = False
    consumers: int = 2
    fetches: bool = False
    ahead: int = 0
    left: int = -1
    rows_x: int = 0
    pairs: bool = False
    narrow: int = 0

    @property
    def shares_columns(self) -> bool:
        """Whether the consumers that share a tile have columns of their own, not rows."""
        return self.consumers > 1 and not self.ping_pong and self.block_m == 64

    @property
    def group_rows(self) -> int:
        """Of a consumer."""
        return self.block_m if self.ping_pong or self.shares_columns else self.block_m // self.consumers

    @property
    def threads(self) -> int:
        """A producer warpgroup and the consumers."""
        return 128 * (1 + self.consumers)

    @property
    def stages_ahead(self) -> int:
        """The ring's where the next launch begins late, which is few rows' way.  Of more rows many blocks ask for the
        same weight: all of the ring's stages cost 12 % at 512 x 1024 x 4096 and 2048 x 1024 x 1024, 1 to 5 % of larger
        products."""
        return self.ahead or (self.stages if self.left >= 0 else 2)

    @property
    def blocks_together(self) -> int:
        """Of an SM: two small ones, if they fit its 228 KB, of which the system takes 1 KB for each."""
        return 2 if self.consumers == 1 and 2 * (self.shared_memory + 1024) <= 228 * 1024 else 1

    @property
    def accumulators(self) -> int:
        """Of a consumer's thread."""
        return self.block_m * self.block_n // (128 if self.ping_pong else 128 * self.consumers)

    @property
    def shared_memory(self) -> int:
        """Bytes: `HopperLayout` of cuda_src/gemm/hopper/tiles.cuh."""
        return self.ring_bytes + self.stages * _BARRIER_BYTES + self.consumers * _OUTPUT_BYTES

    @property
    def fetched_bytes(self) -> int:
        """What a residual that TMA brings takes more: buffers for up to four slabs of a warp, and a barrier a warp."""
        warps, buffers = 4 * self.consumers, min(self.accumulators // 32, 4)
        return warps * (max(0, buffers - 2) * 16 * _ROW_BYTES + 8)

    @property
    def board_bytes(self) -> int:
        """Of the moments of rows that spare warps read: `MomentsBoard` of cuda_src/gemm/hopper/row_norm.cuh."""
        return (2 if self.ping_pong else 1) * (self.block_m * 8 + 16)

    @property
    def parks(self) -> bool:
        """Whether norms of x's rows, and the bias behind them, wait in shared memory: the sums leave no registers."""
        return self.accumulators > 128

    @property
    def parked_bytes(self) -> int:
        """Of that: `ParkedRows` of cuda_src/gemm/hopper/parked_rows.cuh."""
        return 4 * self.consumers * (self.group_rows // 4 * 8 + self.block_n * 4)

    @property
    def ring_bytes(self) -> int:
        """Of the stages."""
        return self.stages * (self.block_m + self.block_n) * _ROW_BYTES

    def __str__(self) -> str:
        words = (
            f"{self.block_m}x{self.block_n}s{self.stages}", "pp" if self.ping_pong else "",
            f"k{self.split}" if self.split > 1 else "", f"m{self.sharers}" if self.sharers > 1 else "",
            "small" if self.consumers == 1 else "", "fetch" if self.fetches else "",
            f"a{self.ahead}" if self.ahead else "", f"l{self.left}" if self.left >= 0 else "",
            f"x{self.rows_x}" if self.rows_x else "",
            "" if self.programmatic else "serial", "pairs" if self.pairs else "",
            "spare" if self.spare_warps else "", f"n{self.narrow}" if self.narrow else "",
        )  # fmt: skip
        return "".join(words)


#: What the choice takes.
TILES = (
    HopperTile(128, 256, 4), HopperTile(256, 128, 4), HopperTile(128, 128, 6, True), HopperTile(128, 128, 6),
    HopperTile(64, 128, 8, True), HopperTile(64, 64, 8, True), HopperTile(128, 64, 8, split=2),
)  # fmt: skip
#: Small blocks, for few rows.
SMALL_TILES = (
    HopperTile(64, 64, 6, consumers=1), HopperTile(64, 64, 6, split=2, consumers=1),
)  # fmt: skip
#: What a residual that TMA can bring turns a chosen tile into: 3 to 8 % less (bench/results/gemm_hopper.csv).
FETCHING_TILES = (
    HopperTile(128, 128, 5, True, fetches=True), HopperTile(128, 128, 6, fetches=True),
    HopperTile(64, 128, 8, True, fetches=True), HopperTile(64, 64, 8, True, fetches=True),
)  # fmt: skip
#: Tiles half as wide again, of few stages: with a residual that TMA brings, and without. Beside a running tensor core
#: each instruction of a finish and of the loop counts, and the wider tile has a third fewer of the loop's for each
#: product; and L2 gives an SM 64 bytes a clock, which tiles of 128 x 128 take whole: a residual costs 6 % at K = 1024.
WIDE_TILES = (HopperTile(128, 192, 4, True, fetches=True), HopperTile(128, 192, 4, True))
_WIDE_STAGES, _WIDE_ROUNDS = 16, 1.035
#: Of tiles that split K: seven take 3 to 4 % less than the eight that fit, and than six.
_SPLIT_STAGES = 7
#: What `bench/gemm.py --hopper` checks and times: those, and some that might join them.
CANDIDATES = (
    *TILES, HopperTile(64, 256, 4, True), HopperTile(128, 128, 6, True, sharers=2), HopperTile(128, 256, 4, sharers=2),
    HopperTile(64, 128, 8, split=2), *SMALL_TILES, *FETCHING_TILES,
)  # fmt: skip


def norm_fits(tile: HopperTile, norm: str | None) -> bool:
    """Whether the kernel can normalise rows of x ("layer", "rms") or of the residual on the way, with this tile.

    The blocks that normalise a row need all of its K, and two consumers.  For a layer norm of x, tiles of 256 columns
    leave no registers; those that park it need none.
    """
    if norm is None:
        return True
    if tile.split > 1 or tile.consumers < 2 or tile.group_rows > 128 or (tile.parks and norm == "residual"):
        return False
    return norm != "layer" or tile.block_n <= 128 or tile.parks


def wide_fits(
    activation: str | None, *, residual: bool, fetched: bool, norm: str | None = None, statistics: bool = False,
    tma_store: bool = True,
) -> bool:  # fmt: skip
    """Whether the finish of tiles with more than 128 sums a thread has registers enough.

    fetched: TMA brings the residual.  norm: what is normalised, see `norm_fits`.  statistics: those of y's rows are
    stored.  tma_store: TMA stores y.
    """
    if statistics or norm == "residual":
        return False
    if norm is not None:
        return not residual and tma_store
    return not residual or (fetched and activation is None)


def narrow_from(tile: HopperTile, rows: int, columns: int, device: DeviceInfo) -> tuple[int, float]:
    """From which column on tiles should be narrower, so that no block has much more to multiply than others, and what
    the busiest has, in tiles of block_m x 128.  Blocks get wide tiles in turn, then narrow ones."""
    down, blocks = -(-rows // tile.block_m), max(device.sm_count, 1)

    def busiest(across: int) -> float:
        wide = down * across
        every = wide + down * -(-(columns - across * tile.block_n) // tile.narrow)
        work = 0.0
        for block in (0, *(count % blocks for count in (wide - 1, wide, every - 1, every))):
            own_wide, own = (max(0, -(-(count - block) // blocks)) for count in (wide, every))
            work = max(work, (own_wide * tile.block_n + (own - own_wide) * tile.narrow) / 128)
        return work

    work, across = min((busiest(across), -across) for across in range(1, columns // tile.block_n + 1))
    return -across * tile.block_n, work


def wide_rounds(activation: str | None, *, residual: bool, norm: str | None = None) -> int | None:
    """Rounds of tiles from which on a finish is better off in tiles half as wide again; None: never.  As measured:
    what costs most gains in the fewest, for the last finish, which nothing hides, is half as long again.
    norm: what is normalised, see `norm_fits`; measured for a layer norm with GELU of f16 pairs."""
    if norm is not None:
        return 12 if activation in ("gelu", "gelu_tanh") else None
    return 12 if residual else {"gelu": 8, "gelu_tanh": 12, "silu": 16}.get(activation or "")


def tile_count(tile: HopperTile, rows: int, columns: int) -> int:
    """Tiles of a rows x columns result."""
    return -(-rows // tile.block_m) * -(-columns // tile.block_n)


def _stages(depth: int) -> int:
    """Of a tile, along K."""
    return max(1, -(-depth // STAGE_DEPTH))


# Microseconds on an H200.  Of a launch in a row of them without its tiles, and of a tile's first bytes.
_LAUNCH_US, _FIRST_BYTES_US = 1.04, 0.3
# What a launch costs more that follows no other, and of the generic kernel, whose model leaves it out.
_ALONE_US, _GENERIC_LAUNCH_US = 1.7, 1.5
# Of a stage: 128 x 128 elements of y by one SM alone, and the part that it takes longer when all are busy (clocks);
# bytes a microsecond from L2 into all SMs.
_SQUARE_US, _LOAD = 0.305, 0.32
_L2_RATE = 12.9e6
# Of a tile's finish, at first and for each 64 columns x 64 rows of a consumer: plain, activation, residual.
_FINISH_US = {"": (0.0, 0.32), "activation": (1.44, 0.59), "residual": (0.42, 0.93)}
# Rounds up to which reading a norm's statistics ahead gains (1 to 4 %); in the steady state of more it costs.
_SPARE_ROUNDS = 4
# Bytes of a weight from which on memory bounds a product of few rows.
_HEAVY_BYTES = 24 << 20
# Rows of x that blocks copy which have no more, and stages of K up to which launches are short.
_COPIED_ROWS, _SHORT_STAGES = (32, 48, 64, 80, 96, 112, 128), 64
# Of the sum over a cluster's blocks.
_EXCHANGE_US = 2.6


def predicted_time(
    tile: HopperTile, rows: int, columns: int, depth: int, device: DeviceInfo, *, activation: bool = False,
    residual: bool = False,
) -> float:  # fmt: skip
    """Microseconds of a rows x depth by depth x columns product, if the device's SMs are those of an H200."""
    sms = max(device.sm_count, 1)
    blocks = tile_count(tile, rows, columns) * tile.split
    rounds, busy = -(-blocks // sms), min(blocks, sms)
    square = _SQUARE_US * (1 + _LOAD * busy / sms)
    l2_bytes = (tile.block_m + tile.block_n / tile.sharers) * _ROW_BYTES
    stage = max(square * tile.block_m * tile.block_n / 128**2, l2_bytes * busy / _L2_RATE)
    products = _FIRST_BYTES_US + math.ceil(_stages(depth) / tile.split) * stage
    first, more = _FINISH_US["residual" if residual else "activation" if activation else ""]
    finish = first + more * (tile.accumulators / 32 / tile.split) + (_EXCHANGE_US if tile.split > 1 else 0.0)
    if not tile.ping_pong:
        return _LAUNCH_US + rounds * (products + finish)
    # A consumer starts a tile every second round, and no sooner than it has finished its last.
    turns = rounds * max(products, (products + finish) / 2) if rounds > 1 else products
    return _LAUNCH_US + turns + finish


def choose_hopper_tile(
    rows: int, columns: int, depth: int, device: DeviceInfo, *, activation: bool = False, residual: bool = False,
    among: Sequence[HopperTile] = TILES,
) -> HopperTile:  # fmt: skip
    """The tile of the least predicted time, the earlier of equals.  One that splits K needs a stage for each part."""

    def time_of(tile: HopperTile) -> float:
        return predicted_time(tile, rows, columns, depth, device, activation=activation, residual=residual)

    limit = device.shared_memory_per_block
    return min((t for t in among if t.shared_memory <= limit and t.split <= _stages(depth)), key=time_of)


def preferred_hopper_tile(
    rows: int, columns: int, depth: int, device: DeviceInfo, *, activation: bool = False, residual: bool = False,
    gated: bool = False, norm: str | None = None, wide_from: int | None = None,
) -> HopperTile | None:  # fmt: skip
    """The tile when the kernel is the better choice for a product of 16-bit elements that asks for none; else None.

    It must be so for a launch that follows no other too: small products keep the generic kernel.
    gated: columns are gates and ups, of which every consumer needs whole 64.
    norm: "layer", "rms" or "residual": what is normalised on the way, see `norm_fits`.
    wide_from: rounds of tiles from which on those half as wide again are better, if they can be taken: `wide_rounds`.
    """
    among = [
        tile
        for tile in TILES
        if (not gated or (tile.split == 1 and not tile.shares_columns and tile.block_n >= 128))
        and norm_fits(tile, norm)
    ]
    tile = choose_hopper_tile(
        rows, columns, depth, device, activation=activation, residual=residual, among=among
    )
    is_heavy = 16 < rows <= 128 and not gated and norm is None and 2 * depth * columns >= _HEAVY_BYTES
    if is_heavy and rows <= 64:
        tile = _heavy_tile(rows, columns, depth, device)
    elif tile.split > 1:
        tile = replace(tile, stages=_SPLIT_STAGES)
    if is_heavy and rows > 64:
        if device.sm_count < 2 * -(-columns // 64) <= 2 * device.sm_count:
            tile = HopperTile(128, 64, 8, True)
        if rows <= tile.block_m:
            tile = replace(tile, rows_x=next(count for count in _COPIED_ROWS if rows <= count) % 128)
    usual = tile
    if wide_from is not None:
        tile = _wide_tile(tile, rows, columns, depth, device, residual, wide_from)
    if tile is usual and residual and (tile.split, tile.consumers) == (1, 2):
        shape = (tile.block_m, tile.block_n, tile.ping_pong)
        fetching = next((t for t in FETCHING_TILES if shape == (t.block_m, t.block_n, t.ping_pong)), tile)
        tile = replace(tile, stages=fetching.stages, fetches=fetching.fetches)
    if norm == "layer" and activation:
        tile = replace(tile, pairs=True)
    few = tile_count(tile, rows, columns) <= _SPARE_ROUNDS * device.sm_count
    if norm in ("layer", "rms") and few and not tile.parks:
        tile = replace(tile, spare_warps=True)
        if norm == "layer" and _shares_weight(tile, rows, columns, device):
            tile = replace(tile, sharers=2)
    options = {"activation": activation, "residual": residual}
    return tile if beats_generic([tile], rows, [columns], depth, device, **options) else None


def _shares_weight(tile: HopperTile, rows: int, columns: int, device: DeviceInfo) -> bool:
    """Whether two blocks bring the weight for each other: from two rounds of tiles on, in whole pairs of tile rows.

    In encoders of 2048 rows that gained 1.4 to 2.2 % (docs/encoder.md); in the many rounds of 8192 rows nothing.
    """
    is_usual = tile.ping_pong and (tile.block_m, tile.block_n) == (128, 128)
    pairs = -(-rows // tile.block_m) % 2 == 0
    return is_usual and pairs and tile_count(tile, rows, columns) >= 2 * device.sm_count


def _wide_tile(
    tile: HopperTile,
    rows: int,
    columns: int,
    depth: int,
    device: DeviceInfo,
    residual: bool,
    least_rounds: int,
) -> HopperTile:
    """One half as wide again where a finish that costs is better off in it: where its rounds, narrower tiles at the end
    included, take hardly longer.  Else the tile itself."""
    wide = replace(WIDE_TILES[0 if residual else 1], narrow=128)
    is_usual = tile.ping_pong and (tile.block_m, tile.block_n) == (128, 128)
    rounds = -(-tile_count(tile, rows, columns) // max(device.sm_count, 1))
    if not is_usual or _stages(depth) > _WIDE_STAGES or columns < wide.block_n or rounds < least_rounds:
        return tile
    column, busiest = narrow_from(wide, rows, columns, device)
    if busiest > _WIDE_ROUNDS * rounds:
        return tile
    return wide if column < columns else replace(wide, narrow=0)


def _heavy_tile(rows: int, columns: int, depth: int, device: DeviceInfo) -> HopperTile:
    """Of 17 to 64 rows by a weight that memory gives, which the model above does not know: as measured.

    An SM takes in 110 KB of x and weight a microsecond, so rows that are not there are not copied.  Two launches lie
    side by side.  Short ones let the next begin 8 copies before their end, when memory soon has nothing else to do;
    longer ones, whose blocks end at different times, at once: else blocks crowd onto the SMs where some have ended.
    """
    rows_x = next(count for count in _COPIED_ROWS if rows <= count) % 64
    across, stages = -(-columns // 64), _stages(depth)
    if 4 * across <= device.sm_count:
        ahead, left = (4, 4) if stages <= 2 * _SHORT_STAGES else (0, -1)
        return HopperTile(64, 64, 12, split=2, consumers=1, ahead=ahead, left=left, rows_x=rows_x)
    if 2 * across <= device.sm_count:
        left = 8 if 2 * stages <= 3 * _SHORT_STAGES else -1
        return HopperTile(64, 64, 12, consumers=1, left=left, rows_x=rows_x)
    if across <= device.sm_count:
        ahead, left = (4, 8) if stages <= _SHORT_STAGES else (0, -1)
        return HopperTile(64, 128, 8, consumers=1, ahead=ahead, left=left, rows_x=rows_x)
    return replace(SMALL_TILES[0], ahead=2, left=0, rows_x=rows_x)


def beats_generic(
    tiles: Sequence[HopperTile], rows: int, columns: Sequence[int], depth: int, device: DeviceInfo, *,
    activation: bool = False, residual: bool = False,
) -> bool:  # fmt: skip
    """Whether launches of these tiles, one for each part of the columns, beat one of the generic kernel for all."""
    generic = choose_tile(rows, columns, depth, 2, device)
    blocks = block_count(generic, rows, columns)
    own = _ALONE_US + sum(
        predicted_time(tile, rows, part, depth, device, activation=activation, residual=residual)
        for tile, part in zip(tiles, columns)
    )
    return own < _GENERIC_LAUNCH_US + modelled_time(generic, blocks, depth, 2, device)
