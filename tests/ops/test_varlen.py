"""`cki.varlen_attention` against its definition, and against `cki.attention` of each sequence by itself, to the bit."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import cki
import cki.sim
from cki import reference
from cki.memory import PagedKVCache
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, F16, F32, normal
from tests.ops.varlen_cases import check, chunked, offsets, packed, plain_varlen, run, sequences_of

LENGTHS = {
    "one": ([70], [130]),
    "awkward": ([1, 2, 3, 31, 33, 63, 65, 127, 129], [129, 3, 2, 65, 33, 64, 1, 127, 200]),
    "empties": ([0, 3, 2, 0, 40, 0], [2, 5, 0, 0, 4, 3]),
    "decoding": ([1, 1, 1, 1], [100, 1, 0, 65]),
    "chunks and decoding": ([1, 20, 70, 1], [80, 20, 110, 1]),
    "no queries at all": ([0, 0], [3, 0]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(device, lengths, causal):
    check(device, packed(F16, *LENGTHS[lengths]), causal=causal)


@pytest.mark.parametrize(
    ("lengths", "block_size"),
    [(lengths, block_size) for lengths in LENGTHS for block_size in (3, 64)]
    + [(lengths, block_size) for lengths in ("awkward", "empties") for block_size in (1, 16, 100)],
)
def test_paged_lengths(device, lengths, block_size):
    check(device, chunked(F16, *LENGTHS[lengths], block_size), causal=True)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim"),
    [
        ("bf16", 8, 8), ("f32", 16, 16), ("f16", 40, 40), ("bf16", 64, 32), ("bf16", 80, 80), ("f32", 96, 40),
        ("bf16", 128, 128), ("f16", 192, 128), ("bf16", 256, 256), ("f32", 1, 1), ("f16", 5, 5), ("f16", 36, 18),
    ],
)  # fmt: skip
def test_head_dims(device, dtype, dim, value_dim, paged):
    make: Any = chunked if paged else packed
    extra = (16,) if paged else ()
    check(device, make(DTYPES[dtype], [33, 9], [70, 12], *extra, dim=dim, value_dim=value_dim), causal=True)


@pytest.mark.parametrize("longest", [None, 1, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (9, 3), (5, 1), (16, 2)])
def test_groups(device, heads, kv_heads, longest):
    """Heads share a block or not, as the hint says; by one kernel, results do not depend on it."""
    lengths = [1, 0, 40, 7], [30, 4, 70, 7]
    tensors = packed(BF16, *lengths, heads=heads, kv_heads=kv_heads)
    out, lse = check(device, tensors, causal=True, max_seqlen_q=longest, max_seqlen_k=longest)
    again = run(device, tensors, causal=True, max_seqlen_q=64 if longest == 1000 else 63, max_seqlen_k=70)
    assert np.array_equal(out, again[0]) and np.array_equal(lse, again[1])
    check(
        device, chunked(BF16, *lengths, 16, heads=heads, kv_heads=kv_heads), causal=True, max_seqlen_q=longest
    )


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 5)},
    "left": {"window": (0, -1)},
    "right": {"window": (-1, 3)},
    "wide window": {"window": (2**40, 2**31)},
    "causal window": {"causal": True, "window": (33, 7)},
    "top left": {"causal": True, "causal_alignment": "top_left"},
    "top left window": {"window": (9, 4), "causal_alignment": "top_left"},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": np.linspace(-2, 4, 6, dtype=np.float32)},
    "alibi": {"alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32)},
    "scale": {"scale": -0.3},
    "scale 0": {"scale": 0.0},
    "all": {
        "causal": True, "window": (33, 0), "softcap": 5.0, "sinks": np.ones(6, np.float32), "scale": 0.4,
        "alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32),
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("features", FEATURES)
def test_features(device, features, dtype):
    """Each type with packed keys and with a cache in turn; with everything at once, both with both."""
    turn = list(FEATURES).index(features) % 2 == (dtype == "bf16")
    for paged in (False, True) if features == "all" else (turn,):
        check_features(device, features, dtype, paged)


def check_features(device, features, dtype, paged):
    lengths = [40, 0, 3, 90], [90, 4, 0, 60]
    options: dict[str, Any] = {"heads": 6, "kv_heads": 2, "padding": 0 if paged else 3}
    tensors = (
        chunked(DTYPES[dtype], *lengths, 4, **options)
        if paged
        else packed(DTYPES[dtype], *lengths, **options)
    )
    check(device, tensors, **FEATURES[features])


def test_keys_with_the_offsets_of_the_queries(device):
    check(device, packed(F16, [5, 0, 70, 64]), causal=True)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_of_no_sequence(device, with_sinks):
    """Before the first offset and past the last: out 0, lse -inf (with sinks: the sink), whatever q holds there."""
    tensors = packed(F16, [200, 30, 7], padding=300)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        tensors[name] = np.array([150, 200, 230, 230], np.int32)
    tensors["q"][:150] = np.nan
    sinks = np.array([0.5, -1.0], np.float32) if with_sinks else None
    options = {"sinks": sinks} if with_sinks else {}
    out, lse = check(device, tensors, causal=True, **options)
    outside = np.r_[0:150, 230 : len(out)]
    assert not out[outside].any()
    assert (lse[:, outside] == (sinks[:, None] if with_sinks else -np.inf)).all()


@pytest.mark.parametrize("sequences", [1, 29, 30, 31, 32, 33, 62, 63, 64, 1100])
def test_many_sequences(device, sequences):
    """The search for a block's sequence, with one to three rounds of probes."""
    lengths = [(i * 7) % 3 for i in range(sequences)]
    lengths[sequences // 2] = 70
    check(device, packed(F16, lengths, heads=1, dim=8), causal=True)


@pytest.mark.parametrize(("dtype", "longest"), [("f32", None), ("bf16", 40), ("bf16", 129)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_the_bits_of_each_sequence_alone(device, dtype, longest, causal, paged):
    """Packing, neighbours, the cache's blocks and the rows that share a block change nothing.

    longest: on sm_90a, from 64 on, another kernel.
    """
    lengths = [70, 1, 0, 129, 33], [150, 65, 5, 129, 0]
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 32}
    tensors = (
        chunked(DTYPES[dtype], *lengths, 16, **shape) if paged else packed(DTYPES[dtype], *lengths, **shape)
    )
    out, lse = check(device, tensors, causal=causal, max_seqlen_q=longest)
    for rows, q, k, v in sequences_of(tensors):
        one = {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": offsets(q.shape[1:2])}
        one["cu_seqlens_k"] = offsets(k.shape[1:2])
        alone, alone_lse = run(device, one, causal=causal, max_seqlen_q=longest)
        assert np.array_equal(alone, out[rows])
        assert np.array_equal(alone_lse, lse[:, rows])


@pytest.mark.parametrize("causal", [False, True])
def test_the_bits_of_dense_attention(causal):
    """By the same kernel: sm_80 has no other."""
    tensors = packed(BF16, [70, 1, 0, 129, 33], [150, 65, 5, 129, 0], heads=4, kv_heads=2, dim=32)
    with cki.device("sim", arch="sm_80"):
        out, lse = cki.varlen_attention(**tensors, causal=causal, return_lse=True)
        for rows, q, k, v in sequences_of(tensors):
            alone, alone_lse = cki.attention(q, k, v, causal=causal, return_lse=True)
            assert np.array_equal(alone[0], out[rows]) and np.array_equal(alone_lse[0], lse[:, rows])


def test_int64_offsets_of_any_strides(device):
    lengths = [5, 40], [50, 60]
    tensors = packed(F16, *lengths)
    wanted = run(device, tensors, causal=True)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        wide = np.full((3, 2), -9, np.int64)
        wide[:, 0] = tensors[name]
        tensors[name] = device.array(wide)[:, 0]
    got = run(device, tensors, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted))
    tensors = chunked(F16, *lengths, 16)
    wanted = run(device, tensors, causal=True)
    table = tensors["block_table"]
    tensors["block_table"] = device.array(np.ascontiguousarray(table.T.astype(np.int64))).T
    tensors["seq_lens"] = tensors["seq_lens"].astype(np.int64)
    got = run(device, tensors, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted))


def test_slices_of_a_projection_and_an_output_with_gaps(device):
    lengths = [20, 0, 45]
    qkv = normal((65, 8, 16), BF16, 4)
    memory = device.array(qkv)
    wide = device.empty((65, 4, 24), BF16)
    out = wide[..., 4:20]
    got = cki.varlen_attention(
        memory[:, :4], memory[:, 4:6], memory[:, 6:], device.array(offsets(lengths)), causal=True, out=out
    )
    assert got is out
    tensors = {"q": qkv[:, :4], "k": qkv[:, 4:6], "v": qkv[:, 6:], "cu_seqlens_q": offsets(lengths)}
    truth = reference.varlen_attention(**tensors, causal=True)
    assert_close(device.numpy(wide)[..., 4:20], truth, plain_varlen(tensors, causal=True)[0])
    assert np.isnan(device.numpy(wide)[..., :4].astype(np.float32)).all()


def test_head_major_blocks(device):
    tensors = chunked(F16, [9, 20], [40, 33], 8, heads=4, kv_heads=2)
    wanted = run(device, tensors, causal=True)
    for name in ("k", "v"):
        tensors[name] = device.array(np.ascontiguousarray(tensors[name].transpose(0, 2, 1, 3))).transpose(
            0, 2, 1, 3
        )
    got = run(device, tensors, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted))


