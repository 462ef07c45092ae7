"""Linear layers, activations and softmax in float64: the specification of `cki.linear`, `linear_fp8`, `gated_linear`,
`gated_activation`, `bias_activation` and `softmax`.

Arguments may be of any float type, ml_dtypes' bfloat16 included; results are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Result = NDArray[np.float64]

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def linear_fp8(x: Array, x_scale: Array, w: Array, w_scale: Array, bias: Array | None = None) -> Result:
    """(x * x_scale) @ (w * w_scale).T + bias.  x, w: values of e4m3, or their codes as uint8; a scale for each 128
    elements of a row of x, or one a row; for each 128 x 128 of w, one a row, or one in all."""
    values = [_values(codes) for codes in (x, w)]
    a = values[0] * _spread(np.asarray(x_scale), values[0].shape[-1], -1)
    rows = np.asarray(w_scale)
    if rows.shape != (values[1].shape[0], 1):
        rows = _spread(rows, values[1].shape[0], 0)
    y: Result = a @ (values[1] * _spread(rows, values[1].shape[1], 1)).T
    return y if bias is None else y + _float64(bias)


def _values(codes: Array) -> Result:
    import ml_dtypes

    codes = np.asarray(codes)
    return _float64(codes.view(ml_dtypes.float8_e4m3fn) if codes.dtype == np.uint8 else codes)


def _spread(scale: Array, extent: int, axis: int) -> Result:
    """A scale for every element of an axis that it has one for all of, or one for each 128 of."""
    if scale.shape[axis] == 1:
        return _float64(scale)
    return _float64(np.repeat(scale, 128, axis).take(range(extent), axis))


def gelu(x: Array) -> Result:
    """x Phi(x) with the normal distribution's Phi(x) = (1 + erf(x / sqrt(2))) / 2 (arXiv:1606.08415)."""
    v = _float64(x)
    result: Result = 0.5 * v * _erfc(-v / math.sqrt(2))
    return result


def gelu_tanh(x: Array) -> Result:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the approximation of the same paper."""
    v = _float64(x)
    return 0.5 * v * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def silu(x: Array) -> Result:
    """x / (1 + exp(-x))."""
    v = _float64(x)
    return v * 0.5 * (1.0 + np.tanh(0.5 * v))


def relu(x: Array) -> Result:
    """x where it is positive, else 0; NaN stays NaN."""
    v = _float64(x)
    return np.where(v < 0, 0.0, v)


def _identity(x: Array) -> Result:
    return _float64(x)


def sigmoid(x: Array) -> Result:
    """1 / (1 + exp(-x))."""
    return 0.5 * (1.0 + np.tanh(0.5 * _float64(x)))


def tanh(x: Array) -> Result:
    """The hyperbolic tangent."""
    return np.tanh(_float64(x))


def quick_gelu(x: Array) -> Result:
    """x / (1 + exp(-1.702 x)): the sigmoid approximation of GELU (arXiv:1606.08415)."""
    return _float64(x) * sigmoid(1.702 * _float64(x))


def relu2(x: Array) -> Result:
    """relu(x)^2 (arXiv:2109.08668)."""
    return relu(x) ** 2


#: `cki.linear` takes the first five.
ACTIVATIONS: dict[str | None, Callable[[Array], Result]] = {
    None: _identity, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "relu": relu,
    "sigmoid": sigmoid, "tanh": tanh, "quick_gelu": quick_gelu, "relu2": relu2,
}  # fmt: skip


def linear(
    x: Array, w: Array, bias: Array | None = None, *, activation: str | None = None, residual: Array | None = None,
    weight_layout: str = "in_out",
) -> Result:  # fmt: skip
    """activation(x @ w + bias) + residual over the last axis of x.

    w: [K, N] ("in_out") or [N, K] ("out_in").  activation: None, "gelu", "gelu_tanh", "silu" or "relu".
    """
    weight = _float64(w) if weight_layout == "in_out" else _float64(w).T
    y = _float64(x) @ weight
    if bias is not None:
        y = y + _float64(bias)
    y = ACTIVATIONS[activation](y)
    return y if residual is None else y + _float64(residual)


def _float64(x: Array) -> Result:
    result: Result = np.asarray(x).astype(np.float64)
    return result


def gated_linear(
    x: Array, w: Array, bias: Array | None = None, *, activation: str | None = "silu", layout: str = "gate_first",
    weight_layout: str = "in_out",
) -> NDArray[np.float64]:  # fmt: skip
    """activation(gate) * up, where x @ w + bias holds both along its last axis (see `gated_activation`)."""
    both = linear(x, w, bias, weight_layout=weight_layout)
    return gated_activation(both, activation=activation, layout=layout)


def gated_activation(
    x: Array, bias: Array | None = None, *, activation: str | None = "silu", layout: str = "gate_first"
) -> Result:
    """activation(gate) * up, where x + bias holds both along its last axis.

    layout: "gate_first" [gate | up], "up_first" [up | gate] or "interleaved" [g0, u0, g1, u1 ...].
    """
    both = _float64(x) if bias is None else _float64(x) + _float64(bias)
    width = both.shape[-1] // 2
    if layout == "interleaved":
        gate, up = both[..., 0::2], both[..., 1::2]
    else:
        gate, up = both[..., :width], both[..., width:]
        if layout == "up_first":
            gate, up = up, gate
    return ACTIVATIONS[activation](gate) * up


def bias_activation(
    x: Array, bias: Array | None = None, *, activation: str | None = "gelu", multiplier: Array | None = None
) -> Result:
    """activation(x + bias) * multiplier."""
    y = ACTIVATIONS[activation](_float64(x) if bias is None else _float64(x) + _float64(bias))
    return y if multiplier is None else y * _float64(multiplier)


def softmax(x: Array, mask: Array | None = None, *, scale: float = 1.0) -> Result:
    """exp(scale * x) / sum(exp(scale * x)) over the last axis, of the elements that mask (True keeps) leaves.

    Hidden elements give 0.  A row whose elements are all hidden or -infinity gives zeros; one with a NaN or +infinity
    that is not hidden gives NaN where it is not hidden.
    """
    keep = np.broadcast_to(True if mask is None else np.asarray(mask), np.shape(x))
    values = np.where(keep, np.asarray(x).astype(np.float64), -np.inf)
    largest = values.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scale * (values - np.where(largest == -np.inf, 0.0, largest)))
    weights = np.where(keep, weights, 0.0)
    total = weights.sum(-1, keepdims=True)
    result: Result = weights / np.where(total == 0, 1.0, total)
    return result
