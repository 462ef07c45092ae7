"""The Hopper attention kernel on packed sequences and paged caches, asked for by its tiles, against the reference."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

import cki
import cki.sim
from cki import reference
from cki.heuristics.attention_hopper import HopperTiles
from cki.ops import varlen
from cki.ops.call import call
from cki.plan import Plan
from tests.compare import assert_close
from tests.ops import varlen_cases
from tests.ops.inputs import BF16, DTYPES, F16
from tests.ops.varlen_cases import chunked, offsets, packed, plain_varlen, sequences_of
from tests.orders import every_check, orders

#: Small tiles: two warpgroups that take turns, rings that are walked through often.
SMALL = HopperTiles(2, 32)
LENGTHS = {
    "one": ([70], [130]),
    "awkward": ([1, 2, 31, 33, 63, 65, 127, 129], [129, 3, 65, 33, 64, 1, 127, 200]),
    "empties": ([0, 3, 2, 0, 40, 0], [2, 5, 0, 0, 4, 3]),
    "no queries at all": ([0, 0], [3, 0]),
}
_specs: dict[HopperTiles, Any] = {}


def spec_of(tiles: HopperTiles) -> Any:
    """cki.varlen_attention's operation with the Hopper kernel and these tiles; one object each, as it is a cache key.

    The device counts as one of a single SM, so that the persistent schedules give a block many tiles.
    """

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        return varlen.plan(problem, outputs, dataclasses.replace(device, sm_count=1), tiles)

    return _specs.setdefault(tiles, dataclasses.replace(varlen.VARLEN_ATTENTION, plan=plan))


def run(
    device: Any, tensors: dict[str, Any], tiles: HopperTiles = SMALL, out: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in host memory."""
    given = {n: device.array(t) for n, t in (tensors | options).items() if isinstance(t, np.ndarray)}
    names = [given_input.name for given_input in varlen.VARLEN_ATTENTION.inputs]
    options["return_lse"] = True
    attributes = tuple(options.get(a.name, a.default) for a in varlen.VARLEN_ATTENTION.attributes)
    got, lse = call(spec_of(tiles), tuple(given.get(n) for n in names), attributes, (out, None))
    return device.numpy(got), device.numpy(lse)


def check(device: Any, tensors: dict[str, Any], tiles: HopperTiles = SMALL, **options: Any) -> np.ndarray:
    """Output and lse against the bound of the other tests; returns the output."""
    out, lse = run(device, tensors, tiles, **options)
    truth, truth_lse = reference.varlen_attention(**tensors, return_lse=True, **options)
    plain_out, plain_lse = plain_varlen(tensors, **options)
    assert_close(out, truth, plain_out, "out")
    assert_close(lse, truth_lse, plain_lse, "lse")
    return out


