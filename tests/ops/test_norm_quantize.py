"""rms_norm_quantize and layer_norm_quantize against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.ops.inputs import BF16, DTYPES, E4M3, F16, F32, STRIDED, normal, strided
from tests.orders import every_check, orders

OPS = ("rms_norm_quantize", "layer_norm_quantize")
GRANULARITIES = ("row", "block128")


def check(device, op, x, *affine, on_device=None, residual=None, granularity="row", **options):
    """Scales are right to 1e-5, codes for a y that is right to 1e-5 of itself and 2e-6 of the largest."""
    given = {} if residual is None else {"residual": device.array(residual)}
    codes, scale, *stored = getattr(cki, op)(
        device.array(x) if on_device is None else on_device, *map(device.array, affine), **given,
        granularity=granularity, out_dtype="uint8", **options,
    )  # fmt: skip
    norm = getattr(cki.reference, op.removesuffix("_quantize"))
    y = norm(x, *affine, residual=residual, **options)
    expected = getattr(cki.reference, op)(x, *affine, residual=residual, granularity=granularity, **options)
    assert len(expected) == 2 + len(stored)
    if residual is not None:
        y = y[0]
        assert np.array_equal(device.numpy(stored[0]).astype(np.float64), expected[2])
    scales = device.numpy(scale).astype(np.float64)
    assert np.allclose(scales, expected[1], rtol=1e-5, atol=0)
    block = x.shape[-1] if granularity == "row" else 128
    exact = y / np.repeat(scales, block, axis=-1)[..., : x.shape[-1]]
    allowed = 1e-5 * np.abs(exact) + 2e-6 * 448
    got = device.numpy(codes).view(E4M3).astype(np.float64)
    below, above = (
        cki.reference.quantize_fp8(exact + sign * allowed, scale=np.ones(1), granularity="tensor")
        for sign in (-1, 1)
    )
    assert ((below <= got) & (got <= above)).all()
    return got, scales


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [1, 3, 31, 127, 384, 1001, 1024, 4096, 16001])
def test_rows(device, op, width):
    dtype = (F32, F16, BF16)[width % 3]
    x = normal((2 if width > 4000 else 5, width), dtype, 1, scale=3)
    affine = [normal((width,), dtype, seed) for seed in ((2, 3) if op.startswith("layer") else (2,))]
    check(device, op, x, *affine)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [4, 100, 128, 384, 1000, 2044, 4096, 20000])
def test_blocks(device, op, width):
    dtype = (F32, F16, BF16)[width % 3]
    x, residual = (normal((3, width), dtype, seed, scale=3) for seed in (1, 2))
    affine = [normal((width,), dtype, seed) for seed in ((3, 4) if op.startswith("layer") else (3,))]
    _, scales = check(device, op, x, *affine, residual=residual, granularity="block128")
    assert scales.shape == (3, -(-width // 128))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_options(device, dtype, granularity):
    x, residual = normal((6, 256), DTYPES[dtype], 1), normal((6, 256), DTYPES[dtype], 2, scale=30)
    weight, bias = normal((256,), F32, 3), normal((256,), F32, 4)
    common = {"residual": residual, "granularity": granularity}
    for normalize in ("rounded", "unrounded"):
        check(
            device, "rms_norm_quantize", x, weight, normalize=normalize, weight_offset=1.0, eps=1e-2, **common
        )
    check(device, "layer_norm_quantize", x, weight, bias, **common)
    if dtype == "bf16":
        check(device, "layer_norm_quantize", x, granularity=granularity)
        check(device, "rms_norm_quantize", x, granularity=granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_extreme_rows(device, granularity):
    """Squares that leave the range of fp32, rows of zeros, and a NaN that stays in its row."""
    x = normal((5, 256), F32, 1) * np.array([1e19, 1e-25, 1.0, 0.0, 1.0], np.float32)[:, None]
    got, _ = check(device, "rms_norm_quantize", x[:3], eps=0.0, granularity=granularity)
    assert (np.abs(got).max(-1) == 448).all()
    x[4, 7] = np.nan
    codes, scale = cki.rms_norm_quantize(device.array(x), granularity=granularity, out_dtype="uint8")
    got = device.numpy(codes).view(E4M3).astype(np.float64)
    assert np.isfinite(got[:4]).all() and not got[3].any() and np.isnan(got[4]).all()
    assert (device.numpy(scale)[3:] == 1).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("layout", STRIDED)
def test_strides_and_alignment(device, layout, granularity):
    base = normal((8, 8, 2 * 144 + 8), F32, 1)
    x, there = strided(layout, base), strided(layout, device.array(base))
    if granularity == "block128" and layout in ("odd start", "stepped last axis"):
        with pytest.raises(UnsupportedError, match="128 neighbours must lie in one warp"):
            cki.rms_norm_quantize(there, granularity=granularity, out_dtype="uint8")
        return
    check(device, "rms_norm_quantize", x, on_device=there, granularity=granularity)


def test_sum_in_place_and_scales_transposed(device):
    x, residual = normal((6, 300), BF16, 1), normal((6, 300), BF16, 2)
    there, scales = device.array(residual), device.empty((3, 6), F32)
    codes, scale, stored = cki.rms_norm_quantize(
        device.array(x), residual=there, granularity="block128", out_dtype="uint8", residual_out=there,
        scale_out=scales.T,
    )  # fmt: skip
    assert stored is there and codes.shape == (6, 300) and scale.shape == (6, 3)
    _, expected, total = cki.reference.rms_norm_quantize(x, residual=residual, granularity="block128")
    assert np.array_equal(device.numpy(there).astype(np.float64), total)
    assert np.allclose(device.numpy(scales).T, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("op", OPS)
def test_empty_batch(device, op):
    x = device.array(np.empty((0, 256), np.float32))
    codes, scale, total = getattr(cki, op)(x, residual=x, granularity="block128", out_dtype="uint8")
    assert (codes.shape, scale.shape, total.shape) == ((0, 256), (0, 2), (0, 256))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("rows", "width"), [(13, 28), (3, 1000), (2, 4100)])
def test_under_every_check(device, op, rows, width, granularity):
    x, residual = normal((rows, width), BF16, 1), normal((rows, width), BF16, 2)
    x[0] = 1e19
    for seed in orders(device, width > 29):
        with every_check(device, seed):
            check(device, op, x, normal((width,), BF16, 3), residual=residual, granularity=granularity)


def test_refused():
    x = np.ones((2, 8), np.float32)
    with cki.device("sim"):
        with pytest.raises(InvalidArgumentError, match="granularity is 'tensor'"):
            cki.rms_norm_quantize(x, granularity="tensor")
        with pytest.raises(InvalidArgumentError, match="weight_offset is 1.0, but there is no weight"):
            cki.rms_norm_quantize(x, weight_offset=1.0)
        with pytest.raises(InvalidTypeError, match="residual is f16, x is f32"):
            cki.layer_norm_quantize(x, residual=x.astype(np.float16))
        with pytest.raises(UnsupportedError, match="rows do not fit in registers"):
            cki.rms_norm_quantize(np.ones((2, 20000), np.float32))


def test_refused_before_sm_89(monkeypatch):
    monkeypatch.setenv("CKI_SIM_ARCH", "sm_80")
    with cki.device("sim"), pytest.raises(UnsupportedError, match="e4m3 need sm_89"):
        cki.layer_norm_quantize(np.ones((2, 8), np.float32))
