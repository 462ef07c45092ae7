"""Inputs of the tests of operations: dtypes, random numbers, and layouts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}
#: How a [6, 4, width] tensor may lie in an [8, 8, 2 * width + 8] one.
STRIDED = (
    "padded rows",
    "odd start",
    "half-aligned start",
    "permuted",
    "every other row",
    "stepped last axis",
)


def normal(
    shape: tuple[int, ...], dtype: Any, seed: int = 0, scale: float = 1.0, mean: float = 0.0
) -> np.ndarray:
    """Normal random numbers, rounded to dtype."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale + mean).astype(dtype)


def strided(name: str, base: Any) -> Any:
    """The [6, 4, width] view of that name (`STRIDED`) of an [8, 8, 2 * width + 8] array."""
    width = (base.shape[-1] - 8) // 2
    return {
        "padded rows": lambda: base[:6, :4, :width],
        "odd start": lambda: base[1:7, :4, 1 : width + 1],
        "half-aligned start": lambda: base[1:7, :4, 4 : width + 4],
        "permuted": lambda: base.transpose(1, 0, 2)[:6, :4, :width],
        "every other row": lambda: base[:6, ::2, :width],
        "stepped last axis": lambda: base[:6, :4, : 2 * width : 2],
    }[name]()