@pytest.mark.parametrize("block_size", [0, 16, 48, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(device, lengths, block_size):
    make: Any = chunked if block_size else packed
    extra = (block_size,) if block_size else ()
    for causal in (False, True):
        check(device, make(F16, *LENGTHS[lengths], *extra, padding=5 * causal), causal=causal)


@pytest.mark.parametrize(
    ("case", "schedule", "consumers", "block_size", "causal"),
    [
        (0, "fixed", 1, 0, True),
        (1, "single", 2, 16, True),
        (2, "dynamic", 2, 0, False),
        (3, "dynamic", 3, 16, True),
    ],
)
def test_rings_and_turns_under_every_check(device, case, schedule, consumers, block_size, causal):
    """Empty slots, tiles without keys, NaN behind the last token and in unused slots; a block has many tiles."""
    lengths = [64 * consumers + 10, 0, 3, 0, 40], [150, 7, 0, 5, 70]
    shape: dict[str, Any] = {"heads": 2, "padding": 5}
    tensors = chunked(BF16, *lengths, block_size, **shape) if block_size else packed(BF16, *lengths, **shape)
    for seed in orders(device, case):
        with every_check(device, seed):
            check(device, tensors, HopperTiles(consumers, 32, schedule=schedule), causal=causal)


@pytest.mark.parametrize(
    ("dim", "value_dim", "block_size"),
    [(8, 8, 0), (8, 8, 16), (40, 72, 16), (64, 64, 0), (128, 96, 16), (256, 256, 0)],
)
def test_head_dims(device, dim, value_dim, block_size):
    make: Any = chunked if block_size else packed
    extra = (block_size,) if block_size else ()
    tensors = make(BF16, [33, 9], [70, 12], *extra, dim=dim, value_dim=value_dim)
    check(device, tensors, causal=True)


@pytest.mark.parametrize(
    ("dim", "tiles"),
    [(64, HopperTiles(3, 128)), (128, HopperTiles(2, 128)), (256, HopperTiles(1, 80, 2, False))],
)
def test_real_tiles(device, dim, tiles):
    lengths = [200, 90], [300, 90]
    check(device, packed(BF16, *lengths, dim=dim, heads=1), tiles)
    check(device, chunked(BF16, *lengths, 64, dim=dim, heads=1), tiles, causal=True)


FEATURES: list[dict[str, Any]] = [
    {"window": (20, 5)}, {"window": (0, -1)}, {"causal": True, "window": (33, 7)},
    {"causal": True, "causal_alignment": "top_left"}, {"softcap": 3.0}, {"scale": -0.3},
    {"sinks": np.linspace(-2, 4, 6, dtype=np.float32)},
    {"alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32)},
]  # fmt: skip
ALL_FEATURES: dict[str, Any] = {
    "causal": True, "window": (33, 0), "softcap": 5.0, "sinks": np.ones(6, np.float32), "scale": 0.4,
    "alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "block_size"),
    [(options, 16 * (index % 2)) for index, options in enumerate(FEATURES)]
    + [(ALL_FEATURES, 0), (ALL_FEATURES, 16)],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_features(device, options, block_size):
    """Packed keys and a cache in turn; with everything at once, both."""
    lengths = [40, 0, 3, 90], [90, 4, 0, 60]
    shape: dict[str, Any] = {"heads": 6, "kv_heads": 2}
    tensors = chunked(BF16, *lengths, block_size, **shape) if block_size else packed(BF16, *lengths, **shape)
    check(device, tensors, **options)


@pytest.mark.parametrize("sequences", [1, 31, 33, 64, 300])
def test_many_sequences(device, sequences):
    lengths = [(i * 7) % 3 for i in range(sequences)]
    lengths[sequences // 2] = 70
    check(device, packed(F16, lengths, heads=1, dim=8), HopperTiles(1, 32, schedule="fixed"), causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_the_bits_of_each_sequence_alone(device, causal):
    """Packing, neighbours, blocks of a cache, rows a tile and schedules change nothing."""
    lengths = [70, 1, 0, 129, 33], [150, 65, 5, 129, 0]
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 32}
    tensors = packed(BF16, *lengths, **shape)
    out, lse = run(device, tensors, causal=causal)
    for other, tiles in (
        (tensors, HopperTiles(1, 32, 3, schedule="dynamic")),
        (chunked(BF16, *lengths, 16, **shape), SMALL),
    ):
        whole = run(device, other, tiles, causal=causal)
        for rows, q, k, v in sequences_of(other):
            one = {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": offsets(q.shape[1:2])}
            one["cu_seqlens_k"] = offsets(k.shape[1:2])
            if not q.shape[1] or not k.shape[1]:
                continue  # no query, or no key for a tensor map
            alone, alone_lse = run(device, one, causal=causal)
            assert np.array_equal(alone, whole[0][rows]) and np.array_equal(alone_lse, whole[1][:, rows])
            if other is tensors:
                assert np.array_equal(alone, out[rows]) and np.array_equal(alone_lse, lse[:, rows])


# What must leave no trace ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_reaches_only_those_who_see_it(device, value, block_size):
    """Not the sequence in front of it, whose last tile holds it; in a cache it is found again for the repair."""
    lengths = [100, 30, 60], [100, 64, 60]
    tensors = chunked(F16, *lengths, block_size) if block_size else packed(F16, *lengths)
    clean = reference.varlen_attention(**tensors, causal=True)
    plain_clean = plain_varlen(tensors, causal=True)[0]
    if block_size:
        tensors["v"][tensors["block_table"][1, 0], 3, 0, 5] = value
    else:
        tensors["v"][100 + 3, 0, 5] = value
    for seed in range(4 if device.kind == "sim" else 1):
        with every_check(device, seed):
            out, _ = run(device, tensors, causal=True)
        bad = ~np.isfinite(out.astype(np.float32))
        assert bad[100:130, :, 5].all() and bad.sum() == 60  # query 0 of sequence 1 stands at key 34
        assert_close(np.where(bad, 0, out), np.where(bad, 0, clean), np.where(bad, 0, plain_clean))


def test_rows_of_no_sequence(device):
    tensors = packed(F16, [200, 30, 7], padding=300)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        tensors[name] = np.array([150, 200, 230, 230], np.int32)
    tensors["q"][:150] = np.nan
    out = check(device, tensors, causal=True)
    assert not out[np.r_[0:150, 230 : len(out)]].any()


def test_entries_outside_the_cache_stand_for_zeros(device):
    """From tables whose entries lie side by side or apart."""
    tensors = chunked(F16, [30, 5], [70, 40], 16)
    tensors["block_table"][0, 1], tensors["block_table"][1, 0] = -3, 2**31 - 1
    check(device, tensors, causal=True)
    tensors["block_table"] = np.repeat(tensors["block_table"].astype(np.int64) + 2**33, 2, axis=1)[:, ::2]
    assert not run(device, tensors)[0][30:].any()


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize(
    "garbage", [[0, 90, 20, 100], [-5, 3, 2**31 - 1, 7], [2**31 - 1, -(2**31), 50, 2**31 - 1]]
)
def test_offsets_that_fall_touch_nothing_outside(device, garbage, block_size):
    tensors = chunked(F16, [100], [100], block_size) if block_size else packed(F16, [100], [100])
    if block_size:
        tensors["block_table"] = np.repeat(tensors["block_table"], len(garbage) - 1, axis=0)
        tensors["seq_lens"] = np.array(garbage[:-1], np.int32)
    else:
        tensors["cu_seqlens_k"] = np.array(garbage, np.int32)
    tensors["cu_seqlens_q"] = np.array(garbage, np.int32)
    whole = device.empty((300, 2, 16), F16)
    with cki.sim.checks(bounds=True) if device.kind == "sim" else contextlib.nullcontext():
        run(device, tensors, causal=True, out=whole[100:200])
    around = device.numpy(whole).astype(np.float32)
    assert np.isnan(around[:100]).all() and np.isnan(around[200:]).all()


@pytest.mark.parametrize("paged", [False, True])
def test_a_captured_graph_serves_other_lengths(device, paged):
    """By the public function, which takes this kernel for long sequences."""
    tensors = (
        chunked(BF16, [160, 20, 20], [96] * 3, 16) if paged else packed(BF16, [160, 20, 20], [150, 100, 38])
    )
    on_device = {n: device.array(t) for n, t in tensors.items()}
    out = device.empty(tensors["q"].shape, BF16)
    graph = cki.capture(cki.varlen_attention, **on_device, causal=True, out=out, max_seqlen_q=200)
    for query_lengths, keys in (
        ([160, 20, 20], [96, 50, 20]),
        ([0, 200, 0], [3, 96, 0]),
        ([1, 1, 7], [96, 1, 7]),
    ):
        tensors["cu_seqlens_q"] = offsets(query_lengths)
        lengths = "seq_lens" if paged else "cu_seqlens_k"
        tensors[lengths] = np.array(keys, np.int32) if paged else offsets(keys)
        for name in ("cu_seqlens_q", lengths):
            on_device[name][:] = device.array(tensors[name])
        graph.replay()
        device.synchronize()
        truth = reference.varlen_attention(**tensors, causal=True)
        assert_close(device.numpy(out), truth, plain_varlen(tensors, causal=True)[0])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_public_function_takes_it_for_long_sequences(device, dtype):
    tensors = packed(DTYPES[dtype], [150, 0, 3, 64], [150, 2, 60, 0], dim=64, padding=4)
    varlen_cases.check(device, tensors, causal=True, max_seqlen_q=150)
    varlen_cases.check(
        device, chunked(DTYPES[dtype], [150, 3], [200, 60], 16, dim=64), causal=True, max_seqlen_q=150
    )


@pytest.mark.parametrize(("block_size", "stages"), [(0, 2), (16, 2), (48, 3)])
def test_two_warps_that_copy(device, block_size, stages):
    """One brings keys and one values; sequences that end in a block with unused slots."""
    make: Any = chunked if block_size else packed
    tensors = make(BF16, [70, 3, 130], [150, 90, 130], *((block_size,) if block_size else ()))
    tiles = HopperTiles(2, 32, stages, schedule="dynamic", copy_warps=2)
    for seed in orders(device, 5):
        with every_check(device, seed):
            check(device, tensors, tiles, causal=True)


@pytest.mark.parametrize("block_size", [0, 16])
def test_packed_heads(device, block_size):
    """Three heads of a KV head in a tile, of sequences of few queries, of none and of some; sinks, slopes by head."""
    make: Any = chunked if block_size else packed
    tensors = make(
        BF16,
        [5, 0, 1, 30, 2],
        [40, 30, 33, 70, 0],
        *((block_size,) if block_size else ()),
        heads=6,
        kv_heads=2,
    )
    sinks, slopes = (np.linspace(a, 2.0, 6).astype(np.float32) for a in (-1.0, 0.01))
    for consumers in (1, 2):
        tiles = HopperTiles(consumers, 32, schedule="dynamic", heads=3)
        check(device, tensors, tiles, causal=True, sinks=sinks, alibi_slopes=slopes)
