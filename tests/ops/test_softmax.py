"""softmax against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, F16, F32, STRIDED, normal, strided
from tests.ops.pointwise_cases import WIDTHS
from tests.orders import every_check, orders

LOWEST = -np.inf


def plain(x, mask=None, scale=1.0):
    """As frameworks compute it: fp32 inside, rounded once."""
    keep = np.broadcast_to(True if mask is None else mask, x.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        v = np.where(keep, x.astype(np.float32) * np.float32(scale), np.float32(LOWEST))
        e = np.exp(v - np.maximum(v.max(-1, keepdims=True), np.float32(-3e38)))
    return (e / np.maximum(e.sum(-1, keepdims=True, dtype=np.float32), np.float32(1e-37))).astype(x.dtype)


def check(device, x, mask=None, scale=1.0):
    given = None if mask is None else device.array(mask)
    y = cki.softmax(device.array(x), given, scale=scale)
    assert y.dtype == x.dtype and y.shape == x.shape
    assert_close(device.numpy(y), cki.reference.softmax(x, mask, scale=scale), plain(x, mask, scale))
    return device.numpy(y)


# Arithmetic is fp32 for every type: each width with f32, and in turns with one of the 16-bit types.
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(n, dtype) for i, n in enumerate([*WIDTHS, 33000]) for dtype in ("f32", ("f16", "bf16")[i % 2])],
)
def test_widths(device, width, dtype):
    rows = 2 if width > 4000 else 5
    x = normal((rows, width), DTYPES[dtype], 1, scale=4)
    y = check(device, x, scale=0.7)
    assert np.abs(y.astype(np.float64).sum(-1) - 1).max() < 0.01


@pytest.mark.parametrize("width", [64, 70000])
def test_logits_of_any_size(device, width):
    """Neither the exponential nor the product with the scale overflows."""
    x = normal((6, width), F32, 1) * np.array([1.0, 60, 1e4, 1e30, 3e37, 1e-30], np.float32)[:, None]
    check(device, x)
    check(device, x, scale=1e-4)
    check(device, x, scale=1e38)
    check(device, -np.abs(x) - np.float32(2000))


@pytest.mark.parametrize("width", [31, 64, 1024, 40000])
@pytest.mark.parametrize("shape", ["full", "one row", "one column", "scalar"])
def test_masks(device, width, shape):
    x = normal((3, 4, width), BF16, 1, scale=3)
    full = np.random.default_rng(2).random((3, 4, width)) < 0.4
    full[0, 0] = False
    mask = {
        "full": full, "one row": full[1, 1], "one column": full[..., 2:3], "scalar": np.array([True])
    }[shape]  # fmt: skip
    y = check(device, x, mask)
    hidden = ~np.broadcast_to(mask, x.shape)
    assert not y[hidden].any()


def test_hidden_elements_may_hold_anything(device):
    x, mask = normal((4, 100), F32, 1), np.ones((4, 100), bool)
    x[0, 3], x[1, 4], x[2, 5] = np.nan, np.inf, LOWEST
    mask[[0, 1, 2], [3, 4, 5]] = False
    y = check(device, x, mask)
    assert np.isfinite(y).all()


@pytest.mark.parametrize("width", [32, 40000])
def test_values_that_are_not_finite(device, width):
    x = normal((5, width), F32, 1)
    x[0, 3], x[1, 4], x[2, 5], x[3] = np.nan, np.inf, LOWEST, LOWEST
    y = device.numpy(cki.softmax(device.array(x)))
    assert np.isnan(y[0]).all() and np.isnan(y[1, 4])
    assert y[2, 5] == 0 and abs(y[2].sum() - 1) < 1e-5
    assert not y[3].any()
    assert abs(y[4].sum() - 1) < 1e-5


@pytest.mark.parametrize("layout", STRIDED)
def test_strides_and_alignment(device, layout):
    base, masks = normal((8, 8, 2 * 48 + 8), BF16, 1), np.random.default_rng(3).random((8, 8, 104)) < 0.5
    x, mask = strided(layout, base), strided(layout, masks)
    y = cki.softmax(strided(layout, device.array(base)), strided(layout, device.array(masks)))
    assert_close(device.numpy(y), cki.reference.softmax(x, mask), plain(x, mask))
    y = cki.softmax(strided(layout, device.array(base)), device.array(masks)[0, 0, ::2][:48])
    mask = masks[0, 0, ::2][:48]
    assert_close(device.numpy(y), cki.reference.softmax(x, mask), plain(x, mask))


def test_five_permuted_axes(device):
    base = normal((2, 3, 2, 4, 3, 16), F32, 1)
    order = (4, 1, 3, 0, 2, 5)
    x = base.transpose(order)
    y = cki.softmax(device.array(base).transpose(order))
    assert_close(device.numpy(y), cki.reference.softmax(x), plain(x))


@pytest.mark.parametrize("width", [333, 40000])
def test_in_place(device, width):
    x = normal((3, width), F16, 1)
    there = device.array(x)
    assert cki.softmax(there, out=there) is there
    assert_close(device.numpy(there), cki.reference.softmax(x), plain(x))


def test_empty_batch_one_axis_and_many_rows(device):
    assert cki.softmax(device.array(np.empty((0, 8), np.float32))).shape == (0, 8)
    check(device, normal((40,), F16, 1))
    check(device, normal((70001, 8), BF16, 1))


@pytest.mark.parametrize(("rows", "width"), [(13, 29), (5, 500), (3, 2100), (2, 33001)])
def test_under_every_check(device, rows, width):
    x, mask = normal((rows, width), BF16, 1), np.random.default_rng(4).random((rows, width)) < 0.5
    for seed in orders(device, width > 29):
        with every_check(device, seed):
            check(device, x, mask)
