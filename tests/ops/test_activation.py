"""gated_activation and bias_activation against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.heuristics.pointwise import ACTIVATIONS, LAYOUTS
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, F16, F32, STRIDED, normal, strided
from tests.ops.pointwise_cases import WIDTHS, plain_activation
from tests.orders import every_check, orders


def plain_gated(x, bias=None, *, activation="silu", layout="gate_first"):
    both = x.astype(np.float32) + (0 if bias is None else bias.astype(np.float32))
    width = both.shape[-1] // 2
    gate, up = both[..., :width], both[..., width:]
    if layout == "up_first":
        gate, up = up, gate
    if layout == "interleaved":
        gate, up = both[..., ::2], both[..., 1::2]
    return (plain_activation(activation, gate) * up).astype(x.dtype)


def plain_bias(x, bias=None, *, activation="gelu", multiplier=None):
    y = plain_activation(activation, x.astype(np.float32) + (0 if bias is None else bias.astype(np.float32)))
    return (y if multiplier is None else y * multiplier.astype(np.float32)).astype(x.dtype)


@pytest.mark.parametrize(
    ("layout", "width"),
    [("gate_first", width) for width in WIDTHS]
    + [(layout, width) for layout in ("up_first", "interleaved") for width in (2, 33, 384, 4097)],
)
def test_gated_widths(device, width, layout):
    dtype = (F32, F16, BF16)[WIDTHS.index(width) % 3]
    x, bias = normal((3, 2 * width), dtype, 1, scale=2), normal((2 * width,), dtype, 2)
    options = {"bias": bias} if WIDTHS.index(width) % 2 else {}
    y = cki.gated_activation(
        device.array(x), **{k: device.array(v) for k, v in options.items()}, layout=layout
    )
    truth = cki.reference.gated_activation(x, **options, layout=layout)
    assert_close(device.numpy(y), truth, plain_gated(x, **options, layout=layout))


VALUES = np.concatenate([np.linspace(-12, 12, 331), [0.0, -0.0, 1e-6, -1e-6, 80.0, -80.0]])


# Arithmetic is fp32 for every type: each activation with f32, and in turns with one of the 16-bit types.
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(name, dtype) for i, name in enumerate(ACTIVATIONS) for dtype in ("f32", ("f16", "bf16")[i % 2])],
    ids=str,
)
def test_every_activation(device, activation, dtype):
    x = VALUES.astype(DTYPES[dtype])
    y = device.numpy(cki.bias_activation(device.array(x), activation=activation))
    truth = cki.reference.bias_activation(x, activation=activation)
    assert_close(y, truth, plain_bias(x, activation=activation))
    x2 = np.stack([x, np.full_like(x, 0.5)], -1).reshape(1, -1)
    gated = device.numpy(cki.gated_activation(device.array(x2), activation=activation, layout="interleaved"))
    assert_close(gated[0], 0.5 * truth, 0.5 * truth.astype(x.dtype).astype(np.float64))


def test_gelu_is_right_relative_to_small_results(device):
    """(1 + erf) / 2 in fp32 is off by 4 % at -5; the tail's own polynomial is not."""
    x = np.linspace(-8, -0.01, 401).astype(np.float32)
    y = device.numpy(cki.bias_activation(device.array(x), activation="gelu")).astype(np.float64)
    truth = cki.reference.bias_activation(x, activation="gelu")
    assert np.max(np.abs(y / truth - 1)) < 5e-6


def test_values_that_are_not_finite(device):
    x = np.ones(VALUES.shape, np.float32)  # a shape for which there are kernels
    x[:3] = np.inf, -np.inf, np.nan
    for activation in ACTIVATIONS:
        y = device.numpy(cki.bias_activation(device.array(x), activation=activation))
        assert np.isnan(y[2]) and np.isfinite(y[3])
        assert y[0] == (1 if activation in ("sigmoid", "tanh") else np.inf)
    relu = device.numpy(cki.bias_activation(device.array(x), activation="relu"))
    assert relu[1] == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_bias_and_multiplier(device, width):
    dtype = (BF16, F32, F16)[WIDTHS.index(width) % 3]
    x, bias, multiplier = (
        normal((3, width), dtype, 1, 2),
        normal((width,), F32, 2),
        normal((3, width), dtype, 3),
    )
    alone = ({"bias": bias}, {"multiplier": multiplier})[WIDTHS.index(width) % 2]
    for options in (alone, {"bias": bias, "multiplier": multiplier}):
        given = {k: device.array(v) for k, v in options.items()}
        y = cki.bias_activation(device.array(x), **given, activation="silu")
        assert y.dtype == x.dtype
        truth = cki.reference.bias_activation(x, **options, activation="silu")
        assert_close(device.numpy(y), truth, plain_bias(x, **options, activation="silu"))


