"""What the tests of the pointwise operations share: inputs, layouts, and activations done plainly in fp32."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}
#: Widths that leave a tail in every direction, that fill tiles, and that take several tiles.
WIDTHS = (1, 2, 3, 8, 31, 33, 127, 129, 384, 1000, 1024, 4097, 20000)
#: How a [6, 4, width] tensor may lie in an [8, 8, 2 * width + 8] one.
STRIDED = (
    "padded rows",
    "odd start",
    "half-aligned start",
    "permuted",
    "every other row",
    "stepped last axis",
)


def normal(shape: tuple[int, ...], dtype: Any, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normal random numbers, rounded to dtype."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


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


_erf = np.vectorize(math.erf, otypes=[np.float32])


def plain_activation(name: str | None, v: np.ndarray) -> np.ndarray:
    """The activation in fp32, as frameworks compute it."""
    v = v.astype(np.float32)
    one, half = np.float32(1), np.float32(0.5)
    with np.errstate(over="ignore"):
        if name == "gelu":
            return half * v * (one + _erf(v * np.float32(math.sqrt(0.5))))
        if name == "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (v + np.float32(0.044715) * v * v * v)
            return half * v * (one + np.tanh(inner))
        if name in ("silu", "quick_gelu"):
            return v / (one + np.exp(-v if name == "silu" else np.float32(-1.702) * v))
        if name == "sigmoid":
            return one / (one + np.exp(-v))
    if name == "tanh":
        return np.tanh(v)
    if name is None:
        return v
    return np.maximum(v, 0) ** (2 if name == "relu2" else 1)