def test_chunked_prefill_over_a_cache(device):
    """Prompts in chunks of several lengths beside decoding, by the tables of each step of a PagedKVCache."""
    cache = PagedKVCache(
        1,
        32,
        block_size=4,
        num_kv_heads=2,
        head_dim=16,
        dtype="bf16",
        max_sequences=4,
        max_blocks_per_sequence=12,
    )
    ids = [cache.allocate_sequence(list(range(100 * i, 100 * i + 40))) for i in range(3)]
    every = {s: [normal((40, n, 16), BF16, 3 * s + i) for i, n in enumerate((4, 2, 2))] for s in ids}
    filled = dict.fromkeys(ids, 0)
    for counts in ((9, 1, 17), (1, 6, 1), (30, 1, 1)):
        step = cache.prepare_step(ids, list(counts))
        q, k, v = (
            np.concatenate([every[s][i][filled[s] : filled[s] + n] for s, n in zip(ids, counts)])
            for i in range(3)
        )
        cki.append_kv(device.array(k), device.array(v), cache.layer(0), step.slot_mapping)
        out = cki.varlen_attention(
            device.array(q), *cache.layer(0)[:2], step.cu_seqlens_q, causal=True, block_table=step.block_table,
            seq_lens=step.seq_lens,
        )  # fmt: skip
        for s, n in zip(ids, counts):
            filled[s] += n
        key_starts = offsets([filled[s] for s in ids])
        k, v = (np.concatenate([every[s][i][: filled[s]] for s in ids]) for i in (1, 2))
        tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets(counts), "cu_seqlens_k": key_starts}
        truth = reference.varlen_attention(**tensors, causal=True)
        assert_close(device.numpy(out), truth, plain_varlen(tensors, causal=True)[0])


