"""`cki.paged_attention` against its definition: types, sizes, features, lengths, what must not be read."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import cki
from cki import dtypes, reference
from cki.heuristics.paged import SERIAL_ARCHS, choose_decode
from cki.memory import PagedKVCache
from cki.ops.call import call
from cki.ops.paged import PAGED_ATTENTION, plan_paged_attention
from cki.ops.spec import OutputSpec
from tests.compare import assert_close
from tests.ops.attention_cases import plain
from tests.ops.inputs import BF16, DTYPES, E4M3, F16, normal
from tests.ops.paged_cases import check_paged, configured, paged_cache, plain_paged


def queries(batch, count, heads, dim, dtype, seed=77):
    return normal((batch, count, heads, dim), dtype, seed, 1.5)


#: Each with f32, and in turns with one of the 16-bit types, for which the kernel is the same.
HEAD_DIMS = (8, 16, 40, 64, 96, 128, 256)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(dim, dtype) for i, dim in enumerate(HEAD_DIMS) for dtype in ("f32", ("f16", "bf16")[i % 2])],
)
def test_head_dimensions_and_types(device, dtype, dim):
    lengths = [70, 1]
    cache, table = paged_cache(lengths, 16, 2, dim, DTYPES[dtype])
    check_paged(device, queries(2, 1, 8, dim, DTYPES[dtype]), cache, table, lengths)


@pytest.mark.parametrize("dim", [2, 20, 36])
def test_rows_of_few_bytes(device, dim):
    """Copies of 4 and 8 bytes."""
    cache, table = paged_cache([50], 16, 1, dim, F16, value_dim=dim + 4)
    check_paged(device, queries(1, 1, 2, dim, F16), cache, table, [50])


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 64, 100, 256])
def test_block_sizes(device, block_size):
    lengths = [130, 0, 17, 64]
    cache, table = paged_cache(lengths, block_size, 2, 16, BF16)
    check_paged(device, queries(4, 1, 4, 16, BF16), cache, table, lengths)


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16, 20])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_groups_and_new_tokens(device, group, count):
    """From one row to more rows than a block holds; lengths below the number of new tokens."""
    lengths = [40, 3, 75]
    cache, table = paged_cache(lengths, 16, 2, 32, F16)
    check_paged(device, queries(3, count, 2 * group, 32, F16), cache, table, lengths)


FEATURES = {
    "window": {"window": (20, 0)},
    "short window": {"window": (0, -1)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": np.linspace(-2, 4, 6, dtype=np.float32)},
    "alibi": {"alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32)},
    "scale": {"scale": 0.05},
    "negative scale": {"scale": -0.3},
    "scale 0": {"scale": 0.0},
    "all": {
        "window": (33, 0), "softcap": 5.0, "sinks": np.ones(6, np.float32), "scale": 0.4,
        "alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32),
    },
}  # fmt: skip


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("dtype", "count"), [("bf16", 1), ("f32", 3)])
def test_features(device, features, dtype, count):
    lengths = [90, 0, 2]
    cache, table = paged_cache(lengths, 4, 2, 16, DTYPES[dtype])
    check_paged(device, queries(3, count, 6, 16, DTYPES[dtype]), cache, table, lengths, **FEATURES[features])


@pytest.mark.parametrize(
    ("dim", "block_size", "scales"),
    [(*case, (1, 3)[i % 2]) for i, case in enumerate(itertools.product((8, 48, 128), (1, 16, 24)))],
)
def test_e4m3(device, dim, block_size, scales):
    """Scales of heads and of tokens in turns, so that every size meets both."""
    lengths = [100, 0, 9]
    cache, table = paged_cache(lengths, block_size, 2, dim, E4M3, scales=scales)
    check_paged(device, queries(3, 2, 8, dim, BF16), cache, table, lengths, softcap=4.0 if dim == 8 else 0.0)


def test_queries_beyond_the_range_of_f16_beside_e4m3(device):
    cache, table = paged_cache([60], 16, 1, 32, E4M3, scales=3)
    check_paged(device, queries(1, 1, 4, 32, BF16) * np.array(1e30, BF16), cache, table, [60], scale=1e-30)


def test_scales_of_values_that_grow_by_far(device):
    """Values of one token 2^30 times as large as those before: the output's unit moves."""
    cache, table = paged_cache([80], 16, 1, 32, E4M3, scales=3)
    order = np.repeat(table[0, :5], 16), np.tile(np.arange(16), 5)
    cache[3][order] = np.exp2(np.linspace(-20, 10, 80))[:, None]
    check_paged(device, queries(1, 1, 4, 32, BF16), cache, table, [80])


