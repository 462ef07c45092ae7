"""How a product of few rows is cut (`cuda_src/gemm/skinny/linear.cu`): pure functions of shapes and device.

Its time is that of the weight's bytes, if enough of them are under way on every SM all the time.  What weighs:
* Blocks: about two an SM.  Where the columns alone give fewer, K is split over the blocks of a cluster (sm_90).
* Bytes in flight: an H200 needs about 40 KB an SM; two rings of 64 KB of weight each have room to spare.
* x: every block reads its rows for its part of K, from L2.  Wide tiles read less of it; with 64 rows and 64 columns it
  doubles the traffic between L2 and SMs.
* The finish: a split product passes its sums between SMs.

The model below is a prediction: no measurement of this kernel has touched it yet.  `bench/linear.py --skinny` is the
measurement, and prints the model's figure beside each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cki.device import DeviceInfo
from cki.heuristics.linear import STAGE_ROW_BYTES, block_count, choose_tile, modelled_time

#: Rows up to which the kernel is meant to be used, and up to which it is taken unasked.
MAX_ROWS = 64
DEFAULT_ROWS = 16
#: Bytes of a weight from which on its reading outweighs the launch.
MIN_WEIGHT_BYTES = 4 << 20
#: Architectures without clusters.
_NO_CLUSTERS = ("sm_80", "sm_89")

# Of an H200.  Bytes a microsecond and SM that memory gives when more than enough are asked for (4.65 TB/s), and those
# under way on an SM that halve it; 112 KB an SM then give 4.5 TB/s.
_READ_RATE = 35_200.0
_HALF_BYTES = 4_000.0
# The same from L2; the most that one SM takes in, and the latency that its bytes under way must cover for that (the
# Hopper GEMM with 32 blocks of 144 KB each reads 110 GB/s a block).
_L2_RATE = 50_000.0
_SM_RATE = 100_000.0
_LATENCY_US = 1.0
# fp32 sums of 16-bit products a microsecond and SM by mma.sync.
_PRODUCT_RATE = 2.5e6
# Microseconds of launch, first bytes and finish; of a cluster's exchange, for each of its blocks; of a stage in a block
# that has its SM for itself, and of one among several.
_EDGE_US = 2.2
_EXCHANGE_US = 0.1
_ALONE_US, _SHARE_US = 0.25, 0.12


@dataclass(frozen=True)
class SkinnyTile:
    """One way to cut a product of few rows.

    block_m, block_n: the tile of a cluster.  warps_n, warps_k: how a block's warps share its columns, and the K steps
        of a stage.  stages: depth of the ring.  split: blocks of the cluster, each with its part of K.
    programmatic: the launch may begin while the one before it in the stream ends (sm_90 and later; else no effect).
    """

    block_m: int
    block_n: int
    warps_n: int
    warps_k: int
    stages: int
    split: int = 1
    programmatic: bool = True

    @property
    def threads(self) -> int:
        return self.warps_n * self.warps_k * 32

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory: the ring, or the parts of the sums that take its place."""
        ring = self.stages * (self.block_m + self.block_n) * STAGE_ROW_BYTES
        return max(ring, self.warps_k * self.block_m * (self.block_n + 8) * 4)

    def __str__(self) -> str:
        warps = f"w{self.warps_n}x{self.warps_k}s{self.stages}"
        return f"{self.block_m}x{self.block_n}{warps}k{self.split}{'' if self.programmatic else 'serial'}"


def _with_splits(
    block_m: int, block_n: int, warps_n: int, warps_k: int, stages: int
) -> tuple[SkinnyTile, ...]:
    return tuple(SkinnyTile(block_m, block_n, warps_n, warps_k, stages, split) for split in (1, 2, 4, 8))


#: What the choice and `bench/linear.py --skinny` try; on an H200 two or three blocks an SM, one of 256 columns.
CANDIDATES = (
    *_with_splits(16, 64, 1, 4, 8), *_with_splits(16, 128, 1, 4, 6), *_with_splits(16, 64, 1, 4, 5),
    SkinnyTile(16, 32, 1, 4, 12), SkinnyTile(16, 32, 1, 4, 6),
    *_with_splits(32, 64, 2, 2, 8), *_with_splits(32, 128, 2, 2, 5), *_with_splits(32, 256, 4, 2, 5),
    SkinnyTile(32, 64, 2, 2, 4),
    *_with_splits(64, 64, 2, 2, 6), *_with_splits(64, 128, 2, 2, 4), *_with_splits(64, 256, 4, 2, 5),
    SkinnyTile(64, 64, 2, 2, 3),
)  # fmt: skip


