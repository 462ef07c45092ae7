"""The references of the pointwise operations against PyTorch's float64, published vectors, and by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cki import reference
from cki.reference.dropout import philox_4x32_10
from tests import cases

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("name", "torch_name", "options"),
    [
        ("gelu", "gelu", {}), ("gelu_tanh", "gelu", {"approximate": "tanh"}), ("silu", "silu", {}),
        ("relu", "relu", {}), ("sigmoid", "sigmoid", {}), ("tanh", "tanh", {}),
    ],
)  # fmt: skip
def test_activations_are_those_of_torch(name, torch_name, options):
    torch = pytest.importorskip("torch")
    x = np.linspace(-12, 12, 301)
    expected = getattr(torch.nn.functional, torch_name)(torch.from_numpy(x), **options).numpy()
    assert np.allclose(reference.bias_activation(x, activation=name), expected, rtol=1e-11, atol=1e-13)


def test_activations_by_hand():
    x, bias = np.array([[-2.0, 3.0]]), np.array([1.0, -1.0])
    assert np.array_equal(reference.bias_activation(x, activation="relu2"), [[0.0, 9.0]])
    assert np.allclose(reference.bias_activation(x, activation="quick_gelu"), x / (1 + np.exp(-1.702 * x)))
    assert np.array_equal(
        reference.bias_activation(x, bias, activation=None, multiplier=2 * x), [[4.0, 12.0]]
    )


@pytest.mark.parametrize("layout", ["gate_first", "up_first", "interleaved"])
def test_gated_layouts_hold_the_same(layout):
    gate, up = RNG.standard_normal((2, 3, 5))
    packed = {
        "gate_first": np.concatenate([gate, up], -1), "up_first": np.concatenate([up, gate], -1),
        "interleaved": np.stack([gate, up], -1).reshape(3, 10),
    }[layout]  # fmt: skip
    y = reference.gated_activation(packed, activation="relu", layout=layout)
    assert np.array_equal(y, np.maximum(gate, 0) * up)
    shifted = reference.gated_activation(packed - 1, np.ones(10), activation="relu", layout=layout)
    assert np.allclose(shifted, y)


def test_softmax_is_that_of_torch():
    torch = pytest.importorskip("torch")
    x = RNG.standard_normal((3, 5, 40)) * 20
    expected = torch.softmax(torch.from_numpy(x) * 0.3, -1).numpy()
    assert np.allclose(reference.softmax(x, scale=0.3), expected, rtol=1e-12, atol=0)


def test_softmax_by_hand():
    x = np.array([[0.0, np.log(3.0), np.nan], [-np.inf, -np.inf, -np.inf]])
    mask = np.array([True, True, False])
    assert np.allclose(reference.softmax(x, mask), [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]])
    assert np.isnan(reference.softmax(x)[0]).all()


def test_codes_are_the_nearest():
    x = np.concatenate(
        [RNG.standard_normal(2000) * 10.0 ** RNG.uniform(-4, 3, 2000), [np.nan, np.inf, -np.inf, 464]]
    )
    got = reference.quantize_fp8(x, scale=np.ones(1), granularity="tensor")
    assert np.array_equal(got, cases.fp8_decode(cases.fp8_encode(x)), equal_nan=True)
    small = x[np.abs(x) < 448]
    assert np.array_equal(
        reference.quantize_fp8(small, scale=np.ones(1), granularity="tensor"),
        small.astype(ml_dtypes.float8_e4m3fn).astype(np.float64),
    )


def test_scales_by_hand():
    x = np.zeros((2, 300))
    x[0, 5], x[0, 299], x[1, 130] = -896, np.inf, 1e-50
    codes, scales = reference.quantize_fp8(x, granularity="block128")
    assert np.array_equal(scales, [[2, 1, 1], [1, 2.0**-126, 1]])
    assert codes[0, 5] == -448 and codes[0, 299] == 448 and codes[1, 130] == 0
    codes, scales = reference.quantize_fp8(x)
    assert np.array_equal(scales, [[2], [2.0**-126]])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)  # fmt: skip
def test_philox_gives_the_published_words(counter, key, expected):
    """The known answers that the authors publish with Random123."""
    assert philox_4x32_10(np.array([counter]), np.array(key))[0].tolist() == expected


def test_dropout_by_hand():
    x = np.arange(1.0, 9.0).reshape(2, 4)
    keeps = reference.dropout_add(np.ones((2, 4)), None, 0.5, [0], [0]) > 0
    words = philox_4x32_10(np.array([[0, 0, 0, 0], [1, 0, 0, 0]]), np.zeros(2))
    assert np.array_equal(keeps, words >= 2**31)
    assert np.array_equal(reference.dropout_add(x, x, 0.5, [0], [0]), np.where(keeps, 3 * x, x))
