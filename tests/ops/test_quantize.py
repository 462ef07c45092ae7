"""quantize_fp8 against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import UnsupportedError
from tests.ops.inputs import BF16, DTYPES, E4M3, F16, F32, STRIDED, normal, strided
from tests.ops.pointwise_cases import WIDTHS
from tests.orders import every_check, orders

GRANULARITIES = ("row", "block128")


def values_of(device, codes):
    """The numbers that codes, of uint8 where the framework has no 8-bit floats, stand for."""
    return device.numpy(codes).view(E4M3).astype(np.float64)


def assert_nearest(got, x, scales):
    """Each code is the nearest to x / scale, or to a number 2^-22 beside it: the reciprocal is rounded."""
    exact = np.asarray(x).astype(np.float64) / scales
    below, above = (
        cki.reference.quantize_fp8(np.abs(exact) * factor, scale=np.ones(1), granularity="tensor")
        for factor in (1 - 2.0**-22, 1 + 2.0**-22)
    )
    number = ~np.isnan(exact)
    assert np.array_equal(~np.isnan(got), number)
    assert ((below <= np.abs(got)) & (np.abs(got) <= above))[number].all()
    assert np.array_equal(np.signbit(got)[number], np.signbit(exact)[number])


def check(device, x, granularity, on_device=None):
    given = device.array(x) if on_device is None else on_device
    codes, scale = cki.quantize_fp8(given, granularity=granularity, out_dtype="uint8")
    _, expected = cki.reference.quantize_fp8(x, granularity=granularity)
    assert np.array_equal(device.numpy(scale), expected.astype(np.float32))
    got = values_of(device, codes)
    assert got.shape == x.shape
    block = x.shape[-1] if granularity == "row" else 128
    assert_nearest(got, x, np.repeat(expected, block, axis=-1)[..., : x.shape[-1]])
    return got, device.numpy(scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("width", [*WIDTHS, 128, 4096, 33000])
def test_widths(device, width, granularity):
    dtype = (F32, F16, BF16)[width % 3]
    rows = 2 if width > 4000 else 5
    got, scale = check(device, normal((rows, width), dtype, 1, scale=3), granularity)
    assert np.abs(got).max() == 448
    assert (scale > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_infinities_and_nan(device, granularity, dtype):
    x = normal((7, 200), DTYPES[dtype], 1)
    x[0] = 0
    x[1, 5], x[1, 150] = np.inf, -np.inf
    x[2, 7] = np.nan
    x[3] = np.nan
    x[4] = np.inf
    x[5] = -0.0
    got, scale = check(device, x, granularity)
    assert (scale[[0, 3, 4, 5]] == 1).all()
    assert got[1, 5] == 448 and got[1, 150] == -448 and (got[4] == 448).all()
    assert np.isnan(got[2, 7]) and np.isfinite(np.delete(got[2], 7)).all() and np.isnan(got[3]).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_magnitudes_of_all_of_fp32(device, granularity):
    x = (
        normal((7, 300), F32, 1)
        * np.array([3e37, 1e20, 1.0, 1e-20, 1e-34, 1e-38, 3e-44], np.float32)[:, None]
    )
    got, scale = check(device, x, granularity)
    assert (scale >= np.float32(2.0**-126)).all()
    assert (np.abs(got[:5]).max(-1) == 448).all()


@pytest.mark.parametrize("exponent", [-149, -140, -128, -127, -126, -120])
def test_given_scales_whose_reciprocal_is_no_number(device, exponent):
    """Zeros stay zeros, the smallest magnitudes have their codes, and others saturate."""
    scale = np.full(1, 2.0**exponent, np.float32)
    steps = np.array([0, -0.0, 1, -3, 7, 200, 448, 460, 2**30, np.inf, -np.inf, np.nan])
    x = np.tile((steps * 2.0**exponent).astype(F32), 11)
    codes = cki.quantize_fp8(
        device.array(x), scale=device.array(scale), granularity="tensor", out_dtype="uint8"
    )
    expected = cki.reference.quantize_fp8(x, scale=scale, granularity="tensor")
    np.testing.assert_array_equal(device.numpy(codes).view(E4M3).astype(np.float64), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_given_scale(device, dtype):
    x = normal((5, 1001), DTYPES[dtype], 1, scale=100)
    x[0, :4] = np.nan, np.inf, -np.inf, 0
    for shape in ((), (1,), (1, 1)):
        scale = np.full(shape, 0.125, np.float32)
        codes = cki.quantize_fp8(
            device.array(x), scale=device.array(scale), granularity="tensor", out_dtype="uint8"
        )
        expected = cki.reference.quantize_fp8(x, scale=scale, granularity="tensor")
        assert np.array_equal(values_of(device, codes), expected, equal_nan=True)


@pytest.mark.parametrize("granularity", ["row", "block128", "tensor"])
@pytest.mark.parametrize("layout", STRIDED)
def test_strides_and_alignment(device, layout, granularity):
    base = normal((8, 8, 2 * 144 + 8), BF16, 1)
    x, there = strided(layout, base), strided(layout, device.array(base))
    if granularity != "tensor":
        check(device, x, granularity, there)
        return
    scale = device.array(np.array([0.01], np.float32))
    codes = cki.quantize_fp8(there, scale=scale, granularity="tensor", out_dtype="uint8")
    assert_nearest(values_of(device, codes), x, np.float64(np.float32(0.01)))


def test_five_permuted_axes(device):
    base = normal((2, 3, 2, 4, 3, 16), F32, 1)
    order = (4, 1, 3, 0, 2, 5)
    for granularity in GRANULARITIES:
        check(device, base.transpose(order), granularity, device.array(base).transpose(order))


def test_outputs_of_other_strides(device):
    """Block scales stored transposed, as a GEMM may want them; codes padded and stepped."""
    x = normal((6, 300), BF16, 1)
    codes, scales = device.empty((6, 640), np.uint8), device.empty((3, 8), F32)
    cki.quantize_fp8(
        device.array(x), granularity="block128", out_dtype="uint8", out=codes[:, 20:620:2],
        scale_out=scales.T[1:7],
    )  # fmt: skip
    _, expected = cki.reference.quantize_fp8(x, granularity="block128")
    assert np.array_equal(device.numpy(scales)[:, 1:7].T, expected.astype(np.float32))
    assert np.isnan(device.numpy(scales)[:, [0, 7]]).all()
    inner = np.ascontiguousarray(device.numpy(codes)[:, 20:620:2]).view(E4M3).astype(np.float64)
    assert_nearest(inner, x, np.repeat(expected, 128, axis=-1)[:, :300])
    rest = np.delete(device.numpy(codes), np.arange(20, 620, 2), axis=1)
    assert (rest == 0xFF).all()


def test_codes_of_the_frameworks_type():
    with cki.device("sim"):
        codes, scale = cki.quantize_fp8(normal((3, 40), F16, 1))
        assert codes.dtype == E4M3 and scale.shape == (3, 1) and scale.dtype == np.float32
        into = np.empty((3, 40), E4M3)
        assert cki.quantize_fp8(normal((3, 40), F16, 1), out=into)[0] is into
        assert np.array_equal(into.view(np.uint8), codes.view(np.uint8))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty_batch_and_one_axis(device, granularity):
    codes, scale = cki.quantize_fp8(
        device.array(np.empty((0, 300), np.float32)), granularity=granularity, out_dtype="uint8"
    )
    assert codes.shape == (0, 300) and scale.shape == (0, 1 if granularity == "row" else 3)
    check(device, normal((300,), F16, 1), granularity)
    check(device, normal((30001, 8), BF16, 1), granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("rows", "width"), [(13, 29), (3, 1000), (2, 2100), (1, 33001)])
def test_under_every_check(device, rows, width, granularity):
    x = normal((rows, width), BF16, 1)
    for seed in orders(device, width > 29):
        with every_check(device, seed):
            check(device, x, granularity)


def test_refused_before_sm_89(monkeypatch):
    monkeypatch.setenv("CKI_SIM_ARCH", "sm_80")
    with cki.device("sim"), pytest.raises(UnsupportedError, match="e4m3 need sm_89"):
        cki.quantize_fp8(np.ones((2, 8), np.float32))
