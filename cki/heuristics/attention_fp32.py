"""Tiles of the fp32 attention kernel on Hopper (`cuda_src/attention/hopper/attention_fp32.cu`).

Measured on an H200, 16384 tokens of width 2048 (bench/attention_fp32.py has the figures of the choice), us full at 512,
2048 and 8192 tokens, causal at 8192.  Head dimension 64: 128 keys without turns 818, 2414, 8431, 4322; in turns 832,
2529, 8550, 4564; 96 keys in turns 930, 2556, 9463, 4668.  Head dimension 128: 64 keys in turns 795, 2262, 8165, 4191;
without 834, 2453, 8829, 4502; 80 keys in turns 821, 2250, 8400, 4150.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cki.device import DeviceInfo
from cki.heuristics.attention_hopper import HopperTiles, key_span, value_span

#: bf16 pieces of a number.
PIECES = 3
#: Beyond it a thread has no registers for two sets of sums, those of a tile and of all.
LARGEST_DIM = 128
#: Fewest queries, and keys, for which the kernel is chosen: the launch that splits must pay.
MIN_QUERIES = 256


@dataclass(frozen=True)
class Fp32Tiles(HopperTiles):
    """`HopperTiles` of the fp32 kernel.  stages: of the one ring of keys and values."""

    def shared_memory(self, head_dim: int, value_dim: int, packed: bool = False) -> int:
        """Bytes: `SharedLayout` of shared_tiles.cuh.  Padded dimensions."""

        def row(dim: int, span: int) -> int:
            return -(-dim * 2 // span) * span * PIECES

        key_row = row(head_dim, key_span(head_dim))
        stage = self.block_keys * max(key_row, row(value_dim, value_span(value_dim)))
        return self.block_rows * key_row + self.stages * stage + self.ring_bytes + 2 * 28


def choose_fp32_tiles(
    queries: int, batch_heads: int, widest: int, is_plain: bool, device: DeviceInfo
) -> Fp32Tiles:
    """Tiles for head dimensions up to `widest`; on it and on features alone the keys a tile depend.

    is_plain: nothing but a scale and limits goes into the logits; else 128 keys would spill 44 bytes.
    """
    rounds = math.ceil(queries / 128) * batch_heads / device.sm_count
    schedule = "single" if rounds <= 1 else "dynamic"
    if widest <= 64:
        return Fp32Tiles(2, 128 if is_plain else 96, 3, ping_pong=False, schedule=schedule)
    return Fp32Tiles(2, 64, 2, schedule=schedule)
