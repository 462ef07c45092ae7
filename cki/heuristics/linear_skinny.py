"""How a product of few rows is cut (`cuda_src/gemm/skinny`): pure functions of shapes and device.

Its time is that of the weight's bytes, if enough of them are under way on every SM all the time.  The model below has
few constants, each a mechanism, fitted to an H200's times (`bench/results/gemm_skinny.csv`, up to 16 rows): for K
whole or over two blocks it is within 13 %, and the tile that it takes is the best one measured.
* Memory gives 4.63 TB/s: what cuBLASLt's times grow by with the weight.
* A block of `linear.cu` takes 0.10 us for a stage (a barrier, one chain of loads and products a warp) and 1 us for
  72 KB of w and x (the threads' own copies); several on an SM together 1 us for 58 KB.  So a block of 64 columns alone
  takes 35 KB/us, just what memory gives an SM: tiles must be spread over all SMs, or two an SM where there are more.
* Ring: `stages - 1` stages cover memory's 1.0 us.  Four stages of 8 KB are just too few for a block alone.
* With rings of their own warps wait for nobody: a block alone takes 1 us for 112 KB, so that half of the SMs keep up
  with memory, and the next launch's blocks lie on the other half.
* Rounds: blocks beyond those that the SMs hold at once start where others have ended: 2.0 us for a launch's start and
  end, and again for each further round; 1.5 where the next launch has begun meanwhile.
* Exchange over a cluster: 0.25 us, and 0.45 ns for each fp32 sum of a block's tile.
* Clusters of 4 and 8 do not spread over all SMs: where they do not fill them anyway, the times are those of two thirds.
* Programmatic launch pays where two launches fit the GPU side by side.  Elsewhere a block that was not there early
  still asks L2 for its first weights, row by row (3 ns each, and the copies wait): 2.0 to 2.9 us lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cki.device import DeviceInfo
from cki.heuristics.linear import STAGE_ROW_BYTES, block_count, choose_tile, modelled_time

#: Rows up to which the kernel is meant to be used, and up to which it is taken unasked.
MAX_ROWS = 64
DEFAULT_ROWS = 16
#: Bytes of a weight from which on its reading outweighs the launch.
MIN_WEIGHT_BYTES = 4 << 20
#: Architectures without clusters.
_NO_CLUSTERS = ("sm_80", "sm_89")

# Of an H200, bytes a microsecond: from memory; from L2; into one SM by `linear.cu`, for a block alone (without the time
# of its stages' barriers) and for several together.
_READ_RATE = 4.63e6
_L2_RATE = 6.6e6
_ALONE_RATE, _SM_RATE, _OWN_RATE = 72e3, 58e3, 112e3
# Microseconds: of memory's latency; of a stage's barrier; of a launch's start and end, and where launches overlap; of
# an exchange and of each fp32 sum of it; of a row of the prefetch (and rows of a stage).
_LATENCY_US, _STAGE_US = 1.02, 0.10
_EDGE_US, _OVERLAPPED_EDGE_US = 2.0, 1.5
_EXCHANGE_US, _EXCHANGE_SUM_US = 0.25, 4.5e-4
_PREFETCH_ROW_US, _PREFETCH_ROWS = 3e-3, 64
# fp32 sums of 16-bit products a microsecond and SM by mma.sync: an estimate, for more rows.
_PRODUCT_RATE = 2.5e6
# Memory and SMs wait for each other where both need about the same time: the norm by which their times add.
_NORM = 5
# Part of the SMs that clusters of more than two blocks reach.
_CLUSTERED = 2 / 3


@dataclass(frozen=True)
class SkinnyTile:
    """One way to cut a product of few rows.

    block_m, block_n: the tile of a cluster.  warps_n, warps_k: how a block's warps share its columns, and the K steps
        of a stage.  stages: depth of the ring.  split: blocks of the cluster, each with its part of K.
    programmatic: the launch may begin while the one before it in the stream ends (sm_90 and later; else no effect).
    ahead: stages of its weight that such a launch asks for in L2 while the one before it ends; 0: as its copies.
    left: of its copies, when it lets the next launch begin: late, that one asks for its weight when memory has nothing
        else to do; -1: from the beginning on.
    own_rings: each of the warps that share K has a ring and takes whole stages in turn; they share no columns.
    refill: such a warp fills a stage anew when it has read it, not a stage later, so that all stages are under way.
    """

    block_m: int
    block_n: int
    warps_n: int
    warps_k: int
    stages: int
    split: int = 1
    programmatic: bool = True
    ahead: int = 0
    left: int = -1
    own_rings: bool = False
    refill: bool = False

    @property
    def threads(self) -> int:
        return self.warps_n * self.warps_k * 32

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory: the ring, and the parts of the sums in its place."""
        rings = self.warps_k if self.own_rings else 1
        ring = rings * self.stages * (self.block_m + self.block_n) * STAGE_ROW_BYTES
        parts = self.warps_k * self.block_m * (-(-self.block_n // 32) * 32 + 8) * 4
        return max(ring, parts)

    def __str__(self) -> str:
        warps = f"w{self.warps_n}x{self.warps_k}s{self.stages}"
        kind = ("own" if self.own_rings else "") + ("" if self.programmatic else "serial")
        early = (f"a{self.ahead}" if self.ahead else "") + (f"l{self.left}" if self.left >= 0 else "")
        early += "r" if self.refill else ""
        return f"{self.block_m}x{self.block_n}{warps}k{self.split}{kind}{early}"


def _with_splits(
    block_m: int, block_n: int, warps_n: int, warps_k: int, stages: int
) -> tuple[SkinnyTile, ...]:
    return tuple(SkinnyTile(block_m, block_n, warps_n, warps_k, stages, split) for split in (1, 2, 4, 8))


#: Of weights [N, K] alone: along N its launches take up to 40 % longer when the next begins as late as it should.
ALONG_K_TILE = SkinnyTile(16, 64, 1, 4, 7, 2)
#: Of weights [N, K] alone, too, so narrow that nearly all SMs have a block: two an SM, so that the next launch's are
#: there; for columns that make a block for half of the SMs; and, alone on one, for those that make one for nearly each.
NARROW_TILES = tuple(
    SkinnyTile(16, block_n, 1, warps, stages, own_rings=True, refill=True)
    for block_n, warps, stages in ((32, 4, 4), (32, 8, 3), (48, 4, 3))
)
FULL_TILE = SkinnyTile(16, 48, 1, 6, 3, own_rings=True, refill=True)
#: Of weights [N, K] with so many columns that blocks take turns, two an SM: a launch's last ones leave SMs to the next.
ROUNDS_TILE = SkinnyTile(16, 32, 1, 8, 2, own_rings=True, refill=True)
#: Of weights [K, N], for columns that make just two blocks for each SM.
PAIR_TILE = SkinnyTile(16, 64, 1, 4, 2, own_rings=True, refill=True)
#: Rounds of `ROUNDS_TILE`'s blocks from which on it is taken: at 1.2 it lost 3 %, from 1.45 on it won 1 to 19 %.
_ROUNDS = 1.4
#: What the model chooses among; on an H200 two or three blocks an SM, one of 256 columns.
CANDIDATES = (
    *NARROW_TILES, FULL_TILE, ALONG_K_TILE,
    *_with_splits(16, 64, 1, 4, 8), *_with_splits(16, 128, 1, 4, 6), *_with_splits(16, 64, 1, 4, 5),
    SkinnyTile(16, 32, 1, 4, 12), SkinnyTile(16, 32, 1, 4, 6),
    *_with_splits(32, 64, 2, 2, 8), *_with_splits(32, 128, 2, 2, 5), *_with_splits(32, 256, 4, 2, 5),
    SkinnyTile(32, 64, 2, 2, 4),
    *_with_splits(64, 64, 2, 2, 6), *_with_splits(64, 128, 2, 2, 4), *_with_splits(64, 256, 4, 2, 5),
    SkinnyTile(64, 64, 2, 2, 3),
    SkinnyTile(16, 64, 1, 4, 5, own_rings=True),
)  # fmt: skip
#: Stages from which on the next launch should begin before the last copies: of a warp's ring, of narrow tiles' K.
_LONG_RING, _SHORT = 32, 96
#: Part of the SMs that have a block.
_FILLED = 0.9


def fits(tile: SkinnyTile, itemsize: int, device: DeviceInfo, *, along_n: bool) -> bool:
    """Whether the kernel can be compiled with this tile for that device and weight order."""
    if tile.shared_memory > device.shared_memory_per_block:
        return False
    sums = tile.block_m * tile.block_n // tile.warps_n // 32  # of a thread
    clusters = tile.split == 1 or device.arch not in _NO_CLUSTERS
    # Rows of a weight's stage are whole groups of eight 16-byte chunks, of which each thread that copies has as many;
    # fp32 keeps its sums twice in registers.
    chunks, copiers = tile.block_n * itemsize // 16, 32 if tile.own_rings else tile.threads
    whole = not along_n or (chunks % 8 == 0 and copiers % chunks == 0)
    return clusters and whole and sums * (itemsize // 2) <= 128 and not (tile.own_rings and tile.warps_n > 1)


def blocks_together(tile: SkinnyTile, device: DeviceInfo) -> int:
    """Blocks that share an SM, by shared memory: the system takes 1 KB for each, which an SM has beyond the most."""
    return max(1, min(3, (device.shared_memory_per_block + 1024) // (tile.shared_memory + 1024)))


def skinny_blocks(tile: SkinnyTile, rows: int, columns: int) -> tuple[int, int, int]:
    """The grid of a rows x columns result."""
    return -(-columns // tile.block_n) * tile.split, -(-rows // tile.block_m), 1


def side_by_side(tile: SkinnyTile, rows: int, columns: int, device: DeviceInfo) -> bool:
    """Whether the GPU holds all blocks of two launches at once."""
    across, down, _ = skinny_blocks(tile, rows, columns)
    return 2 * across * down <= blocks_together(tile, device) * max(device.sm_count, 1)


def _fills(tile: SkinnyTile, rows: int, columns: int, device: DeviceInfo) -> bool:
    """Whether a launch has a block alone on nearly each SM: the next one's come as they end."""
    across, down, _ = skinny_blocks(tile, rows, columns)
    return (
        blocks_together(tile, device) == 1 and _FILLED * device.sm_count <= across * down <= device.sm_count
    )


def _measured_tile(
    rows: int, columns: int, itemsize: int, device: DeviceInfo, *, along_n: bool
) -> SkinnyTile | None:
    """`ROUNDS_TILE` or `PAIR_TILE` where an H200 is faster by it than by the model's choice: launches overlap although
    two do not fit the GPU, for blocks of the next come as the last round's end."""
    tile = PAIR_TILE if along_n else ROUNDS_TILE
    if device.arch != "sm_90a" or itemsize != 2 or rows > tile.block_m or blocks_together(tile, device) != 2:
        return None
    rounds = skinny_blocks(tile, rows, columns)[0] / (2 * max(device.sm_count, 1))
    taken = _FILLED <= rounds <= 1 if along_n else rounds >= _ROUNDS
    return replace(tile, ahead=4, left=0) if taken else None


def _launched(
    tile: SkinnyTile, rows: int, columns: int, stages: int, device: DeviceInfo, *, along_n: bool
) -> SkinnyTile:
    """The tile with how its launches overlap, as measured.

    The next launch should begin when this one's copies end.  With several blocks an SM it must while all of them still
    run, or it crowds onto the SMs where they have ended: 19 us instead of 13.6 (one row, 6144 x 4096); and long ones
    end at different times.  Of launches beside each other, long ones took 28.0 us (14336 x 4096) when begun two copies
    before the end and asked for 16 stages, 28.3 with 4 and 12; short ones 9.4 at the end, 10.2 before.  stages: of K.
    """
    if tile == FULL_TILE and _fills(tile, rows, columns, device):
        return replace(tile, ahead=8, left=0)
    if not tile.programmatic or not side_by_side(tile, rows, columns, device):
        return replace(tile, programmatic=False)
    if tile.refill:
        is_short, is_narrow = stages <= _SHORT, tile.block_n == 32
        ahead, left = (10, 0) if is_short and is_narrow else (8 if is_narrow else 4, 2 if is_short else 4)
        return replace(tile, ahead=ahead, left=left)
    if tile.own_rings:
        ahead, left = (16, 2) if stages > _LONG_RING * tile.warps_k else (12, 0)
        return replace(tile, ahead=ahead, left=left)
    across, down, _ = skinny_blocks(tile, rows, columns)
    if across * down <= device.sm_count:
        return replace(tile, ahead=4, left=0)
    return replace(tile, ahead=2, left=2) if along_n else replace(tile, ahead=4, left=4)


def _overlaps(tile: SkinnyTile, rows: int, columns: int, device: DeviceInfo) -> bool:
    """Whether the next launch does something while one ends."""
    full = replace(tile, ahead=0, left=-1) == FULL_TILE and _fills(tile, rows, columns, device)
    return full or side_by_side(tile, rows, columns, device)


def predicted_time(
    tile: SkinnyTile, rows: int, columns: int, depth: int, itemsize: int, device: DeviceInfo
) -> float:
    """Microseconds of a rows x depth by depth x columns product, if the device's SMs are those of an H200.

    One of several launches in a row.  Not measured: more than 16 rows, fp32.
    """
    sms = max(device.sm_count, 1)
    across, down, _ = skinny_blocks(tile, rows, columns)
    blocks, together = across * down, blocks_together(tile, device)
    stages = -(-depth * itemsize // STAGE_ROW_BYTES)
    own_stages = -(-stages // tile.split)
    stage_bytes = (tile.block_n + tile.block_m) * STAGE_ROW_BYTES
    products = tile.block_m * tile.block_n * STAGE_ROW_BYTES / itemsize * (6 if itemsize == 4 else 1)
    alone = max(_STAGE_US + stage_bytes / _ALONE_RATE, _LATENCY_US / (tile.stages - 1))
    share = max(stage_bytes / _SM_RATE, products / _PRODUCT_RATE)
    if tile.own_rings:
        alone = share = max(
            stage_bytes / _OWN_RATE, _LATENCY_US / tile.warps_k / (tile.stages - (not tile.refill))
        )
    fullest = math.ceil(blocks / (sms * (_CLUSTERED if tile.split > 2 else 1)))  # blocks of the fullest SM
    rounds = [together] * (fullest // together) + [fullest % together] * (fullest % together > 0)
    in_sms = own_stages * sum(max(alone, count * share) for count in rounds)
    read = depth * columns * itemsize / _READ_RATE
    copied = blocks * own_stages * (tile.block_n + min(rows, tile.block_m)) * STAGE_ROW_BYTES / _L2_RATE
    overlapped = tile.programmatic and _overlaps(tile, rows, columns, device)
    edge = _OVERLAPPED_EDGE_US if overlapped else _EDGE_US
    if tile.split > 1:
        edge += _EXCHANGE_US + min(rows, tile.block_m) * tile.block_n * _EXCHANGE_SUM_US
    if tile.programmatic and not overlapped:
        edge += min(together, fullest) * (tile.stages - 1) * _PREFETCH_ROWS * _PREFETCH_ROW_US
    return float((in_sms**_NORM + max(read, copied) ** _NORM) ** (1 / _NORM) + edge * len(rounds))


def choose_skinny_tile(
    rows: int, columns: int, depth: int, itemsize: int, device: DeviceInfo, *, along_n: bool,
    among: Sequence[SkinnyTile] = CANDIDATES,
) -> SkinnyTile | None:  # fmt: skip
    """The tile of the least predicted time, the earlier of equals, but for `_measured_tile`; None when none fits.

    along_n: the weight's rows in memory run along N.  A predicted launch is programmatic where two fit the GPU side by
    side; only there, and for 16-bit elements, its warps have rings of their own.
    """
    stages = -(-depth * itemsize // STAGE_ROW_BYTES)
    measured = _measured_tile(rows, columns, itemsize, device, along_n=along_n)
    if measured is not None and among is CANDIDATES:
        return measured
    found = [
        _launched(tile, rows, columns, stages, device, along_n=along_n)
        for tile in among
        if fits(tile, itemsize, device, along_n=along_n)
        and not (tile == ALONG_K_TILE and along_n)
        and not (tile.own_rings and (itemsize > 2 or not _overlaps(tile, rows, columns, device)))
        and not (tile.own_rings and not tile.refill and not along_n)  # narrow tiles are better
        and not (tile.block_n == 48 and columns <= 32 * device.sm_count)
    ]
    lowest = min((tile.block_m for tile in found if tile.block_m >= rows), default=MAX_ROWS)
    found = [tile for tile in found if tile.block_m == lowest]
    return min(
        found, key=lambda tile: predicted_time(tile, rows, columns, depth, itemsize, device), default=None
    )


def preferred_tile(
    rows: int, columns: int, depth: int, itemsize: int, device: DeviceInfo, *, along_n: bool, copy_width: int
) -> SkinnyTile | None:  # fmt: skip
    """The tile when the kernel is the better choice for a product that asks for none; else None.

    copy_width: bytes of the narrower operand's copies.  Below 16 the copies, not the memory, bound the time.
    """
    if not 0 < rows <= DEFAULT_ROWS or depth * columns * itemsize < MIN_WEIGHT_BYTES or copy_width < 16:
        return None
    tile = choose_skinny_tile(rows, columns, depth, itemsize, device, along_n=along_n)
    if tile is None or _measured_tile(rows, columns, itemsize, device, along_n=along_n):
        return tile
    generic = choose_tile(rows, [columns], depth, itemsize, device)
    # The generic kernel's model knows stages, not memory.  The bytes that move are those of such a tile here.
    computed = modelled_time(generic, block_count(generic, rows, [columns]), depth, itemsize, device)
    like = SkinnyTile(generic.block_m, generic.block_n, generic.warps_n, 1, generic.stages, 1, False)
    other = max(_EDGE_US + computed, predicted_time(like, rows, columns, depth, itemsize, device))
    return tile if predicted_time(tile, rows, columns, depth, itemsize, device) <= other else None
