"""The definitions of paged attention, appending to a cache and merging of attention states, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cki.reference.rope import apply_rope

#: The largest e4m3 value.
E4M3_MAX = 448.0


def merge_states(outs: Any, lses: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out [..., dim], lse [...]) of outs [states, ..., dim] and lses [states, ...]; see `cki.merge_states`.

    lse = ln sum_i exp(lses_i),  out = sum_i exp(lses_i - lse) outs_i  over the states with lses_i > -inf; 0 and -inf
    where there is none.
    """
    outs, lses = np.asarray(outs).astype(np.float64), np.asarray(lses).astype(np.float64)
    largest = lses.max(axis=0)
    subtract = np.where(largest == -np.inf, 0.0, largest)
    weights = np.exp(lses - subtract)
    total = weights.sum(axis=0)
    used = np.where((lses == -np.inf)[..., None], 0.0, outs)
    out = (weights[..., None] * used).sum(axis=0) / np.where(total == 0, 1.0, total)[..., None]
    with np.errstate(divide="ignore"):
        return out, subtract + np.log(total)


def _unit_rms(x: np.ndarray, weight: Any, eps: float, offset: float) -> np.ndarray:
    if weight is None:
        return x
    rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normed: np.ndarray = x / rms * (np.asarray(weight).astype(np.float64) + offset)
    return normed


def append_kv(
    k: Any, v: Any, cache: Any, slot_mapping: Any, *, q: Any = None, positions: Any = None, cos_sin: Any = None,
    rope_base: float | None = None, rotary_dim: int | None = None, interleaved: bool = False,
    q_norm_weight: Any = None, k_norm_weight: Any = None, norm_eps: float = 1e-6, norm_weight_offset: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:  # fmt: skip
    """(keys, values, queries) in float64 as `cki.append_kv` computes them before they are stored.

    keys, values: [blocks, block_size, kv_heads, dim], the caches' values (codes times scales, for e4m3) with the new
    tokens in their slots, not rounded to the cache's type.  queries: None without q.
    """
    k, v = np.asarray(k).astype(np.float64), np.asarray(v).astype(np.float64)
    queries = None if q is None else np.asarray(q).astype(np.float64)
    k = _unit_rms(k, k_norm_weight, norm_eps, norm_weight_offset)
    if queries is not None:
        queries = _unit_rms(queries, q_norm_weight, norm_eps, norm_weight_offset)
    if cos_sin is not None or rope_base is not None:
        options: dict[str, Any] = {"rotary_dim": rotary_dim, "interleaved": interleaved, "cos_sin": cos_sin}
        options["base"] = rope_base or 1.0
        k = apply_rope(k, positions, **options)
        queries = None if queries is None else apply_rope(queries, positions, **options)
    keys, values = dequantized(*cache)
    block_size = keys.shape[1]
    for token, slot in enumerate(np.asarray(slot_mapping).tolist()):
        if 0 <= slot < keys.shape[0] * block_size:
            keys[divmod(slot, block_size)], values[divmod(slot, block_size)] = k[token], v[token]
    return keys, values, queries


def dequantized(
    k_cache: Any, v_cache: Any, k_scale: Any = None, v_scale: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of caches in float64; scales [blocks, block_size, kv_heads] or [kv_heads], or None."""
    pair = []
    for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
        values = np.array(cache).astype(np.float64)
        pair.append(values if scale is None else values * np.asarray(scale).astype(np.float64)[..., None])
    return pair[0], pair[1]


def quantize_e4m3(x: Any, scale: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """(codes as ml_dtypes.float8_e4m3fn, scale) of rows x [..., dim].

    scale [...]: largest magnitude / 448, 1 for a row of zeros, where none is given.  Codes round to nearest even and
    saturate at 448; NaN stays NaN.
    """
    x = np.asarray(x).astype(np.float64)
    if scale is None:
        largest = np.abs(x).max(axis=-1)
        scale = np.where(largest > 0, largest / E4M3_MAX, 1.0)
    scale = np.asarray(scale).astype(np.float64)
    codes = np.clip(x / scale[..., None], -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return codes, scale
