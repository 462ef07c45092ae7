"""e4m3 weights with a scale for each block of 128 by 128, as DeepSeek-V3 and Qwen3-FP8 files hold them.

A weight is codes[n, k] * scales[n // 128, k // 128].  Files call the scales `weight_scale_inv`: the inverse of what the
weight was multiplied with before rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cki.engine.parts import in_parts
from cki.errors import InvalidArgumentError

Array = npt.NDArray[Any]

BLOCK = 128
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
#: The largest number of e4m3.
LARGEST_E4M3 = 448.0
#: Every number of e4m3, by its bits.
_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


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
    starts = np.arange(0, weight.shape[1], BLOCK)

    def fill(rows: slice) -> None:
        strip = np.asarray(weight[rows], np.float32)
        largest = np.maximum.reduceat(np.abs(strip).max(axis=0), starts)
        if not np.isfinite(largest).all():
            raise InvalidArgumentError(f"weight is not finite in rows {rows.start} to {rows.stop - 1}")
        # 2**-126: below, the quotient by 448 is subnormal and would lose its digits.
        scale = np.where(
            largest > 0, np.maximum(largest / np.float32(LARGEST_E4M3), np.float32(2.0**-126)), 1
        )
        scales[rows.start // BLOCK] = scale
        strip = strip / np.repeat(scale, BLOCK)[: weight.shape[1]]
        codes[rows] = np.clip(strip, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3)

    in_parts(weight.shape[0], BLOCK, fill)
    return QuantizedWeight(codes, scales)


def dequantize_blocks(weight: QuantizedWeight) -> Array:
    """codes * scales, f32 [n, k]."""
    codes, scales = weight
    values = np.empty(codes.shape, np.float32)

    def fill(rows: slice) -> None:
        np.take(_VALUES, codes[rows].view(np.uint8), out=values[rows], mode="clip")
        values[rows] *= np.repeat(scales[rows.start // BLOCK], BLOCK)[: codes.shape[1]]

    in_parts(codes.shape[0], BLOCK, fill)
    return values
