"""The Hopper attention kernel's softmax that is checked by its sums: scores that its references do not serve.

Keys are walked from the last to the first, 32 a tile.  A score is q[0] * k[0] / 4 here, the other columns are small.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cki.heuristics.attention_hopper import HopperTiles
from tests.ops.attention_cases import qkv
from tests.ops.inputs import BF16, DTYPES, F16, normal
from tests.ops.test_attention_hopper import check, hopper
from tests.ops.test_attention_hopper_packed import check as check_packed
from tests.ops.test_attention_hopper_packed import packed
from tests.orders import every_check, orders

TILES = HopperTiles(2, 32, schedule="dynamic")
KEYS = 170
#: In units of log(2), by the number of a tile from the last on: what the largest score of a tile is.
PATHS = {
    "rising by 8": lambda tile: 8 * tile,
    "rising by 14": lambda tile: 14 * tile,
    "rising by 15": lambda tile: 15 * tile,
    "rising by 16": lambda tile: 16 * tile,
    "rising by 40": lambda tile: 40 * tile,
    "rising by 130": lambda tile: 130 * tile,
    "rising by 1000": lambda tile: 1000 * tile,
    "falling by 20": lambda tile: -20 * tile,
    "falling by 1000": lambda tile: -1000 * tile,
    "alternating": lambda tile: 300 * (tile % 2),
    "one giant in the middle": lambda tile: 3000 * (tile == 3),
    "all large": lambda tile: 5000,
    "all very negative": lambda tile: -5000,
}


def along(path: Any, dtype: Any, queries: int = 70, dim: int = 16) -> tuple[np.ndarray, ...]:
    """A third of the queries has scores along the path, one against it, one of its own size."""
    q, k, v = qkv(dtype, queries, KEYS, dim=dim)
    tiles = (KEYS - 1 - np.arange(KEYS)) // 32
    units = np.array([float(path(int(tile))) for tile in tiles])
    scale = max(1.0, np.abs(units).max() / 64)  # so that products are what f16 and bf16 hold
    k[..., 0] = (units / scale)[None, :, None]
    q[..., 0] = 0
    q[:, 1::3, :, 0] = scale * np.log(2) * dim**0.5
    q[:, 2::3, :, 0] = -scale * np.log(2) * dim**0.5
    return q, k, v


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("path", PATHS)
def test_scores_along_a_path(device, path, dtype):
    check(device, *along(PATHS[path], DTYPES[dtype]), tiles=TILES)


@pytest.mark.parametrize("at", [0, 31, 32, 100, KEYS - 1])
@pytest.mark.parametrize("size", [20, 60, 1e4])
def test_one_giant_score(device, at, size):
    q, k, v = qkv(F16, 70, KEYS, dim=16)
    k[:, at, :, 0] = 200
    q[:, ::2, :, 0] = size / 50
    check(device, q, k, v, tiles=TILES)


@pytest.mark.parametrize("dim", [24, 64, 80, 128, 256])
def test_scores_again_of_every_slab(device, dim):
    """Rows of 128 bytes, more, and less."""
    q, k, v = along(PATHS["rising by 40"], F16, dim=dim)
    check(device, q, k, v, tiles=TILES)
    q, k, v = qkv(BF16, 70, KEYS, dim=dim)
    check(device, q * 10, k * 10, v, tiles=TILES)  # standard deviations of scores above 100


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (60, 5)}, {"sinks": np.array([3.0, 400.0], np.float32)}], ids=str
)
def test_beside_hidden_keys_and_sinks(device, options):
    for path in ("rising by 16", "rising by 1000", "alternating"):
        check(device, *along(PATHS[path], BF16, queries=KEYS), tiles=TILES, **options)


def test_under_every_check(device):
    """Keys and queries are read again beside copies that wait for their place."""
    inputs = along(PATHS["rising by 40"], F16, queries=200)
    for consumers, stages in ((2, 2), (3, 3)):
        tiles = dataclasses.replace(TILES, consumers=consumers, stages=stages)
        for seed in orders(device, consumers):
            with every_check(device, seed):
                check(device, *inputs, tiles=tiles)


def test_a_row_does_not_depend_on_the_others_of_its_warp(device):
    """Whose references move elsewhere."""
    for path in ("rising by 16", "rising by 130"):
        q, k, v = along(PATHS[path], BF16)
        other = normal(q.shape, BF16, 7)
        for kept in range(3):
            mixed = other.copy()
            mixed[:, kept::3] = q[:, kept::3]
            got = [device.numpy(hopper(*map(device.array, (x, k, v)), tiles=TILES)[0]) for x in (q, mixed)]
            assert np.array_equal(got[0][:, kept::3], got[1][:, kept::3])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_queries_that_are_not_finite(device, value):
    """Their rows are NaN, the others untouched."""
    q, k, v = qkv(F16, 70, KEYS, dim=16)
    out = device.numpy(hopper(*map(device.array, (q, k, v)), tiles=TILES)[0])
    q[:, 5::7, :, 3] = value
    got = device.numpy(hopper(*map(device.array, (q, k, v)), tiles=TILES)[0])
    bad = np.zeros(70, bool)
    bad[5::7] = True
    assert np.isnan(got[:, bad]).all() and np.array_equal(got[:, ~bad], out[:, ~bad])


def test_packed_sequences_and_caches(device):
    tensors = packed(BF16, (40, 170, 0, 90), (170, 40, 3, 200))
    tensors["q"] = tensors["q"] * 12
    tensors["k"] = tensors["k"] * 12
    check_packed(device, tensors, TILES)
    check_packed(device, tensors, TILES, causal=True)


def test_packed_heads_and_parts_of_keys(device):
    q, k, v = qkv(F16, 5, 300, heads=8, kv_heads=2, dim=16)
    for tiles in (
        dataclasses.replace(TILES, heads=4),
        dataclasses.replace(TILES, heads=4, splits=3, schedule="single"),
    ):
        check(device, q * 12, k * 12, v, tiles=tiles)
