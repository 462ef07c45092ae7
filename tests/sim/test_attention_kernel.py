"""A Hopper attention kernel (TMA, wgmma with A in registers and V MN-major) on the simulated device."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

import cki
from cki import sim
from cki.loader import TensorMap

KERNEL = Path(__file__).parent / "kernels" / "wgmma_attention.cu"


def attend(key_tiles: int, blocks: int = 1) -> float:
    """The largest error of one head against float64."""
    rng = np.random.default_rng(0)
    rows = (128 * blocks, 128 * key_tiles, 128 * key_tiles)
    q, k, v = (rng.standard_normal((n, 64)).astype(ml_dtypes.bfloat16) for n in rows)
    out = np.full((rows[0], 64), np.nan, np.float32)
    maps = [TensorMap(x, (128, 64)) for x in (q, k, v)]
    with cki.device("sim"):
        cki.load(KERNEL)(blocks, 384, *maps, out, key_tiles, 0.125 * 1.4426950408889634, smem=5 * 16384 + 40)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    p = np.exp(q @ k.T / 8)
    return float(np.max(np.abs(out - p @ v / p.sum(1, keepdims=True))))


def test_attention() -> None:
    assert attend(5, 2) < 2e-3  # probabilities are rounded to bf16


def test_attention_under_every_check() -> None:
    for seed in range(6):
        with sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed):
            assert attend(4) < 2e-3
