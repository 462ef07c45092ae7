"""How a product of e4m3 weights and few tokens is cut (`cuda_src/gemm/hopper/linear_w8a16.cu`): functions of shapes and
device."""

from __future__ import annotations

from cki.device import DeviceInfo

#: Tokens that one launch takes, in the sizes that a product of the tensor core has.
TOKEN_SIZES = (8, 16, 32, 64)
MAX_TOKENS = TOKEN_SIZES[-1]
#: Elements with one scale: of K in a stage, of w's rows in a tile.
BLOCK = 128
THREADS = 256 + 128 + 32
_CONSUMER_THREADS = 256
_ARRANGED = 3
_SPAN = 128
#: Barriers, squares, one word: an upper bound, in bytes.
_SMALL = 1024


def token_size(tokens: int) -> int:
    """The product's tokens, of which the last are zeros."""
    return next(size for size in TOKEN_SIZES if size >= tokens)


def stages(size: int, shared_memory_per_block: int) -> int:
    """Depth of the ring: as many as fit."""
    room = shared_memory_per_block - _SMALL - _ARRANGED * 2 * size * _SPAN
    return max(2, min(12, room // (BLOCK * _SPAN + 2 * size * _SPAN)))


def shared_memory(size: int, depth_of_ring: int) -> int:
    """Bytes of dynamic shared memory: the ring of w and x, x in order, and what is small."""
    return depth_of_ring * (BLOCK * _SPAN + 2 * size * _SPAN) + _ARRANGED * 2 * size * _SPAN + _SMALL


def tiles(columns: int, *, gated: bool) -> int:
    """Tiles of y's columns; with gates half of a tile's rows of w are gates."""
    return -(-columns // (BLOCK // 2 if gated else BLOCK))


def blocks(columns: int, depth: int, device: DeviceInfo, *, gated: bool) -> int:
    """One block an SM, and a stage of K at least for each."""
    return max(1, min(tiles(columns, gated=gated) * -(-depth // BLOCK), device.sm_count))


def part_bytes(size: int) -> int:
    """Of a block's sums of one tile, and its tokens' squares."""
    return 4 * (size // 2 * _CONSUMER_THREADS + size)
