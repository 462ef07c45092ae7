"""DeviceInfo: what heuristics need to know of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceInfo:
    """kind: "cuda" or "sim".  arch: "sm_90a" and the like.  Sizes in bytes."""

    kind: str
    index: int
    name: str
    arch: str
    sm_count: int
    shared_memory_per_block: int
    l2_bytes: int
