"""How a product of few tokens is cut for Hopper (`cuda_src/gemm/hopper/linear_tokens.cu`): functions of shapes and
device."""

from __future__ import annotations

from cki.device import DeviceInfo

#: Tokens that one launch takes, in the sizes that a product of the tensor core has.
TOKEN_SIZES = (8, 16, 32, 64)
MAX_TOKENS = TOKEN_SIZES[-1]
#: Rows of w in a tile, bytes of each in a stage.
TILE_ROWS, SPAN = 128, 128
THREADS = 256 + 128 + 128
_CONSUMER_THREADS = 256
_ARRANGED = 3
#: Tokens up to which codes are multiplied as they are (`cuda_src/gemm/hopper/linear_tokens_e4m3.cu`).
_SPLIT_TOKENS = 16
#: Of the ring; where x is split fewer are faster: 84.1 us instead of 86.5 with 16 tokens (as below).
_MOST_STAGES, _MOST_SPLIT_STAGES = 12, 8
#: Barriers, squares, one word: an upper bound, in bytes.
_SMALL = 3072


def token_size(tokens: int) -> int:
    """The product's tokens, of which the last are zeros."""
    return next(size for size in TOKEN_SIZES if size >= tokens)


def stage_depth(itemsize: int) -> int:
    """Elements of K in a stage.  itemsize: of w."""
    return SPAN // itemsize


def splits_x(size: int, itemsize: int) -> bool:
    """Whether x is made two e4m3 numbers an element, and codes are not converted.

    On an H200 the four products of a layer of Qwen3-8B took 82.7 us so with 8 tokens and 86.5 with 16 (converted: 94
    and 95.5), 115 with 32 and 178 with 64 (converted: 106 and 136).
    """
    return itemsize == 1 and size <= _SPLIT_TOKENS


def _stage_bytes(size: int, itemsize: int) -> tuple[int, int]:
    """Of w and of x."""
    return TILE_ROWS * SPAN, size * stage_depth(itemsize) * 2


def _arranged_bytes(size: int, itemsize: int, *, norm: bool) -> int:
    """Of x as products take it, where that is not in the ring."""
    arranged = (norm or itemsize == 1) and not splits_x(size, itemsize)
    return _ARRANGED * _stage_bytes(size, itemsize)[1] if arranged else 0


def _ring_stage_bytes(size: int, itemsize: int, *, norm: bool) -> int:
    """Of w and x; where x is split also of gamma, and of the tokens' powers of two."""
    beside = (2 * stage_depth(itemsize) if norm else 0) + 4 * size if splits_x(size, itemsize) else 0
    return sum(_stage_bytes(size, itemsize)) + beside


def stages(size: int, itemsize: int, shared_memory_per_block: int, *, norm: bool) -> int:
    """Depth of the ring: as many as fit, up to a limit."""
    room = shared_memory_per_block - _SMALL - _arranged_bytes(size, itemsize, norm=norm)
    most = _MOST_SPLIT_STAGES if splits_x(size, itemsize) else _MOST_STAGES
    return max(2, min(most, room // _ring_stage_bytes(size, itemsize, norm=norm)))


def shared_memory(size: int, itemsize: int, depth_of_ring: int, *, norm: bool) -> int:
    """Bytes of dynamic shared memory: the ring of w and x, x as products take it, and what is small."""
    ring = depth_of_ring * _ring_stage_bytes(size, itemsize, norm=norm)
    return ring + _arranged_bytes(size, itemsize, norm=norm) + _SMALL


def tiles(columns: int, *, gated: bool) -> int:
    """Tiles of y's columns; with gates half of a tile's rows of w are gates."""
    return -(-columns // (TILE_ROWS // 2 if gated else TILE_ROWS))


def blocks(columns: int, depth: int, itemsize: int, device: DeviceInfo, *, gated: bool) -> int:
    """One block an SM, or as few as have as many stages: fewer then share a tile."""
    stages_of_all = tiles(columns, gated=gated) * -(-depth // stage_depth(itemsize))
    return -(-stages_of_all // -(-stages_of_all // device.sm_count))


def counters(columns: int, *, gated: bool) -> int:
    """Zeros that a launch needs: of each tile's warps."""
    return tiles(columns, gated=gated) * _CONSUMER_THREADS // 32


def part_bytes(size: int) -> int:
    """Of a block's sums of one tile, and its tokens' squares by each warp."""
    return 4 * (size // 2 * _CONSUMER_THREADS + size * _CONSUMER_THREADS // 32)