def fits(tile: SkinnyTile, itemsize: int, device: DeviceInfo, *, along_n: bool) -> bool:
    """Whether the kernel can be compiled with this tile for that device and weight order."""
    clusters = tile.split == 1 or device.arch not in _NO_CLUSTERS
    # Rows of a weight's stage are whole groups of eight 16-byte chunks; fp32 keeps its sums twice in registers.
    whole = not along_n or tile.block_n * itemsize % 128 == 0
    held = tile.block_m * tile.block_n // tile.warps_n // 32 * (itemsize // 2)
    return clusters and whole and held <= 128 and tile.shared_memory <= device.shared_memory_per_block


def blocks_together(tile: SkinnyTile, device: DeviceInfo) -> int:
    """Blocks that share an SM, by shared memory."""
    return max(1, min(3, device.shared_memory_per_block // tile.shared_memory))


def skinny_blocks(tile: SkinnyTile, rows: int, columns: int) -> tuple[int, int, int]:
    """The grid of a rows x columns result."""
    return -(-columns // tile.block_n) * tile.split, -(-rows // tile.block_m), 1


def predicted_time(
    tile: SkinnyTile, rows: int, columns: int, depth: int, itemsize: int, device: DeviceInfo
) -> float:
    """Microseconds of a rows x depth by depth x columns product, if the device's SMs are those of an H200."""
    sms = max(device.sm_count, 1)
    across, down, _ = skinny_blocks(tile, rows, columns)
    stages = -(-depth * itemsize // STAGE_ROW_BYTES)
    own_stages = -(-stages // tile.split)
    block_bytes = own_stages * (tile.block_n + min(rows, tile.block_m)) * STAGE_ROW_BYTES
    fullest = -(-across * down // sms)  # blocks of the fullest SM
    together = blocks_together(tile, device)
    ring_bytes = max(1, min(tile.stages - 1, own_stages)) * tile.block_n * STAGE_ROW_BYTES
    under_way = min(across * down, together * sms) * ring_bytes / sms
    read = depth * columns * itemsize / (_READ_RATE * sms) * (1 + _HALF_BYTES / under_way)
    taken_in = min(_SM_RATE, min(together, fullest) * ring_bytes / _LATENCY_US)
    copied = max(across * down * block_bytes / (_L2_RATE * sms), fullest * block_bytes / taken_in)
    rounds = [together] * (fullest // together) + [fullest % together]
    products = tile.block_m * tile.block_n * STAGE_ROW_BYTES / itemsize * (6 if itemsize == 4 else 1)
    share = max(_SHARE_US, products / _PRODUCT_RATE)
    computed = own_stages * sum(max(_ALONE_US, count * share) for count in rounds if count)
    exchanged = 0.0
    if tile.split > 1:
        exchanged = tile.split * (_EXCHANGE_US + rows * columns * 4 / (_L2_RATE * sms))
    return _EDGE_US + max(read, copied, computed) + exchanged


def choose_skinny_tile(
    rows: int, columns: int, depth: int, itemsize: int, device: DeviceInfo, *, along_n: bool,
    among: Sequence[SkinnyTile] = CANDIDATES,
) -> SkinnyTile | None:  # fmt: skip
    """The tile of the least predicted time, the earlier of equals; None when none fits.

    along_n: the weight's rows in memory run along N.
    """
    found = [tile for tile in among if fits(tile, itemsize, device, along_n=along_n)]
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
    if tile is None:
        return None
    generic = choose_tile(rows, [columns], depth, itemsize, device)
    # The generic kernel's model knows stages, not memory.  The bytes that move are those of such a tile here.
    computed = modelled_time(generic, block_count(generic, rows, [columns]), depth, itemsize, device)
    like = SkinnyTile(generic.block_m, generic.block_n, generic.warps_n, 1, generic.stages)
    other = max(_EDGE_US + computed, predicted_time(like, rows, columns, depth, itemsize, device))
    return tile if predicted_time(tile, rows, columns, depth, itemsize, device) <= other else None
