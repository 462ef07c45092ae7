"""Layer norm and RMS norm in float64: the specification of `cki.layer_norm`, `cki.rms_norm` and their quantised forms.

Arguments may be of any float type, ml_dtypes' bfloat16 included; results are float64.  The sum x + residual is
rounded to the type of x, as the operations store it: to nearest even, from a sum in fp32 (which gives the same as a
single rounding of the exact sum, because fp32 has more than twice the digits of the 16-bit types).

Quantisation to e4m3, alone and of norms: scales are those of fp32, as the operations return them; codes are returned as
the values that they stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Result = NDArray[np.float64]

_LARGEST = 448.0  # of e4m3
_BLOCK = 128


def layer_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, residual: Array | None = None,
    eps: float = 1e-5, normalize: str = "rounded",
) -> Result | tuple[Result, Result]:  # fmt: skip
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
) -> Result | tuple[Result, Result]:  # fmt: skip
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


def quantize_fp8(
    x: Array, *, scale: Array | None = None, granularity: str = "row"
) -> Result | tuple[Result, Result]:
    """(codes, scales) with a scale for each row ("row") or 128 neighbours of it ("block128"); the codes alone with the
    one given scale ("tensor").

    scale = largest finite magnitude / 448, rounded to fp32, at least 2^-126; 1 where there are only zeros.
    codes = x / scale to the nearest number of e4m3, ties to even, at most 448 in magnitude; NaN stays NaN.
    """
    values = np.asarray(x).astype(np.float64)
    if granularity == "tensor":
        return _nearest(values / float(np.ravel(np.asarray(scale))[0]))
    width = values.shape[-1]
    block = width if granularity == "row" else _BLOCK
    starts = np.arange(0, width, block)
    magnitudes = np.where(np.isfinite(values), np.abs(values), 0.0)
    largest = np.maximum.reduceat(magnitudes, starts, axis=-1)
    scales = np.maximum((largest / _LARGEST).astype(np.float32), np.float32(2.0**-126)).astype(np.float64)
    scales = np.where(largest == 0, 1.0, scales)
    return _nearest(values / np.repeat(scales, np.diff([*starts, width]), axis=-1)), scales


def rms_norm_quantize(
    x: Array,
    weight: Array | None = None,
    *,
    residual: Array | None = None,
    granularity: str = "row",
    **options: Any,
) -> tuple[Result, ...]:
    """(codes, scales) of the RMS norm, with a residual (codes, scales, x + residual); options are `rms_norm`'s."""
    return _quantized(rms_norm(x, weight, residual=residual, **options), granularity)


def layer_norm_quantize(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, residual: Array | None = None,
    granularity: str = "row", **options: Any,
) -> tuple[Result, ...]:  # fmt: skip
    """(codes, scales) of the layer norm, with a residual (codes, scales, x + residual); options are `layer_norm`'s."""
    return _quantized(layer_norm(x, weight, bias, residual=residual, **options), granularity)


def _quantized(normalized: Result | tuple[Result, Result], granularity: str) -> tuple[Result, ...]:
    y, *stored = normalized if isinstance(normalized, tuple) else (normalized,)
    return (*quantize_fp8(y, granularity=granularity), *stored)


def _nearest(values: Result) -> Result:
    """The nearest number of e4m3: multiples of 2^(exponent - 3), of 2^-9 at least."""
    magnitude = np.minimum(np.abs(values), _LARGEST)
    _, exponent = np.frexp(np.where(magnitude > 0, magnitude, 1.0))
    step = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    nearest: Result = np.copysign(np.minimum(np.rint(magnitude / step) * step, _LARGEST), values)
    return nearest
