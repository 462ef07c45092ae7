"""Configurations of the decoding kernel to time beside the chosen one: warps, stages, blocks an SM, clusters."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from cki.heuristics.paged import DecodeConfig, DecodeShape, choose_dealt, choose_decode, choose_groups


@dataclasses.dataclass(frozen=True)
class Variant:
    """A configuration to time.  groups: at most so many; blocks_per_sm: for which registers and shared memory must
    leave room, without making the grid larger when `cluster`.
    """

    warps: int = 0
    stages: int = 0
    blocks_per_sm: int = 1
    groups: int = 0
    cluster: bool = False
    counted: bool = False

    def __str__(self) -> str:
        marks = {f" g{self.groups}": self.groups, " cluster": self.cluster, " counted": self.counted}
        return "".join((f"{self.warps}w{self.stages}s@{self.blocks_per_sm}", *filter(marks.get, marks)))

    def choose(self, shape: DecodeShape, device: Any) -> DecodeConfig:
        chosen = choose_decode(shape, device)
        units = shape.kv_heads * -(-shape.rows // chosen.rows)
        blocks = device.sm_count * (1 if self.cluster else self.blocks_per_sm)
        if self.groups:
            blocks = min(blocks, self.groups * units)
        groups, together = choose_groups(units, self.warps, shape.positions, blocks)
        dealt, groups = choose_dealt(shape, units, groups, together)
        return dataclasses.replace(
            chosen, warps=self.warps, stages=self.stages, min_blocks=self.blocks_per_sm, groups=groups,
            together=together, dealt=dealt, by_lengths=dealt and shape.batch > 1, cluster=self.cluster,
        )  # fmt: skip


def parse_variant(text: str) -> Variant:
    """As `str` writes them: "8w3s@1", "4w6s@1 g8 cluster"."""
    found = re.fullmatch(r"(\d+)w(\d+)s@(\d+)( g(\d+))?( cluster)?( counted)?", text)
    if found is None:
        raise ValueError(f"{text!r} is not like '8w3s@1 g8 cluster'")
    warps, stages, blocks = (int(found[i]) for i in (1, 2, 3))
    return Variant(warps, stages, blocks, int(found[5] or 0), bool(found[6]), bool(found[7]))


#: Worth timing; those that do not fit a cell are refused at their launch and left out.
CANDIDATES = (
    Variant(8, 3, 1), *(Variant(*shape, groups=8, cluster=True) for shape in ((4, 6, 1), (8, 3, 1), (12, 2, 1))),
)  # fmt: skip