def test_nothing_is_rounded_before_the_end(device):
    """1 + 2^-9 is 1 in bf16; the fp32 sum, minus 1 by the multiplier's partner row, keeps it."""
    x, bias = np.ones((1, 64), BF16), np.full(64, 2.0**-9, BF16)
    y = device.numpy(cki.bias_activation(device.array(x), device.array(bias), activation="relu2"))
    assert np.array_equal(y.astype(np.float64), np.full((1, 64), np.float64(BF16.type((1 + 2.0**-9) ** 2))))


@pytest.mark.parametrize("layout", STRIDED)
def test_strides_and_alignment(device, layout):
    base = normal((8, 8, 2 * 48 + 8), BF16, 1)
    x = strided(layout, base)
    on_device = strided(layout, device.array(base))
    y = cki.bias_activation(on_device, activation="gelu", multiplier=on_device)
    assert_close(
        device.numpy(y),
        cki.reference.bias_activation(x, activation="gelu", multiplier=x),
        plain_bias(x, activation="gelu", multiplier=x),
    )
    for halves in LAYOUTS:
        y = cki.gated_activation(on_device, layout=halves)
        truth = cki.reference.gated_activation(x, layout=halves)
        assert_close(device.numpy(y), truth, plain_gated(x, layout=halves))


def test_output_of_other_strides(device):
    x, out = normal((5, 4, 64), F16, 1), device.empty((5, 4, 48), F16)
    y = cki.gated_activation(device.array(x), out=out[..., 8:40])
    assert_close(device.numpy(y), cki.reference.gated_activation(x), plain_gated(x))
    rest = device.numpy(out).astype(np.float32)
    assert np.isnan(rest[..., :8]).all() and np.isnan(rest[..., 40:]).all()


def test_stepped_bias(device):
    x, bias = normal((5, 40), F32, 1), normal((81,), F32, 2)
    on_device = device.array(bias)
    y = cki.bias_activation(device.array(x), on_device[:80:2])
    assert_close(device.numpy(y), cki.reference.bias_activation(x, bias[:80:2]), plain_bias(x, bias[:80:2]))
    y = cki.gated_activation(device.array(x), on_device[1:41])
    assert_close(device.numpy(y), cki.reference.gated_activation(x, bias[1:41]), plain_gated(x, bias[1:41]))


def test_five_permuted_axes(device):
    base = normal((2, 3, 2, 4, 3, 16), F32, 1)
    order = (4, 1, 3, 0, 2, 5)
    x = base.transpose(order)
    y = cki.gated_activation(device.array(base).transpose(order))
    assert_close(device.numpy(y), cki.reference.gated_activation(x), plain_gated(x))


@pytest.mark.parametrize("target", ["x", "multiplier"])
def test_in_place(device, target):
    x, multiplier = normal((3, 390), BF16, 1), normal((3, 390), BF16, 2)
    given = {"x": device.array(x), "multiplier": device.array(multiplier)}
    y = cki.bias_activation(**given, activation="gelu_tanh", out=given[target])
    assert y is given[target]
    options = {"activation": "gelu_tanh", "multiplier": multiplier}
    assert_close(device.numpy(y), cki.reference.bias_activation(x, **options), plain_bias(x, **options))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_empty_batch(device, shape):
    x = device.array(np.empty(shape, np.float32))
    assert cki.bias_activation(x).shape == shape
    assert cki.gated_activation(x).shape == (*shape[:-1], 4)


def test_one_dimension_and_many_rows(device):
    x = normal((40,), F16, 1)
    assert_close(
        device.numpy(cki.gated_activation(device.array(x))), cki.reference.gated_activation(x), plain_gated(x)
    )
    x = normal((70001, 8), BF16, 1)
    y = cki.gated_activation(device.array(x), activation="relu")
    truth = cki.reference.gated_activation(x, activation="relu")
    assert_close(device.numpy(y), truth, plain_gated(x, activation="relu"))


@pytest.mark.parametrize(("rows", "width"), [(3, 29), (9, 32), (2, 2100), (1, 16500)])
def test_under_every_check(device, rows, width):
    x, bias = normal((rows, 2 * width), BF16, 1), normal((2 * width,), BF16, 2)
    for seed in orders(device, width > 29):
        with every_check(device, seed):
            y = cki.gated_activation(device.array(x), device.array(bias), layout="interleaved")
            z = cki.bias_activation(device.array(x), device.array(bias), multiplier=device.array(x))
        options = {"bias": bias, "layout": "interleaved"}
        assert_close(device.numpy(y), cki.reference.gated_activation(x, **options), plain_gated(x, **options))
        options = {"bias": bias, "multiplier": x}
        assert_close(device.numpy(z), cki.reference.bias_activation(x, **options), plain_bias(x, **options))
