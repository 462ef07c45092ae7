"""What the attention tests share: inputs, the plain computation of the error bound, one checked call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import cki
from cki import reference
from cki.reference.attention import visible_keys
from cki.reference.dropout import attention_keeps
from tests.compare import assert_close
from tests.ops.inputs import normal

TENSORS = ("bias", "mask", "sinks", "alibi_slopes", "dropout_seed", "dropout_offset")


def qkv(
    dtype: Any, queries: int, keys: int, heads: int = 2, kv_heads: int = 1, dim: int = 32, value_dim: int = 0,
    batch: int = 1, seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    return (
        normal((batch, queries, heads, dim), dtype, 3 * seed, 1.5),
        normal((batch, keys, kv_heads, dim), dtype, 3 * seed + 1, 1.5),
        normal((batch, keys, kv_heads, value_dim or dim), dtype, 3 * seed + 2),
    )


def plain(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, causal_alignment: str = "bottom_right",
    scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0, bias: Any = None,
    mask: Any = None, sinks: Any = None, alibi_slopes: Any = None, dropout_p: float = 0.0, dropout_seed: Any = None,
    dropout_offset: Any = None, first_batch: int = 0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(out, lse) as one would compute them without thinking: whole matrices in fp32, weights rounded to v's type."""
    dtype = q.dtype
    q, k, v = (t.astype(np.float32) for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    factor = np.float32(1.0 / math.sqrt(q.shape[3]) if scale is None else scale)
    with np.errstate(all="ignore"):
        logits = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float32) * factor
        if softcap > 0:
            logits = np.float32(softcap) * np.tanh(logits / np.float32(softcap))
        visible, position = visible_keys(q.shape[1], k.shape[1], causal, causal_alignment, window)
        if alibi_slopes is not None:
            distance = np.abs(position[:, None] - np.arange(k.shape[1])).astype(np.float32)
            logits = logits - np.asarray(alibi_slopes, np.float32)[:, None, None] * distance
        visible = np.broadcast_to(visible, logits.shape)
        if bias is not None:
            visible = visible & np.broadcast_to(bias.astype(np.float32) != -np.inf, logits.shape)
            logits = logits + bias.astype(np.float32)
        if mask is not None:
            visible = visible & np.broadcast_to(mask.astype(bool), logits.shape)
        logits = np.where(visible, logits, np.float32(-np.inf))
        largest = logits.max(axis=-1, initial=-np.inf)
        if sinks is not None:
            largest = np.maximum(largest, np.asarray(sinks, np.float32)[None, :, None])
        subtract = np.where(np.isfinite(largest), largest, np.float32(0.0))
        weights = np.where(visible, np.exp(logits - subtract[..., None]), np.float32(0.0))
        total = weights.sum(axis=-1, dtype=np.float32)
        if sinks is not None:
            total = total + np.exp(np.asarray(sinks, np.float32)[None, :, None] - subtract)
        lse = np.where(total > 0, subtract + np.log(total), np.float32(-np.inf))
        hidden = ~visible.any(axis=(1, 2))  # [batch, keys]: what nobody sees may be anything
        v = np.where(hidden[:, :, None, None], np.float32(0.0), v)
        weights = (
            (weights / np.where(total > 0, total, np.float32(1.0))[..., None])
            .astype(dtype)
            .astype(np.float32)
        )
        if dropout_p:
            batch, heads, queries, keys = weights.shape
            rows = [first_batch * heads + row for row in range(batch * heads)]
            options = (dropout_p, int(dropout_seed[0]), int(dropout_offset[0]))
            kept = np.stack([attention_keeps(queries, keys, row, *options) for row in rows])
            weights = weights * kept.reshape(weights.shape) / np.float32(1.0 - dropout_p)
        out = np.einsum("bhij,bjhd->bihd", weights, v, dtype=np.float32)
    return out.astype(dtype), lse


def check(
    device: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, given: tuple[Any, Any, Any] | None = None,
    out: Any = None, **options: Any,
) -> np.ndarray:  # fmt: skip
    """Runs cki.attention and holds output and lse against the bound; returns the output.

    given: q, k, v as the device's arrays, where their layout matters.
    """
    tensors = given or tuple(device.array(t) for t in (q, k, v))
    on_device = {n: device.array(t) if n in TENSORS and t is not None else t for n, t in options.items()}
    got, lse = cki.attention(*tensors, return_lse=True, out=out, **on_device)
    truth, true_lse = reference.attention(q, k, v, return_lse=True, **options)
    options.pop("deterministic", None)
    plain_out, plain_lse = plain(q, k, v, **options)
    result = device.numpy(got)
    assert result.dtype == q.dtype
    assert_close(result, truth, plain_out, "out")
    assert_close(device.numpy(lse), true_lse, plain_lse, "lse")
    return result
