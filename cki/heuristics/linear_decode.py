"""How a decoder's product of few tokens is cut (`cuda_src/gemm/skinny/decode.cu`): functions of shapes and device."""

from __future__ import annotations

from cki.device import DeviceInfo

#: Tokens that one launch takes.
MAX_TOKENS = 16
#: Architectures on which a launch can begin while the one before it runs.
PROGRAMMATIC = ("sm_90a", "sm_100a", "sm_120a")
NO_CLUSTERS = ("sm_80", "sm_89")
#: Of the kernel: warps that share K, bytes of K a step.
WARPS, STEP_BYTES = 8, 128
_TILE_ROWS = 16
_STAGE_BYTES = WARPS * _TILE_ROWS * STEP_BYTES
_PART_PITCH = 24
#: Neighbours of K, and rows of a weight, with one scale.
SCALE_BLOCK = 128
#: Elements of K from which on two blocks share them; of codes half as many.
_SPLIT_DEPTH = 8192
#: Steps under way.
_MOST_STAGES, _LEAST_STAGES = 8, 2


def slots(tokens: int) -> int:
    """Room for tokens: 1, 2, 4, 8 or 16."""
    return 1 << (tokens - 1).bit_length()


def round_depth(itemsize: int) -> int:
    """Elements of K that a block's warps take at a time.  itemsize: of w."""
    return WARPS * STEP_BYTES // itemsize


def _fixed_bytes(tokens: int, depth: int, itemsize: int, *, norm: bool, split: int = 1) -> int:
    """Bytes of shared memory besides the ring and inboxes: sums of two tiles, squares, powers, gamma, n."""
    together = split * round_depth(itemsize)
    padded = -(-depth // together) * together // split
    parts = 2 * WARPS * _PART_PITCH * 4
    squares, gamma = (WARPS * 4, 2 * padded) if norm else (0, 0)
    powers = padded // SCALE_BLOCK * 4 if itemsize == 1 else 0
    return gamma + (parts + squares + powers + 2 * padded) * slots(tokens)


def stages(
    tokens: int, depth: int, itemsize: int, device: DeviceInfo, *, norm: bool, split: int = 1, inboxes: int = 0,
    steps: int = _MOST_STAGES,
) -> int:  # fmt: skip
    """Steps that a lane has under way; 0 if x leaves no room.

    itemsize: of w.  inboxes: bytes.  steps: of a warp in all.  As many as there is room for, so that an SM has one
    block.  With rings of which two fitted, a decode step of eight layers of Qwen3-8B (bf16, 1 token, H200) took
    1707 us instead of 1111: launches that begin early can lie on SMs that the launch before does not use, two blocks on
    each, and on others none.
    """
    fixed = _fixed_bytes(tokens, depth, itemsize, norm=norm, split=split) + inboxes
    room = (device.shared_memory_per_block - fixed) // _STAGE_BYTES
    found = min(_MOST_STAGES, max(steps, _LEAST_STAGES), room)
    return found if found >= _LEAST_STAGES else 0


def shared_memory(
    tokens: int, depth: int, itemsize: int, ring: int, *, norm: bool, split: int = 1, inboxes: int = 0
) -> int:
    """Bytes of dynamic shared memory.  ring: its stages."""
    return ring * _STAGE_BYTES + _fixed_bytes(tokens, depth, itemsize, norm=norm, split=split) + inboxes


def inboxes(tokens: int, tiles: int, clusters: int, split: int) -> tuple[int, int]:
    """Tiles that a block of a cluster may finish, and the bytes of what it is sent for them."""
    if split == 1:
        return 0, 0
    led = (tiles + clusters * split - 1) // (clusters * split)
    return led, led * ((split - 1) * tokens * _TILE_ROWS * 4 + 8)


def split(depth: int, itemsize: int, device: DeviceInfo, *, norm: bool) -> int:
    """Blocks that share K.  Not by the tokens: a row's last bits must not depend on them.  itemsize: of w.

    On an H200 two took for 12288, of e4m3, 15.1 / 17.5 us at 1 / 4 tokens where one took 16.7 / 24.8, and 8 tokens
    fit; for 4096, of e4m3, 8.3 / 9.1 / 10.1 us at 1 / 4 / 8 tokens instead of 8.2 / 10.2 / 13.6.  Four were slower.
    """
    least = _SPLIT_DEPTH if itemsize > 1 else _SPLIT_DEPTH // 2
    return 2 if depth >= least and not norm and device.arch not in NO_CLUSTERS else 1


def clusters(tiles: int, device: DeviceInfo, split: int = 1) -> int:
    """Clusters of `split` blocks, one block an SM; each takes its tiles in turn."""
    return max(1, min(tiles, device.sm_count // split))


def obstacles(
    tokens: int, depth: int, itemsize: int, device: DeviceInfo, *, norm: bool, split: int = 1
) -> list[str]:
    """Why a product of these extents cannot be computed by the kernel; none where it can."""
    found = []
    if not 1 <= tokens <= MAX_TOKENS:
        found.append(f"{tokens} tokens, not 1 to {MAX_TOKENS}")
    elif not stages(tokens, depth, itemsize, device, norm=norm, split=split):
        found.append(
            f"{tokens} rows of {depth} do not fit into {device.shared_memory_per_block} bytes of shared memory"
        )
    if split > 1 and (norm or device.arch in NO_CLUSTERS):
        found.append(f"a cluster of {split} shares K, which takes sm_90 and no norm")
    unit = 16 // itemsize
    if depth % unit or not depth:
        found.append(f"K is {depth}, no multiple of {unit}")
    return found
