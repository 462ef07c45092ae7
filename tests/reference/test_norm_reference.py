"""The reference against PyTorch's float64 norms, by hand where PyTorch has none, and its stated roundings."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cki import reference

RNG = np.random.default_rng(0)


def test_layer_norm_is_that_of_torch():
    torch = pytest.importorskip("torch")
    x, weight, bias = RNG.standard_normal((3, 5, 40)), RNG.standard_normal(40), RNG.standard_normal(40)
    expected = torch.nn.functional.layer_norm(
        torch.from_numpy(x), (40,), torch.from_numpy(weight), torch.from_numpy(bias), 1e-3
    )
    assert np.allclose(
        reference.layer_norm(x, weight, bias, eps=1e-3), expected.numpy(), rtol=1e-12, atol=1e-12
    )


def test_rms_norm_is_that_of_torch():
    torch = pytest.importorskip("torch")
    x, weight = RNG.standard_normal((3, 5, 40)), RNG.standard_normal(40)
    expected = torch.nn.functional.rms_norm(torch.from_numpy(x), (40,), torch.from_numpy(weight), 1e-3)
    assert np.allclose(reference.rms_norm(x, weight, eps=1e-3), expected.numpy(), rtol=1e-12, atol=1e-12)
    offset = torch.nn.functional.rms_norm(torch.from_numpy(x), (40,), torch.from_numpy(weight + 1), 1e-3)
    got = reference.rms_norm(x, weight, eps=1e-3, weight_offset=1.0)
    assert np.allclose(got, offset.numpy(), rtol=1e-12, atol=1e-12)


def test_a_row_by_hand():
    x = np.array([[3.0, -1.0, 1.0, 1.0]])
    assert np.allclose(reference.rms_norm(x, eps=0.0), x / np.sqrt(3.0))
    assert np.allclose(reference.layer_norm(x, eps=0.0), [[2 / 2**0.5, -2 / 2**0.5, 0.0, 0.0]])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_sum_is_rounded_to_the_type(dtype):
    x = RNG.standard_normal((4, 64)).astype(dtype)
    residual = (RNG.standard_normal((4, 64)) * 30).astype(dtype)
    y, stored = reference.rms_norm(x, residual=residual)
    in_fp32 = x.astype(np.float32) + residual.astype(np.float32)
    assert np.array_equal(stored, in_fp32.astype(dtype).astype(np.float64))
    assert np.array_equal(y, reference.rms_norm(stored.astype(dtype)))
    unrounded, same = reference.rms_norm(x, residual=residual, normalize="unrounded")
    assert np.array_equal(same, stored)
    exact = x.astype(np.float64) + residual.astype(np.float64)
    assert np.array_equal(unrounded, reference.rms_norm(exact))
    if dtype is not np.float32:
        assert np.any(unrounded != y)


def test_large_mean():
    x = RNG.standard_normal((4, 64)) + 1e4
    y = reference.layer_norm(x, eps=0.0)
    assert np.allclose(y.mean(-1), 0, atol=1e-9)
    assert np.allclose(y.var(-1), 1)


def test_embedding_by_hand():
    word, place, kind = (
        np.arange(12.0).reshape(4, 3),
        100 * np.ones((5, 3)),
        np.array([[0.0] * 3, [1000.0] * 3]),
    )
    ids = np.array([[1, 3], [0, 9]])
    assert np.array_equal(reference.embed_tokens(ids, word)[0], word[[1, 3]])
    assert np.array_equal(reference.embed_tokens(ids, word)[1], [[0, 1, 2], [0, 0, 0]])
    whole = reference.embed_tokens(ids, word, place, np.array([[1, 0], [0, 1]]), kind, np.array([2, 7]))
    assert np.array_equal(whole[0], [word[1] + 1100, word[3]])  # position 7 is outside its table
    assert np.array_equal(whole[1], [word[0] + 100, [1000] * 3])


def test_pooling_by_hand():
    x = np.array([[[3.0, 4.0], [1.0, 0.0], [np.nan, np.inf]], [[np.nan] * 2] * 3])
    mask = np.array([[1, 1, 0], [0, 0, 0]])
    assert np.array_equal(reference.mean_pool(x, mask, normalize=False), [[2.0, 2.0], [0.0, 0.0]])
    assert np.allclose(reference.mean_pool(x, mask), [[0.5**0.5, 0.5**0.5], [0.0, 0.0]])
    assert np.array_equal(reference.mean_pool(x, np.array([2, 0])), reference.mean_pool(x, mask))
