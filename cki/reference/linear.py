"""Linear layers and their activations in float64: the specification of `cki.linear`.

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


ACTIVATIONS: dict[str | None, Callable[[Array], Result]] = {
    None: _identity, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "relu": relu,
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
    from cki.reference.pointwise import gated_activation  # which takes its activations from here

    both = linear(x, w, bias, weight_layout=weight_layout)
    return gated_activation(both, activation=activation, layout=layout)
