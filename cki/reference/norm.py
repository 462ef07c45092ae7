"""Layer norm and RMS norm in float64: the specification of `cki.layer_norm` and `cki.rms_norm`.

Arguments may be of any float type, ml_dtypes' bfloat16 included; results are float64.  The sum x + residual is
rounded to the type of x, as the operations store it: to nearest even, from a sum in fp32 (which gives the same as a
single rounding of the exact sum, because fp32 has more than twice the digits of the 16-bit types).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Result = NDArray[np.float64] | tuple[NDArray[np.float64], NDArray[np.float64]]


def layer_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, residual: Array | None = None,
    eps: float = 1e-5, normalize: str = "rounded",
) -> Result:  # fmt: skip
    """(v - mean(v)) / sqrt(mean((v - mean(v))^2) + eps) * weight + bias over the last axis, v = x or x + residual.

    Returns y, or with a residual (y, x + residual rounded to x's type).  normalize: "rounded" or "unrounded": which of
    the two sums v is.
    """
    v, stored = _input(x, residual, normalize)
    deviation = v - v.mean(-1, keepdims=True)
    y = deviation / np.sqrt((deviation * deviation).mean(-1, keepdims=True) + eps)
    if weight is not None:
        y = y * _float64(weight)
    if bias is not None:
        y = y + _float64(bias)
    return y if stored is None else (y, stored)


def rms_norm(
    x: Array, weight: Array | None = None, *, residual: Array | None = None, eps: float = 1e-6,
    weight_offset: float = 0.0, normalize: str = "rounded",
) -> Result:  # fmt: skip
    """v / sqrt(mean(v^2) + eps) * (weight + weight_offset) over the last axis; the rest as for `layer_norm`."""
    v, stored = _input(x, residual, normalize)
    y = v / np.sqrt((v * v).mean(-1, keepdims=True) + eps)
    if weight is not None:
        y = y * (_float64(weight) + weight_offset)
    return y if stored is None else (y, stored)


def _float64(x: Array) -> NDArray[np.float64]:
    return np.asarray(x).astype(np.float64)


def _input(
    x: Array, residual: Array | None, normalize: str
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """What the norm reads, and the sum as it is stored (None without a residual)."""
    if residual is None:
        return _float64(x), None
    exact = _float64(x) + _float64(residual)
    dtype = np.asarray(x).dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    stored = exact.astype(wide).astype(dtype).astype(np.float64)
    return (stored if normalize == "rounded" else exact), stored
