"""Tiles of the Hopper GEMM (`cuda_src/gemm/hopper/linear.cu`): pure functions of shapes and device.

What weighs:
* Accumulators: tile elements of a consumer / 128, at most 128 a thread.  More of them mean fewer reads of shared memory
  for each product: 64 x 256 and 128 x 128 a consumer keep the tensor core fed.
* Cooperative or ping-pong: two consumers share a tile, or take tiles in turn.  A shared tile is twice as large, so it
  needs less traffic from L2; in turn, one's bias, activation, residual and stores run beside the other's products.
* Shared memory: `stages` times 64 elements of K of both operands, and 32 KB for results on their way out; 227 KB at
  most.

Measured on an H200 with a dense prototype of the cooperative 128 x 256 tile with four stages, bf16: 0.99 to 1.03 of
cuBLASLt's speed without epilogue; bias and GELU cost 4 to 14 %, which ping-pong is to hide.  The kernel here has not
been timed yet: `bench/linear.py --hopper` does, and until it has, nothing selects this kernel by itself.

No choice changes results: every sum runs over K in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cki.device import DeviceInfo

#: Elements of K in a stage, and bytes of a row of it: one swizzled row of 16-bit elements.
STAGE_DEPTH = 64
_ROW_BYTES = 128
#: Two buffers of 16 rows x 64 columns for each of eight warps.
_OUTPUT_BYTES = 8 * 2 * 16 * _ROW_BYTES
_BARRIER_BYTES = 16  # of a stage
#: Registers of (producer, consumer) threads after setmaxnreg: 128 * 24 + 256 * 240 of 65536.
REGISTER_SHARES = (24, 240)
#: Registers a thread at launch: 65536 / 384, a multiple of 8.
LAUNCH_REGISTERS = 168


@dataclass(frozen=True)
class HopperTile:
    """block_m x block_n: a tile of the result.  stages: of the ring.  ping_pong: two consumers take tiles in turn, else
    they share each."""

    block_m: int
    block_n: int
    stages: int = 4
    ping_pong: bool = False

    @property
    def threads(self) -> int:
        """A producer warpgroup and two consumers."""
        return 384

    @property
    def accumulators(self) -> int:
        """Of a consumer's thread."""
        return self.block_m * self.block_n // (128 if self.ping_pong else 256)

    @property
    def shared_memory(self) -> int:
        """Bytes: `HopperLayout` of cuda_src/gemm/hopper/tiles.cuh."""
        stage = (self.block_m + self.block_n) * _ROW_BYTES + _BARRIER_BYTES
        return self.stages * stage + _OUTPUT_BYTES

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}s{self.stages}{'pp' if self.ping_pong else ''}"


#: What `bench/linear.py --hopper` checks and times.
CANDIDATES = (
    HopperTile(128, 256, 4), HopperTile(256, 128, 4), HopperTile(128, 256, 3), HopperTile(128, 128, 4),
    HopperTile(128, 128, 4, True), HopperTile(128, 128, 6, True), HopperTile(64, 256, 4, True),
    HopperTile(64, 128, 6, True),
)  # fmt: skip


def tile_count(tile: HopperTile, rows: int, columns: int) -> int:
    """Tiles of a rows x columns result."""
    return -(-rows // tile.block_m) * -(-columns // tile.block_n)


def choose_hopper_tile(
    rows: int, columns: int, device: DeviceInfo, *, has_epilogue: bool, among: Sequence[HopperTile] = CANDIDATES
) -> HopperTile:  # fmt: skip
    """Where a search should begin, by a model that no measurement has touched yet: the least tensor-core time on the
    fullest SM, where a finish that is not hidden counts as a tenth of it; ties go to the earlier candidate.

    has_epilogue: bias, activation or residual.
    """

    def modelled_time(tile: HopperTile) -> float:
        rounds = -(-tile_count(tile, rows, columns) // max(device.sm_count, 1))
        exposed = 1.1 if has_epilogue and not (tile.ping_pong and rounds > 1) else 1.0
        return rounds * tile.block_m * tile.block_n * exposed

    return min((t for t in among if t.shared_memory <= device.shared_memory_per_block), key=modelled_time)
