"""`jax.nn.dot_product_attention` by `cki.attention`: the same signature, the same axes."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from cki.adapter import type_name
from cki.adapters.renamed import renamed
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError

_OPERATION = "dot_product_attention"
_NAMES = {
    "q": "query", "k": "key", "v": "value", "window": "local_window_size", "causal": "is_causal",
    "return_lse": "return_residual",
}  # fmt: skip


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

    window = (-1, -1) if local_window_size is None else _window(local_window_size)
    query, key, value = _array("query", query), _array("key", key), _array("value", value)
    is_single = query.ndim == 3
    if is_single:
        query, key, value = query[None], key[None], value[None]
    if key_value_seq_lengths is not None:
        is_key = _before("key_value_seq_lengths", key_value_seq_lengths, key)[:, None, None, :]
        mask = is_key if mask is None else _both(_array("mask", mask), is_key)
    is_query = None if query_seq_lengths is None else _before("query_seq_lengths", query_seq_lengths, query)
    try:
        results = operations.attention(
            query, key, value, bias=bias, mask=mask, scale=scale, causal=is_causal, causal_alignment="top_left",
            window=window, return_lse=return_residual,
        )  # fmt: skip
    except CkiError as error:
        raise renamed(error, _OPERATION, _NAMES) from None
    out, lse = results if return_residual else (results, None)
    if is_query is not None:
        out = jnp.where(is_query[:, :, None, None], out, jnp.zeros((), out.dtype))
    if lse is None:
        return out[0] if is_single else out
    residual = jnp.transpose(lse, (0, 2, 1)).astype(key.dtype)
    return (out[0], residual[0]) if is_single else (out, residual)


def _array(name: str, given: Any) -> Any:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"{_OPERATION}: {name} is of type {type_name(type(given))}", hint="JAX or NumPy arrays"
        ) from error


def _before(name: str, given: Any, tensor: Any) -> Any:
    """[batch, length]: which places of `tensor` [batch, length, ...] lie before the lengths given."""
    lengths = _array(name, given)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InvalidTypeError(f"{_OPERATION}: {name} is {lengths.dtype}", hint=f"{name} of int32")
    if tensor.ndim < 2:  # of a shape that attention refuses
        return jnp.ones((1, 1), bool)
    if lengths.shape != tensor.shape[:1]:
        raise InvalidArgumentError(
            f"{_OPERATION}: {name} has shape {lengths.shape}", hint=f"{name} of shape {tensor.shape[:1]}"
        )
    return jnp.arange(tensor.shape[1]) < lengths[:, None]


def _both(mask: Any, is_key: Any) -> Any:
    if mask.dtype != jnp.bool_:
        raise InvalidTypeError(f"{_OPERATION}: mask is {mask.dtype}", hint="a mask of bool")
    if mask.shape[-1:] not in ((), (1,), is_key.shape[-1:]):
        raise InvalidArgumentError(
            f"{_OPERATION}: mask has shape {mask.shape}, there are {is_key.shape[-1]} keys",
            hint="a mask broadcastable to [batch, heads, queries, keys]",
        )
    return jnp.logical_and(mask, is_key)


def _window(given: Any) -> tuple[Any, ...]:
    sizes = (given, given) if isinstance(given, Integral) and not isinstance(given, bool) else given
    if isinstance(sizes, (tuple, list)):
        # -1, which is no limit to CKI, is a number to JAX.
        if any(isinstance(size, Integral) and size < 0 for size in sizes):
            raise InvalidArgumentError(
                f"{_OPERATION}: local_window_size is {given!r}", hint="sizes of 0 or more; None is no limit"
            )
        return tuple(
            int(size) if isinstance(size, Integral) and not isinstance(size, bool) else size for size in sizes
        )
    raise InvalidTypeError(
        f"{_OPERATION}: local_window_size is {given!r}", hint="an integer, or a pair of them (left, right)"
    )
