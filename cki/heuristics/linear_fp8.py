"""Tiles of the products of e4m3 codes (`cuda_src/gemm/hopper/linear_fp8.cu`)."""

from __future__ import annotations

from dataclasses import dataclass

#: Elements of K in a stage, neighbours with one scale, and bytes of a row of a stage.
BLOCK = 128
#: Rows of a tile.
BLOCK_M = 128
_CONSUMER_WARPS = 8
#: A warp's 16 rows x 64 columns of the result on their way out, in bytes.
_SLAB_BYTES = 16 * 128
_BARRIER_BYTES = 16  # of a stage


@dataclass(frozen=True)
class Fp8Tile:
    """block_n: columns of a tile of 128 rows, whole 64, at most 192.  stages: of the ring.
    parts: accumulators of a stage's products; 2 need tiles of at most 128 columns.
    lag: stages of a tile that the second consumer begins behind the first.
    outputs: buffers of a warp for its results.
    sharers: blocks of a cluster whose tiles lie below each other, and who bring their weight for each other."""

    block_n: int = 128
    stages: int = 5
    parts: int = 2
    lag: int = 1
    outputs: int = 2
    sharers: int = 1

    @property
    def threads(self) -> int:
        """A producer warpgroup and two consumers."""
        return 3 * 128

    @property
    def shared_memory(self) -> int:
        """Bytes: the ring, results, barriers; and of each stage a scale a row, those of columns, whole 16 bytes."""
        stage = (BLOCK_M + self.block_n) * BLOCK + _BARRIER_BYTES + (BLOCK_M + 4) * 4
        return self.stages * stage + _CONSUMER_WARPS * self.outputs * _SLAB_BYTES

    def clusters(self, rows: int, columns: int) -> int:
        """Of a rows x columns result: tiles, or pairs of them below each other."""
        return -(-rows // (BLOCK_M * self.sharers)) * -(-columns // self.block_n)

    def __str__(self) -> str:
        words = (
            f"{BLOCK_M}x{self.block_n}s{self.stages}p{self.parts}l{self.lag}o{self.outputs}",
            f"m{self.sharers}" if self.sharers > 1 else "",
        )  # fmt: skip
        return "".join(words)


#: What `bench/gemm_fp8.py --tiles` times.
CANDIDATES = (
    Fp8Tile(), Fp8Tile(lag=3), Fp8Tile(stages=6, outputs=1), Fp8Tile(sharers=2), Fp8Tile(192, 5, 1, 2, 1),
)  # fmt: skip
