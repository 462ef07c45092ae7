"""How element-wise kernels spread rows over threads and blocks: pure functions of shapes, alignment and device.

The kernels (`cuda_src/pointwise`) read each element once and write it once.  As for norms, bytes in flight decide:
16-byte accesses where width and alignment allow, 64 bytes of them a thread before the first is used, and at least 1024
threads an SM, which is 64 KB or more an SM.  Problems of a few rows take one access a thread and more blocks instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cki.device import DeviceInfo

#: Widest row of an output: the kernels count columns in 32 bits, with room for twice as many inputs or a grid's step.
MAX_WIDTH = 1 << 29

#: Activations by name, with the numbers of cuda_src/pointwise/activation.cuh.
ACTIVATIONS: dict[str | None, int] = {
    None: 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "relu": 4, "sigmoid": 5, "tanh": 6, "quick_gelu": 7, "relu2": 8,
}  # fmt: skip

#: Where gate and up lie in one tensor, with the numbers of cuda_src/pointwise/gated_activation.cu.
LAYOUTS = {"gate_first": 0, "up_first": 1, "interleaved": 2}

_THREADS = 256
_LOADS = 4  # accesses of 16 bytes that a thread has in flight
_MAX_GRID_Y = 65535


@dataclass(frozen=True)
class TileConfig:
    """How an element-wise kernel is cut (cuda_src/pointwise/tile.cuh).

    size: elements an access.  full_tiles: rows are whole tiles, so that the kernel tests no column against the width.
    min_blocks: blocks an SM that the register budget must allow.
    """

    size: int
    threads_per_row: int
    rows_per_block: int
    vectors_per_thread: int
    full_tiles: bool
    min_blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_row * self.rows_per_block

    @property
    def max_registers(self) -> int:
        """Registers a thread may use so that `min_blocks` blocks fit an SM (they are given out by eights)."""
        return min(255, 65536 // (self.threads * self.min_blocks) // 8 * 8)

    def constants(self) -> dict[str, Any]:
        """What the kernel is specialised by."""
        return {
            "kVectorSize": self.size, "kThreadsPerRow": self.threads_per_row, "kRowsPerBlock": self.rows_per_block,
            "kVectorsPerThread": self.vectors_per_thread, "kFullTiles": self.full_tiles, "kMinBlocks": self.min_blocks,
        }  # fmt: skip

    def reason(self, rows: int, width: int) -> str:
        """What a launch says of itself."""
        return (
            f"{rows} rows of {width}, {self.vectors_per_thread} x {self.size} elements a thread, "
            f"{self.threads_per_row} threads a row"
        )

    def grid(self, rows: int, width: int) -> tuple[int, int, int]:
        """Blocks: groups of rows, tiles of a row (a block takes several where there are more than the axis holds)."""
        tile = self.threads_per_row * self.vectors_per_thread * self.size
        return -(-rows // self.rows_per_block), min(-(-width // tile), _MAX_GRID_Y), 1


def tile_config(
    rows: int, width: int, size: int, inputs: int, device: DeviceInfo, *, min_blocks: int, min_lanes: int = 1
) -> TileConfig:
    """The configuration for rows of `width` elements of the output.

    size: elements of a thread's vector.  inputs: accesses that one vector of the output waits for.
    min_blocks: blocks an SM for which the kernel finds registers.  min_lanes: threads of a row at least.
    """
    vectors = -(-width // size)
    most = max(1, _LOADS // inputs)
    if rows * vectors <= 2 * device.sm_count * _THREADS * most:
        most = 1
    found = []
    for per_thread in range(most, 0, -1):
        for lanes in (256, 128, 64, 32, 16, 8, 4, 2, 1):
            reach = lanes * per_thread
            tiles = -(-vectors // reach)
            if lanes < min_lanes or (tiles > 1 and lanes < 8):
                break  # less than 128 neighbouring bytes an access
            # Up to an eighth of the threads may idle; then most in flight, then fewest tiles.
            idle = (tiles * reach - vectors) / (tiles * reach)
            found.append((0.0 if idle <= 0.125 else idle, -per_thread, tiles, lanes))
    _, negative, tiles, lanes = min(found)
    full = tiles * lanes * -negative * size == width
    return TileConfig(size, lanes, _THREADS // lanes, -negative, full, min_blocks)
