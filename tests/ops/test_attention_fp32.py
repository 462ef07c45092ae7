"""The Hopper attention kernel of fp32 tensors against the float64 reference, and when it is taken."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cki import dtypes, reference
from cki.device import sim_device
from cki.errors import UnsupportedError
from cki.heuristics.attention_fp32 import Fp32Tiles
from cki.operand import dense
from cki.ops.attention import plan_attention
from tests.compare import assert_close
from tests.ops import test_attention_hopper_packed as packed_sequences
from tests.ops.attention_cases import check as check_chosen
from tests.ops.attention_cases import plain, qkv
from tests.ops.inputs import F32, normal
from tests.ops.test_attention_hopper import check, hopper
from tests.ops.varlen_cases import packed
from tests.orders import every_check, orders

#: Small tiles: a ring that is walked through often.
SMALL = Fp32Tiles(2, 32, 3, schedule="dynamic")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (31, 33), (65, 63), (127, 2), (200, 300), (300, 70)])
def test_sizes(device, queries, keys, causal):
    q, k, v = qkv(F32, queries, keys, dim=16)
    check(device, q, k, v, tiles=SMALL, causal=causal)


@pytest.mark.parametrize(("dim", "tiles"), [(64, Fp32Tiles(2, 128, 3, False)), (128, Fp32Tiles(2, 64))])
def test_real_tiles(device, dim, tiles):
    q, k, v = qkv(F32, 200, 400, heads=1, dim=dim)
    check(device, q, k, v, tiles=tiles)
    check(device, q, k, v, tiles=tiles, causal=True)


@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (96, 72)])
def test_head_dims_and_groups(device, dim, value_dim):
    """Also a dimension whose rows begin at any multiple of 4 bytes."""
    q, k, v = qkv(F32, 70, 90, heads=6, kv_heads=2, dim=dim, value_dim=value_dim, batch=2)
    check(device, q, k, v, tiles=SMALL, causal=True, sinks=normal((6,), F32, 4))


@pytest.mark.parametrize("window", [(0, 0), (5, -1), (70, 3), (-1, 40)])
def test_windows(device, window):
    q, k, v = qkv(F32, 140, 250, dim=16)
    check(device, q, k, v, tiles=SMALL, window=window)


@pytest.mark.parametrize("dim", [16, 128])
def test_all_features_and_dropout(device, dim):
    """As the heuristics choose the kernel."""
    q, k, v = qkv(F32, 256, 260, dim=dim)
    options = {
        "causal": True, "window": (200, -1), "softcap": 5.0, "sinks": np.ones(2, np.float32),
        "alibi_slopes": np.array([0.5, 0.03], np.float32), "bias": normal((1, 1, 256, 260), F32, 3),
        "mask": np.random.default_rng(0).random((1, 2, 256, 260)) < 0.7,
    }  # fmt: skip
    check_chosen(device, q, k, v, **options)
    numbers = {"dropout_seed": np.array([7]), "dropout_offset": np.array([3])}
    check_chosen(device, q, k, v, dropout_p=0.3, **numbers)


def test_long_sums(device):
    """In one chain of sums the tensor core cuts off 2e-5 of a result over 2048 keys."""
    q, k, v = qkv(F32, 64, 16384 if device.kind == "cuda" else 1024, heads=1, dim=64)
    check(device, q, k, v + np.float32(3), tiles=Fp32Tiles(2, 128, 3, ping_pong=False))


@pytest.mark.parametrize("lengths", ["awkward", "empties"])
def test_packed_sequences(device, lengths):
    """NaN behind the last token and between sequences that share a tile."""
    for causal in (False, True):
        tensors = packed(F32, *packed_sequences.LENGTHS[lengths], padding=5 * causal)
        packed_sequences.check(device, tensors, SMALL, causal=causal)


@pytest.mark.parametrize("schedule", ["single", "dynamic"])
def test_rings_and_turns_under_every_check(device, schedule):
    q, k, v = qkv(F32, 140, 150, heads=3, dim=16)
    for seed in orders(device, len(schedule)):
        with every_check(device, seed):
            check(device, q, k, v, tiles=dataclasses.replace(SMALL, schedule=schedule), causal=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_what_a_hidden_key_holds_does_not_matter(device, value):
    q, k, v = qkv(F32, 140, 150, dim=16)
    k[0, 120:], v[0, 120:] = value, value
    out = device.numpy(hopper(*map(device.array, (q, k, v)), tiles=SMALL, causal=True)[0])[:, :110]
    seen = (q[:, :110], k[:, :120], v[:, :120])
    assert_close(out, reference.attention(*seen, causal=True), plain(*seen, causal=True)[0])


def test_a_visible_value_that_is_not_finite_is_in_the_result(device):
    q, k, v = qkv(F32, 70, 90, dim=16)
    v[0, 80, 0, 3], v[0, 81, 0, 4], v[0, 82, 0, 5] = np.inf, -np.inf, np.nan
    out = device.numpy(hopper(*map(device.array, (q, k, v)), tiles=SMALL)[0])
    truth = reference.attention(q, k, v)
    assert np.array_equal(
        np.where(np.isfinite(truth), 0, truth), np.where(np.isfinite(out), 0, out), equal_nan=True
    )


@pytest.mark.parametrize(("scale", "keys"), [(1e-30, 90), (1e30, 90), (3.4e38, 1)])
def test_every_magnitude_of_values_keeps_fp32_accuracy(device, scale, keys):
    """bf16 has the range of fp32, and what would be rounded to infinity is cut off instead."""
    q, k, v = qkv(F32, 70, keys, dim=16)
    if keys == 1:
        v = np.sign(v)
    check(device, q, k, v * np.float32(scale), tiles=SMALL)


def test_large_and_small_logits(device):
    q, k, v = qkv(F32, 70, 100, dim=64)
    check(device, q * 300, k, v, tiles=SMALL)
    check(device, q * 1e-20, k * 1e-20, v, tiles=SMALL)


def test_slices_and_views_of_any_place(device):
    q, k, v = qkv(F32, 70, 70, heads=2, kv_heads=2, dim=40, batch=2)
    fused = device.array(np.stack([q, k, v], axis=2))
    out = device.empty((2, 2, 70, 40), F32).transpose(0, 2, 1, 3)
    given = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
    check(device, q, k, v, tiles=SMALL, given=given, out=out, causal=True)
    odd = device.empty((2, 70, 2, 41), F32)[:, :, :, 1:]
    odd[...] = device.array(q)
    check(device, q, k, v, tiles=SMALL, given=(odd, device.array(k), device.array(v)))


def test_a_row_has_the_bits_that_it_has_alone(device):
    q, k, v = qkv(F32, 150, 170, heads=2, dim=16, batch=3)
    alone = hopper(*(device.array(t[1:2]) for t in (q[:, 40:], k, v)), causal=True, tiles=SMALL)
    together = hopper(*map(device.array, (q, k, v)), causal=True, tiles=SMALL)
    assert np.array_equal(device.numpy(together[0])[1:2, 40:], device.numpy(alone[0]))


def test_a_stepped_last_axis_is_refused(device):
    q, _, v = (device.array(t) for t in qkv(F32, 3, 5, dim=20))
    wide = device.array(qkv(F32, 3, 5, dim=40)[1])
    with pytest.raises(UnsupportedError, match="k has stride 2 along head_dim"):
        hopper(q, wide[..., ::2], v, tiles=SMALL)


def test_when_it_is_taken():
    """Dense fp32 tensors of many queries and up to 128 dimensions, on sm_90a."""

    def entry(queries=1024, keys=1024, dim=64, arch="sm_90a", dtype=dtypes.f32, **options):
        q, out = (dense(name, (2, queries, 4, dim), dtype) for name in ("q", "out"))
        k, v = (dense(name, (2, keys, 2, dim), dtype) for name in "kv")
        return plan_attention(q, k, v, out, device=sim_device(arch), **options)[-1].kernel.entry

    mask, wide = dense("mask", (2, 1, 1, 1024), dtypes.bool_), dense("mask", (1024, 1024), dtypes.bool_)
    for options in (
        {},
        {"causal": True},
        {"window": (100, 0), "dim": 128},
        {"dim": 40},
        {"softcap": 3.0, "mask": mask},
    ):
        assert entry(**options) == "attention_fp32", options
    every_other = {"mask": wide.view((1024, 1024), (2048, 2))}
    for options in (
        {"queries": 64},
        {"keys": 64},
        {"dim": 160},
        {"arch": "sm_80"},
        {"deterministic": True},
        every_other,
    ):
        assert entry(**options) == "attention", options
