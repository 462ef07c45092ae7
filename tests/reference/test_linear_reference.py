"""The float64 definitions of linear layers and activations against values known otherwise."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from cki.reference.linear import gelu, gelu_tanh, linear, relu, silu


def test_linear_by_hand():
    x, w = np.array([[1.0, 2.0]]), np.array([[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]])
    expected = [[1 * 3 + 2 * 6, 1 * 4 + 2 * 7, 1 * 5 + 2 * 8]]
    assert np.array_equal(linear(x, w), expected)
    assert np.array_equal(linear(x, w.T, weight_layout="out_in"), expected)
    assert np.array_equal(linear(x, w, np.array([1.0, 0.0, -1.0])), [[16, 18, 20]])


def test_the_residual_comes_after_the_activation():
    y = linear(np.array([[1.0]]), np.array([[-2.0]]), activation="relu", residual=np.array([[5.0]]))
    assert np.array_equal(y, [[5.0]])


def test_16_bit_inputs_give_float64_results():
    y = linear(np.ones((2, 3), ml_dtypes.bfloat16), np.full((3, 1), 0.1, np.float16))
    assert y.dtype == np.float64
    assert np.array_equal(y, np.full((2, 1), 3 * float(np.float16(0.1))))


def test_gelu_is_x_times_the_normal_distribution():
    """Phi(1) = 0.841344746068543 and Phi(-3) = 0.00134989803163009 (Abramowitz and Stegun, table 26.1)."""
    assert gelu(np.array([1.0, -3.0])) == pytest.approx(
        [0.841344746068543, -3 * 0.00134989803163009], rel=1e-13
    )
    assert gelu(np.array([-20.0]))[0] == pytest.approx(-10 * math.erfc(20 / math.sqrt(2)), rel=1e-12)


def test_activations_at_known_points():
    for function in (gelu, gelu_tanh, silu, relu):
        assert function(np.array([0.0]))[0] == 0
        assert function(np.array([40.0]))[0] == pytest.approx(40.0)
        assert function(np.array([-1e3]))[0] == pytest.approx(0.0, abs=1e-300)
        assert np.isnan(function(np.array([np.nan]))[0])
    assert silu(np.array([1.0]))[0] == pytest.approx(1 / (1 + math.exp(-1)))
    assert np.max(np.abs(gelu(np.linspace(-6, 6, 2001)) - gelu_tanh(np.linspace(-6, 6, 2001)))) < 5e-4


def test_activations_against_torch():
    torch = pytest.importorskip("torch")
    x = np.linspace(-9, 9, 1001)
    t = torch.from_numpy(x)
    functional = torch.nn.functional
    assert gelu(x) == pytest.approx(functional.gelu(t).numpy(), abs=1e-14)
    assert gelu_tanh(x) == pytest.approx(functional.gelu(t, approximate="tanh").numpy(), abs=1e-14)
    assert silu(x) == pytest.approx(functional.silu(t).numpy(), abs=1e-14)
