"""`cki.decode_attention`: dense and ragged caches by the kernel of `cki.paged_attention`."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki import reference
from tests.compare import assert_close
from tests.ops.attention_cases import plain
from tests.ops.inputs import BF16, DTYPES, E4M3, F16, normal


def check_decode(device, q, k, v, lengths, **options):
    """lengths: of each sequence; k and v dense (4 axes, NaN past each length) or ragged (3 axes)."""
    device = device.holding(k.dtype)
    ragged = k.ndim == 3
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    index = {"cu_seqlens_k": starts} if ragged else {"seq_lens": np.asarray(lengths, np.int32)}
    arrays = {name: device.array(value) for name, value in index.items()}
    extra = {n: device.array(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    got = cki.decode_attention(*map(device.array, (q, k, v)), **arrays, **extra, return_lse=True)
    truth = reference.decode_attention(q, k, v, **index, **options, return_lse=True)
    scales = (options.pop("k_scale", None), options.pop("v_scale", None))
    keys, values = (
        t.astype(np.float32) if s is None else t.astype(np.float32) * s[..., None]
        for t, s in zip((k, v), scales)
    )
    for b, length in enumerate(lengths):
        rows = [t[starts[b] : starts[b] + length] if ragged else t[b, :length] for t in (keys, values)]
        out, lse = plain(q[b : b + 1], *(t.astype(q.dtype)[None] for t in rows), causal=True, **options)
        assert_close(device.numpy(got[0])[b], truth[0][b], out[0], f"out of sequence {b}")
        assert_close(device.numpy(got[1])[b], truth[1][b], lse[0], f"lse of sequence {b}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3])
def test_dense(device, dtype, queries):
    lengths = [45, 0, 80]
    q = normal((3, queries, 6, 32), DTYPES[dtype], 1)
    k, v = (normal((3, 80, 2, 32), DTYPES[dtype], i) for i in (2, 3))
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = np.nan, np.nan
    check_decode(device, q, k, v, lengths, softcap=6.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged(device, dtype):
    lengths = [45, 0, 80, 1]
    q = normal((4, 2, 4, 16), DTYPES[dtype], 1)
    k, v = (normal((sum(lengths), 2, 16), DTYPES[dtype], i) for i in (2, 3))
    check_decode(device, q, k, v, lengths, window=(30, -1))


@pytest.mark.parametrize("scale", [1e-30, -1e-30, 1e30])
def test_scales_at_the_ends_of_what_is_allowed(device, scale):
    """Beyond them reciprocals and logits leave fp32: zeros or NaN came without a word."""
    q, k, v = normal((1, 2, 2, 16), F16, 1), normal((1, 40, 1, 16), F16, 2), normal((1, 40, 1, 16), F16, 3)
    for queries in (q, q[:, :1]):
        check_decode(device, queries, k, v, [33], scale=scale)
    got = cki.attention(*map(device.array, (q, k, v)), scale=scale, causal=True)
    truth = reference.attention(q, k, v, scale=scale, causal=True)
    np.testing.assert_allclose(device.numpy(got), truth, atol=2e-3)


def test_dense_head_major(device):
    """[batch, kv_heads, capacity, dim] in memory."""
    q, k, v = normal((2, 1, 4, 16), BF16, 1), normal((2, 2, 40, 16), BF16, 2), normal((2, 2, 40, 16), BF16, 3)
    lengths = np.array([40, 11], np.int32)
    keys, values = (device.array(t).transpose(0, 2, 1, 3) for t in (k, v))
    out = cki.decode_attention(device.array(q), keys, values, device.array(lengths))
    truth = reference.decode_attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), lengths)
    assert np.abs(device.numpy(out).astype(np.float64) - truth).max() < 0.02


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_e4m3(device, ragged, static):
    lengths = [50, 33]
    shape = (83, 2) if ragged else (2, 50, 2)
    k, v = (normal((*shape, 32), np.float32, i, 60.0).astype(E4M3) for i in (2, 3))
    generator = np.random.default_rng(4)
    scale = [
        np.exp(generator.uniform(-5, -3, shape[-1:] if static else shape)).astype(np.float32)
        for _ in range(2)
    ]
    check_decode(device, normal((2, 1, 4, 32), F16, 1), k, v, lengths, k_scale=scale[0], v_scale=scale[1])


def test_offsets_outside_the_tokens_are_inert(device):
    q = device.array(normal((3, 1, 2, 16), F16, 1))
    k = device.array(normal((20, 2, 16), F16, 2))
    offsets = device.array(np.array([-4, 10, 20, 900], np.int32))
    out, lse = cki.decode_attention(q, k, k, cu_seqlens_k=offsets, return_lse=True)
    assert (device.numpy(out)[[0, 2]] == 0).all()
    assert (device.numpy(lse)[[0, 2]] == -np.inf).all()
    assert np.isfinite(device.numpy(lse)[1]).all()
