"""Differentiable expressions of attention and of the layers that are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cki.adapters.gradient import Arrays, Attributes, Expression, Inputs
from cki.adapters.gradient_rows import layer_norm, linear, masked_exponentials
from cki.errors import UnsupportedError

#: A function of a tensor to put dropout in; `_keep` without.
Dropout = Callable[[Any], Any]


def _keep(x: Any) -> Any:
    return x


def attention(
    a: Arrays, q: Any, k: Any, v: Any, *, bias: Any = None, mask: Any = None, sinks: Any = None,
    alibi_slopes: Any = None, causal: bool = False, causal_alignment: str = "bottom_right", scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, dropout: Dropout = _keep,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) of `cki.attention`, whose arguments these are.  dropout: of the weights."""
    batch, queries, heads, head_dim = a.shape(q)
    keys, kv_heads, value_dim = a.shape(v)[1:]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    # Query heads that share keys stand below each other: nothing is repeated.
    rows = a.reshape(a.transpose(q, (0, 2, 1, 3)), (batch, kv_heads, group * queries, head_dim))
    logits = a.wide(a.matmul(rows, a.transpose(k, (0, 2, 3, 1)))) * scale
    logits = a.reshape(logits, (batch, heads, queries, keys))
    if softcap > 0:
        logits = softcap * a.tanh(logits / softcap)
    position = a.arange(queries, q)[:, None] + (keys - queries if causal_alignment == "bottom_right" else 0)
    distance = a.arange(keys, q)[None, :] - position
    if alibi_slopes is not None:
        slopes = a.reshape(a.wide(alibi_slopes), (1, heads, 1, 1))
        logits = logits - slopes * a.like(a.abs(distance), logits)
    conditions = []
    left, right = window
    if causal or right >= 0:
        conditions.append(distance <= (min(right, 0) if causal and right >= 0 else 0 if causal else right))
    if left >= 0:
        conditions.append(distance >= -left)
    if mask is not None:
        conditions.append(a.as_bool(mask))
    if bias is not None:
        b = a.wide(bias)
        conditions.append(b > -math.inf)
        logits = logits + a.where(conditions[-1], b, 0.0)
    visible = None
    for condition in conditions:
        visible = condition if visible is None else visible & condition
    sink = None if sinks is None else a.reshape(a.wide(sinks), (1, heads, 1, 1))
    weights, total, largest = masked_exponentials(a, logits, visible, sink)
    lse = largest + a.log(total)
    if visible is not None and sink is None:
        lse = a.where(a.sum(weights) > 0, lse, -math.inf)
    shares = a.reshape(dropout(a.like(weights / total, v)), (batch, kv_heads, group * queries, keys))
    out = a.reshape(a.matmul(shares, a.transpose(v, (0, 2, 1, 3))), (batch, heads, queries, value_dim))
    return a.transpose(out, (0, 2, 1, 3)), lse[..., 0]


