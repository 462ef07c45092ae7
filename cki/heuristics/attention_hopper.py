"""Tiles of the Hopper attention kernel (`cuda_src/attention/hopper/attention.cu`): pure functions of shapes and device.

What weighs:
* Rows a block: every block reads all keys and values, so more rows mean less traffic from L2; 64 rows a consumer
  warpgroup, one to three of them.  Fewer where there are few rows, else most of a tile would be padding.
* Registers a thread of a consumer: block_keys/2 scores, block_keys/4 packed weights, value_dim/2 output, and about 30
  besides.  A block has 65536: 240 a thread for two consumer warpgroups, 160 for three.
* Shared memory: the query tile and `stages` tiles of keys and values, 227 KB together.

docs/attention_hopper.md has the measured figures.

The number of keys a tile is the one choice that changes results (in the last bits).  It depends on head dimensions
and features, never on batch, heads or lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cki.device import DeviceInfo

#: How tiles reach blocks: `Schedule` in cuda_src/attention/hopper/scheduler.cuh.
SCHEDULES = ("single", "fixed", "dynamic")
#: Part of L2 for keys and values of a section: of short tiles that differ in length, of tiles that do not, of others.
_SHORT_SHARE, _ALIKE_SHARE, _LONG_SHARE = 0.16, 0.025, 0.55
#: Row blocks of a head up to which its tiles are short.
_SHORT_BLOCKS = 8
_REGISTER_FILE = 65536
#: Query rows of a consumer warpgroup: the M of wgmma.
GROUP_ROWS = 64


@dataclass(frozen=True)
class HopperTiles:
    """consumers: warpgroups of 64 query rows each.  block_keys: keys a tile, a multiple of 16.  stages: of the rings of
    keys and of values.  ping_pong: warpgroups take turns at starting products.  schedule: one of SCHEDULES.
    blocks_per_sm: how many blocks share an SM (more than one: one consumer warpgroup each).
    heads: query heads of a KV head that share a tile, a divisor of their number; each consumer then has 64 // heads
    queries.  splits: parts of dense keys at most, each computed as a batch of its own and merged by a second launch.
    copy_warps: 2 where one brings keys and one values, None for what suits the consumers.
    ahead: how many of a thread's weights are computed beside the search for the largest score, a register each; None
    for what the registers allow.  before_values: how many before the product of values is waited for; None for half of
    them.
    section: (batch, head) pairs in a section, whole groups; None for what `sections_of` finds."""

    consumers: int
    block_keys: int
    stages: int = 2
    ping_pong: bool = True
    schedule: str = "single"
    blocks_per_sm: int = 1
    heads: int = 1
    splits: int = 1
    copy_warps: int | None = None
    ahead: int | None = None
    before_values: int | None = None
    section: int | None = None

    @property
    def block_rows(self) -> int:
        return GROUP_ROWS * self.consumers

    @property
    def block_queries(self) -> int:
        """Queries of a block: its rows, shared by the heads of a tile."""
        return GROUP_ROWS // self.heads * self.consumers

    @property
    def threads(self) -> int:
        """The consumers' and the producer's."""
        return 128 * (self.consumers + 1)

    @property
    def registers(self) -> int:
        """Registers a thread at launch: what the compiler may use before setmaxnreg moves them."""
        return min(255, _REGISTER_FILE // (self.threads * self.blocks_per_sm) // 8 * 8)

    def weights_ahead(self, value_dim: int, has_dropout: bool) -> int:
        """`ahead`, or its default: fewer where outputs and what is dropped leave few registers."""
        if self.ahead is not None:
            return self.ahead
        is_full = self.consumers == 3 or (has_dropout and value_dim > 192)
        return min(8 if is_full else 16, self.block_keys // 4)

    @property
    def weights_before_values(self) -> int:
        """`before_values`, or its default."""
        return self.block_keys // 4 if self.before_values is None else self.before_values

    def copying_warps(self, copies: int) -> int:
        """`copy_warps`, or its default for so many TMA boxes a tile of keys; 0: keys are not in a cache."""
        return self.copy_warps or (2 if copies and self.consumers == 3 else 1)

    def register_shares(self, packed: bool = False) -> tuple[int, int]:
        """Registers of a producer's and of a consumer's thread after setmaxnreg; (0, 0): as launched.

        packed: sequences of their own lengths, for which the producer searches.
        """
        if self.consumers == self.blocks_per_sm == 1:
            return 0, 0
        if self.consumers == 3:
            producer = 32
        elif packed:
            producer = 40  # with 24 a search spills
        else:
            producer = 24
        # Of what the block was launched with, not of the SM's: a warp that asks for more than the others give up waits
        # for ever.
        launched = self.registers * (self.consumers + 1)
        return producer, min(240, (launched - producer) // self.consumers // 8 * 8)

    @property
    def ring_bytes(self) -> int:
        """Of the barriers of queries, keys, values, handed-over tiles and wishes, and of values to be cleared."""
        return 16 * (self.consumers + 2 * self.stages + 2 + 1) + 8 * self.stages

    def shared_memory(self, head_dim: int, value_dim: int, packed: bool = False) -> int:
        """Bytes: `SharedLayout` of shared_tiles.cuh.  Padded dimensions.  packed: sequences of their own lengths."""

        def pattern(nbytes: int) -> int:
            return -(-nbytes // 1024) * 1024

        key_row = -(-head_dim * 2 // key_span(head_dim)) * key_span(head_dim)
        tiles = pattern(self.block_rows * key_row) + pattern(self.stages * self.block_keys * key_row)
        tiles += self.stages * self.block_keys * value_dim * 2
        return tiles + self.ring_bytes + 2 * (28 if packed else 12)

    def __str__(self) -> str:
        text = f"{self.block_rows} rows x {self.block_keys} keys, {self.stages} stages, {self.schedule}"
        if self.ping_pong:
            text += ", ping-pong"
        if self.heads > 1:
            text += f", {self.heads} heads a tile"
        if self.splits > 1:
            text += f", keys in {self.splits} parts"
        if self.copy_warps is not None:
            text += f", {self.copy_warps} copying warps"
        if self.ahead is not None:
            text += f", {self.ahead} weights ahead"
        if self.before_values is not None:
            text += f", {self.before_values} before values"
        if self.section is not None:
            text += f", sections of {self.section}"
        return text if self.blocks_per_sm == 1 else f"{text}, {self.blocks_per_sm} blocks an SM"


def key_span(head_dim: int) -> int:
    """Bytes of a row of a slab of queries and keys: the widest swizzle, or the whole row when that is shorter."""
    return 128 if head_dim > 32 else 64 if head_dim > 16 else 32


def value_span(value_dim: int) -> int:
    """The same for values, whose slabs must divide the row: what wgmma's MN-major operands have been tested for."""
    return next(span for span in (128, 64, 32) if value_dim * 2 % span == 0)


