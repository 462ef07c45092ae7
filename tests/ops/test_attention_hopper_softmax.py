"""The Hopper attention kernel's softmax, whose references follow scores lazily, and its narrow last tiles of keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cki.heuristics.attention_hopper import HopperTiles
from tests.ops.attention_cases import qkv
from tests.ops.inputs import BF16, DTYPES, F16, normal
from tests.ops.test_attention_hopper import check, hopper
from tests.orders import every_check, orders

LAZY = HopperTiles(2, 32, schedule="dynamic")


def rising(tokens: int, dtype: Any, steps: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries and keys whose scores rise towards the first key, which is walked to last: every third row by 2**5 a tile
    of 32 keys, the next by 2**30, the others by nothing."""
    q, k, v = qkv(dtype, tokens, tokens, dim=16)
    k[..., 0] = -np.arange(tokens, dtype=np.float32)[None, :, None] / 32
    q[..., 0] = 0
    q[:, 1::3, :, 0] = 5 * 4 * np.log(2)
    q[:, 2::3, :, 0] = 30 * 4 * np.log(2)
    return q, k, v


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (63, 65), (64, 48), (200, 300)])
def test_sizes(device, queries, keys):
    q, k, v = qkv(F16, queries, keys)
    check(device, q, k, v, tiles=LAZY)
    check(device, q, k, v, tiles=LAZY, causal=True)


@pytest.mark.parametrize(("case", "consumers", "causal"), [(1, 2, True), (2, 3, False), (3, 1, True)])
def test_every_check(device, case, consumers, causal):
    q, k, v = qkv(BF16, 64 * consumers + 10, 150, heads=3, dim=16)
    tiles = dataclasses.replace(LAZY, consumers=consumers)
    for seed in orders(device, case):
        with every_check(device, seed):
            check(device, q, k, v, tiles=tiles, causal=causal)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_references_that_rise(device, dtype, causal):
    q, k, v = rising(150, DTYPES[dtype])
    check(device, q, k, v, tiles=LAZY, causal=causal)


def test_a_row_does_not_depend_on_the_others_of_its_warp(device):
    """Whose references move in other tiles than its own."""
    q, k, v = rising(150, BF16)
    other = normal(q.shape, BF16, 7)
    for kept in range(3):
        mixed = other.copy()
        mixed[:, kept::3] = q[:, kept::3]
        got = [device.numpy(hopper(*map(device.array, (x, k, v)), tiles=LAZY)[0]) for x in (q, mixed)]
        assert np.array_equal(got[0][:, kept::3], got[1][:, kept::3])


def test_large_references(device):
    q, k, v = qkv(F16, 70, 200, dim=64)
    q[:, ::3] *= 300
    k *= 300
    check(device, q, k, v, tiles=LAZY)
    q, k, v = qkv(BF16, 70, 200, dim=64)
    k[:, :40] *= 1e4  # large only in the tiles that come last
    check(device, q, k, v, tiles=LAZY)


def test_rows_that_see_their_first_key_late(device):
    q, k, v = qkv(F16, 300, 70, dim=16)
    out = check(device, q, k, v, tiles=LAZY, causal=True)
    assert not out[:, : 300 - 70].any()
    check(device, q, k, v, tiles=LAZY, window=(2, 1), causal_alignment="top_left")
    mask = np.random.default_rng(0).random((1, 1, 300, 70)) < 0.02
    check(device, q, k, v, tiles=LAZY, mask=mask)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0, "causal": True}, {"scale": -0.4}, {"sinks": np.array([1.0, -2.0], np.float32)},
        {"bias": normal((1, 2, 100, 150), F16, 3), "causal": True},
    ],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_features(device, options):
    q, k, v = qkv(BF16, 100, 150, dim=16)
    check(device, q, k, v, tiles=LAZY, **options)


@pytest.mark.parametrize("ahead", [0, 4])
def test_when_weights_are_computed_changes_no_bit(device, ahead):
    q, k, v = rising(150, BF16)
    changed = dataclasses.replace(LAZY, ahead=ahead, before_values=4 + ahead)
    got = [
        device.numpy(hopper(*map(device.array, (q, k, v)), tiles=t, causal=True)[0]) for t in (LAZY, changed)
    ]
    assert np.array_equal(got[0], got[1])


@pytest.mark.parametrize("block_keys", [16, 48, 80])
def test_narrow_tiles_of_every_size(device, block_keys):
    """One product of values, and odd numbers of them, of which a narrow tile has the larger half."""
    tiles = dataclasses.replace(LAZY, block_keys=block_keys)
    for keys in (block_keys // 2, block_keys, 2 * block_keys + 3, 150):
        q, k, v = qkv(F16, 70, keys, dim=16)
        check(device, q, k, v, tiles=tiles, window=(-1, 20))