# What must not be read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_value_that_is_not_finite_reaches_only_those_who_see_it(device, dtype):
    """In its own sequence and, causal, in later queries; in a cache it is found again for the repair.

    The generic kernel, by its hint: all others keep their bits.
    """
    lengths = [100, 30, 60], [100, 64, 60]
    options: dict[str, Any] = {"causal": True, "max_seqlen_q": 63}
    tensors = packed(DTYPES[dtype], *lengths)
    clean = run(device, tensors, **options)[0]
    tensors["v"][100 + 50, 0, 5] = np.inf
    out = run(device, tensors, **options)[0].astype(np.float32)
    seen = np.zeros(190, bool)
    seen[100 + 16 : 130] = True  # query i of sequence 1 stands at key i + 34
    assert (out[seen][..., 5] == np.inf).all()
    assert np.array_equal(out[~seen], clean[~seen].astype(np.float32))
    assert np.isfinite(np.delete(out, 5, axis=2)).all()
    paged = chunked(DTYPES[dtype], *lengths, 16)
    clean = run(device, paged, **options)[0]
    block = paged["block_table"][1, 50 // 16]
    paged["v"][block, 50 % 16, 0, 5] = np.nan
    out = run(device, paged, **options)[0].astype(np.float32)
    assert np.isnan(out[seen][..., 5]).all()
    assert np.array_equal(out[~seen], clean[~seen].astype(np.float32))


def test_entries_outside_the_cache_stand_for_zeros(device):
    tensors = chunked(F16, [30, 5], [70, 40], 16)
    tensors["block_table"][0, 1], tensors["block_table"][1, 0] = -3, 2**31 - 1
    check(device, tensors, causal=True)


def test_blocks_before_the_window_are_not_read(device):
    tensors = chunked(F32, [10], [100], 16, dim=16)
    wanted = run(device, tensors, causal=True, window=(20, 0))
    tensors["block_table"][0, :4] = 2**31 - 1
    got = run(device, tensors, causal=True, window=(20, 0))
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted))