def sections_of(
    kv_bytes: int, group: int, batch_heads: int, row_blocks: int, resident: int, device: DeviceInfo, *,
    is_alike: bool, is_packed: bool = False, wanted: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """((batch, head) pairs in a section, the number of the last section, which takes all that are left): whole groups.

    kv_bytes: of one KV head.  row_blocks: tiles of one head.  resident: blocks that run at a time.  wanted: pairs,
    instead of what is best.  is_packed: a head's tiles are those of all sequences.

    A section's keys and values take a small part of L2 where tiles are alike or short: with 33 MB, 64 heads of 512 keys
    and 256 columns were read from memory in one burst and not at all in the next round, and the kernel took 1.03 to 1.2
    times as long.  Long tiles that differ in length gain nothing by it, and at 256 columns lost 3 %.
    is_alike: all tiles have about as many keys.  Else the last section has tiles for one and a half rounds or 16 heads
    at least, so that long causal tiles find short ones to end with: fewer cost half a long tile (4 % at 16 heads of
    16384 tokens).
    """
    groups = batch_heads // group
    is_short = row_blocks <= _SHORT_BLOCKS and not is_packed
    share = _ALIKE_SHARE if is_alike else _SHORT_SHARE if is_short else _LONG_SHARE
    size = min(groups, max(1, int(device.l2_bytes * share / max(kv_bytes, 1))))
    if wanted is not None:
        size = min(groups, max(1, wanted // group))
    last = 1 if is_alike else -(-min(3 * resident // 2, 16 * row_blocks) // (row_blocks * group))
    return group * size, max(0, (groups - last) // size)


#: Fewest queries for which the kernel is chosen whatever the number of keys: a tile has 64 rows at least.
MIN_QUERIES = 64
#: Up to this many queries over this many keys and more, tiles are `choose_few_rows`'s.
FEW_QUERIES, FEW_ROWS_KEYS = 128, 256


def _options(head_dim: int, value_dim: int, is_plain: bool) -> list[tuple[HopperTiles, float]]:
    """(tiles, time of a row of queries relative to the first) for each number of rows that a tile may have."""
    widest = max(head_dim, value_dim)
    # More rows share the copies of keys and values, but few
    # tiles leave SMs idle in the last round.
    if widest <= 64:
        options = [(HopperTiles(2, 128, 3), 1.2), (HopperTiles(1, 128, 2, False, "fixed", 2), 1.2)]
        if is_plain:
            options.insert(0, (HopperTiles(3, 128), 1.0))
    else:
        if widest <= 128:
            block_keys = 128 if is_plain else 112
        elif widest <= 192:
            block_keys = 96 if is_plain else 80
        else:
            block_keys = 80 if is_plain else 48
        options = [(HopperTiles(2, block_keys), 1.0), (HopperTiles(1, block_keys, 2, False), 1.5)]
    return options


def choose_hopper_tiles(
    queries: int, batch_heads: int, head_dim: int, value_dim: int, has_limits: bool, is_plain: bool, device: DeviceInfo
) -> HopperTiles:  # fmt: skip
    """Tiles for padded head dimensions, from times on an H200 (bench/results/attention_hopper.csv).

    has_limits: causal or windowed.  is_plain: nothing but a positive scale goes into the logits.
    Keys a tile depend on dimensions and features only: they decide the order of sums, and a row's result must not
    change with the batch beside it.
    """
    options = _options(head_dim, value_dim, is_plain)

    def modelled_time(option: tuple[HopperTiles, float]) -> float:
        tiles, cost = option
        rounds = -(-queries // tiles.block_rows) * batch_heads / device.sm_count
        # Causal tiles differ in length: the last round is half one on average.
        return (rounds + 0.5 if has_limits and rounds > 1 else math.ceil(rounds)) * tiles.block_rows * cost

    tiles = min(options, key=modelled_time)[0]
    assert tiles.shared_memory(head_dim, value_dim) <= device.shared_memory_per_block
    rounds = -(-queries // tiles.block_rows) * batch_heads / (device.sm_count * tiles.blocks_per_sm)
    if rounds <= 1:
        return replace(tiles, schedule="single")
    # Drawing numbers costs a launch that zeroes the counter.
    return replace(tiles, schedule="dynamic" if has_limits or rounds > 4 else "fixed")


#: Microseconds of an H200: of a tile of 128 keys and 256 columns of keys and values by 1, 2 or 3 consumers, of a tile
#: of queries besides, and of the launch that merges parts.
_STEP_US = {1: 1.0, 2: 1.4, 3: 2.0}
_TILE_US, _MERGE_US = 2.0, 2.5
#: Bytes of keys and values that come from memory in a microsecond, and of parts that are written and read in L2.
_MEMORY_RATE, _PARTS_RATE = 4.2e6, 3.0e6
#: Fewest tiles of keys in a part, and most parts.
_PART_TILES, _MOST_PARTS = 2, 32


def packable_heads(group: int) -> int:
    """The most query heads of a KV head that a tile takes: a divisor of the group, up to half of its rows."""
    return max(n for n in range(1, min(group, GROUP_ROWS // 2) + 1) if group % n == 0)


def choose_few_rows(
    queries: int, keys: int, batch: int, kv_heads: int, group: int, head_dim: int, value_dim: int, is_plain: bool,
    may_split: bool, device: DeviceInfo,
) -> HopperTiles:  # fmt: skip
    """Tiles for few queries: heads packed or not, keys in parts where tiles are fewer than SMs, by a model of the time.

    Padded head dimensions.  may_split: whether results may depend on the number of keys, heads and batches.
    """
    shapes = [tiles for tiles, _ in _options(head_dim, value_dim, is_plain)]
    key_tiles = -(-keys // shapes[0].block_keys)
    most_parts = min(_MOST_PARTS, max(1, key_tiles // _PART_TILES)) if may_split else 1
    options = [
        replace(tiles, heads=heads, splits=splits, schedule="single")
        for tiles in shapes
        for heads in {1, packable_heads(group)}
        for splits in range(1, most_parts + 1)
        if splits == 1
        or -(-key_tiles // -(-key_tiles // splits)) == splits  # a number of parts that is possible
    ]
    memory = 2 * batch * kv_heads * keys * (head_dim + value_dim) / _MEMORY_RATE

    def modelled_time(tiles: HopperTiles) -> float:
        count = -(-queries // tiles.block_queries) * batch * kv_heads * group // tiles.heads * tiles.splits
        rounds = math.ceil(count / (device.sm_count * tiles.blocks_per_sm))
        together = min(tiles.blocks_per_sm, math.ceil(count / device.sm_count))  # blocks of an SM at a time
        step = _STEP_US[tiles.consumers] * together * tiles.block_keys * (head_dim + value_dim) / (128 * 256)
        busy = rounds * (-(-key_tiles // tiles.splits) * step + _TILE_US)
        parts = 8 * tiles.splits * batch * queries * kv_heads * group * value_dim / _PARTS_RATE
        # Of several that wait for memory the one that is busy least.
        return max(busy, memory) + 0.05 * busy + (_MERGE_US + parts if tiles.splits > 1 else 0.0)

    tiles = min(options, key=modelled_time)
    assert tiles.shared_memory(head_dim, value_dim) <= device.shared_memory_per_block
    count = -(-queries // tiles.block_queries) * batch * kv_heads * group // tiles.heads
    is_long = tiles.splits == 1 and count > device.sm_count * tiles.blocks_per_sm
    return replace(tiles, schedule="dynamic") if is_long else tiles


def choose_packed_tiles(
    tokens: int, sequences: int, heads: int, head_dim: int, value_dim: int, has_limits: bool, is_plain: bool,
    device: DeviceInfo, packed_heads: int = 1,
) -> HopperTiles:  # fmt: skip
    """Tiles for packed sequences, of which only the number is known: lengths are taken as spread around the mean.

    Half a tile of each sequence is wasted then on average.  Keys a tile depend on dimensions and features only.
    packed_heads: of a KV head in a tile.
    """
    options = [(replace(t, heads=packed_heads), cost) for t, cost in _options(head_dim, value_dim, is_plain)]

    def rounds(tiles: HopperTiles) -> float:
        return (tokens / tiles.block_queries + sequences / 2) * heads / tiles.heads / device.sm_count

    tiles = min(options, key=lambda o: max(rounds(o[0]) + 0.5, 1.0) * o[0].block_rows * o[1])[0]
    return replace(tiles, schedule="dynamic" if rounds(tiles) > tiles.blocks_per_sm else "single")
