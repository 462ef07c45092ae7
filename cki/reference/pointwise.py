"""Activations and softmax in float64: the specification of `cki.gated_activation`, `bias_activation` and `softmax`.

Arguments may be of any float type, ml_dtypes' bfloat16 included; results are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cki.reference.linear import ACTIVATIONS as LINEAR_ACTIVATIONS
from cki.reference.linear import relu

Array = NDArray[Any]
Result = NDArray[np.float64]


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


ACTIVATIONS: dict[str | None, Callable[[Array], Result]] = {
    **LINEAR_ACTIVATIONS, "sigmoid": sigmoid, "tanh": tanh, "quick_gelu": quick_gelu, "relu2": relu2,
}  # fmt: skip


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


def _float64(x: Array) -> Result:
    result: Result = np.asarray(x).astype(np.float64)
    return result


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