def _attention(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    options = dict(attributes)
    wants_lse = options.pop("return_lse")
    options.pop("deterministic")
    options.pop("out_dtype")
    if inputs.get("q_descale") is not None:
        raise UnsupportedError(
            "attention: e4m3 beside recompute_gradient",
            ["codes have no gradient"],
            "bf16, f16 or f32 tensors",
        )
    if p := options.pop("dropout_p"):
        raise UnsupportedError(
            f"attention: dropout_p is {p} beside recompute_gradient",
            ["the plain expression draws no Philox numbers"],
            "dropout_p=0.0, or the framework's own dropout",
        )
    unused = ("dropout_seed", "dropout_offset", "q_descale", "k_descale", "v_descale")
    tensors = {name: tensor for name, tensor in inputs.items() if name not in unused}
    out, lse = attention(a, **tensors, **options)
    return (out, lse) if wants_lse else (out,)


def fused_attention(
    a: Arrays, x: Any, wq: Any, wk: Any = None, wv: Any = None, wo: Any = None, gamma: Any = None, beta: Any = None,
    bq: Any = None, bk: Any = None, bv: Any = None, bo: Any = None, mask: Any = None, cu_seqlens: Any = None, *,
    num_heads: int, head_dim: int, num_kv_heads: int | None = None, causal: bool = False, pre_ln: bool = True,
    residual: bool = True, epsilon: float = 1e-5, scale: float | None = None, weight_layout: str = "in_out",
    max_seqlen: int | None = None, folded: bool = False, dropout: Dropout = _keep, attention_dropout: Dropout = _keep,
) -> Any:  # fmt: skip
    """`cki.fused_attention`, whose arguments these are.

    dropout: of what is added to x.  attention_dropout: of the attention's weights.  max_seqlen and folded (norms whose
    weights are in wq) change nothing here.
    """
    if cu_seqlens is not None:
        inside, mask = _packed_mask(a, x, cu_seqlens)
        x = x[None]
    kv_heads = num_kv_heads or num_heads
    u = a.like(layer_norm(a, x, gamma, beta, epsilon), x) if pre_ln else x
    batch, seq, _ = a.shape(x)
    q_columns, kv_columns = num_heads * head_dim, kv_heads * head_dim
    if wk is None:
        packed = linear(a, u, wq, bq, weight_layout=weight_layout)
        q, k = packed[..., :q_columns], packed[..., q_columns : q_columns + kv_columns]
        v = packed[..., q_columns + kv_columns :]
    else:
        q, k, v = (linear(a, u, w, b, weight_layout=weight_layout) for w, b in ((wq, bq), (wk, bk), (wv, bv)))
    context, _ = attention(
        a, a.reshape(q, (batch, seq, num_heads, head_dim)), a.reshape(k, (batch, seq, kv_heads, head_dim)),
        a.reshape(v, (batch, seq, kv_heads, head_dim)), mask=_over_heads(mask), causal=causal, scale=scale,
        dropout=attention_dropout,
    )  # fmt: skip
    y = linear(a, a.reshape(context, (batch, seq, q_columns)), wo, bo, weight_layout=weight_layout)
    y = dropout(y)
    y = a.like(a.wide(y) + a.wide(x), x) if residual else y
    if not pre_ln:
        y = a.like(layer_norm(a, y, gamma, beta, epsilon), x)
    return y if cu_seqlens is None else a.where(inside, y[0], 0.0)


def _over_heads(mask: Any) -> Any:
    """[batch, keys] or [batch, queries, keys] with axes for heads and queries."""
    if mask is None or len(mask.shape) == 4:
        return mask
    return mask[:, None, None, :] if len(mask.shape) == 2 else mask[:, None]


def _packed_mask(a: Arrays, x: Any, cu_seqlens: Any) -> tuple[Any, Any]:
    """Which tokens [tokens, 1] belong to a sequence, and which [1, tokens, tokens] to the same one."""
    token = a.arange(a.shape(x)[0], x)
    ends = a.like(cu_seqlens, token)
    begun = a.sum(a.like(token[:, None] >= ends[None, :], token))  # [tokens, 1]
    inside = (begun > 0) & (token[:, None] < ends[-1])
    return inside, (begun == a.transpose(begun, (1, 0)))[None] & inside[None]


def encoder_layer(
    a: Arrays, x: Any, wq: Any, wk: Any = None, wv: Any = None, wo: Any = None, w1: Any = None, w2: Any = None,
    attention_gamma: Any = None, attention_beta: Any = None, output_gamma: Any = None, output_beta: Any = None,
    bq: Any = None, bk: Any = None, bv: Any = None, bo: Any = None, b1: Any = None, b2: Any = None, mask: Any = None,
    cu_seqlens: Any = None, *, activation: str | None = "gelu", pre_ln: bool = True, epsilon: float = 1e-5,
    weight_layout: str = "in_out", folded: bool = False, dropout: Dropout = _keep, attention_dropout: Dropout = _keep,
    **block: Any,
) -> Any:  # fmt: skip
    """`cki.encoder_layer`, whose arguments these are; dropout and attention_dropout as in `fused_attention`.

    folded changes nothing here: norms whose weights are in others have none of their own.
    """
    y = fused_attention(
        a, x, wq, wk, wv, wo, attention_gamma, attention_beta, bq, bk, bv, bo, mask, cu_seqlens, pre_ln=pre_ln,
        epsilon=epsilon, weight_layout=weight_layout, dropout=dropout, attention_dropout=attention_dropout, **block,
    )  # fmt: skip
    return fused_ffn(
        a, y, w1, w2, output_gamma, output_beta, b1, b2, activation=activation, pre_ln=pre_ln, epsilon=epsilon,
        weight_layout=weight_layout, dropout=dropout,
    )  # fmt: skip


def fused_ffn(
    a: Arrays, x: Any, w1: Any, w2: Any, gamma: Any = None, beta: Any = None, b1: Any = None, b2: Any = None, *,
    activation: str | None = "gelu", pre_ln: bool = True, residual: bool = True, epsilon: float = 1e-5,
    weight_layout: str = "in_out", dropout: Dropout = _keep,
) -> Any:  # fmt: skip
    """`cki.fused_ffn`, whose arguments these are.  dropout: of what is added to x."""
    u = a.like(layer_norm(a, x, gamma, beta, epsilon), x) if pre_ln else x
    inner = linear(a, u, w1, b1, activation=activation, weight_layout=weight_layout)
    y = dropout(linear(a, inner, w2, b2, weight_layout=weight_layout))
    if residual:
        y = a.like(a.wide(y) + a.wide(x), x)
    return y if pre_ln else a.like(layer_norm(a, y, gamma, beta, epsilon), x)


def encoder_layers(
    a: Arrays, x: Any, *, final_gamma: Any = None, final_beta: Any = None, epsilon: float = 1e-5, mask: Any = None,
    cu_seqlens: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """`cki.encoder_layers`: options are arguments of `encoder_layer`, with an axis of layers where they are tensors."""
    for number in range(options["wq"].shape[0]):
        layer = {name: value[number] if hasattr(value, "shape") else value for name, value in options.items()}
        x = encoder_layer(a, x, epsilon=epsilon, mask=mask, cu_seqlens=cu_seqlens, **layer)
    if final_gamma is None and final_beta is None:
        return x
    return a.like(layer_norm(a, x, final_gamma, final_beta, epsilon), x)


EXPRESSIONS: dict[str, Expression] = {
    "attention": _attention,
    "fused_attention": lambda a, inputs, attributes: (fused_attention(a, **inputs, **attributes),),
    "fused_ffn": lambda a, inputs, attributes: (fused_ffn(a, **inputs, **attributes),),
    "encoder_layer": lambda a, inputs, attributes: (encoder_layer(a, **inputs, **attributes),),
    "encoder_layers": lambda a, inputs, attributes: (encoder_layers(a, **inputs, **attributes),),
}
