"""Launch shapes of the kernels on paged caches: pure functions of shapes and device."""

from __future__ import annotations

from cki.device import DeviceInfo


def append_blocks_per_token(tokens: int, heads: int, heads_at_a_time: int, device: DeviceInfo) -> int:
    """Blocks that share the heads of one token in `append_kv`.

    One block a token computes its angles once, which is what many tokens want.  A decoding step has few tokens, and
    then as many blocks as fill the device take one trip each.
    """
    trips = -(-heads // heads_at_a_time)
    return max(1, min(trips, 4 * device.sm_count // max(tokens, 1)))
