"""Launch shapes of the kernels on paged caches: pure functions of shapes and device."""

from __future__ import annotations

from dataclasses import dataclass

from cki.device import DeviceInfo


def append_blocks_per_token(tokens: int, heads: int, heads_at_a_time: int, device: DeviceInfo) -> int:
    """Blocks that share the heads of one token in `append_kv`.

    One block a token computes its angles once, which is what many tokens want.  A decoding step has few tokens, and
    then as many blocks as fill the device take one trip each.
    """
    trips = -(-heads // heads_at_a_time)
    return max(1, min(trips, 4 * device.sm_count // max(tokens, 1)))


# ---------------------------------------------------------------------------------------------------------------------
# decoding (`cuda_src/attention/decode.cu`)

#: Keys of a tile.
TILE_KEYS = 16
#: Query rows of one mma.sync tile.
TILE_ROWS = 8
#: Sequences up to which the work is cut evenly among blocks.  Above, there are more units than blocks in any case.
MAX_SPLIT_BATCH = 1024
#: Registers a thread for queries and output, of 255.
_ROW_REGISTERS = 100
#: The part of a device's blocks that a grid in whole groups should use.
_WELL_USED = 0.9
#: Shared memory of a block besides what `DecodeConfig.shared_memory` counts: barriers and flags.
_STATIC_BYTES = 128
#: Architectures without clusters, where a launch cannot begin before the one ahead of it has ended, either.
SERIAL_ARCHS = ("sm_80", "sm_89")
#: Blocks of a cluster: what every device of sm_90 and later takes, and less where units are many.
_CLUSTERS = (8, 4, 2)
#: The part of a device's SMs that clusters of 8 blocks, one an SM, can have at the same time: of the 132 SMs of an H200
#: 120, since some lie in GPCs whose SMs are no multiple of 8.
_IN_CLUSTERS = 0.9
#: Bytes of keys and values up to which clusters on half of the SMs are faster than all SMs and a second launch, for
#: tiles of the size that was measured and for others.
_CLUSTERED_BYTES, _CLUSTERED_SMALL = 256 << 20, 32 << 20
#: Rows up to which half of the SMs keep up.
_CLUSTERED_ROWS = 4
#: Tiles of all units up to which fewer warps, with more tiles each, are as good or better: fewer states to combine.
_FEW_TILES = 2048
#: The same in clusters; and tiles up to which clusters serve products that take longer than the memory.
_FEW_IN_CLUSTERS = 512
# Blocks an SM, warps, stages: the first that fit are taken, then what fits any head dimension and device.
_EIGHT_WARPS = ((1, 8, 6), (1, 8, 5), (1, 8, 4), (1, 8, 3))
_EIGHT_WARPS_OF_CODES = ((1, 8, 3), (1, 8, 2))
_FOUR_WARPS = ((1, 4, 6),)
_TWO_BLOCKS = ((2, 4, 6), (2, 4, 4))
#: Sequences up to which a lane each of every warp looks at their lengths (`dealing_pays`).
MAX_DEALT_BATCH = 32
_ANY_SIZE = ((2, 4, 3), (2, 4, 2), (1, 4, 4), (1, 4, 3), (1, 4, 2), (1, 2, 2), (1, 1, 2))
#: Warps of a block of the launch that merges.
MERGE_WARPS = 4


@dataclass(frozen=True)
class DecodeShape:
    """What the choice depends on.  rows: queries times query heads a KV head.  Item sizes in bytes.

    positions: the most tiles of 16 keys that all sequences together can have.  alone: a unit's result must not depend
    on the rest of the batch.  window: queries do not see all keys before them.  scattered: the keys of a tile lie in
    several blocks, or are copied by less than 16 bytes.  whole_rows: a warp writes a row, of 128 columns.
    """

    batch: int
    rows: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    token_scales: bool
    positions: int
    alone: bool = False
    window: bool = False
    scattered: bool = False
    whole_rows: bool = False


@dataclass(frozen=True)
class DecodeConfig:
    """warps a block; stages of each warp's ring; row_tiles of 8 rows; rows of a unit.

    When split, the grid is `groups` groups of `together` blocks (decode_schedule.cuh), and together divides the units
    of a sequence.  min_blocks: blocks an SM that the compiler must leave room for.  split: whether units are shared by
    blocks.  dealt: each sequence's tiles are dealt to groups of its own.  by_lengths: of several sequences, where the
    lengths say that it pays; groups is then a multiple of the batch, and otherwise cut the line.  cluster: all groups
    (dealt without by_lengths: those of a sequence) are a cluster, which merges parts through distributed shared memory
    (decode_cluster.cuh; at most 16 groups, sm_90 and later).  prefetch: bytes that L2 is told to fetch around a copy of
    16: 0, 128 or 256.
    """

    warps: int
    stages: int
    row_tiles: int
    rows: int
    groups: int
    together: int
    min_blocks: int
    split: bool
    dealt: bool = False
    by_lengths: bool = False
    cluster: bool = False
    prefetch: int = 128

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def blocks(self) -> int:
        """Of the grid, when split."""
        return self.groups * self.together

    @property
    def least_positions(self) -> int:
        """A block gets a tile for each warp at least."""
        return self.warps

    def state_floats(self, value_dim: int, itemsize: int) -> int:
        """Floats of one state (`StateLayout`)."""
        return self.rows * (padded_dim(value_dim, itemsize) + 4)

    def shared_memory(self, shape: DecodeShape) -> int:
        """Bytes: rings, a state a warp, what a block of a cluster is sent, the schedule."""
        states = self.warps * self.state_floats(shape.value_dim, shape.itemsize) * 4
        rings = self.warps * self.stages * stage_bytes(shape)
        return rings + states + self.inbox_bytes(shape) + self.schedule_bytes(shape.batch)

    def inbox_bytes(self, shape: DecodeShape) -> int:
        """Bytes of the parts that a block of a cluster is sent (`ClusterInbox`)."""
        columns = padded_dim(shape.value_dim, shape.itemsize)
        item = 128 if shape.whole_rows else 32 if columns % 32 == 0 else 16
        return (2 * self.rows * columns // item + self.groups - 1) * (item + 4) * 4 if self.cluster else 0

    def schedule_bytes(self, batch: int) -> int:
        """Bytes of the line of work, in both launches: two numbers a sequence, one a warp."""
        return (2 * (batch if self.split else 1) + 1 + max(self.warps, MERGE_WARPS)) * 4


def padded_dim(dim: int, itemsize: int) -> int:
    """A head dimension rounded up to what the products take at once: 16 elements, 32 of e4m3."""
    unit = 32 if itemsize == 1 else 16
    return -(-dim // unit) * unit


def stage_bytes(shape: DecodeShape) -> int:
    """Bytes of one tile in a ring (`CacheTile`): keys and values, and scales of tokens."""
    rows = [padded_dim(dim, shape.itemsize) * shape.itemsize for dim in (shape.head_dim, shape.value_dim)]
    padding = sum(16 for row in rows if row % 64)
    return TILE_KEYS * (sum(rows) + padding + (8 if shape.token_scales else 0))


def _row_tiles(shape: DecodeShape) -> int:
    """Row tiles that a warp holds in registers: as many as there are rows, as far as registers go."""
    words = 4 if shape.itemsize == 4 else 8
    registers = (
        padded_dim(shape.value_dim, shape.itemsize) // 4
        + 2 * padded_dim(shape.head_dim, shape.itemsize) // words // 2
    )
    return min(-(-shape.rows // TILE_ROWS), max(1, _ROW_REGISTERS // registers), 3)


def choose_groups(units: int, warps: int, positions: int, blocks: int) -> tuple[int, int]:
    """(groups, together) for a grid of at most `blocks` blocks, or a few more where one sequence's units are more.

    All units of a sequence together if that uses the device well, else the largest part of them that does.  No more
    groups than there can be tiles for their warps.
    """
    divisors = [n for n in range(units, 0, -1) if units % n == 0 and n <= blocks]
    together = next(n for n in divisors if blocks // n * n >= _WELL_USED * blocks or n == 1)
    most = -(-positions * (units // together) // warps)
    return max(1, min(blocks // together, most)), together


def choose_dealt(shape: DecodeShape, units: int, groups: int, together: int) -> tuple[bool, int]:
    """(whether tiles are dealt, groups) for so many groups of the line: those of each sequence are as many.

    Not dealt if the groups of whole sequences would leave too much of the device idle.  A window decides which tiles
    there are by the lengths, and then nothing is known before them.
    """
    if shape.window or together != units or shape.batch > min(groups, MAX_DEALT_BATCH):
        return False, groups
    dealt = groups // shape.batch * shape.batch
    return (True, dealt) if dealt >= _WELL_USED * groups else (False, groups)


def choose_cluster(shape: DecodeShape, units: int, device: DeviceInfo) -> int:
    """Groups that are to be a cluster, which merges without a second launch; 0 if they should not be one.

    Half of the SMs read as fast as all, if their warps keep up: with dealt tiles, 16-bit elements and few rows.
    """
    if device.arch in SERIAL_ARCHS:
        return 0
    groups = next((n for n in _CLUSTERS if units * n <= _IN_CLUSTERS * device.sm_count), 0)
    if units * groups < device.sm_count // 4:
        return 0
    if not choose_dealt(shape, units, groups, units)[0]:
        return 0
    tiles = shape.positions * units
    if shape.itemsize != 2 or shape.rows > _CLUSTERED_ROWS or shape.scattered:
        return groups if tiles <= _FEW_IN_CLUSTERS else 0
    most = _CLUSTERED_BYTES if 8192 <= stage_bytes(shape) < 16384 else _CLUSTERED_SMALL
    return groups if tiles * stage_bytes(shape) <= most else 0


def choose_decode(shape: DecodeShape, device: DeviceInfo) -> DecodeConfig:
    """The configuration for a problem: one block an SM, its rings as deep as they fit.

    Blocks of one unit each are two an SM, so that one reads while the other ends.  docs/paged_attention.md has the
    measurements behind warps, stages and clusters.
    """
    tiles = _row_tiles(shape)
    row_blocks = -(-shape.rows // (tiles * TILE_ROWS))
    rows = -(-shape.rows // row_blocks)
    units = shape.kv_heads * row_blocks
    split = not shape.alone and shape.batch <= MAX_SPLIT_BATCH and shape.positions * units < 2**30
    per_sm = device.shared_memory_per_block + 1024  # the system takes 1 KB of each block's
    clustered = choose_cluster(shape, units, device) if split else 0
    first: tuple[tuple[int, int, int], ...]
    eight = _EIGHT_WARPS if shape.itemsize > 1 else _EIGHT_WARPS_OF_CODES
    if not split:
        first = _TWO_BLOCKS
    elif shape.positions * units <= (_FEW_IN_CLUSTERS if clustered else _FEW_TILES):
        first = (*_FOUR_WARPS, *eight)
    else:
        first = eight
    for min_blocks, warps, stages in (*first, *_ANY_SIZE):
        groups, together, dealt = (clustered or 1, units if clustered else 1, False)
        if split:
            if not clustered:
                groups, together = choose_groups(units, warps, shape.positions, device.sm_count * min_blocks)
            dealt, groups = choose_dealt(shape, units, groups, together)
        config = DecodeConfig(
            warps, stages, -(-rows // TILE_ROWS), rows, groups, together, min_blocks, split,
            dealt=dealt, by_lengths=dealt and shape.batch > 1, cluster=clustered > 0,
        )  # fmt: skip
        limit = min(per_sm // min_blocks - 1024, device.shared_memory_per_block)
        if config.shared_memory(shape) + _STATIC_BYTES <= limit:
            return config
    raise AssertionError(f"head dimensions {shape.head_dim} and {shape.value_dim} fit no configuration")
