"""The definition of rotary positions, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


def apply_rope(
    x: Any, positions: Any, *, cos_sin: Any = None, base: float = 10000.0, rotary_dim: int | None = None,
    interleaved: bool = False, inverse: bool = False,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Each pair (a, b) of the first rotary_dim elements becomes (a cos t - b sin t, a sin t + b cos t).

    x [tokens, heads, head_dim], positions [tokens].  t = position * base^(-2i / rotary_dim) for pair i, or cosines and
    sines from cos_sin [positions, rotary_dim]; a position outside it turns nothing.  Pairs are (i, i + rotary_dim / 2),
    or (2i, 2i + 1).  inverse turns back.
    """
    x = np.array(x, np.float64)
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    pairs = rotary_dim // 2
    positions = np.asarray(positions).astype(np.int64)
    if cos_sin is None:
        angles = positions[:, None] * float(base) ** (-2.0 * np.arange(pairs) / rotary_dim)
        cosine, sine = np.cos(angles), np.sin(angles)
    else:
        table = np.asarray(cos_sin).astype(np.float64)
        inside = (positions >= 0) & (positions < len(table))
        rows = table[np.where(inside, positions, 0)]
        cosine = np.where(inside[:, None], rows[:, :pairs], 1.0)
        sine = np.where(inside[:, None], rows[:, pairs:], 0.0)
    cosine, sine = cosine[:, None], (-sine if inverse else sine)[:, None]
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, pairs)
    second = slice(1, rotary_dim, 2) if interleaved else slice(pairs, rotary_dim)
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * cosine - b * sine, a * sine + b * cosine
    turned: np.ndarray[Any, Any] = x
    return turned
