"""Shared by the tests of the linear kernel for few rows: tiles, inputs, a comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
import cki.reference
from cki.heuristics.linear_skinny import SkinnyTile, fits
from tests.compare import assert_close
from tests.ops.inputs import normal
from tests.ops.linear_cases import linear_with_tile, plain

#: Rings of two stages; K in one block, and over clusters.
WHOLE, PAIR, FOUR = (SkinnyTile(16, 64, 1, 4, 2, split) for split in (1, 2, 4))
#: The last block's share of K is larger; two warps share columns; no programmatic launch.
EIGHT = SkinnyTile(16, 64, 2, 2, 2, 8, ahead=3, left=1)
SQUARE = SkinnyTile(32, 64, 2, 2, 2, 2, programmatic=False)
#: Each warp has a ring; some have a stage more than others.
OWN = SkinnyTile(16, 64, 1, 4, 2, 2, left=1, own_rings=True)
#: Refilled as soon as they are read, in either order of the weight.
REFILLED = SkinnyTile(16, 64, 1, 4, 2, ahead=4, left=0, own_rings=True, refill=True)
#: The same of weights along K alone, refilled as soon as they are read: two blocks an SM, and one.
NARROW = SkinnyTile(16, 32, 1, 4, 2, ahead=3, left=1, own_rings=True, refill=True)
FULL = SkinnyTile(16, 48, 1, 5, 2, left=0, own_rings=True, refill=True)
FEW = (WHOLE, PAIR, FOUR, EIGHT, SQUARE, OWN, REFILLED)

LAYOUTS = ("in_out", "out_in")


def weight(depth: int, columns: int, dtype: Any, layout: str) -> np.ndarray:
    """Normal numbers of variance 1 / depth."""
    shape = (depth, columns) if layout == "in_out" else (columns, depth)
    return normal(shape, dtype, 2, scale=max(depth, 1) ** -0.5)


def require(device: Any, tile: SkinnyTile) -> None:
    """Skip where the device cannot run this tile."""
    if not fits(tile, 2, device.info, along_n=False):
        pytest.skip("the tile is not for this device")


def check(device: Any, tile: SkinnyTile, x: Any, w: Any, bias: Any = None, **options: Any) -> np.ndarray:
    """Runs the kernel on row-major copies and compares; returns the result."""
    require(device, tile)
    on_device = {k: device.array(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    vector = None if bias is None else device.array(bias)
    got = device.numpy(linear_with_tile(tile, device.array(x), device.array(w), vector, **on_device))
    with np.errstate(invalid="ignore"):
        truth, same = cki.reference.linear(x, w, bias, **options), plain(x, w, bias, **options)
    assert_close(got, truth, same, f"{tile}, {x.shape} by {w.shape} of {x.dtype}")
    return got