def test_lengths_beyond_the_table_are_cut_off(device):
    tensors = chunked(F16, [30, 5], [64, 32], 16)
    tensors["block_table"] = np.ascontiguousarray(tensors["block_table"][:, :4])
    tensors["block_table"][1, 2:] = tensors["block_table"][0, :2]
    tensors["seq_lens"] = np.array([900, -4], np.int32)
    check(device, tensors)


@pytest.mark.parametrize(
    "garbage",
    [
        [0, 90, 20, 100], [-5, 3, 2**31 - 1, 7], [100, 0, 0, 0], [2**31 - 1, -(2**31), 50, 2**31 - 1],
        [0, 90, 0, 90, 0, 90, 0, 90], [-(2**31), *[2**31 - 1, 0] * 40],
    ],
)  # fmt: skip
@pytest.mark.parametrize("block_size", [0, 16])
def test_offsets_that_fall_touch_nothing_outside(device, garbage, block_size):
    """The result is undefined, but what lies around the tensors is neither read nor written."""
    if block_size:
        tensors = chunked(F16, [100], [100], block_size)
        tensors["block_table"] = np.repeat(tensors["block_table"], len(garbage) - 1, axis=0)
        tensors["seq_lens"] = np.resize(np.array(garbage, np.int32), len(garbage) - 1)
    else:
        tensors = packed(F16, [100], [100])
        tensors["cu_seqlens_k"] = np.array(garbage, np.int32)
    tensors["cu_seqlens_q"] = np.array(garbage, np.int32)
    whole = device.empty((300, 2, 16), F16)
    on_device = {n: device.array(t) for n, t in tensors.items()}
    with cki.sim.checks(bounds=True) if device.kind == "sim" else contextlib.nullcontext():
        for longest in (1, 100):
            cki.varlen_attention(**on_device, causal=True, out=whole[100:200], max_seqlen_q=longest)
    around = device.numpy(whole).astype(np.float32)
    assert np.isnan(around[:100]).all() and np.isnan(around[200:]).all()


# Edges and promises ---------------------------------------------------------------------------------------------------