@pytest.mark.parametrize("merge", ["here", "launch", "cluster", "unsplit"])
@pytest.mark.parametrize(("groups", "together"), [(1, 2), (3, 1), (7, 2), (40, 1), (40, 2)])
def test_every_division_of_the_work(device, merge, groups, together):
    """Units shared by many blocks, blocks with many units, rings of all warps wrapped."""
    lengths = [3, 0, 500, 33, 260]
    cache, table = paged_cache(lengths, 16, 2, 16, F16)
    counters = device.array(np.zeros(5 * 3 * 4, np.uint32)) if merge == "here" else None
    cluster = merge == "cluster"
    groups = min(groups, 16) if cluster else groups
    run = configured(
        counters, groups=groups, together=together, split=merge != "unsplit", stages=2, cluster=cluster
    )
    sinks = np.ones(4, np.float32)
    check_paged(device, queries(5, 3, 4, 16, F16), cache, table, lengths, run=run, sinks=sinks)
    if counters is not None:
        assert not device.numpy(counters).any()


@pytest.mark.parametrize("merge", ["here", "launch", "cluster"])
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("length", [0, 30, 900])
def test_one_sequence_is_dealt(device, merge, groups, length):
    """Groups without work, one group with all of it, several rounds of tiles."""
    cache, table = paged_cache([length], 16, 2, 16, F16)
    counters = device.array(np.zeros(3 * 4, np.uint32)) if merge == "here" else None
    run = configured(
        counters, groups=groups, together=2, warps=2, stages=2, dealt=True, cluster=merge == "cluster"
    )
    sinks = np.ones(4, np.float32)
    check_paged(device, queries(1, 3, 4, 16, F16), cache, table, [length], run=run, sinks=sinks)
    if counters is not None:
        assert not device.numpy(counters).any()


@pytest.mark.parametrize("merge", ["here", "launch", "cluster"])
@pytest.mark.parametrize("splits", [1, 3])
def test_sequences_of_about_one_length_are_dealt(device, monkeypatch, merge, splits):
    """The first two batches are dealt, the others' line is cut: each is read and merged its own way."""
    stage = 2 * 16 * 16 * 2  # bytes of a tile
    monkeypatch.setattr("cki.ops.paged._DEALING_SAVES", 24 * 2 * stage)
    for seed, lengths in enumerate(([300, 300, 300], [310, 120, 290], [700, 3, 40], [0, 0, 416])):
        cache, table = paged_cache(lengths, 16, 2, 16, F16, seed=seed)
        counters = device.array(np.zeros(3 * 3 * 4, np.uint32)) if merge == "here" else None
        run = configured(
            counters, groups=3 * splits, together=2, warps=2, stages=2, dealt=True, by_lengths=True,
            cluster=merge == "cluster",
        )  # fmt: skip
        check_paged(device, queries(3, 3, 4, 16, F16), cache, table, lengths, run=run)
        if counters is not None:
            assert not device.numpy(counters).any()


def test_clusters_of_several_sequences(device):
    """Each has its own blocks, whatever its length is."""
    lengths = [900, 0, 30, 17]
    cache, table = paged_cache(lengths, 16, 2, 16, BF16)
    run = configured(None, groups=3, together=2, warps=2, stages=2, dealt=True, cluster=True)
    check_paged(device, queries(4, 3, 4, 16, BF16), cache, table, lengths, run=run)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("lengths", [[1300], [1100, 40, 300]])
def test_more_tiles_than_a_warp_finds_at_once(device, block_size, lengths):
    cache, table = paged_cache(lengths, block_size, 1, 16, BF16)
    one = len(lengths) == 1
    run = configured(None, groups=1 if one else 2, together=1, warps=1, stages=2, dealt=one, cluster=False)
    check_paged(device, queries(len(lengths), 1, 2, 16, BF16), cache, table, lengths, run=run)


