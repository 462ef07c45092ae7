"""`cki.append_kv` and `cki.apply_rope` against their definitions: values, bits of codes, what must stay untouched."""

from __future__ import annotations

import operator
import sys
import types
from typing import Any

import numpy as np
import pytest

import cki
from cki import reference
from cki.errors import CkiError
from cki.memory import PagedKVCache
from cki.reference.paged import dequantized, quantize_e4m3
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, E4M3, F16, F32, normal
from tests.orders import every_check, orders

BLOCKS, BLOCK_SIZE = 5, 3


def caches(dtype: Any, heads: int, dim: int, value_dim: int, seed: int = 9) -> tuple[np.ndarray, np.ndarray]:
    shape = (BLOCKS, BLOCK_SIZE, heads)
    return normal((*shape, dim), dtype, seed), normal((*shape, value_dim), dtype, seed + 1)


def cos_sin(positions: int, rotary_dim: int) -> np.ndarray:
    angles = np.arange(positions)[:, None] * 100.0 ** (-2.0 * np.arange(rotary_dim // 2) / rotary_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def check_append(
    device: Any, k: np.ndarray, v: np.ndarray, cache: tuple[np.ndarray, ...], slots: Any, **options: Any
) -> None:
    """One call; K, V and Q against the reference, and every slot that is not named bit for bit as before."""
    device = device.holding(*(t.dtype for t in cache))
    slots = np.asarray(slots)
    on_device = tuple(device.array(t) for t in cache)
    tensors = {n: device.array(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    got_q = cki.append_kv(device.array(k), device.array(v), on_device, device.array(slots), **tensors)
    after = [device.numpy(t) for t in on_device]
    keys, values, queries = reference.append_kv(k, v, cache, slots, **options)
    written = np.zeros(BLOCKS * BLOCK_SIZE, bool)
    written[slots[(slots >= 0) & (slots < written.size)]] = True
    untouched = ~written.reshape(BLOCKS, BLOCK_SIZE)
    for before, now in zip(cache[:2], after[:2]):
        raw = np.dtype(f"u{now.itemsize}")
        assert np.array_equal(now.view(raw)[untouched], before.view(raw)[untouched])
    for name, now, truth in (("k", after[0], keys), ("v", after[1], values)):
        now, truth = now[~untouched], truth[~untouched]
        assert_close(now, truth, plain(truth, now.dtype, k.dtype), name)
    if queries is None:
        assert got_q is None
    else:
        assert_close(device.numpy(got_q), queries, plain(queries, k.dtype, k.dtype), "q")


def plain(truth: np.ndarray, dtype: Any, computed: Any) -> np.ndarray:
    """A row rounded once to the type it is stored in, after fp32 arithmetic."""
    return truth.astype(np.float32).astype(dtype)


ROTATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "neox": {"rope_base": 10000.0},
    "interleaved": {"rope_base": 500.0, "interleaved": True},
    "partial": {"rope_base": 10000.0, "rotary_dim": 6},
    "partial interleaved": {"rope_base": 10000.0, "rotary_dim": 10, "interleaved": True},
    "table": {"cos_sin": cos_sin(40, 16)},
    "partial table": {"cos_sin": cos_sin(40, 8), "rotary_dim": 8},
}


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_and_norm(device, rotation, norm):
    k, v, q = normal((6, 2, 16), BF16, 1), normal((6, 2, 16), BF16, 2), normal((6, 4, 16), BF16, 3)
    options = dict(ROTATIONS[rotation], q=q)
    if rotation != "none":
        options["positions"] = np.array([0, 1, 39, 7, 7, 12])
    if norm:
        options |= {"q_norm_weight": normal((16,), F32, 5), "k_norm_weight": normal((16,), F32, 6)}
        options["norm_weight_offset"] = 1.0
    check_append(device, k, v, caches(BF16, 2, 16, 16), [4, -1, 14, 0, 15, 2], **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (7, 5), (64, 40), (128, 128), (256, 16)])
def test_types_and_head_dimensions(device, dtype, dim, value_dim):
    k, v = normal((4, 3, dim), DTYPES[dtype], 1), normal((4, 3, value_dim), DTYPES[dtype], 2)
    options = {"rope_base": 1e4, "positions": np.arange(4, dtype=np.int32) * 50, "rotary_dim": dim // 2 * 2}
    check_append(
        device, k, v, caches(DTYPES[dtype], 3, dim, value_dim), np.array([3, 4, 5, 11], np.int32), **options
    )


def test_cache_of_another_type(device):
    k, v = normal((4, 2, 16), F32, 1), normal((4, 2, 16), F32, 2)
    check_append(device, k, v, caches(F16, 2, 16, 16), [3, 4, 5, 11])


def test_angles_are_right_far_from_the_start(device):
    """In fp32, position * frequency would be off by 0.03 here."""
    x = normal((3, 1, 64), F32, 1)
    positions = np.array([1_000_003, 131_071, 2**31 - 1], np.int64)
    got = device.numpy(cki.apply_rope(device.array(x), device.array(positions)))
    assert np.abs(got - reference.apply_rope(x, positions)).max() < 1e-6 * 4


def test_fused_projection_slices_and_head_major_blocks(device):
    """q, k and v as slices of one projection; a cache whose blocks are [heads, block_size, dim] in memory."""
    qkv = normal((5, 8, 16), BF16, 1)
    fused = device.array(qkv)
    memory = device.array(np.zeros((2, BLOCKS, 2, BLOCK_SIZE, 16), BF16))
    k_cache, v_cache = (memory[i].transpose(0, 2, 1, 3) for i in (0, 1))
    slots, positions = np.array([7, 3, 0, 14, -1]), np.arange(5)
    q = cki.append_kv(
        fused[:, 4:6], fused[:, 6:], (k_cache, v_cache), device.array(slots), q=fused[:, :4],
        positions=device.array(positions), rope_base=1e4,
    )  # fmt: skip
    zeros = np.zeros((BLOCKS, BLOCK_SIZE, 2, 16))
    keys, values, queries = reference.append_kv(
        qkv[:, 4:6], qkv[:, 6:], (zeros, zeros), slots, q=qkv[:, :4], positions=positions, rope_base=1e4
    )
    stored = device.numpy(memory).transpose(0, 1, 3, 2, 4)
    for got, truth in ((stored[0], keys), (stored[1], values), (device.numpy(q), queries)):
        assert_close(got, truth, truth.astype(BF16))


def test_queries_in_place(device):
    x = normal((4, 3, 16), F16, 1)
    k = device.array(x)
    q = device.array(x)
    cache = tuple(device.array(t) for t in caches(F16, 3, 16, 16))
    positions, slots = device.array(np.arange(4)), device.array(np.arange(4))
    got = cki.append_kv(k, k, cache, slots, q=q, positions=positions, rope_base=1e4, q_out=q)
    assert got is q
    truth = reference.apply_rope(x, np.arange(4))
    assert_close(device.numpy(q), truth, truth.astype(F16))


def codes_close(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal codes but for values that lie on the edge between two, where fp32 and fp64 may fall on either side."""
    different = got.view(np.uint8) != wanted.view(np.uint8)
    assert different.mean() < 0.01
    steps = np.abs(got.view(np.uint8).astype(int) - wanted.view(np.uint8).astype(int))
    assert steps.max() <= 1


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("static", [False, True])
def test_e4m3(device, dim, static):
    device = device.holding(E4M3)
    k, v = normal((6, 2, dim), BF16, 1, 3.0), normal((6, 2, dim), BF16, 2, 0.01)
    v[3, 1] = 0  # a row of zeros has the scale 1
    slots = np.array([4, -1, 13, 0, 15, 2])
    cache = [device.array(np.zeros((BLOCKS, BLOCK_SIZE, 2, dim), E4M3)) for _ in range(2)]
    if static:
        scales = [np.array([0.01, 0.02], np.float32), np.array([1e-4, 2e-5], np.float32)]
    else:
        scales = [np.full((BLOCKS, BLOCK_SIZE, 2), 7.0, np.float32) for _ in range(2)]
    scales_on_device = [device.array(t) for t in scales]
    positions = np.arange(6)
    cki.append_kv(
        device.array(k), device.array(v), (*cache, *scales_on_device), device.array(slots),
        positions=device.array(positions), rope_base=1e4,
    )  # fmt: skip
    for rows, stored, scale, before in zip(
        (reference.apply_rope(k, positions), v.astype(np.float64)), cache, scales_on_device, scales
    ):
        codes, token_scale = quantize_e4m3(rows, np.broadcast_to(before, (6, 2)) if static else None)
        after = device.numpy(scale)
        for token, slot in enumerate(slots):
            if not 0 <= slot < BLOCKS * BLOCK_SIZE:
                continue
            at = divmod(slot, BLOCK_SIZE)
            codes_close(device.numpy(stored)[at], codes[token])
            if not static:
                np.testing.assert_allclose(after[at], token_scale[token], rtol=1e-6)
        if not static:
            untouched = np.delete(after.reshape(-1, 2), [4, 13, 0, 2], axis=0)
            assert (untouched == 7.0).all()


def test_a_layer_of_a_paged_cache(device):
    """Two steps of a PagedKVCache, the second growing into a new block; what is stored is what was given."""
    device = device.holding(E4M3)
    for dtype in ("f16", "e4m3"):
        cache = PagedKVCache(
            2,
            8,
            block_size=4,
            num_kv_heads=2,
            head_dim=16,
            dtype=dtype,
            max_sequences=2,
            max_blocks_per_sequence=4,
        )
        sequence = cache.allocate_sequence([1, 2, 3])
        k, v = normal((5, 2, 16), F16, 1), normal((5, 2, 16), F16, 2)
        for first, count in ((0, 3), (3, 2)):
            step = cache.prepare_step([sequence], [count])
            new = slice(first, first + count)
            cki.append_kv(device.array(k[new]), device.array(v[new]), cache.layer(1), step.slot_mapping)
        table = step.block_table.numpy()[0, :2]
        layer = cache.layer(1)
        scales = (None, None) if dtype == "f16" else (layer.k_scale.numpy(), layer.v_scale.numpy())
        for stored, rows in zip(dequantized(layer.k.numpy(), layer.v.numpy(), *scales), (k, v)):
            got = stored[table].reshape(8, 2, 16)[:5]
            assert np.abs(got - rows).max() <= (0 if dtype == "f16" else np.abs(rows).max() / 16)


def one_step(dtype):
    """(layer, inputs) of a cache on the simulated device with one sequence of three new tokens."""
    cache = PagedKVCache(
        1,
        4,
        block_size=4,
        num_kv_heads=2,
        head_dim=16,
        dtype=dtype,
        max_sequences=1,
        max_blocks_per_sequence=2,
    )
    return cache.layer(0), cache.prepare_step([cache.allocate_sequence([1, 2, 3])], [3])


@pytest.mark.parametrize("dtype", ["f16", "e4m3"])
def test_a_layer_beside_tensors_of_other_frameworks(dtype):
    """Imported by each framework's own from_dlpack: the same codes as with NumPy's arrays."""
    x = normal((3, 2, 16), F16, 1)
    stored = []
    with cki.device("sim"):
        for package in ("numpy", "torch", "jax"):
            convert = {"numpy": "asarray", "torch": "from_numpy", "jax": "numpy.asarray"}[package]
            k = operator.attrgetter(convert)(pytest.importorskip(package))(x)
            layer, step = one_step(dtype)
            cki.append_kv(k, k, layer, step.slot_mapping)
            out = cki.paged_attention(k[None], layer, step.block_table, step.seq_lens)
            assert type(out) is type(k)
            codes = layer.k.numpy().reshape(-1, 2, 16)[step.slot_mapping.numpy()]
            stored.append((codes.tobytes(), np.asarray(out).tobytes()))
    assert stored[0] == stored[1] == stored[2]


def test_a_layer_beside_tensors_that_cannot_be_of_its_type(monkeypatch):
    """CuPy has no 8-bit floats and raises a TypeError at the import."""

    class Array:
        __module__ = "cupy"

    def from_dlpack(tensor):
        raise TypeError("Unsupported dtype. dtype code: 10")

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(from_dlpack=from_dlpack))
    with cki.device("sim"):
        layer, step = one_step("e4m3")
        with pytest.raises(cki.errors.InvalidTypeError, match="a cache of e4m3 beside arrays of cupy"):
            cki.append_kv(Array(), Array(), layer, step.slot_mapping)


def test_under_every_check(device):
    """Small blocks of threads cover three trips over the heads; partners of a pair meet through shared memory."""
    k, v, q = normal((3, 5, 24), BF16, 1), normal((3, 5, 16), BF16, 2), normal((3, 70, 24), BF16, 3)
    weight = normal((24,), BF16, 4)
    for seed in orders(device):
        with every_check(device, seed):
            check_append(
                device, k, v, caches(BF16, 5, 24, 16), [3, 14, 7], q=q, positions=np.array([3, 9, 2]), rope_base=1e4,
                q_norm_weight=weight, k_norm_weight=weight, rotary_dim=20,
            )  # fmt: skip


def test_positions_outside_the_table_turn_nothing(device):
    x = normal((3, 2, 16), F32, 1)
    options = {"cos_sin": cos_sin(4, 16)}
    got = cki.apply_rope(
        device.array(x), device.array(np.array([-1, 4, 2])), cos_sin=device.array(options["cos_sin"])
    )
    truth = reference.apply_rope(x, [-1, 4, 2], **options)
    assert np.array_equal(device.numpy(got)[:2], x[:2])
    assert_close(device.numpy(got), truth, truth.astype(np.float32))


def test_inverse_turns_back(device):
    x, positions = normal((5, 2, 16), F32, 1), device.array(np.arange(5) * 1000)
    turned = cki.apply_rope(device.array(x), positions)
    back = cki.apply_rope(turned, positions, inverse=True, out=turned)
    assert np.abs(device.numpy(back) - x).max() < 1e-6


def test_no_tokens():
    with cki.device("sim"):
        empty = np.zeros((0, 2, 16), F16)
        cache = caches(F16, 2, 16, 16)
        assert cki.append_kv(empty, empty, cache, np.zeros(0, np.int64)) is None
        assert cki.append_kv(empty, empty, cache, np.zeros(0, np.int64), q=empty).shape == (0, 2, 16)


def test_every_broken_rule_is_named():
    k = np.zeros((3, 2, 16), F16)
    cache = (np.zeros((4, 2, 3, 16), F16), np.zeros((4, 3, 2, 8), F16))
    with cki.device("sim"), pytest.raises(cki.errors.InvalidTypeError) as caught:
        cki.append_kv(
            k, np.zeros((2, 2, 16), F32), cache, np.zeros(4, np.float32), rope_base=1e4, rotary_dim=7,
            q_norm_weight=np.zeros(15, F16),
        )  # fmt: skip
    for words in (
        "v is f32, k is f16", "v has 2 tokens, k has 3", "k_cache has 3 heads, not 2", "v_cache has head_dim 8, not 16",
        "slot_mapping is f32", "slot_mapping has shape (4,)", "a rotation without positions", "rotary_dim is 7",
        "q_norm_weight has shape (15,)", "q_norm_weight is given without q",
    ):  # fmt: skip
        assert words in str(caught.value), words


def test_a_read_only_cache_is_refused():
    k, cache = np.zeros((1, 2, 16), F16), caches(F16, 2, 16, 16)
    cache[0].flags.writeable = False
    with cki.device("sim"), pytest.raises(cki.errors.InvalidArgumentError, match="k_cache is read-only"):
        cki.append_kv(k, k, cache, np.zeros(1, np.int64))


def one_call() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """k, v, k_cache, v_cache and slots of 4 tokens."""
    return normal((4, 2, 8), F32, 1), normal((4, 2, 8), F32, 2), *caches(F32, 2, 8, 8), np.arange(4)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("k_cache shares memory with v_cache", lambda k, v, kc, vc, s: (k, v, kc, kc, s)),
        ("k_cache shares memory with k", lambda k, v, kc, vc, s: (kc.reshape(-1, 2, 8)[2:6], v, kc, vc, s)),
        (
            "v_cache shares memory with slot_mapping",
            lambda k, v, kc, vc, s: (k, v, kc, vc, vc.view(np.int64).ravel()[:4]),
        ),
        (
            "k_cache overlaps itself",
            lambda k, v, kc, vc, s: (k, v, np.lib.stride_tricks.as_strided(kc, kc.shape, (0, *kc.strides[1:])), vc, s),
        ),
    ],
)  # fmt: skip
def test_caches_that_share_memory_are_refused(message, change):
    k, v, k_cache, v_cache, slots = change(*one_call())
    before = k_cache.copy(), v_cache.copy()
    with cki.device("sim"):
        for _ in range(3):  # the later calls find the problem known
            with pytest.raises(CkiError, match=message):
                cki.append_kv(k, v, (k_cache, v_cache), slots)
    assert np.array_equal(k_cache, before[0]) and np.array_equal(v_cache, before[1])


def test_keys_and_values_may_lie_interleaved_in_one_array():
    k, v, _, _, slots = one_call()
    both = np.zeros((BLOCKS, 2, BLOCK_SIZE, 2, 8), F32)
    with cki.device("sim"):
        for _ in range(3):
            cki.append_kv(k, v, (both[:, 0], both[:, 1]), slots)
    assert np.array_equal(both[:, 0].reshape(-1, 2, 8)[:4], k)
    assert np.array_equal(both[:, 1].reshape(-1, 2, 8)[:4], v)


def test_a_known_problem_is_refused_where_only_a_later_call_shares_memory():
    torch = pytest.importorskip("torch")
    k, v, k_cache, v_cache, slots = map(torch.from_numpy, one_call())
    with cki.device("sim"):
        for _ in range(3):
            cki.append_kv(k, v, (k_cache, v_cache), slots)
        with pytest.raises(CkiError, match="k_cache shares memory with v_cache"):
            cki.append_kv(k, v, (k_cache, k_cache), slots)


def test_read_only_scales_are_refused_where_they_are_written():
    k, v, _, _, slots = one_call()
    codes = [np.zeros((BLOCKS, BLOCK_SIZE, 2, 8), E4M3) for _ in range(2)]
    with cki.device("sim"):
        for shape in ((BLOCKS, BLOCK_SIZE, 2), (2,)):
            scales = [np.ones(shape, F32), np.ones(shape, F32)]
            scales[1].flags.writeable = False
            if len(shape) == 1:  # scales of heads are read
                cki.append_kv(k, v, (*codes, *scales), slots)
                continue
            with pytest.raises(CkiError, match="v_scale is read-only"):
                cki.append_kv(k, v, (*codes, *scales), slots)
            assert (scales[0] == 1).all()


def test_immutable_arrays_are_not_written_on_a_stream():
    jnp = pytest.importorskip("jax.numpy")
    k, v, k_cache, v_cache, slots = map(jnp.asarray, one_call())
    before = np.array(k_cache)
    with cki.device("sim"), pytest.raises(CkiError, match="k_cache is read-only"):
        cki.append_kv(k, v, (k_cache, v_cache), slots, stream=0)
    assert np.array_equal(k_cache, before)


def test_queries_for_no_output_are_named_as_they_were_given():
    k, v, k_cache, v_cache, slots = one_call()
    with cki.device("sim"), pytest.raises(CkiError, match="q_out is given"):
        cki.append_kv(k, v, (k_cache, v_cache), slots, q_out=k.copy())


def test_e4m3_needs_its_scales_and_sm_89():
    k, codes, scales = np.zeros((1, 2, 16), F16), np.zeros((4, 2, 2, 16), E4M3), np.ones(2, np.float32)
    with (
        cki.device("sim"),
        pytest.raises(cki.errors.InvalidArgumentError, match="e4m3 cache without its scales"),
    ):
        cki.append_kv(k, k, (codes, codes.copy()), np.zeros(1, np.int64))
    with cki.device("sim", arch="sm_80"), pytest.raises(cki.errors.UnsupportedError, match="sm_89"):
        cki.append_kv(k, k, (codes, codes.copy(), scales, scales), np.zeros(1, np.int64))


@pytest.mark.parametrize(
    ("slots", "positions", "message"),
    [
        ([0, 15], [0, 1], "slot_mapping holds 15, the cache has 15 slots"),
        ([0, -2], [0, 1], "slot_mapping holds -2"),
        ([3, 3], [0, 1], "slot 3 more than once"),
        ([0, 1], [0, 4], "positions holds 4, cos_sin has 4 rows"),
    ],
)
def test_validated_slots_and_positions(monkeypatch, slots, positions, message):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    k = np.zeros((2, 2, 16), F16)
    with cki.device("sim"), pytest.raises(cki.errors.InvalidArgumentError, match=message):
        cki.append_kv(
            k,
            k,
            caches(F16, 2, 16, 16),
            np.array(slots),
            positions=np.array(positions),
            cos_sin=cos_sin(4, 16),
        )


def test_a_held_call_without_queries_returns_none(device):
    k, (k_cache, v_cache) = normal((2, 1, 16), F16, 1), caches(F16, 1, 16, 16)
    tensors = [device.array(t) for t in (k, k, k_cache, v_cache, np.array([3, 0]))]
    new, cache, slots = tensors[:2], tuple(tensors[2:4]), tensors[4]
    held = cki.hold(cki.append_kv, *new, cache, slots)
    assert held(*tensors) is None
    written = device.numpy(cache[0]).reshape(-1, 1, 16)
    assert np.array_equal(written[[3, 0]], k)
