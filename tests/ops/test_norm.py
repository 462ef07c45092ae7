"""layer_norm and rms_norm against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, F16, F32, STRIDED, normal, strided
from tests.ops.norm_cases import plain, truth

WIDTHS = (1, 2, 3, 31, 33, 63, 65, 127, 129, 384, 1000, 1024, 4096, 4097, 20000)
FEW_WIDTHS = (2, 33, 384, 4097)


def apply(op: str, *args: Any, **options: Any) -> Any:
    return getattr(cki, op)(*args, **options)


@pytest.mark.parametrize(
    ("op", "dtype", "width"),
    [("rms_norm", "bf16", width) for width in WIDTHS]
    + [("layer_norm", "f32", width) for width in WIDTHS]
    + [
        (op, dtype, width)
        for op, dtype in (("rms_norm", "f32"), ("layer_norm", "bf16"))
        for width in FEW_WIDTHS
    ]
    + [(op, "f16", width) for op in ("rms_norm", "layer_norm") for width in (31, 1024)],
)
def test_widths(device, op, dtype, width):
    rows = 2 if width > 4000 else 5
    x = normal((rows, width), DTYPES[dtype], 1)
    affine = [normal((width,), DTYPES[dtype], seed) for seed in ((2, 3) if op == "layer_norm" else (2,))]
    y = apply(op, device.array(x), *map(device.array, affine))
    assert_close(device.numpy(y), truth(op, x, *affine), plain(op, x, *affine))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_affine_is_optional(device, op):
    x = normal((3, 5, 40), F32, 1)
    y = apply(op, device.array(x))
    assert y.shape == x.shape
    assert_close(device.numpy(y), truth(op, x), plain(op, x))


@pytest.mark.parametrize("given", ["weight", "bias"])
def test_layer_norm_with_one_of_weight_and_bias(device, given):
    x, vector = normal((3, 33), F32, 1), normal((33,), F32, 2)
    y = cki.layer_norm(device.array(x), **{given: device.array(vector)})
    assert_close(
        device.numpy(y), truth("layer_norm", x, **{given: vector}), plain("layer_norm", x, **{given: vector})
    )


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("weight_dtype", ["f32", "f16"])
def test_weights_of_another_type(device, op, weight_dtype):
    x = normal((5, 384), BF16, 1)
    weight = normal((384,), DTYPES[weight_dtype], 2)
    y = apply(op, device.array(x), device.array(weight))
    assert y.dtype == x.dtype
    assert_close(device.numpy(y), truth(op, x, weight), plain(op, x, weight))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("dtype", "width"), [("bf16", 128), ("f16", 129), ("f32", 1028)])
@pytest.mark.parametrize("normalize", ["rounded", "unrounded"])
def test_residual(device, op, dtype, width, normalize):
    x, weight = normal((6, width), DTYPES[dtype], 1), normal((width,), DTYPES[dtype], 2)
    residual = normal((6, width), DTYPES[dtype], 3, scale=30)
    y, s = apply(
        op, device.array(x), device.array(weight), residual=device.array(residual), normalize=normalize
    )
    expected, stored = truth(op, x, weight, residual=residual, normalize=normalize)
    assert np.array_equal(device.numpy(s).astype(np.float64), stored)  # bit-equal to the rounded sum
    read = (x.astype(np.float32) + residual.astype(np.float32)).astype(np.float32)
    read = read.astype(x.dtype) if normalize == "rounded" else read
    assert_close(device.numpy(y), expected, plain(op, read, weight).astype(x.dtype))


def test_residual_variants_differ(device):
    """In bf16 the two sums are far enough apart for the outputs to tell which one was read."""
    x, residual = normal((4, 128), BF16, 1), normal((4, 128), BF16, 2, scale=30)
    results = [
        device.numpy(cki.rms_norm(device.array(x), residual=device.array(residual), normalize=which)[0])
        for which in ("rounded", "unrounded")
    ]
    assert np.any(results[0] != results[1])


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 10.0])
def test_eps_is_inside_the_root(device, op, eps):
    x = normal((3, 64), F32, 1) * np.array([1e-4, 1e-3, 1e-2], np.float32)[:, None]
    y = apply(op, device.array(x), eps=eps)
    assert_close(device.numpy(y), truth(op, x, eps=eps), plain(op, x, eps=eps))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_weight_offset_is_added_in_fp32(device, dtype):
    """1 + 0.0039 is 1 in bf16; the result must be that of the fp32 sum, rounded once."""
    weight = np.tile([0.00390625, 15.8125, -0.99609375, 0.005, 3.0, -1.0, 127.5, 0.0], 8).astype(BF16)
    x = normal((4, 64), DTYPES[dtype], 1)
    y = cki.rms_norm(device.array(x), device.array(weight), weight_offset=1.0)
    assert_close(
        device.numpy(y),
        truth("rms_norm", x, weight, weight_offset=1.0),
        plain("rms_norm", x, weight, weight_offset=1.0),
    )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("width", [64, 2048])
def test_large_mean_beside_small_spread(device, dtype, width):
    """mean 1e4, spread 1: mean(x^2) - mean(x)^2 would be noise, and even the rounding of the mean shows in fp32."""
    x = normal((4, width), DTYPES[dtype], 1, mean=1e4)
    y = device.numpy(cki.layer_norm(device.array(x)))
    expected = truth("layer_norm", x)
    assert_close(y, expected, plain("layer_norm", x))
    if dtype == "f32":
        assert np.abs(y - expected).max() < 1e-5


def test_constant_rows_give_the_bias(device):
    x = np.repeat(np.array([[0.0], [1e4], [-3.3e7]], np.float32), 100, axis=1)
    bias = normal((100,), F32, 2)
    y = device.numpy(cki.layer_norm(device.array(x), None, device.array(bias)))
    assert np.abs(y - bias).max() < 1e-4


@pytest.mark.parametrize("width", [64, 1000, 2000, 20001])
def test_rows_of_equal_or_hardly_different_numbers(device, width):
    """Deviations from a rounded mean are all error then: their squares overflow, or that of their own mean shows."""
    values = np.array([3e9, 1.7e12, 1e19, -1e22, 1e30, -3e38, np.finfo(F32).max], F32)
    x = np.repeat(values[:, None], width, axis=1)
    assert not device.numpy(cki.layer_norm(device.array(x))).any()
    assert not truth("layer_norm", x).any()
    assert np.isnan(device.numpy(cki.layer_norm(device.array(x), eps=0.0))).all()  # 0 / 0
    for some in (slice(3, 4), slice(0, None, 3)):
        x[:, some] = np.nextafter(values, np.float32(0))[:, None]
        y, expected = device.numpy(cki.layer_norm(device.array(x))), truth("layer_norm", x)
        assert np.abs(y - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("width", [8, 64, 2000, 20001])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_row_with_an_infinity_is_nan_throughout(device, width, dtype, value):
    x = normal((3, width), dtype, 1)
    x[1, 5] = value
    y = device.numpy(cki.layer_norm(device.array(x))).astype(np.float32)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("width", [64, 2000])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_whose_squares_leave_the_range_of_fp32(device, op, width):
    scales = np.array([1e15, 1e19, 3e37, 1e-25, 1e-40, 1.0], np.float64)
    x = (normal((6, width), np.float64, 1).clip(-3, 3) * scales[:, None]).astype(np.float32)
    y = device.numpy(apply(op, device.array(x), eps=0.0))
    expected = truth(op, x, eps=0.0)
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()


def test_values_that_are_not_finite_stay_in_their_row(device):
    x = normal((4, 64), F32, 1)
    x[1, 3], x[2, 5] = np.inf, np.nan
    for y in (cki.rms_norm(device.array(x)), cki.layer_norm(device.array(x))):
        finite = np.isfinite(device.numpy(y)).all(-1)
        assert list(finite) == [True, False, False, True]


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("layout", STRIDED)
def test_strides_and_alignment(device, op, layout):
    base = normal((8, 8, 2 * 48 + 8), BF16, 1)
    weight = normal((48,), BF16, 2)
    x = strided(layout, base)
    y = apply(op, strided(layout, device.array(base)), device.array(weight))
    assert_close(device.numpy(y), truth(op, x, weight), plain(op, x, weight), layout)


def test_stepped_and_misaligned_weights(device):
    x, weights = normal((5, 40), F32, 1), normal((2, 81), F32, 2)
    on_device = device.array(weights)
    y = cki.layer_norm(device.array(x), on_device[0, :80:2], on_device[1, 1:41])
    affine = (weights[0, :80:2], weights[1, 1:41])
    assert_close(device.numpy(y), truth("layer_norm", x, *affine), plain("layer_norm", x, *affine))


def test_residual_of_other_strides(device):
    """Every tensor has its own layout: x permuted, the residual one row for all, outputs padded."""
    base, row = normal((3, 4, 5, 24), BF16, 1), normal((24,), BF16, 2)
    x, residual = base.transpose(0, 2, 1, 3), np.broadcast_to(row, (3, 5, 4, 24))
    out, sums = device.empty((3, 5, 4, 32), BF16), device.empty((3, 5, 4, 32), BF16)
    on_device = device.array(base).transpose(0, 2, 1, 3)
    one_row = device.array(row)
    if device.kind == "cuda":
        import cupy

        spread = cupy.broadcast_to(one_row, (3, 5, 4, 24))
    else:
        spread = np.broadcast_to(one_row, (3, 5, 4, 24))
    y, s = cki.rms_norm(on_device, residual=spread, out=out[..., :24], residual_out=sums[..., 8:])
    expected, stored = truth("rms_norm", x, residual=residual)
    assert np.array_equal(device.numpy(s).astype(np.float64), stored)
    assert_close(device.numpy(y), expected, plain("rms_norm", (x + residual).astype(BF16)))
    untouched = np.isnan(device.numpy(out)[..., 24:].astype(np.float32)).all()
    assert untouched
    assert np.isnan(device.numpy(sums)[..., :8].astype(np.float32)).all()


def test_five_permuted_axes(device):
    """More leading axes than the kernel indexes: several launches."""
    base = normal((2, 3, 2, 4, 3, 16), F32, 1)
    order = (4, 1, 3, 0, 2, 5)
    y = cki.rms_norm(device.array(base).transpose(order))
    x = base.transpose(order)
    assert_close(device.numpy(y), truth("rms_norm", x), plain("rms_norm", x))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("dtype", "width"), [("bf16", 384), ("f32", 4097)])
def test_in_place(device, op, dtype, width):
    x, residual = normal((3, width), DTYPES[dtype], 1), normal((3, width), DTYPES[dtype], 2)
    alone = device.array(x)
    assert apply(op, alone, out=alone) is alone
    assert_close(device.numpy(alone), truth(op, x), plain(op, x))
    left, right = device.array(x), device.array(residual)
    apply(op, left, residual=right, out=left, residual_out=right)
    expected, stored = truth(op, x, residual=residual)
    assert np.array_equal(device.numpy(right).astype(np.float64), stored)
    assert_close(device.numpy(left), expected, plain(op, stored.astype(x.dtype)))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 0, 3, 5)])
def test_empty_batch(device, shape):
    x = device.array(np.empty(shape, np.float32))
    y = cki.layer_norm(x)
    assert y.shape == shape
    y, s = cki.rms_norm(x, residual=x)
    assert y.shape == s.shape == shape


def test_one_dimension(device):
    x = normal((40,), F16, 1)
    assert_close(
        device.numpy(cki.layer_norm(device.array(x))), truth("layer_norm", x), plain("layer_norm", x)
    )


def test_many_rows(device):
    """More rows than a grid's second axis holds; the last is written like the first."""
    x = normal((70001, 8), BF16, 1)
    y = cki.rms_norm(device.array(x))
    assert_close(device.numpy(y), truth("rms_norm", x), plain("rms_norm", x))
