"""How a decoder's product of few tokens is cut (`cuda_src/gemm/skinny/decode.cu`): functions of shapes and device."""

from __future__ import annotations

from cki.device import DeviceInfo

#: Tokens that one launch takes.
MAX_TOKENS = 16
#: Architectures on which a launch can begin while the one before it runs.
PROGRAMMATIC = ("sm_90a", "sm_100a", "sm_120a")
#: Of the kernel: warps that share K, bytes of K a step.
WARPS, STEP_BYTES = 8, 128
_TILE_ROWS = 16


def steps_ahead(arch: str) -> int:
    """Steps that a lane has under way.  For Blackwell four take registers that two blocks an SM do not have."""
    return 3 if arch in ("sm_100a", "sm_120a") else 4


def row_pitch(depth: int, itemsize: int) -> int:
    """Elements from one row of x to the next in shared memory: whole steps, and a little, by which the chunks of two
    tokens fall into different banks.  itemsize: of w.

    A lane's chunk of x is 16 bytes beside a 16-bit weight, and 32 beside codes, read in two accesses.
    """
    step = STEP_BYTES // itemsize
    return -(-depth // step) * step + (32 if itemsize == 2 else 8)


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens."""
    return -(-tokens // 8)


def shared_memory(tokens: int, depth: int, itemsize: int, *, norm: bool) -> int:
    """Bytes of dynamic shared memory: sums of two tiles, x's rows, gamma."""
    parts = 2 * WARPS * token_tiles(tokens) * _TILE_ROWS * 8 * 4
    return parts + 2 * (tokens * row_pitch(depth, itemsize) + (depth if norm else 0))


def blocks(tiles: int, device: DeviceInfo) -> int:
    """One block an SM; each takes its tiles in turn."""
    return max(1, min(tiles, device.sm_count))


def obstacles(tokens: int, depth: int, itemsize: int, device: DeviceInfo, *, norm: bool) -> list[str]:
    """Why a product of these extents cannot be computed by the kernel; none where it can."""
    found = []
    if not 1 <= tokens <= MAX_TOKENS:
        found.append(f"{tokens} tokens, not 1 to {MAX_TOKENS}")
    elif shared_memory(tokens, depth, itemsize, norm=norm) + 1024 > device.shared_memory_per_block:
        found.append(
            f"{tokens} rows of {depth} do not fit into {device.shared_memory_per_block} bytes of shared memory"
        )
    unit = 16 // itemsize
    if depth % unit or not depth:
        found.append(f"K is {depth}, no multiple of {unit}")
    return found
