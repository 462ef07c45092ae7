"""The attention reference against PyTorch, against a second formulation, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cki import reference
from tests import cases

RNG = np.random.default_rng(0)


def test_is_that_of_torch():
    torch = pytest.importorskip("torch")
    q, k, v = (RNG.standard_normal((2, n, h, 8)) for n, h in ((5, 4), (7, 2), (7, 2)))
    bias = RNG.standard_normal((1, 4, 5, 7))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(t).transpose(1, 2) for t in (q, k, v)),
        attn_mask=torch.from_numpy(bias),
        enable_gqa=True,
    )
    assert np.allclose(reference.attention(q, k, v, bias=bias), expected.transpose(1, 2).numpy(), atol=1e-12)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(t).transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    got = reference.attention(q, k, v, causal=True, causal_alignment="top_left")
    assert np.allclose(got, expected.transpose(1, 2).numpy(), atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_the_running_maximum_formulation(seed):
    """cases.py computes the same row by row in tiles of five keys."""
    rng = np.random.default_rng(seed)
    queries, keys = (int(n) for n in rng.integers(1, 12, 2))
    q, k, v = (rng.standard_normal((2, n, h, 8)) for n, h in ((queries, 6), (keys, 2), (keys, 2)))
    options = {
        "causal": bool(rng.random() < 0.5),
        "causal_alignment": ["bottom_right", "top_left"][seed % 2],
        "window": tuple(int(w) for w in rng.integers(-1, 6, 2)),
        "softcap": float(rng.choice([0.0, 2.0])),
        "scale": float(rng.uniform(-1, 1)),
        "bias": np.where(rng.random((1, 6, queries, keys)) < 0.2, -np.inf, 0.5),
        "mask": rng.random((2, 1, queries, keys)) < 0.8,
        "sinks": rng.standard_normal(6) if seed % 3 else None,
        "alibi_slopes": rng.random(6),
    }
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    other = cases.attention_online(q, k, v, **options)
    assert np.allclose(out, other["out"], atol=1e-12)
    assert np.allclose(lse, other["lse"], atol=1e-12)


def test_two_keys_by_hand():
    q, k = np.array([[[[2.0]]]]), np.array([[[[0.0]], [[math.log(3.0)]]]])
    v = np.array([[[[4.0]], [[8.0]]]])
    out, lse = reference.attention(q, k, v, scale=0.5, return_lse=True)  # weights 1 and 3
    assert np.allclose(out, 7.0)
    assert np.allclose(lse, math.log(4.0))
    out, lse = reference.attention(q, k, v, scale=0.5, sinks=np.array([math.log(4.0)]), return_lse=True)
    assert np.allclose(out, 3.5)
    assert np.allclose(lse, math.log(8.0))


def test_causal_of_two_queries_and_four_keys():
    """The two matrices that the documentation draws."""
    v = np.eye(4)[None, :, None]
    zero = np.zeros((1, 2, 1, 4))
    seen = reference.attention(zero, np.zeros((1, 4, 1, 4)), v, causal=True)[0, :, 0] > 0
    assert np.array_equal(seen, [[1, 1, 1, 0], [1, 1, 1, 1]])
    options = {"causal": True, "causal_alignment": "top_left"}
    seen = reference.attention(zero, np.zeros((1, 4, 1, 4)), v, **options)[0, :, 0] > 0
    assert np.array_equal(seen, [[1, 0, 0, 0], [1, 1, 0, 0]])
    seen = reference.attention(zero, np.zeros((1, 4, 1, 4)), v, window=(1, 0))[0, :, 0] > 0
    assert np.array_equal(seen, [[0, 1, 1, 0], [0, 0, 1, 1]])


def test_rows_that_see_nothing():
    q, k, v = (RNG.standard_normal((1, n, 1, 4)) for n in (3, 5, 5))
    mask = np.ones((3, 5), bool)
    mask[1] = False
    out, lse = reference.attention(q, k, v, mask=mask, return_lse=True)
    assert not out[0, 1].any()
    assert lse[0, 0, 1] == -np.inf
    out, lse = reference.attention(q, k, v, mask=mask, sinks=np.array([1.5]), return_lse=True)
    assert not out[0, 1].any()
    assert lse[0, 0, 1] == 1.5
    out, lse = reference.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_hidden_nan_is_not_seen():
    q, k, v = (RNG.standard_normal((1, n, 1, 4)) for n in (3, 3, 3))
    clean = reference.attention(q, k, v, causal=True)
    k[0, 2], v[0, 2] = np.nan, np.nan
    assert np.array_equal(reference.attention(q, k, v, causal=True)[0, :2], clean[0, :2])
