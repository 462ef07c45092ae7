"""Dropout of attention weights: against the definition, keep rates, independence of tiles and company, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.reference.dropout import attention_keeps, philox_4x32_10
from tests.ops import varlen_cases
from tests.ops.attention_cases import check, qkv
from tests.ops.inputs import BF16, DTYPES, F16, F32, normal


def counters(seed: int = 11, offset: int = 5, dtype: Any = np.int64) -> dict[str, np.ndarray]:
    return {"dropout_seed": np.array([seed], dtype), "dropout_offset": np.array([offset], dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_dropout(device, dtype, causal):
    """Two batches and several heads; more keys than two tiles; a head dimension of whole and of half mma steps."""
    tensors = qkv(DTYPES[dtype], 70, 150, heads=4, kv_heads=2, dim=40, batch=2)
    check(device, *tensors, causal=causal, dropout_p=0.3, **counters())


def test_few_queries_share_a_block_with_their_group(device):
    tensors = qkv(BF16, 3, 90, heads=6, kv_heads=2, dim=64, batch=2)
    check(device, *tensors, causal=True, dropout_p=0.5, **counters(dtype=np.uint64))


def test_wide_heads_and_all_features(device):
    q, k, v = qkv(F16, 20, 75, heads=2, dim=192, value_dim=128)
    bias = normal((1, 2, 20, 75), F16, 9)
    sinks, slopes = np.array([0.5, -1.0], np.float32), np.array([0.1, 0.3], np.float32)
    options = {"bias": bias, "sinks": sinks, "alibi_slopes": slopes, "softcap": 5.0, "window": (40, 9)}
    check(device, q, k, v, dropout_p=0.1, **options, **counters(-1, 2**40 + 3))


@pytest.mark.parametrize("paged", [False, True])
def test_packed_sequences(device, paged):
    lengths = [40, 0, 3, 90], [90, 4, 0, 60]
    make: Any = varlen_cases.chunked if paged else varlen_cases.packed
    tensors = make(BF16, *lengths, *((16,) if paged else ()), heads=4, kv_heads=2, dim=32)
    varlen_cases.check(device, tensors, causal=True, dropout_p=0.25, **counters())


def run(device: Any, q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    tensors = {name: device.array(o) if isinstance(o, np.ndarray) else o for name, o in options.items()}
    return device.numpy(cki.attention(device.array(q), device.array(k), device.array(v), **tensors))


def test_each_head_keeps_its_share(device):
    """Equal weights and values that name their key: the output counts what was kept."""
    p, keys = 0.2, 2048
    q = np.zeros((2, 16, 3, 16), F32)
    k, v = np.zeros((2, keys, 3, 16), F32), np.ones((2, keys, 3, 16), F32)
    kept = run(device, q, k, v, dropout_p=p, **counters())[..., 0] * (1 - p)
    shares = kept.mean(axis=1)  # [batch, heads] over 16 x 2048 weights: a deviation of 0.0022
    assert np.all(np.abs(shares - (1 - p)) < 0.011)
    assert len(np.unique(kept)) > 20  # rows and heads differ


def test_one_key_in_sixteen_places(device):
    """The value of key j is unit vector j: the output is the row of weights itself."""
    q, k = np.zeros((1, 5, 1, 64), F32), np.zeros((1, 64, 1, 64), F32)
    v = np.eye(64, dtype=F32)[None, :, None, :]
    got = run(device, q, k, v, dropout_p=0.5, **counters(3, 4))[0, :, 0]
    np.testing.assert_array_equal(got > 0, attention_keeps(5, 64, 0, 0.5, 3, 4))


def test_company_changes_nothing(device):
    """Batch 0 alone has the bits that it has beside batch 1; fewer queries, other rows a block, the same weights."""
    q, k, v = qkv(F16, 130, 100, heads=2, batch=2)
    options = {"dropout_p": 0.4, "causal_alignment": "top_left", "causal": True, **counters()}
    both = run(device, q, k, v, **options)
    np.testing.assert_array_equal(run(device, q[:1], k[:1], v[:1], **options)[0], both[0])
    np.testing.assert_array_equal(run(device, q[:, :70], k, v, **options), both[:, :70])


def test_another_offset_drops_others(device):
    q, k, v = qkv(BF16, 8, 64)
    one, same, other, seed = (
        run(device, q, k, v, dropout_p=0.5, **counters(*pair)) for pair in ((1, 1), (1, 1), (1, 2), (2, 1))
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other) and not np.array_equal(one, seed)


def test_what_lies_behind_a_dropped_key_has_no_influence(device):
    q, k, v = qkv(BF16, 5, 40, heads=1)
    keeps = attention_keeps(5, 40, 0, 0.5, 11, 5)
    key = int(np.flatnonzero(~keeps[2])[0])
    v[0, key] = np.nan
    got = run(device, q, k, v, dropout_p=0.5, **counters())[0, :, 0].astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), keeps[:, key])


def test_no_dropout_is_the_plain_call(device):
    q, k, v = qkv(F16, 20, 40)
    np.testing.assert_array_equal(run(device, q, k, v, dropout_p=0.0, **counters()), run(device, q, k, v))


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan"), 2])
def test_probabilities_outside_are_refused(p):
    q, k, v = qkv(F16, 4, 4)
    with cki.device("sim"), pytest.raises(InvalidArgumentError, match=f"dropout_p is {p}"):
        cki.attention(q, k, v, dropout_p=p, **counters())


def test_counters_are_needed_and_checked():
    q, k, v = qkv(F16, 4, 4)
    with cki.device("sim"):
        with pytest.raises(InvalidArgumentError, match="dropout_p is 0.5 without dropout_seed") as missing:
            cki.attention(q, k, v, dropout_p=0.5)
        assert "without dropout_offset" in str(missing.value)
        with pytest.raises(InvalidTypeError, match="dropout_seed is f32") as wrong:
            cki.attention(
                q,
                k,
                v,
                dropout_p=0.5,
                dropout_seed=np.zeros(1, np.float32),
                dropout_offset=np.zeros(2, np.int64),
            )
        assert "dropout_offset has shape (2,)" in str(wrong.value)


def test_keeps_of_the_definition():
    """One weight by hand: key 27 of query 6 in row 9."""
    words = philox_4x32_10(
        np.array([[27 // 16 * 4 + 27 % 8 // 2, 6, 9, 5]], np.uint64), np.array([11, 0], np.uint64)
    )
    word = int(words[0, 3])  # 27 % 16 is 11: the second tile, the odd key
    for threshold, kept in ((word, True), (word + 1, False)):
        assert attention_keeps(7, 30, 9, threshold / 2**32, 11, 5)[6, 27] == kept
