"""How a product of few tokens with e4m3 weights is cut for Hopper (`cuda_src/gemm/hopper/linear_tokens_e4m3.cu`):
functions of shapes and device."""

from __future__ import annotations

from cki.device import DeviceInfo

#: Tokens that one launch takes, in the sizes that a product of the tensor core has.
TOKEN_SIZES = (8, 16)
MAX_TOKENS = TOKEN_SIZES[-1]
#: Rows of w in a tile; codes of each in a stage.
TILE_ROWS, STAGE_DEPTH = 128, 128
THREADS = 256 + 128 + 128
_CONSUMER_THREADS = 256
#: Of the ring: fewer than fit are faster, 84.1 us for the four products of a layer of Qwen3-8B with 16 tokens, and 86.5
#: with 11 stages (an H200).
_MOST_STAGES = 8
#: Barriers, squares, one word: an upper bound, in bytes.
_SMALL = 3072


def token_size(tokens: int) -> int:
    """The product's tokens, of which the last are zeros."""
    return next(size for size in TOKEN_SIZES if size >= tokens)


def _stage_bytes(size: int, *, norm: bool) -> int:
    """Of w, of x, of the tokens' powers of two, and of gamma."""
    return TILE_ROWS * STAGE_DEPTH + size * STAGE_DEPTH * 2 + 4 * size + (2 * STAGE_DEPTH if norm else 0)


def stages(size: int, shared_memory_per_block: int, *, norm: bool) -> int:
    """Depth of the ring: as many as fit, up to a limit."""
    room = shared_memory_per_block - _SMALL
    return max(2, min(_MOST_STAGES, room // _stage_bytes(size, norm=norm)))


def shared_memory(size: int, depth_of_ring: int, *, norm: bool) -> int:
    """Bytes of dynamic shared memory: the ring, and what is small."""
    return depth_of_ring * _stage_bytes(size, norm=norm) + _SMALL


def tiles(columns: int, *, gated: bool) -> int:
    """Tiles of y's columns; with gates half of a tile's rows of w are gates."""
    return -(-columns // (TILE_ROWS // 2 if gated else TILE_ROWS))


def blocks(columns: int, depth: int, device: DeviceInfo, *, gated: bool) -> int:
    """One block an SM, or as few as have as many stages: fewer then share a tile."""
    stages_of_all = tiles(columns, gated=gated) * -(-depth // STAGE_DEPTH)
    return -(-stages_of_all // -(-stages_of_all // device.sm_count))


def counters(columns: int, *, gated: bool) -> int:
    """Zeros that a launch needs: of each tile's warps."""
    return tiles(columns, gated=gated) * _CONSUMER_THREADS // 32


def part_bytes(size: int) -> int:
    """Of a block's sums of one tile, and its tokens' squares by each warp."""
    return 4 * (size // 2 * _CONSUMER_THREADS + size * _CONSUMER_THREADS // 32)
