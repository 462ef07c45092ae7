"""cki.fused_ffn against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from tests.compare import assert_close
from tests.ops.encoder_cases import EVERY_DTYPE, ORDERS, launches
from tests.ops.inputs import BF16, DTYPES, F16, normal
from tests.ops.linear_cases import plain as plain_linear
from tests.ops.norm_cases import plain as plain_norm

__all__ = ["launches"]  # a fixture


def tensors(dtype, shape=(2, 11), hidden=48, inner=80):
    weights = {"w1": (hidden, inner), "w2": (inner, hidden)}
    vectors = {"gamma": hidden, "beta": hidden, "b1": inner, "b2": hidden}
    return {
        "x": normal((*shape, hidden), dtype, 1),
        **{n: normal(s, dtype, i, scale=max(s[0], 1) ** -0.5) for i, (n, s) in enumerate(weights.items(), 2)},
        **{n: normal((w,), dtype, i, scale=0.5) for i, (n, w) in enumerate(vectors.items(), 4)},
    }


def plain(
    x,
    w1,
    w2,
    gamma=None,
    beta=None,
    b1=None,
    b2=None,
    *,
    activation="gelu",
    pre_ln=True,
    residual=True,
    epsilon=1e-5,
):
    """As a chain of separate operations of x's dtype."""
    u = plain_norm("layer_norm", x, gamma, beta, eps=epsilon) if pre_ln else x
    y = plain_linear(plain_linear(u, w1, b1, activation=activation), w2, b2)
    if residual:
        y = (y.astype(np.float32) + x.astype(np.float32)).astype(x.dtype)
    return y if pre_ln else plain_norm("layer_norm", y, gamma, beta, eps=epsilon)


def check(device, given, **options):
    on_device = {name: device.array(tensor) for name, tensor in given.items()}
    y = device.numpy(cki.fused_ffn(**on_device, **options))
    assert_close(y, cki.reference.fused_ffn(**given, **options), plain(**given, **options))


@ORDERS
@EVERY_DTYPE
def test_both_orders(device, dtype, pre_ln):
    check(device, tensors(DTYPES[dtype]), pre_ln=pre_ln)
    check(device, tensors(DTYPES[dtype], (7,), hidden=33, inner=19), pre_ln=pre_ln, residual=False)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "relu"])
def test_activations(device, activation):
    check(device, tensors(F16), activation=activation, epsilon=1e-3)


def test_vectors_are_optional(device):
    given = tensors(BF16)
    check(device, {name: given[name] for name in ("x", "w1", "w2")})
    check(device, {name: given[name] for name in ("x", "w1", "w2", "beta", "b2")}, pre_ln=False)


def test_weights_as_torch_stores_them_strides_and_out(device):
    given = tensors(F16)
    expected = device.numpy(cki.fused_ffn(**{name: device.array(t) for name, t in given.items()}))
    stored = {
        n: device.array(np.ascontiguousarray(given[n].T) if n in ("w1", "w2") else given[n]) for n in given
    }
    wide = device.array(np.concatenate([given["x"]] * 2, axis=-1))
    stored["x"], out = wide[..., :48], device.array(np.full((2, 11, 48), np.nan, F16))
    assert cki.fused_ffn(**stored, weight_layout="out_in", out=out) is out
    assert_close(device.numpy(out), cki.reference.fused_ffn(**given), expected)


def test_launches_and_nothing_to_compute(device, launches):
    given = {name: device.array(t) for name, t in tensors(F16).items()}
    for pre_ln in (True, False):
        launches.clear()
        cki.fused_ffn(**given, pre_ln=pre_ln)
        assert len(launches) == 3
    launches.clear()
    assert (
        cki.fused_ffn(**{**given, "x": device.array(np.zeros((0, 48), F16))}).shape == (0, 48)
        and not launches
    )


def test_every_broken_rule_is_named(device):
    given = {name: device.array(t) for name, t in tensors(F16).items()}
    with pytest.raises(InvalidArgumentError) as found:
        cki.fused_ffn(**{**given, "w2": given["w1"], "b1": given["b2"]}, activation="swish", epsilon=-1.0)
    for words in ("activation is 'swish'", "epsilon is -1.0", "w2 has shape (48, 80)", "b1 has shape (48,)"):
        assert words in str(found.value)
    with pytest.raises(InvalidTypeError, match="w1 is bf16, x is f16"):
        cki.fused_ffn(**{**given, "w1": device.array(tensors(BF16)["w1"])})


@ORDERS
def test_no_inner_features(device, pre_ln):
    """An empty product launches nothing: y is b2 and the residual, with the norm."""
    check(device, tensors(F16, inner=0), pre_ln=pre_ln)
