"""Quantisation to e4m3 in float64: the specification of `cki.quantize_fp8`, `rms_norm_quantize`, `layer_norm_quantize`.

Scales are those of fp32, as the operation returns them; codes are returned as the values that they stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cki.reference.norm import layer_norm, rms_norm

Array = NDArray[Any]
Result = NDArray[np.float64]

_LARGEST = 448.0
_BLOCK = 128


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
