"""What the tests of the pointwise operations share: inputs, layouts, and activations done plainly in fp32."""

from __future__ import annotations

import math

import numpy as np

#: Widths that leave a tail in every direction, that fill tiles, and that take several tiles.
WIDTHS = (1, 2, 3, 8, 31, 33, 127, 129, 384, 1000, 1024, 4097, 20000)


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
