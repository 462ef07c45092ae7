"""`jax.nn.dot_product_attention` by `cki.attention`: the same signature, the same axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`, usable inside `jax.jit`; arguments as there.

    query: [batch, T, heads, head_dim] or without batch.  key, value: [batch, S, kv_heads, head_dim] likewise; heads is
    a multiple of kv_heads.  f32, f16 or bf16, all alike.  bias, mask (bool): broadcastable to [batch, heads, T, S].
    is_causal and local_window_size count positions from the first query and the first key, as JAX does.
    query_seq_lengths, key_value_seq_lengths: i32 [batch]; rows of queries past the length are 0.
    implementation: None is CKI; "xla" and "cudnn" are JAX's own.

    Returns [batch, T, heads, head_dim], with return_residual also the logarithms of the sums of exponentials,
    [batch, T, heads] in key's dtype.  One difference: a query that sees no key gets 0, where JAX averages all values.
    """
    if implementation is not None:
        return jax.nn.dot_product_attention(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            implementation=implementation, return_residual=return_residual,
        )  # fmt: skip
    from cki.adapters import jax as operations

    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    is_single = query.ndim == 3
    if is_single:
        query, key, value = query[None], key[None], value[None]
    if key_value_seq_lengths is not None:
        is_key = jnp.arange(key.shape[1]) < jnp.asarray(key_value_seq_lengths)[:, None]
        is_key = is_key[:, None, None, :]
        mask = is_key if mask is None else jnp.logical_and(mask, is_key)
    window = (-1, -1) if local_window_size is None else local_window_size
    results = operations.attention(
        query, key, value, bias=bias, mask=mask, scale=scale, causal=is_causal, causal_alignment="top_left",
        window=(window, window) if isinstance(window, int) else tuple(window), return_lse=return_residual,
    )  # fmt: skip
    out, lse = results if return_residual else (results, None)
    if query_seq_lengths is not None:
        is_query = jnp.arange(query.shape[1]) < jnp.asarray(query_seq_lengths)[:, None]
        out = jnp.where(is_query[:, :, None, None], out, jnp.zeros((), out.dtype))
    if lse is None:
        return out[0] if is_single else out
    residual = jnp.transpose(lse, (0, 2, 1)).astype(key.dtype)
    return (out[0], residual[0]) if is_single else (out, residual)
