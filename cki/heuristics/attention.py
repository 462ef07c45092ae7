"""Tile sizes of the attention kernel (`cuda_src/attention/attention.cu`): pure functions of shapes and device.

What weighs:
* Rows a block: every block reads all keys and values, so more rows mean less traffic; blocks of fewer rows where
  there are few (decoding, short prompts), else most of a tile would be padding.
* Rows a warp: 32 (two mma row tiles) halve the reads of shared memory, which limits mma.sync at 16.  Output and
  scores of 32 rows take (value_dim + block_keys) registers a thread of the 255 there are, so the tile of keys
  shrinks as the head dimension grows, and features that need registers of their own get 16 rows.
* Keys a tile: fewer barriers and wider overlap against shared memory: 99 KB a block on sm_89 and sm_120, 163 KB on
  sm_80, 227 KB on sm_90 and sm_100.

Measured on an H200, bf16, TFLOP/s of (warps, row tiles, keys): head dimension 64, 2048 keys: (4, 2, 64) 286,
(4, 2, 32) 240, (4, 1, 64) 223, (8, 1, 64) 206; 128, 4096 keys: (4, 2, 32) 307, (8, 1, 128) 281, (4, 1, 64) 258;
256, 4096 keys: (8, 1, 64) 281, (4, 1, 32) 252, (4, 1, 64) 221.

The number of keys a tile is the one choice that changes results (in the last bits).  It depends on head dimensions,
type, features and device, never on batch, heads or lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from cki.device import DeviceInfo


@dataclass(frozen=True)
class AttentionTiles:
    """How a block is cut: warps, row_tiles of 16 query rows a warp, block_keys a tile.

    min_blocks: blocks an SM that the compiler must leave room for.  registers: the budget a thread.
    """

    warps: int
    row_tiles: int
    block_keys: int
    min_blocks: int = 1
    registers: int = 255

    @property
    def block_rows(self) -> int:
        """Query rows of a block."""
        return self.warps * self.row_tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    def shared_memory(self, head_dim: int, value_dim: int, itemsize: int, paged: bool = False) -> int:
        """Bytes: the query tile and two stages of keys and values, 16 bytes of padding a row; a word beside them.

        Dimensions are padded ones.  paged: and the place of each key, 8 bytes.
        """
        query = self.block_rows * (head_dim * itemsize + 16)
        stage = self.block_keys * ((head_dim + value_dim) * itemsize + 32 + (8 if paged else 0))
        return query + 2 * stage + 16


def padded(dim: int) -> int:
    """A head dimension rounded up to whole mma steps; the rest is filled with zeros inside the kernel."""
    return -(-dim // 16) * 16


def heads_per_block(queries: int, group: int) -> int:
    """Query heads that share a block: the whole group of a KV head where the queries of one head fill no tile."""
    return group if queries < 64 else 1


def choose_tiles(
    rows: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    plain: bool,
    device: DeviceInfo,
    paged: bool = False,
) -> AttentionTiles:
    """Tiles for `rows` query rows a head (or packed group of heads) and padded head dimensions.

    plain: nothing but a scale and limits on the right (causal) goes into the logits.
    paged: the places of keys in a cache take shared memory too.
    """
    for tiles in _candidates(max(head_dim, value_dim), itemsize, plain):
        if tiles.shared_memory(head_dim, value_dim, itemsize, paged) <= device.shared_memory_per_block:
            return _fewer_rows(tiles, rows)
    raise AssertionError(f"head dimensions {head_dim} and {value_dim} fit no tile")


def _candidates(widest: int, itemsize: int, plain: bool) -> tuple[AttentionTiles, ...]:
    """Tiles in order of preference; the first that fits in shared memory is taken."""
    if itemsize == 4:
        if widest > 192 and not plain:  # output rows and what features keep leave registers for few scores
            return (AttentionTiles(2, 1, 16),)
        return AttentionTiles(4, 1, 32), AttentionTiles(4, 1, 16), AttentionTiles(2, 1, 16)
    if widest <= 96:
        return AttentionTiles(4, 2 if plain else 1, 64), AttentionTiles(4, 1, 32)
    if widest <= 128:
        return AttentionTiles(4, 2, 32) if plain else AttentionTiles(4, 1, 64), AttentionTiles(4, 1, 32)
    if plain:
        return (
            AttentionTiles(8, 1, 64),
            AttentionTiles(8, 1, 32),
            AttentionTiles(4, 1, 32),
            AttentionTiles(4, 1, 16),
        )
    return AttentionTiles(8, 1, 32), AttentionTiles(4, 1, 16)


def _fewer_rows(tiles: AttentionTiles, rows: int) -> AttentionTiles:
    """The same keys a tile with no more rows a block than there are (in steps of 16, 32, 64, 128)."""
    for warps in (1, 2, 4):
        if rows <= warps * 16 < tiles.block_rows:
            return AttentionTiles(warps, 1, tiles.block_keys)
    return tiles
