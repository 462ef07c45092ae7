"""How a decoder's product of few tokens is cut (`cuda_src/gemm/skinny/decode.cu`): functions of shapes and device."""

from __future__ import annotations

from cki.device import DeviceInfo

#: Tokens that one launch takes.
MAX_TOKENS = 16
#: Architectures on which a launch can begin while the one before it runs.
PROGRAMMATIC = ("sm_90a", "sm_100a", "sm_120a")
#: Of the kernel: warps that share K, elements of K a step, steps that a lane has under way.
WARPS, STEP_K, DEPTH = 8, 64, 4
_TILE_ROWS = 16


def row_pitch(depth: int) -> int:
    """Elements from one row of x to the next in shared memory: whole steps, and then 64 bytes past a multiple of 128.

    So two tokens' chunks fall into different banks.
    """
    return -(-depth // STEP_K) * STEP_K + 32


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens."""
    return -(-tokens // 8)


def shared_memory(tokens: int, depth: int, *, norm: bool) -> int:
    """Bytes of dynamic shared memory: sums of two tiles, x's rows, gamma."""
    parts = 2 * WARPS * token_tiles(tokens) * _TILE_ROWS * 8 * 4
    return parts + 2 * (tokens * row_pitch(depth) + (depth if norm else 0))


def blocks(tiles: int, device: DeviceInfo) -> int:
    """One block an SM; each takes its tiles in turn."""
    return max(1, min(tiles, device.sm_count))


def obstacles(tokens: int, depth: int, device: DeviceInfo, *, norm: bool) -> list[str]:
    """Why a product of these extents cannot be computed by the kernel; none where it can."""
    found = []
    if not 1 <= tokens <= MAX_TOKENS:
        found.append(f"{tokens} tokens, not 1 to {MAX_TOKENS}")
    elif shared_memory(tokens, depth, norm=norm) + 1024 > device.shared_memory_per_block:
        found.append(
            f"{tokens} rows of {depth} do not fit into {device.shared_memory_per_block} bytes of shared memory"
        )
    if depth % 8 or not depth:
        found.append(f"K is {depth}, no multiple of 8")
    return found
