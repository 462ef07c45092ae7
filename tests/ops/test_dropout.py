"""dropout_add against the float64 reference: which elements are dropped agrees exactly, on both devices."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.reference.dropout import dropout_keeps
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, F16, F32, STRIDED, normal, strided
from tests.ops.pointwise_cases import WIDTHS
from tests.orders import every_check, orders


def counter(device, value, dtype=np.int64):
    return device.array(np.array([value], dtype))


def plain(x, residual, p, seed, offset):
    keeps = dropout_keeps(x.shape, p, seed, offset)
    y = np.where(keeps, x.astype(np.float32) * np.float32(1 / (1 - p)), np.float32(0))
    return (y if residual is None else y + residual.astype(np.float32)).astype(x.dtype)


def check(device, x, residual, p=0.3, seed=123456789, offset=7):
    y = cki.dropout_add(
        device.array(x), None if residual is None else device.array(residual), p, counter(device, seed),
        counter(device, offset),
    )  # fmt: skip
    truth = cki.reference.dropout_add(x, residual, p, [seed], [offset])
    assert_close(device.numpy(y), truth, plain(x, residual, p, seed, offset))
    return device.numpy(y)


@pytest.mark.parametrize("width", WIDTHS)
def test_widths(device, width):
    dtype = (F32, F16, BF16)[WIDTHS.index(width) % 3]
    x, residual = normal((3, width), dtype, 1), normal((3, width), dtype, 2)
    check(device, x, residual)
    alone = check(device, x, None, p=0.5)
    assert np.array_equal(alone != 0, dropout_keeps(x.shape, 0.5, 123456789, 7) & (x != 0))


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.999, 1 - 2.0**-40])
def test_probabilities(device, p):
    x = normal((100, 200), F32, 1)
    y = check(device, x, None, p=p)
    assert abs(np.mean(y == 0) - p) < 0.015
    if p == 0:
        assert np.array_equal(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_dropping_it_is_the_sum(device, dtype):
    x, residual = normal((4, 96), DTYPES[dtype], 1), normal((4, 96), DTYPES[dtype], 2)
    y = check(device, x, residual, p=0.0)
    assert np.array_equal(y, (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype))


def test_seeds_and_offsets_of_64_bits(device):
    x = np.ones((8, 64), np.float32)
    seen = []
    for seed, offset in ((0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32), (-1, 2**63 - 1), (2**62 + 5, -9)):
        seen.append(check(device, x, None, p=0.5, seed=seed, offset=offset) != 0)
    shares = [np.mean(a == b) for i, a in enumerate(seen) for b in seen[i + 1 :]]
    assert min(shares) > 0.35 and max(shares) < 0.65
    y = cki.dropout_add(
        device.array(x), None, 0.5, counter(device, 2**64 - 1, np.uint64), counter(device, 5, np.uint64)
    )
    assert np.array_equal(device.numpy(y) != 0, dropout_keeps(x.shape, 0.5, -1, 5))


@pytest.mark.parametrize("layout", STRIDED)
def test_the_choice_does_not_depend_on_strides_or_type(device, layout):
    expected = dropout_keeps((6, 4, 48), 0.4, 11, 12)
    for dtype in (BF16, F32):
        base = np.ones((8, 8, 2 * 48 + 8), dtype)
        there = strided(layout, device.array(base))
        y = cki.dropout_add(there, there, 0.4, counter(device, 11), counter(device, 12))
        assert np.array_equal(device.numpy(y).astype(np.float32) > 1, expected)


def test_the_choice_does_not_depend_on_the_number_of_rows(device):
    """One row alone, a few and many take other tilings; the first elements are dropped alike."""
    many = dropout_keeps((3000, 64), 0.5, 1, 2)
    for rows in (1, 3, 3000):
        x = np.ones((rows, 64), np.float16)
        y = cki.dropout_add(device.array(x), None, 0.5, counter(device, 1), counter(device, 2))
        assert np.array_equal(device.numpy(y) != 0, many[:rows])


def test_five_permuted_axes(device):
    base = normal((2, 3, 2, 4, 3, 16), F32, 1)
    order = (4, 1, 3, 0, 2, 5)
    x = base.transpose(order)
    y = cki.dropout_add(
        device.array(base).transpose(order), None, 0.3, counter(device, 3), counter(device, 4)
    )
    assert_close(
        device.numpy(y), cki.reference.dropout_add(x, None, 0.3, [3], [4]), plain(x, None, 0.3, 3, 4)
    )


def test_what_is_dropped_may_hold_anything(device):
    x = np.full((4, 64), np.nan, np.float32)
    keeps = dropout_keeps(x.shape, 0.5, 1, 2)
    y = cki.dropout_add(
        device.array(x), device.array(np.ones_like(x)), 0.5, counter(device, 1), counter(device, 2)
    )
    assert np.array_equal(np.isnan(device.numpy(y)), keeps)


@pytest.mark.parametrize("target", ["x", "residual"])
def test_in_place(device, target):
    x, residual = normal((3, 390), BF16, 1), normal((3, 390), BF16, 2)
    given = {"x": device.array(x), "residual": device.array(residual)}
    y = cki.dropout_add(**given, p=0.2, seed=counter(device, 1), offset=counter(device, 2), out=given[target])
    assert y is given[target]
    truth = cki.reference.dropout_add(x, residual, 0.2, [1], [2])
    assert_close(device.numpy(y), truth, plain(x, residual, 0.2, 1, 2))


def test_each_replay_that_advances_the_offset_differs(device):
    x = device.array(np.ones((16, 64), np.float32))
    seed, offset = counter(device, 5), counter(device, 0)
    graph = cki.capture(lambda t: cki.dropout_add(t, None, 0.5, seed, offset), x)
    for step in range(3):
        offset[...] = step
        y = device.numpy(graph.replay())
        device.synchronize()
        assert np.array_equal(y != 0, dropout_keeps((16, 64), 0.5, 5, step))
    graph.close()


def test_empty_batch_and_one_axis(device):
    one = counter(device, 1)
    assert cki.dropout_add(device.array(np.empty((0, 8), np.float32)), None, 0.5, one, one).shape == (0, 8)
    check(device, normal((41,), F16, 1), None)


@pytest.mark.parametrize(("rows", "width"), [(13, 29), (3, 32), (2, 2102), (1, 33001)])
def test_under_every_check(device, rows, width):
    x, residual = normal((rows, width), BF16, 1), normal((rows, width), BF16, 2)
    for seed in orders(device, width > 29):
        with every_check(device, seed):
            check(device, x, residual)
