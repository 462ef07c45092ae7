"""bench/attention_dropout.py as far as it goes without a GPU: its calls drop the same weights."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.heuristics.attention import AttentionTiles
from cki.heuristics.attention_hopper import HopperTiles


@pytest.fixture
def dropout(script):
    return script("attention_dropout")


def test_both_kernels_drop_the_same(dropout):
    shape = dropout.attention.parse("1x100x2x16:causal", "f16")
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 2, 16)).astype(np.float16)
    counters = np.array([5]), np.array([6])
    with cki.device("sim"):
        outs = [
            dropout.tiles_call(shape, tiles)(q, k, v, np.empty_like(q), *counters)
            for tiles in (HopperTiles(2, 32), AttentionTiles(4, 1, 32))
        ]
    np.testing.assert_allclose(outs[0].astype(np.float32), outs[1].astype(np.float32), atol=4e-3)
    assert dropout.hopper_tiles(shape).consumers == 2