def test_skewed_batch(device):
    lengths = [1500, *[20] * 7]
    cache, table = paged_cache(lengths, 16, 1, 16, BF16)
    check_paged(device, queries(8, 1, 2, 16, BF16), cache, table, lengths)


@pytest.mark.parametrize(("merge", "count"), [("here", 150), ("launch", 150), ("cluster", 100)])
def test_more_sequences_than_threads(device, merge, count):
    """Their lengths are added up in several rounds, or by several each thread."""
    lengths = [(7 * i) % 41 for i in range(count)]
    cache, table = paged_cache(lengths, 16, 1, 16, F16)
    counters = device.array(np.zeros(count * 2, np.uint32)) if merge == "here" else None
    run = configured(counters, groups=7, together=1, warps=2, stages=2, cluster=merge == "cluster")
    check_paged(device, queries(count, 1, 2, 16, F16), cache, table, lengths, run=run)
    if counters is not None:
        assert not device.numpy(counters).any()


def test_many_sequences(device):
    """More than the division among blocks takes."""
    lengths = [i % 3 for i in range(1100)]
    cache, table = paged_cache(lengths, 2, 1, 8, F16)
    check_paged(device, queries(1100, 1, 1, 8, F16), cache, table, lengths)


def test_given_outputs_int64_indices_and_strides(device):
    """Head-major blocks, queries as a slice of a projection, an output with gaps."""
    lengths = np.array([40, 7], np.int64)
    (k, v), table = paged_cache(lengths.tolist(), 8, 2, 16, BF16)
    q = normal((2, 1, 12, 16), BF16, 5)
    memory = [
        device.array(np.ascontiguousarray(t.transpose(0, 2, 1, 3))).transpose(0, 2, 1, 3) for t in (k, v)
    ]
    wide = device.empty((2, 1, 4, 24), BF16)
    out = wide[..., 4:20]
    got = cki.paged_attention(
        device.array(q)[:, :, :4],
        tuple(memory),
        device.array(table.astype(np.int64)),
        device.array(lengths),
        out=out,
    )
    assert got is out
    truth = reference.paged_attention(q[:, :, :4], (k, v), table, lengths)
    assert_close(device.numpy(wide)[..., 4:20], truth, plain_paged(q[:, :, :4], (k, v), table, lengths)[0])
    assert np.isnan(device.numpy(wide).astype(np.float32)[..., [0, 23]]).all()


def test_bad_entries_and_lengths_are_inert(device):
    """A length beyond the table is cut off, a negative one is 0, a block that does not exist stands for zeros."""
    cache, table = paged_cache([64, 64, 64], 16, 1, 16, F16)
    table = table[:, :4].copy()
    table[2, 1] = len(cache[0]) + 5
    check_paged(device, queries(3, 1, 2, 16, F16), cache, table, [1000, -5, 64])


def test_lengths_that_change_between_calls_with_the_same_counters(device):
    counters = device.array(np.zeros(3 * 4, np.uint32))
    run = configured(counters, groups=5, together=2)
    for seed, lengths in enumerate(([3, 6, 1], [300, 2, 117], [1, 1, 1], [0, 400, 0])):
        cache, table = paged_cache(lengths, 4, 2, 16, BF16, seed=seed)
        check_paged(device, queries(3, 1, 4, 16, BF16), cache, table, lengths, run=run)
    assert not device.numpy(counters).any()


def test_same_call_same_bits(device):
    lengths = [300, 41, 128]
    cache, table = paged_cache(lengths, 16, 2, 32, BF16)
    first = check_paged(device, queries(3, 1, 8, 32, BF16), cache, table, lengths)
    again = check_paged(device, queries(3, 1, 8, 32, BF16), cache, table, lengths)
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(first, again))


def test_deterministic_results_do_not_depend_on_the_batch(device):
    """The same sequence alone and between others, in a larger table: the same bits."""
    lengths = [300, 41, 128]
    cache, table = paged_cache(lengths, 16, 2, 32, BF16)
    q = queries(3, 1, 8, 32, BF16)
    whole = check_paged(device, q, cache, table, lengths, deterministic=True)
    alone = check_paged(device, q[1:2], cache, table[1:2, :3].copy(), lengths[1:2], deterministic=True)
    assert all(np.array_equal(a[1:2].view(np.uint8), b.view(np.uint8)) for a, b in zip(whole, alone))


