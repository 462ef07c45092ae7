"""Whether a product can normalise rows, or store what the next one needs for it (`cki.ops.linear_hopper.RowNorm`)."""

from __future__ import annotations

from cki.device import DeviceInfo
from cki.heuristics.linear import weight_access
from cki.heuristics.linear_hopper import HopperTile
from cki.operand import Operand
from cki.ops import linear_hopper, linear_skinny


def fused_norm_tile(
    x: Operand, w: Operand, residual: Operand | None, y: Operand, device: DeviceInfo, *, activation: str | None = None,
    weight_layout: str = "in_out", norm: str | None = None, statistics: bool = False,
) -> HopperTile | None:  # fmt: skip
    """The tile with which a product normalises rows or stores their statistics, where that is the way to take."""
    k, n = (0, 1) if weight_layout == "in_out" else (1, 0)
    access = weight_access(w.shape[k], w.shape[n], w.strides[k], w.strides[n])
    if linear_skinny.preferred(x, w, residual, y, device, access) is not None:
        return None
    return linear_hopper.preferred(
        x, w, residual, y, device, access, activation, norm=norm, statistics=statistics
    )
