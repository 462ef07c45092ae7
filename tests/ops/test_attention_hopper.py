"""The Hopper attention kernel, asked for by its tiles, against the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cki import reference
from cki.errors import UnsupportedError
from cki.heuristics.attention_hopper import HopperTiles
from cki.ops.attention import ATTENTION, plan_attention
from cki.ops.attention_hopper import workspace_of
from cki.ops.call import call
from cki.plan import Plan
from tests.compare import assert_close
from tests.ops.attention_cases import plain, qkv
from tests.ops.inputs import BF16, DTYPES, F16, F32, normal
from tests.orders import every_check, orders

#: Small tiles: two warpgroups that take turns, rings that are walked through often.
SMALL = HopperTiles(2, 32)
_specs: dict[HopperTiles, Any] = {}


def spec_of(tiles: HopperTiles) -> Any:
    """cki.attention's operation with the Hopper kernel and these tiles; one object each, because it is a cache key.

    The device counts as one of a single SM, so that the persistent schedules give a block many tiles.
    """

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        device = dataclasses.replace(device, sm_count=1)
        options = {
            n: problem.attribute(n) for n in ("causal", "causal_alignment", "scale", "window", "softcap")
        }
        tensors = {n: problem.get(n) for n in ("bias", "mask", "sinks", "alibi_slopes")}
        steps = plan_attention(
            problem["q"], problem["k"], problem["v"], outputs["out"], lse=outputs["lse"], device=device, tiles=tiles,
            **options, **tensors,
        )  # fmt: skip
        return Plan(steps, workspace_of(steps))

    return _specs.setdefault(tiles, dataclasses.replace(ATTENTION, plan=plan))


def hopper(
    q: Any, k: Any, v: Any, *, tiles: HopperTiles = SMALL, out: Any = None, causal: bool = False,
    causal_alignment: str = "bottom_right", scale: Any = None, window: Any = (-1, -1), softcap: float = 0.0,
    bias: Any = None, mask: Any = None, sinks: Any = None, alibi_slopes: Any = None,
) -> Any:  # fmt: skip
    """(out, lse)"""
    inputs = (q, k, v, bias, mask, sinks, alibi_slopes, *(None,) * 5)
    attributes = (causal, causal_alignment, scale, window, softcap, True, 0.0, False, None)
    return call(spec_of(tiles), inputs, attributes, (out, None))


def check(
    device: Any, q: Any, k: Any, v: Any, *, tiles: HopperTiles = SMALL, given: Any = None, out: Any = None,
    **options: Any,
) -> np.ndarray:  # fmt: skip
    """Runs the kernel and holds output and lse against the bound; returns the output."""
    tensors = given or tuple(device.array(t) for t in (q, k, v))
    named = ("bias", "mask", "sinks", "alibi_slopes")
    on_device = {n: device.array(t) if n in named and t is not None else t for n, t in options.items()}
    got, lse = hopper(*tensors, tiles=tiles, out=out, **on_device)
    truth, true_lse = reference.attention(q, k, v, return_lse=True, **options)
    plain_out, plain_lse = plain(q, k, v, **options)
    result = device.numpy(got)
    assert_close(result, truth, plain_out, "out")
    assert_close(device.numpy(lse), true_lse, plain_lse, "lse")
    return result


SIZES = [(1, 1), (2, 3), (31, 33), (33, 31), (63, 65), (65, 63), (127, 2), (129, 129), (200, 300)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_sizes(device, queries, keys, causal):
    q, k, v = qkv(F16, queries, keys)
    check(device, q, k, v, causal=causal)


@pytest.mark.parametrize(
    ("case", "schedule", "consumers", "causal"),
    [(0, "dynamic", 2, True), (1, "single", 2, True), (2, "fixed", 1, True), (3, "dynamic", 3, False)],
)
def test_rings_and_turns_under_every_check(device, case, schedule, consumers, causal):
    """Rings of two stages walked through more than twice, five and more tiles of queries a block where it persists."""
    q, k, v = qkv(BF16, 64 * consumers + 10, 150, heads=3, dim=16)
    tiles = HopperTiles(consumers, 32, schedule=schedule)
    for seed in orders(device, case):
        with every_check(device, seed):
            check(device, q, k, v, tiles=tiles, causal=causal)


# Whole slabs of 128 bytes, one and a half, less than one; value dimensions of their own; every kind of value slab.
@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim"),
    [
        ("bf16", 8, 8), ("f16", 24, 24), ("bf16", 40, 72), ("f16", 64, 64), ("bf16", 72, 40), ("f16", 80, 80),
        ("bf16", 96, 96), ("f16", 128, 128), ("bf16", 136, 136), ("f16", 192, 128), ("f16", 256, 256),
    ],
)  # fmt: skip
def test_head_dims(device, dtype, dim, value_dim):
    q, k, v = qkv(DTYPES[dtype], 70, 70, dim=dim, value_dim=value_dim)
    check(device, q, k, v, causal=True)


@pytest.mark.parametrize("shared", ["heads", "batches", "both", "values of batches"])
def test_keys_and_values_that_are_shared(device, shared):
    """Stride 0: one KV head for all heads, one sequence of keys for all batches."""
    q, k, v = qkv(F16, 70, 90, heads=4, kv_heads=4, dim=16, batch=3)
    heads = slice(0, 1) if shared in ("heads", "both") else slice(None)
    batches = slice(0, 1) if shared != "heads" else slice(None)
    stored = {"k": k[batches, :, heads] if shared != "values of batches" else k, "v": v[batches, :, heads]}
    k, v = (np.broadcast_to(stored[name], k.shape) for name in "kv")
    given = [device.array(np.ascontiguousarray(t)) for t in stored.values()]
    if device.kind == "cuda":
        import cupy

        given = [cupy.broadcast_to(t, k.shape) for t in given]
    else:
        given = [np.broadcast_to(t, k.shape) for t in given]
    check(device, q, k, v, given=(device.array(q), *given), causal=True)


@pytest.mark.parametrize(
    ("dim", "tiles"),
    [(64, HopperTiles(3, 128)), (128, HopperTiles(2, 176)), (256, HopperTiles(2, 80, 2, False))],
)
def test_real_tiles(device, dim, tiles):
    q, k, v = qkv(BF16, 200, 400, dim=dim, heads=1)
    check(device, q, k, v, tiles=tiles)
    check(device, q, k, v, tiles=tiles, causal=True)


@pytest.mark.parametrize(
    "tiles", [HopperTiles(1, 64, 3, False, "fixed", 2), HopperTiles(3, 16, 4, True, "dynamic")]
)
def test_stages_and_blocks_an_sm(device, tiles):
    q, k, v = qkv(F16, 300, 333, heads=3, dim=32)
    check(device, q, k, v, tiles=tiles, causal=True)


# Heads that fill a tile's rows or leave some over, all of a group or a part of it; one block or several tiles a block.
@pytest.mark.parametrize(
    ("group", "heads", "consumers", "queries", "schedule"),
    [(4, 4, 1, 16, "single"), (8, 4, 2, 70, "dynamic"), (7, 7, 2, 20, "fixed"), (3, 3, 1, 1, "single")],
)
def test_packed_heads(device, group, heads, consumers, queries, schedule):
    """Also with keys in parts, and what belongs to a head: slopes, sinks, bias and mask; a NaN behind a hidden key is
    repaired."""
    q, k, v = qkv(BF16, queries, 90, heads=2 * group, kv_heads=2, dim=32, batch=2)
    tiles = HopperTiles(consumers, 32, schedule=schedule, heads=heads)
    check(device, q, k, v, tiles=tiles, causal=True)
    tiles = dataclasses.replace(tiles, splits=3)
    check(device, q, k, v, tiles=tiles, causal=True)
    v[1, 80] = np.nan
    mask = np.ones((1, 2 * group, queries, 90), bool)
    mask[..., 80] = False
    check(
        device, q, k, v, tiles=tiles, mask=mask, bias=normal((2, 2 * group, 1, 90), F32, 1),
        sinks=normal((2 * group,), F32, 2), alibi_slopes=normal((2 * group,), F32, 3), window=(50, 3),
    )  # fmt: skip


def test_packed_heads_must_divide_the_group(device):
    q, k, v = (device.array(t) for t in qkv(F16, 4, 20, heads=6, kv_heads=2))
    with pytest.raises(UnsupportedError, match="2 heads a tile do not divide the 3 query heads of a KV head"):
        hopper(q, k, v, tiles=HopperTiles(1, 32, heads=2))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups(device, group):
    q, k, v = qkv(BF16, 70, 70, heads=2 * group, kv_heads=2, dim=16, batch=2, seed=group)
    check(device, q, k, v, causal=True)


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (5, -1), (70, 3), (-1, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(device, alignment, window, causal):
    q, k, v = qkv(F16, 140, 250, dim=16)
    check(device, q, k, v, causal=causal, causal_alignment=alignment, window=window)


def test_more_queries_than_keys(device):
    """The first queries see nothing: whole tiles of them load nothing, others skip what their block needs."""
    q, k, v = qkv(F16, 300, 70, dim=16)
    out = check(device, q, k, v, causal=True)
    assert not out[:, : 300 - 70].any()
    check(device, q, k, v, window=(2, 1), causal_alignment="top_left")


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0}, {"scale": -0.4}, {"scale": 3.0}, {"softcap": 2.0, "causal": True},
        {"sinks": np.array([1.0, -2.0], np.float32)},
        {"alibi_slopes": np.array([0.5, 0.03], np.float32), "causal": True},
        {"bias": normal((1, 2, 100, 150), F16, 3)}, {"bias": normal((150,), F32, 3), "window": (40, 10)},
        {"mask": np.random.default_rng(0).random((1, 1, 100, 150)) < 0.3, "causal": True},
        {"mask": np.zeros((1, 1, 1, 150), bool), "sinks": np.array([1.0, -2.0], np.float32)},
    ],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_features(device, options):
    q, k, v = qkv(BF16, 100, 150, dim=16)
    check(device, q, k, v, **options)


def test_all_features_under_every_check(device):
    q, k, v = qkv(BF16, 150, 170, dim=16)
    options = {
        "causal": True, "window": (100, -1), "softcap": 5.0, "sinks": np.ones(2, np.float32),
        "alibi_slopes": np.array([0.5, 0.03], np.float32), "bias": normal((1, 1, 150, 170), F32, 3),
        "mask": np.random.default_rng(0).random((1, 2, 150, 170)) < 0.7,
    }  # fmt: skip
    for seed in range(3 if device.kind == "sim" else 1):
        with every_check(device, seed):
            check(device, q, k, v, **options)


def test_logits_far_above_half_precision(device):
    """Rows with a large reference take the other form of the exponent, beside rows with a small one."""
    q, k, v = qkv(F16, 70, 100, dim=64)
    q[:, ::3] *= 300
    k *= 300
    check(device, q, k, v)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("limits", [{"causal": True}, {"window": (20, 10)}, {"mask": True}])
def test_only_queries_that_see_a_bad_value_get_it(device, limits, value):
    """A value that is not finite behind a hidden key, in the tiles of queries that do not see it."""
    q, k, v = qkv(F16, 140, 150, dim=16)
    if "mask" in limits:
        limits = {"mask": np.random.default_rng(0).random((1, 1, 140, 150)) < 0.5}
    clean, clean_plain = v.copy(), plain(q, k, v, **limits)[0]
    v[0, 120, 0, 3] = value
    on_device = {n: device.array(t) if n == "mask" else t for n, t in limits.items()}
    out = device.numpy(hopper(*map(device.array, (q, k, v)), **on_device)[0])
    truth = reference.attention(q, k, v, **limits)
    good = np.isfinite(truth)
    assert not good.all() and good[..., 3].any()
    assert np.array_equal(np.isfinite(out), good)
    assert np.array_equal(np.isnan(out), np.isnan(truth))
    clean_truth = reference.attention(q, k, clean, **limits)
    assert_close(
        np.where(good, out, 0), np.where(good, truth, 0), np.where(good, clean_plain + truth - clean_truth, 0)
    )


def test_nan_behind_a_mask_leaves_no_trace(device):
    q, k, v = qkv(BF16, 70, 150, batch=2, dim=16)
    mask = np.ones((2, 1, 1, 150), bool)
    mask[:, :, :, 100:] = False
    mask[1] = False  # the queries of this batch see nothing
    k[:, 100:], v[:, 100:] = np.nan, np.nan
    out = check(device, q, k, v, mask=mask)
    assert not out[1].any()


def test_a_nan_query_spoils_its_own_row_only(device):
    q, k, v = qkv(F16, 70, 100, dim=16)
    q[0, 5, 1, 2] = np.nan
    out, lse = (device.numpy(t) for t in hopper(*map(device.array, (q, k, v)), causal=True))
    assert np.isnan(out[0, 5, 1]).all() and np.isnan(lse[0, 1, 5])
    out[0, 5, 1], lse[0, 1, 5] = 0, 0
    assert np.isfinite(out).all() and np.isfinite(lse).all()


def test_slices_of_one_projection_and_head_major_views(device):
    """q, k and v as slices of [batch, tokens, 3, heads, dim]; keys stored [batch, heads, tokens, dim]; any out."""
    q, k, v = qkv(F16, 70, 70, heads=2, kv_heads=2, dim=40, batch=2)
    fused = device.array(np.stack([q, k, v], axis=2))
    out = device.empty((2, 2, 70, 40), F16).transpose(0, 2, 1, 3)
    given = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
    check(device, q, k, v, given=given, out=out, causal=True)
    swapped = device.array(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    odd = device.empty((2, 70, 2, 41), F16)[:, :, :, 1:]
    check(device, q, k, v, given=(device.array(q), swapped, device.array(v)), out=odd)


def test_results_do_not_depend_on_batch_queries_or_schedule(device):
    q, k, v = qkv(BF16, 150, 170, heads=2, dim=32, batch=3)
    alone = hopper(*(device.array(t[1:2]) for t in (q[:, 40:], k, v)), causal=True, tiles=HopperTiles(1, 32))
    for schedule in ("single", "fixed", "dynamic"):
        together = hopper(
            *map(device.array, (q, k, v)), causal=True, tiles=HopperTiles(2, 32, schedule=schedule)
        )
        assert np.array_equal(device.numpy(together[0])[1:2, 40:], device.numpy(alone[0]))
        assert np.array_equal(device.numpy(together[1])[1:2, :, 40:], device.numpy(alone[1]))


def test_what_the_kernel_does_not_take_is_refused_before_launch(device):
    q, k, v = (device.array(t) for t in qkv(F32, 3, 5, dim=20))
    with pytest.raises(UnsupportedError, match="q has dtype f32"):
        hopper(q, k, v)
    q, k, v = (device.array(t) for t in qkv(F16, 3, 5, dim=20))
    with pytest.raises(UnsupportedError, match="k's rows do not begin at multiples of 16 bytes"):
        hopper(q, k, v)