@pytest.mark.parametrize("deterministic", [False, True])
def test_replays_over_changing_steps_equal_eager_calls_bit_for_bit(device, monkeypatch, deterministic):
    """One graph for four sequences serves steps that grow, that are rolled back, and that have fewer sequences.

    The lengths pass from about even to skewed, so the work is divided in both ways.
    """
    monkeypatch.setattr(
        "cki.ops.paged._DEALING_SAVES", 8 * 2 * 1536
    )  # tiles of a batch, heads, bytes of a tile
    cache = PagedKVCache(
        1, 120, block_size=4, num_kv_heads=2, head_dim=16, dtype="f16", max_sequences=4, max_blocks_per_sequence=70,
    )  # fmt: skip
    q = device.array(queries(4, 1, 4, 16, F16))
    tables = cache.layer(0), cache.block_table, cache.seq_lens
    graph = cki.capture(lambda q: cki.paged_attention(q, *tables, deterministic=deterministic), q)
    live = [cache.allocate_sequence() for _ in range(4)]
    for round_, counts in enumerate(([40, 41, 40, 42], [1, 1, 1, 1], [1, 200, 1, 1], [1, 1], [1, 1, 1])):
        batch = live[: len(counts)]
        step = cache.prepare_step(batch, counts)
        new = [device.array(normal((sum(counts), 2, 16), F16, 10 * round_ + i)) for i in (0, 1)]
        cki.append_kv(*new, cache.layer(0), step.slot_mapping)
        replayed = device.numpy(graph.replay()).copy()
        eager = device.numpy(cki.paged_attention(q, *tables, deterministic=deterministic))
        assert np.array_equal(replayed.view(np.uint16), eager.view(np.uint16))
        assert np.isfinite(replayed).all() and replayed[: len(counts)].any((1, 2, 3)).all()
        assert not replayed[len(counts) :].any()
        for sequence in batch:
            cache.truncate(sequence, cache.length(sequence) - 1)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("lengths", [[1500], [200, 1, 0, 900, 16, 17]])
