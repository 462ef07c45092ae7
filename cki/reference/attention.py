"""The definition of `cki.attention`, in float64 NumPy: the specification that kernels are tested against."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cki.reference.dropout import attention_keeps


def visible_keys(
    queries: int, keys: int, causal: bool, causal_alignment: str, window: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(visible [queries, keys] bool, position [queries]) of causal and windowed attention.

    position(i) = i + keys - queries (bottom_right) or i (top_left);  causal: j <= position;
    window (left, right): position - left <= j <= position + right, -1 is no limit.
    """
    shift = {"bottom_right": keys - queries, "top_left": 0}[causal_alignment]
    position = np.arange(queries) + shift
    key = np.arange(keys)
    left, right = window
    visible = np.ones((queries, keys), bool)
    if causal:
        visible &= key <= position[:, None]
    if left >= 0:
        visible &= key >= position[:, None] - left
    if right >= 0:
        visible &= key <= position[:, None] + right
    return visible, position


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    dropout_offset: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: str | None = None,
    first_batch: int = 0,
) -> Any:
    """softmax(logits) v in float64; names, shapes and conventions of `cki.attention`.

    x_ij      = scale q_i.k_j                            scale: 1/sqrt(head_dim) by default
    x_ij      = softcap tanh(x_ij / softcap)             where softcap > 0
    logit_ij  = x_ij - slope |position(i) - j| + bias_ij
    weight_ij = exp(logit_ij) over the visible keys: causal, window, bias > -inf, mask
    out_i     = sum_j kept_ij weight_ij v_j / (sum_j weight_ij + exp(sink)) / (1 - dropout_p)
    lse_i     = ln(sum_j weight_ij + exp(sink))          no sink: no such term

    kept_ij is `cki.reference.dropout.attention_keeps`, 1 without dropout; the batch is counted from first_batch.
    q, k and v of e4m3 codes stand for codes times descale: [batch, kv_heads] or [kv_heads].
    deterministic and out_dtype change nothing.
    A row that sees no key: out = 0, lse = -inf (with sinks: lse = sink).
    Returns out [batch, queries, heads, value_dim], or (out, lse [batch, heads, queries]).
    """
    q, k, v = (np.asarray(t).astype(np.float64) for t in (q, k, v))
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    if q_descale is not None:
        # [batch, 1, kv_heads, 1]
        of_q, of_k, of_v = (
            np.broadcast_to(np.asarray(d, np.float64), (batch, kv_heads))[:, None, :, None]
            for d in (q_descale, k_descale, v_descale)
        )
        q, k, v = q * np.repeat(of_q, heads // kv_heads, axis=2), k * of_k, v * of_v
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    band, position = visible_keys(queries, keys, causal, causal_alignment, window)
    full = (batch, heads, queries, keys)
    out = np.zeros((batch, queries, heads, value_dim))
    lse = np.full((batch, heads, queries), -np.inf)
    bias = None if bias is None else np.broadcast_to(np.asarray(bias).astype(np.float64), full)
    mask = None if mask is None else np.broadcast_to(np.asarray(mask).astype(bool), full)
    for b, h in np.ndindex(batch, heads):
        kv_head = h // (heads // kv_heads)
        sink = -np.inf if sinks is None else float(sinks[h])
        with np.errstate(invalid="ignore", over="ignore"):
            logits = scale * (q[b, :, h] @ k[b, :, kv_head].T)
            if softcap > 0:
                logits = softcap * np.tanh(logits / softcap)
            if alibi_slopes is not None:
                logits = logits - float(alibi_slopes[h]) * np.abs(position[:, None] - np.arange(keys))
        visible = band.copy()
        if bias is not None:
            visible &= bias[b, h] != -np.inf
            logits = logits + np.where(visible, bias[b, h], 0.0)
        if mask is not None:
            visible &= mask[b, h]
        keeps = np.ones((queries, keys), bool)
        if dropout_p:
            seed, offset = (int(np.ravel(counter)[0]) for counter in (dropout_seed, dropout_offset))
            keeps = attention_keeps(queries, keys, (first_batch + b) * heads + h, dropout_p, seed, offset)
        for i in range(queries):
            seen = np.flatnonzero(visible[i])
            row = logits[i, seen]
            largest = np.max(row, initial=sink)
            if largest == -np.inf:
                continue
            weights = np.exp(row - largest)
            total = weights.sum() + np.exp(sink - largest)
            lse[b, h, i] = largest + np.log(total)
            with np.errstate(invalid="ignore"):
                kept = keeps[i, seen]
                out[b, i, h] = (weights / total)[kept] @ v[b, seen[kept], kv_head] / (1.0 - dropout_p)
    return (out, lse) if return_lse else out
