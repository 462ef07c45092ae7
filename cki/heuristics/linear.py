"""How a GEMM is cut into tiles and how its operands are read: pure functions of shapes, strides and device.

The kernel (`cuda_src/gemm/linear.cu`) computes one tile of the result in a block.  Large tiles read each operand
less often and keep the tensor cores busier; small ones waste less of a small problem and spread it over more SMs.
The choice is the tile of the least modelled time: blocks that share an SM take turns in rounds, and a round takes,
for each 128 bytes of K, the sum of its blocks' shares of the SM or the time of one block alone, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cki.device import DeviceInfo
from cki.operand import Operand

#: Largest extent of a row, column or depth axis: the kernel counts them, and tiles beyond their end, in 32 bits.
MAX_EXTENT = 2**31 - 1024

#: Activations by name, with the numbers of cuda_src/gemm/activation.cuh.
ACTIVATIONS: dict[str | None, int] = {None: 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "relu": 4}

#: Bytes of K in one stage of the ring.
STAGE_ROW_BYTES = 128

# Stages' worth of time that a round spends on filling its ring and writing its results: less where blocks overlap.
_EDGE_STAGES = {True: 2, False: 4}


@dataclass(frozen=True)
class Tile:
    """One way to cut the result.

    block_m, block_n: the tile of a block.  warps_m, warps_n: how its warps share it.  stages: depth of the ring.
    min_blocks: blocks an SM for which the compiler keeps registers.  max_registers: the stated budget a thread.
    alone, share: microseconds of a stage, for a block that has an SM to itself and for one of `min_blocks` on it.  They
        were measured on an H200 (f16; estimated for fp32); only their ratios matter.
    """

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int
    stages: int
    min_blocks: int
    max_registers: int
    alone: float
    share: float

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * 32

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * (self.block_m + self.block_n) * STAGE_ROW_BYTES


#: For 16-bit elements.  Three stages of the two largest fit into 96 and 144 KB.
TILES_16BIT = (
    Tile(16, 64, 1, 4, 6, 3, 104, 0.28, 0.14),
    Tile(32, 64, 1, 4, 4, 3, 112, 0.40, 0.17),
    Tile(64, 64, 2, 2, 4, 3, 144, 0.47, 0.25),
    Tile(64, 128, 2, 2, 4, 2, 200, 0.74, 0.44),
    Tile(128, 128, 2, 2, 3, 2, 255, 1.13, 0.73),
    Tile(128, 256, 2, 4, 3, 1, 255, 1.56, 1.56),
)
#: For fp32, whose products come in threes and whose sums are kept twice.
TILES_FP32 = (
    Tile(16, 64, 1, 4, 6, 3, 104, 0.35, 0.25),
    Tile(32, 64, 1, 4, 4, 3, 144, 0.50, 0.38),
    Tile(64, 64, 2, 2, 4, 2, 200, 0.80, 0.70),
    Tile(128, 64, 4, 2, 4, 1, 200, 1.30, 1.30),
)


def choose_tile(
    rows: int,
    columns: Sequence[int],
    depth: int,
    itemsize: int,
    device: DeviceInfo,
    *,
    gathered: bool = False,
) -> Tile:
    """The tile for a rows x depth by depth x sum(columns) product.

    columns: of each part of the weight; parts do not share tiles.  itemsize: bytes of an element.
    gathered: an operand is read element by element, which no tile shape makes fast: a small one holds fewer registers.
    """
    tiles = TILES_16BIT if itemsize == 2 else TILES_FP32
    fitting = [tile for tile in tiles if tile.shared_memory <= device.shared_memory_per_block]
    if gathered:
        fitting = [tile for tile in fitting if tile.block_m * tile.block_n <= 64 * 64]
    return min(
        fitting,
        key=lambda tile: modelled_time(tile, block_count(tile, rows, columns), depth, itemsize, device),
    )


def modelled_time(tile: Tile, blocks: int, depth: int, itemsize: int, device: DeviceInfo) -> float:
    """Microseconds of a launch of so many tiles; memory's rate is not in it."""
    stages = max(1, -(-depth * itemsize // STAGE_ROW_BYTES))
    fullest = -(-blocks // max(device.sm_count, 1))  # blocks of the fullest SM
    together = min(tile.min_blocks, device.shared_memory_per_block // tile.shared_memory)
    rounds = [together] * (fullest // together) + [fullest % together]
    steps = stages + _EDGE_STAGES[together > 1]
    return steps * sum(max(tile.alone, count * tile.share) for count in rounds if count)


def block_count(tile: Tile, rows: int, columns: Sequence[int]) -> int:
    """Blocks of a launch."""
    return -(-rows // tile.block_m) * sum(-(-n // tile.block_n) for n in columns)


@dataclass(frozen=True)
class WeightAccess:
    """How a weight is read: `along_n` when its rows in memory run along N ([K, N] row-major), else along K.

    stride: elements between rows in memory.  column_stride: between elements of a row; 1 unless both axes are strided.
    """

    along_n: bool
    stride: int
    column_stride: int


def weight_access(depth: int, columns: int, depth_stride: int, column_stride: int) -> WeightAccess:
    """The access for a depth x columns weight of those strides.  Strides of axes of extent 1 do not matter."""
    depth_step = 1 if depth == 1 else depth_stride
    column_step = 1 if columns == 1 else column_stride
    if column_step == 1 and not (depth_step == 1 and depth > 1):
        return WeightAccess(True, 0 if depth == 1 else depth_stride, 1)
    return WeightAccess(False, 0 if columns == 1 else column_stride, depth_step)


def copy_bytes(operand: Operand, column_stride: int, row_strides: Sequence[int]) -> int:
    """Bytes of a piece that copies of this operand move: the most that divides every row's address, at most 16."""
    itemsize = operand.dtype.itemsize
    if column_stride != 1:
        return itemsize
    steps = (operand.alignment, operand.offset, *(stride * itemsize for stride in row_strides))
    return next((size for size in (16, 8, 4) if all(step % size == 0 for step in steps)), itemsize)


def pair_access(operand: Operand, column_stride: int, row_strides: Sequence[int]) -> bool:
    """Whether two neighbouring columns, the first of them even, can be read or written at once."""
    pair = 2 * operand.dtype.itemsize
    steps = (operand.alignment, operand.offset, *(stride * operand.dtype.itemsize for stride in row_strides))
    return column_stride == 1 and all(step % pair == 0 for step in steps)
