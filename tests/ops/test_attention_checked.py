"""The attention kernel under every check of the simulated device.

The ring of two stages of keys and values is filled at least five times, so that a stage is used again more than
once; seeds vary the order of threads, the moment at which copies land and the poison they find.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from tests.ops.attention_cases import check, qkv
from tests.ops.inputs import DTYPES, normal
from tests.orders import every_check, orders


def _options(name: str, queries: int, keys: int) -> dict[str, Any]:
    if name == "causal":
        return {"causal": True}
    if name == "window":
        return {"window": (90, 5)}
    mask = np.random.default_rng(1).random((1, 1, 1, keys)) < 0.5
    return {
        "bias": normal((1, 1, queries, keys), np.float32, 5),
        "mask": mask,
        "sinks": np.ones(2, np.float32),
    }


@pytest.mark.parametrize(
    ("dtype", "features", "dim", "queries", "keys"),
    [
        ("f16", "causal", 16, 20, 300),  # cp.async, two warps
        (
            "bf16",
            "bias and mask",
            7,
            3,
            300,
        ),  # odd head dimension: loads and stores instead of cp.async; packed heads
        ("f32", "window", 16, 70, 170),  # tf32, four warps, two blocks
    ],
)
def test_small_shapes_under_every_check(device, dtype, features, dim, queries, keys):
    q, k, v = qkv(DTYPES[dtype], queries, keys, dim=dim)
    options = _options(features, queries, keys)
    for seed in orders(device, ("f16", "bf16", "f32").index(dtype)):
        with every_check(device, seed):
            check(device, q, k, v, **options)


def test_dropping_and_repairing_values_under_every_check(device):
    """NaN in a key that some queries see: dropped from the tile by the threads that copied it, repaired later."""
    q, k, v = qkv(DTYPES["f16"], 40, 330, dim=16)
    v[0, 320, 0, 3] = np.nan
    for seed in range(5 if device.kind == "sim" else 1):
        with every_check(device, seed):
            out = device.numpy(cki.attention(*map(device.array, (q, k, v)), causal=True)).astype(np.float32)
        seen = np.arange(40) + 330 - 40 >= 320
        assert np.isnan(out[0, seen, :, 3]).all()
        assert np.isfinite(out[0, ~seen]).all()
        assert np.isfinite(np.delete(out, 3, axis=3)).all()
