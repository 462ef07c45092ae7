"""Rows that Hopper's attention computes again, because keys that they do not see hold NaN, where logits are large.

Such a row's logits are sums in another order than those of the tensor core.  At 1e6 they differ by some 0.1, so that
weights relative to the tensor core's sum of exponentials would not add up to 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cki import reference
from cki.heuristics.attention_fp32 import Fp32Tiles
from cki.heuristics.attention_hopper import HopperTiles
from cki.reference.dropout import attention_keeps
from tests.ops import test_attention_e4m3 as codes
from tests.ops import test_attention_hopper_dropout as dropout
from tests.ops import test_attention_hopper_packed as packed_sequences
from tests.ops.attention_cases import qkv
from tests.ops.inputs import BF16, F32
from tests.ops.test_attention_hopper import check, hopper
from tests.ops.varlen_cases import chunked, packed

#: q is multiplied by it; logits of `qkv` are about 2.
FACTORS = [1e4, 1e6]
SMALL, SMALL_FP32 = HopperTiles(2, 32), Fp32Tiles(2, 32)
#: Nobody sees it; it lies in a tile that all rows pass over.
HIDDEN = 20
#: Of weights that add up to 1, in fp32, rounded to the output's type.
CLOSE = {BF16: 2**-8, F32: 1e-5}


def hidden_nan(
    dtype: Any, factor: float, queries: int = 140, **shape: Any
) -> tuple[Any, Any, Any, np.ndarray]:
    """q, k, v and a mask: NaN behind key HIDDEN, in column 0 of all other values a 1."""
    q, k, v = qkv(dtype, queries, 150, **shape)
    v[..., 0] = 1
    v[:, HIDDEN] = np.nan
    mask = np.ones((1, 1, 1, 150), bool)
    mask[..., HIDDEN] = False
    return (q * factor).astype(dtype), k, v, mask


@pytest.mark.parametrize("factor", [1.0, *FACTORS])
@pytest.mark.parametrize(("dtype", "tiles"), [(BF16, SMALL), (F32, SMALL_FP32)])
def test_weights_add_up_to_one(device, dtype, tiles, factor):
    q, k, v, mask = hidden_nan(dtype, factor)
    out = check(device, q, k, v, tiles=tiles, mask=mask)
    np.testing.assert_allclose(out[..., 0].astype(np.float64), 1.0, atol=CLOSE[dtype])


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("dtype", "tiles"), [(BF16, SMALL), (F32, SMALL_FP32)])
def test_an_attention_sink_takes_its_share(device, dtype, tiles, factor):
    """Each head's sink is as large as its rows' largest logits: it takes all of some and nothing of others."""
    q, k, v, mask = hidden_nan(dtype, factor)
    largest = np.einsum("bihd,bjhd->hij", q.astype(np.float64), k.astype(np.float64)).max(axis=2) / np.sqrt(
        32
    )
    sinks = np.median(largest, axis=1).astype(np.float32)
    out = check(device, q, k, v, tiles=tiles, mask=mask, sinks=sinks)[..., 0].astype(np.float64)
    assert (out < 1e-3).any()
    assert out.max() <= 1 + CLOSE[dtype]


@pytest.mark.parametrize("heads", [1, 4])
def test_keys_in_parts(device, heads):
    """A part's rows are weighed within the part; the sink counts in one of them."""
    q, k, v, mask = hidden_nan(BF16, 1e6, queries=16, heads=4)
    tiles = HopperTiles(1, 32, schedule="single", heads=heads, splits=3)
    for sinks in (None, np.full(4, 1e5, np.float32)):
        out = hopper(
            *map(device.array, (q, k, v)), tiles=tiles, mask=device.array(mask), sinks=given(device, sinks)
        )[0]
        truth = reference.attention(q, k, v, mask=mask, sinks=sinks)[..., 0]
        near = np.abs(device.numpy(out)[..., 0].astype(np.float64) - truth) <= CLOSE[BF16]
        assert (
            near.all() if sinks is None else near.mean() > 0.9
        )  # a sink beside a logit as large has any share


def given(device: Any, array: np.ndarray | None) -> Any:
    return None if array is None else device.array(array)


@pytest.mark.parametrize("block_size", [0, 16])
def test_packed_sequences_and_caches(device, block_size):
    """Behind the causal limit of one sequence's queries, in a tile that they share with those who see it."""
    lengths = [100, 30], [100, 64]
    tensors = chunked(BF16, *lengths, block_size) if block_size else packed(BF16, *lengths)
    tensors["q"] = (tensors["q"] * 1e6).astype(BF16)
    tensors["v"][..., 0] = 1
    if block_size:
        tensors["v"][tensors["block_table"][0, 90 // 16], 90 % 16] = np.nan
    else:
        tensors["v"][90] = np.nan
    out, _ = packed_sequences.run(device, tensors, causal=True)
    assert np.isnan(out[90:100].astype(np.float32)).all()
    np.testing.assert_allclose(np.delete(out[..., 0], slice(90, 100), 0).astype(np.float64), 1.0, atol=2**-8)


def test_a_cache_block_that_is_not_there_has_its_share(device):
    """Keys of zeros have logits of 0, which are the largest of rows whose others are far below."""
    tensors = chunked(BF16, [100], [100], 16)
    tensors["v"][..., 0] = 1
    tensors["v"][tensors["block_table"][0, 5], 4:] = np.nan  # keys 84 to 95
    tensors["block_table"][0, 1] = -1
    out, _ = packed_sequences.run(device, tensors, causal=True)
    truth = reference.varlen_attention(**tensors, causal=True)
    np.testing.assert_allclose(out[:84].astype(np.float64), truth[:84], atol=2**-7)
    assert (truth[40:84, :, 0] < 0.9).any()


@pytest.mark.parametrize("factor", FACTORS)
def test_dropped_keys_count_in_the_sum(device, factor):
    q, k, v = qkv(BF16, 140, 64, dim=32, heads=1)
    q = (q * factor).astype(BF16)
    v[..., 0] = 1
    options = {"dropout_p": 0.5, **dropout.counters()}
    clean, _ = dropout.run(device, SMALL, q=q, k=k, v=v, **options)
    v[0, HIDDEN] = np.nan
    out, _ = dropout.run(device, SMALL, q=q, k=k, v=v, **options)
    drops = ~attention_keeps(140, 64, 0, 0.5, 11, 5)[:, HIDDEN]
    assert drops.any()
    # One key has nearly all weight of a row, but where two logits are within the rounding of the others.
    near = np.abs(out[0, drops, 0, 0].astype(np.float64) - clean[0, drops, 0, 0].astype(np.float64)) < 2**-6
    assert near.mean() > 0.9
    assert (out[0, drops, 0, 0].astype(np.float64) <= 2 * (1 + 2**-8)).all()


@pytest.mark.parametrize("tiles", [codes.SMALL, codes.LAZY, codes.CONVERTED])
def test_codes(device, tiles):
    """Descales make the logits large; NaN in the last keys, which no query sees, but the second half's tiles hold."""
    device = device.holding(codes.E4M3)
    tensors, descales = codes.codes(120, 150)
    descales["q_descale"] = descales["q_descale"] * np.float32(1e6)
    tensors["v"][..., 0] = 1
    tensors["v"][:, 120:] = np.nan
    out = codes.check(device, (tensors, descales), tiles, causal=True, causal_alignment="top_left")
    ones = out[..., 0].astype(np.float64) / descales["v_descale"][0, 0]
    np.testing.assert_allclose(ones, 1.0, atol=2**-7)