def test_programmatic_launches_behind_what_writes_their_inputs(device, lengths, early):
    """In a graph of steps, each of which stores a token and attends: what launches one after the other gives."""
    if device.info.arch in SERIAL_ARCHS:
        pytest.skip("no launch begins before the one ahead ends")
    cache, table = paged_cache(lengths, 16, 2, 32, F16)

    def overlapped(problem, outputs, info):
        k = problem["k_cache"]
        return plan_paged_attention(
            problem["q"], k, problem["v_cache"], problem["seq_lens"], outputs["out"], info,
            block_table=problem["block_table"], counters=problem.get("counters"), overlaps=True, keys_early=early,
        )  # fmt: skip

    spec = dataclasses.replace(PAGED_ATTENTION, plan=overlapped)
    batch = len(lengths)
    slots = [int(table[b, (n - 1) // 16]) * 16 + (n - 1) % 16 if n else -1 for b, n in enumerate(lengths)]
    new = [device.array(normal((batch, 2, 32), F16, seed)) for seed in (3, 4)]
    q = device.array(queries(batch, 1, 4, 32, F16))
    k, v, table, lens, slots = (
        device.array(np.asarray(a)) for a in (*cache, table, np.int32(lengths), slots)
    )
    results = []
    for overlapping in (False, True):

        def steps(x, overlapping=overlapping):
            outs = []
            for _ in range(3):
                cki.append_kv(*new, (k, v), slots)
                inputs, attributes = (x, k, v, table, lens, *(None,) * 5), (None, (-1, -1), 0.0, False, False)
                outs.append(call(spec if overlapping else PAGED_ATTENTION, inputs, attributes, (None, None)))
                x = outs[-1]
            return tuple(outs)

        graph = cki.capture(steps, q)
        results.append([device.numpy(out).copy() for out in graph.replay()])
    for apart, overlapped in zip(*results):
        assert np.isfinite(apart).all() and apart.any()
        assert np.array_equal(apart.view(np.uint16), overlapped.view(np.uint16))


# Merged in a cluster; by the block that arrives last; alone.
@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ([70, 300], {}), ([70, 300, 0, 33, 9, 1, 16, 40, 90], {"groups": 5, "cluster": False}),
        ([90, 17], {"split": False}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("parts", [1, 2])
def test_rows_become_codes(device, lengths, changes, parts):
    """Those that quantising the result gives, or of two parts, which are the result itself."""
    if device.info.arch in SERIAL_ARCHS:
        pytest.skip("conversions to e4m3, clusters")
    batch = len(lengths)
    cache, table = paged_cache(lengths, 16, 2, 128, BF16)
    q = queries(batch, 1, 4, 128, BF16)

    def choose(shape, info):
        chosen = choose_decode(shape, dataclasses.replace(info, sm_count=20))
        if changes:
            return dataclasses.replace(
                chosen, **{"dealt": False, "by_lengths": False, "cluster": False, **changes}
            )
        assert chosen.cluster
        return chosen

    def plan(problem, outputs, info):
        codes = (outputs["out"], outputs["lse"]) if outputs["out"].dtype == dtypes.u8 else None
        return plan_paged_attention(
            problem["q"], problem["k_cache"], problem["v_cache"], problem["seq_lens"],
            problem["q"] if codes else outputs["out"], info, block_table=problem["block_table"],
            counters=problem["counters"], choose=choose, overlaps=True, keys_early=True, codes=codes,
        )  # fmt: skip

    def infer(problem):
        rows = batch if parts == 1 else 64
        return {"out": OutputSpec((rows, 4 * 128), dtypes.u8), "lse": OutputSpec((batch, 4), dtypes.f32)}

    given = [device.array(np.asarray(a)) for a in (q, *cache, table, np.int32(lengths))]
    zeros = device.array(np.zeros(batch * 4, np.uint32))
    inputs, attributes = (*given, None, None, None, None, zeros), (None, (-1, -1), 0.0, False, True)
    plain = dataclasses.replace(PAGED_ATTENTION, plan=plan, name=f"plain_{len(changes)}")
    out = call(plain, inputs, attributes, (None, None))[0]
    spec = dataclasses.replace(plain, infer=infer, name=f"codes_{parts}_{len(changes)}")
    codes, scales = (device.numpy(t) for t in call(spec, inputs, attributes, (None, None)))
    groups = device.numpy(out).astype(np.float64).reshape(batch, 4, 128)
    values = codes.view(E4M3).astype(np.float64).reshape(-1, 4, 128)
    if parts == 2:
        first = np.arange(batch) // 8 * 16 + np.arange(batch) % 8
        values = values[first] + values[first + 8]
    largest = np.abs(groups).max(-1, keepdims=True)
    error = np.abs(values[:batch] * scales[..., None] - groups)
    allowed = np.abs(groups) / 16 + largest * 2**-9 if parts == 1 else largest * 2**-17
    assert (error <= allowed).all()


def test_a_captured_workspace_stays_the_graphs(device):
    """Whoever asks for memory between two replays, or calls eagerly, gets other memory."""
    cache, table = paged_cache([200, 70], 16, 2, 16, F16)
    run = configured(None, groups=5, together=2, warps=2, stages=2)
    arguments = [
        device.array(queries(2, 1, 4, 16, F16)),
        tuple(map(device.array, cache)),
        device.array(table),
    ]
    lengths = device.array(np.asarray([200, 70], np.int32))
    graph = cki.capture(lambda lengths: run(*arguments, lengths), lengths)
    for keys in ([200, 70], [3, 70], [200, 0]):
        lengths[:] = device.array(np.asarray(keys, np.int32))
        eager = device.numpy(run(*arguments, lengths)).copy()
        taken = [device.array(np.full(size, np.nan, np.float32)) for size in (300, 1440, 1504, 2880, 4000)]
        replayed = device.numpy(graph.replay())
        assert np.array_equal(replayed.view(np.uint16), eager.view(np.uint16))
        assert np.isfinite(replayed).all() and len(taken) == 5


def test_offsets_beyond_32_bits(device):
    """Blocks 2^30 elements apart; memory that is not touched is never there."""
    if device.kind == "cuda":
        pytest.skip("12 GB of device memory for the sake of an offset")
    stride = 2**30
    memory = [np.empty(2 * stride + 16 * 16, np.float16) for _ in range(2)]
    shape, strides = (3, 16, 1, 16), (2 * stride, 32, 32, 2)
    cache = tuple(np.lib.stride_tricks.as_strided(t, shape, strides) for t in memory)
    for i, t in enumerate(cache):
        t[[0, 2]] = np.nan
        t[2] = normal((16, 1, 16), F16, i)
    new = normal((2, 1, 16), F16, 5)
    cki.append_kv(new, new, cache, np.array([2 * 16 + 8, 2 * 16 + 9]))
    assert np.array_equal(cache[0][2, 8:10], new) and np.array_equal(cache[1][2, 8:10], new)
    q, table = queries(1, 1, 1, 16, F16), np.array([[2]], np.int32)
    out = cki.paged_attention(q, cache, table, np.array([10], np.int32))
    small = tuple(t[2:].copy() for t in cache)
    assert_close(
        out, reference.paged_attention(q, small, table * 0, [10]), plain_paged(q, small, table * 0, [10])[0]
    )


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_window_runs_on_in_few_blocks(device, block_size):
    """Blocks behind the window are given up and used again by either sequence while both go on."""
    cache = PagedKVCache(
        1, 20 // block_size + 5, block_size=block_size, num_kv_heads=1, head_dim=16, dtype="f16", max_sequences=2,
        max_blocks_per_sequence=80 // block_size, window_left=9,
    )  # fmt: skip
    sequences = [cache.allocate_sequence(), cache.allocate_sequence()]
    history = normal((2, 2, 80, 1, 16), F16, 5)  # keys and values of each sequence
    used: set[int] = set()
    for begin, count in ((0, 7), *((7 + 3 * i, 3) for i in range(20))):
        step = cache.prepare_step(sequences, count)
        new = history[:, :, begin : begin + count]
        cki.append_kv(*(device.array(np.concatenate(t)) for t in new), cache.layer(0), step.slot_mapping)
        used.update(block for sequence in sequences for block in cache.blocks(sequence))
        q = queries(2, count, 2, 16, F16)
        out = cki.paged_attention(
            device.array(q), cache.layer(0), step.block_table, step.seq_lens, window=(9, 0)
        )
        k, v = history[:, :, : begin + count]
        assert_close(
            device.numpy(out), reference.attention(q, k, v, causal=True, window=(9, -1)),
            plain(q, k, v, causal=True, window=(9, -1))[0],
        )  # fmt: skip
    assert len(used) <= cache.num_blocks < 2 * 67 / block_size


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_append_then_attend_on_a_paged_cache(device, dtype):
    """Prefill of two sequences, then three decoding steps; each equals attention over all that was appended."""
    device = device.holding(E4M3 if dtype == "e4m3" else BF16)
    cache = PagedKVCache(
        1,
        16,
        block_size=4,
        num_kv_heads=2,
        head_dim=16,
        dtype=dtype,
        max_sequences=4,
        max_blocks_per_sequence=8,
    )
    a, b = cache.allocate_sequence(list(range(9))), cache.allocate_sequence(list(range(50, 55)))
    keys = {s: (normal((14, 2, 16), BF16, s), normal((14, 2, 16), BF16, 9 + s)) for s in (a, b)}
    filled = {a: 0, b: 0}
    for counts in ((9, 5), (1, 1), (2, 2), (1, 1)):
        step = cache.prepare_step([a, b], list(counts))
        new = [[keys[s][i][filled[s] : filled[s] + n] for s, n in zip((a, b), counts)] for i in (0, 1)]
        cki.append_kv(*(device.array(np.concatenate(t)) for t in new), cache.layer(0), step.slot_mapping)
        for s, n in zip((a, b), counts):
            filled[s] += n
        if counts[0] != counts[1]:
            continue
        q = queries(2, counts[0], 4, 16, BF16)
        out = cki.paged_attention(device.array(q), cache.layer(0), step.block_table, step.seq_lens)
        for i, s in enumerate((a, b)):
            k, v = (t[None, : filled[s]] for t in keys[s])
            truth = reference.attention(q[i : i + 1], k, v, causal=True)[0]
            difference = np.abs(device.numpy(out)[i].astype(np.float64) - truth).max()
            assert difference <= (0.02 if dtype == "bf16" else 0.15), difference