def test_empty_tensors(device):
    zero = np.zeros(1, np.int32)
    tensors = {n: normal((0, 2, 16), F16, 0) for n in ("q", "k", "v")}
    out, lse = run(device, {**tensors, "cu_seqlens_q": zero})
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)
    tensors["q"] = normal((70, 2, 16), F16, 0)
    for starts in ([0, 70], [0], [3, 3, 9]):
        given = {"cu_seqlens_q": np.array(starts, np.int32), "cu_seqlens_k": np.zeros(len(starts), np.int32)}
        out, lse = check(device, tensors | given)
        assert not out.any() and (lse == -np.inf).all()


def test_every_element_is_written(device):
    tensors = packed(BF16, [70, 0, 33], [10, 4, 0], dim=20, padding=40)
    on_device = {n: device.array(t) for n, t in tensors.items()}
    out = device.empty(tensors["q"].shape, BF16)
    assert cki.varlen_attention(**on_device, out=out) is out
    assert np.isfinite(device.numpy(out).astype(np.float32)).all()


@pytest.mark.parametrize("paged", [False, True])
def test_a_captured_graph_serves_other_lengths(device, paged):
    """Offsets, lengths and tables change between replays; each gives the bits of an eager call."""
    key_lengths = [96, 96, 96]
    tensors = (
        chunked(BF16, [60, 20, 20], key_lengths, 8) if paged else packed(BF16, [60, 20, 20], [150, 100, 38])
    )
    on_device = {n: device.array(t) for n, t in tensors.items()}
    out = device.empty(tensors["q"].shape, BF16)
    graph = cki.capture(cki.varlen_attention, **on_device, causal=True, out=out)
    for query_lengths, keys in (
        ([60, 20, 20], [96, 50, 20]),
        ([0, 100, 0], [3, 96, 0]),
        ([1, 1, 7], [96, 1, 7]),
    ):
        tensors["cu_seqlens_q"] = offsets(query_lengths)
        if paged:
            tensors["seq_lens"] = np.array(keys, np.int32)
        else:
            tensors["cu_seqlens_k"] = offsets(keys)
        for name in ("cu_seqlens_q", "seq_lens" if paged else "cu_seqlens_k"):
            on_device[name][:] = device.array(tensors[name])
        graph.replay()
        device.synchronize()
        got = device.numpy(out)
        assert np.array_equal(got, device.numpy(cki.varlen_attention(**on_device, causal=True)))
        truth = reference.varlen_attention(**tensors, causal=True)
        assert_close(got, truth, plain_varlen(tensors, causal=True)[0])


def test_offsets_beyond_32_bits(device):
    """Tokens and blocks 2^30 elements apart; memory that is not touched is never there."""
    if device.kind == "cuda":
        pytest.skip("12 GB of device memory for the sake of an offset")
    stride = 2**30
    memory = [np.empty(2 * stride + 16 * 16, np.float16) for _ in range(2)]
    cache = [np.lib.stride_tricks.as_strided(t, (3, 16, 1, 16), (2 * stride, 32, 32, 2)) for t in memory]
    for i, t in enumerate(cache):
        t[2] = normal((16, 1, 16), F16, i)
    tensors = {
        "q": normal((3, 1, 16), F16, 7), "k": cache[0][2:].copy(), "v": cache[1][2:].copy(),
        "cu_seqlens_q": offsets([3]), "block_table": np.array([[0]], np.int32), "seq_lens": np.array([10], np.int32),
    }  # fmt: skip
    far = {**tensors, "k": cache[0], "v": cache[1], "block_table": np.array([[2]], np.int32)}
    assert np.array_equal(run(device, far)[0], check(device, tensors)[0])
    tokens = [t[:, 0] for t in cache]  # [3, 1, 16], tokens 2^30 elements apart
    starts = np.array([2, 3], np.int32)
    near = {
        "q": tensors["q"],
        "k": tensors["k"][0, :1],
        "v": tensors["v"][0, :1],
        "cu_seqlens_q": offsets([3]),
    }
    near["cu_seqlens_k"] = offsets([1])
    far = {**near, "k": tokens[0], "v": tokens[1], "cu_seqlens_k": starts}
    assert np.array_equal(run(device, far)[0], check(device, near)[0])
