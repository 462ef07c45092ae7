"""Tiles of the e4m3 attention kernel on Hopper (`cuda_src/attention/hopper/attention_e4m3.cu`).

What weighs is what `cki.heuristics.attention_hopper` says, with other sizes: operands are half as large, so shared
memory holds more stages; weights take a quarter of a register each; and a second set of accumulators takes the products
of a tile, to be added in fp32.  With 128 keys a tile that fits without spills: 64 scores, 16 words of weights, 68
outputs and 68 sums at value dimension 128.  128 keys are also what a slab of transposed values holds.

Measured on an H200, 4 sequences of 4096 tokens, us full and causal: head dimension 64, 3 consumers x 96 keys, lazy:
916, 527; 2 x 128, lazy: 1021, 593; 2 x 128, eager: 984, 624.  Head dimension 128, 2 x 128, eager: 653, 370; lazy: 658,
396.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cki.device import DeviceInfo
from cki.heuristics.attention_hopper import MIN_QUERIES as MIN_QUERIES
from cki.heuristics.attention_hopper import HopperTiles, key_span

#: Fewest queries for which codes are converted to f16 for the 16-bit kernel, where this one does not serve a call.
MIN_CONVERTED = 128
#: Value columns of which a thread has registers for two sets of sums: those of the tiles in flight, and all.
PROMOTED_DIM = 128
#: Columns of ones beside the values.
_SUM_COLUMNS = 8
#: Keys of a slab of transposed values: a swizzled row of 128 bytes.
SLAB_KEYS = 128


@dataclass(frozen=True)
class E4m3Tiles(HopperTiles):
    """`HopperTiles` of the e4m3 kernel.  block_keys: a multiple of 32.
    lazy: references of the softmax follow scores only when these rise by 2**4, and nothing is rescaled until then."""

    lazy: bool = False

    def shared_memory(self, head_dim: int, value_dim: int, packed: bool = False) -> int:
        """Bytes: `SharedLayout` of shared_tiles.cuh.  Padded dimensions."""

        def pattern(nbytes: int) -> int:
            return -(-nbytes // 1024) * 1024

        span = key_span(head_dim // 2)
        key_row = -(-head_dim // span) * span
        tiles = pattern(self.block_rows * key_row) + pattern(self.stages * self.block_keys * key_row)
        tiles += self.stages * -(-self.block_keys // SLAB_KEYS) * SLAB_KEYS * (value_dim + _SUM_COLUMNS)
        return tiles + self.ring_bytes + 2 * 12

    def __str__(self) -> str:
        return super().__str__() + (", lazy" if self.lazy else "")


def choose_e4m3_tiles(
    queries: int, batch_heads: int, head_dim: int, value_dim: int, has_limits: bool, device: DeviceInfo
) -> E4m3Tiles:
    """Tiles for padded head dimensions.  has_limits: causal or windowed.

    Keys a tile and the softmax depend on dimensions alone: they decide the order of sums, and a row's result must not
    change with the batch beside it.
    """
    consumers = 1 if queries <= 64 else 2
    if max(head_dim, value_dim) <= 64:
        # The softmax is what takes the time: a third consumer to hide its latency, and fewer of its instructions.
        tiles = E4m3Tiles(3 if queries > 128 else consumers, 96, 3, lazy=True)
    else:
        tiles = E4m3Tiles(consumers, 128, 3 if head_dim <= 128 else 2)
    assert tiles.shared_memory(head_dim, min(value_dim, PROMOTED_DIM)) <= device.shared_memory_per_block
    rounds = math.ceil(queries / tiles.block_rows) * batch_heads / device.sm_count
    if rounds <= 1:
        return tiles
    # The launch that turns the values zeroes the counter too, so drawing numbers costs no launch of its own.
    return replace(tiles, schedule="dynamic" if has_limits or rounds > 4 else "fixed")
