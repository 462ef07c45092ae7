"""e4m3 weights with a scale for each block of 128 by 128, as DeepSeek-V3 and Qwen3-FP8 files hold them.

A weight is codes[n, k] * scales[n // 128, k // 128].  Files call the scales `weight_scale_inv`: the inverse of what the
weight was multiplied with before rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cki.errors import InvalidArgumentError

Array = npt.NDArray[Any]

BLOCK = 128
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
#: The largest number of e4m3.
LARGEST_E4M3 = 448.0


class QuantizedWeight(NamedTuple):
    """codes: e4m3 [n, k].  scales: f32 [ceil(n / 128), ceil(k / 128)]."""

    codes: Array
    scales: Array


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a weight of that shape."""
    return tuple(-(-extent // BLOCK) for extent in shape)


def quantize_blocks(weight: Array) -> QuantizedWeight:
    """A matrix [n, k] of finite numbers in e4m3: each block's largest magnitude becomes 448, the rest is rounded to
    nearest even.  A block of zeros has scale 1.

    Raises InvalidArgumentError for what is no matrix, and where numbers are not finite.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise InvalidArgumentError(f"weight has shape {weight.shape}, not two axes of 1 or more")
    codes = np.empty(weight.shape, E4M3)
    scales = np.empty(scales_shape(weight.shape), np.float32)
    for row in range(scales.shape[0]):
        rows = slice(row * BLOCK, (row + 1) * BLOCK)
        strip = np.asarray(weight[rows], np.float32)
        starts = np.arange(0, weight.shape[1], BLOCK)
        largest = np.maximum.reduceat(np.abs(strip).max(axis=0), starts)
        if not np.isfinite(largest).all():
            raise InvalidArgumentError(f"weight is not finite in rows {rows.start} to {rows.stop - 1}")
        # 2**-126: below, the quotient by 448 is subnormal and would lose its digits.
        scale = np.where(
            largest > 0, np.maximum(largest / np.float32(LARGEST_E4M3), np.float32(2.0**-126)), 1
        )
        scales[row] = scale
        divided = strip / np.repeat(scale, BLOCK)[: weight.shape[1]]
        codes[rows] = np.clip(divided, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3)
    return QuantizedWeight(codes, scales)


def dequantize_blocks(weight: QuantizedWeight) -> Array:
    """codes * scales, f32 [n, k]."""
    codes, scales = weight
    values = codes.astype(np.float32)
    for row, of_columns in enumerate(scales):
        values[row * BLOCK : (row + 1) * BLOCK] *= np.repeat(of_columns, BLOCK)[: codes.shape[1]]
    return values
