"""Blocks and encoder layers in float64: the specification of `cki.fused_attention`, `cki.fused_ffn`,
`cki.encoder_layer` and `cki.encoder_layers`.

Arguments may be of any float type, ml_dtypes' bfloat16 included; results are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cki.reference.attention import attention
from cki.reference.linear import linear
from cki.reference.norm import layer_norm

Array = NDArray[Any]
Result = NDArray[np.float64]


def fused_attention(
    x: Array, wq: Array, wk: Array | None, wv: Array | None, wo: Array, gamma: Array | None = None,
    beta: Array | None = None, bq: Array | None = None, bk: Array | None = None, bv: Array | None = None,
    bo: Array | None = None, mask: Array | None = None, *, num_heads: int, head_dim: int,
    num_kv_heads: int | None = None, causal: bool = False, pre_ln: bool = True, residual: bool = True,
    epsilon: float = 1e-5, scale: float | None = None, weight_layout: str = "in_out", cu_seqlens: Array | None = None,
) -> Result:  # fmt: skip
    """Layer norm, Q, K and V projections, attention, output projection; x [batch, seq, hidden].

    With A(u) = attention(u wq + bq, u wk + bk, u wv + bv) wo + bo:

        pre_ln    y = A(LN(x)) + x
        else      y = LN(A(x) + x)                both without the "+ x" when residual is False

    wk and wv None: wq holds all three, as bq does their biases.
    cu_seqlens: x is [tokens, hidden], of sequences one behind the other; rows of none of them are zero.
    """
    if cu_seqlens is not None:
        return _sequences(x, cu_seqlens, lambda one: fused_attention(
            one, wq, wk, wv, wo, gamma, beta, bq, bk, bv, bo, num_heads=num_heads, head_dim=head_dim,
            num_kv_heads=num_kv_heads, causal=causal, pre_ln=pre_ln, residual=residual, epsilon=epsilon, scale=scale,
            weight_layout=weight_layout,
        ))  # fmt: skip
    u = _float64(x)
    batch, seq, _ = u.shape
    if pre_ln:
        u = _norm(u, gamma, beta, epsilon)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if wk is None or wv is None:
        packed = linear(u, wq, bq, weight_layout=weight_layout)
        q, k, v = np.split(packed, np.cumsum([num_heads * head_dim, kv_heads * head_dim]), axis=-1)
    else:
        q, k, v = (linear(u, w, b, weight_layout=weight_layout) for w, b in ((wq, bq), (wk, bk), (wv, bv)))
    context = attention(
        q.reshape(batch, seq, num_heads, head_dim), k.reshape(batch, seq, kv_heads, head_dim),
        v.reshape(batch, seq, kv_heads, head_dim), causal=causal, scale=scale, mask=_attention_mask(mask),
    )  # fmt: skip
    merged, added = context.reshape(batch, seq, num_heads * head_dim), x if residual else None
    y = linear(merged, wo, bo, residual=added, weight_layout=weight_layout)
    return y if pre_ln else _norm(y, gamma, beta, epsilon)


def fused_ffn(
    x: Array, w1: Array, w2: Array, gamma: Array | None = None, beta: Array | None = None, b1: Array | None = None,
    b2: Array | None = None, *, activation: str | None = "gelu", pre_ln: bool = True, residual: bool = True,
    epsilon: float = 1e-5, weight_layout: str = "in_out",
) -> Result:  # fmt: skip
    """F(u) = activation(u w1 + b1) w2 + b2 with norm and residual; x [..., hidden].

    pre_ln: F(LN(x)) + x, else LN(F(x) + x); both without the "+ x" when residual is False.
    """
    u = _norm(x, gamma, beta, epsilon) if pre_ln else x
    inner = linear(u, w1, b1, activation=activation, weight_layout=weight_layout)
    y = linear(inner, w2, b2, residual=x if residual else None, weight_layout=weight_layout)
    return y if pre_ln else _norm(y, gamma, beta, epsilon)


def encoder_layer(
    x: Array, wq: Array, wk: Array | None, wv: Array | None, wo: Array, w1: Array, w2: Array, *,
    attention_gamma: Array | None = None, attention_beta: Array | None = None, output_gamma: Array | None = None,
    output_beta: Array | None = None, bq: Array | None = None, bk: Array | None = None, bv: Array | None = None,
    bo: Array | None = None, b1: Array | None = None, b2: Array | None = None, mask: Array | None = None,
    num_heads: int, head_dim: int, num_kv_heads: int | None = None, causal: bool = False, pre_ln: bool = True,
    activation: str | None = "gelu", epsilon: float = 1e-5, scale: float | None = None,
    weight_layout: str = "in_out", cu_seqlens: Array | None = None, folded: bool = False,
) -> Result:  # fmt: skip
    """A transformer encoder layer: the attention block, then the feed-forward block F(u) = act(u w1 + b1) w2 + b2.
    folded says that norms without weights have theirs in wq and w1, which changes no formula.

    pre_ln    a = A(LN(x)) + x      y = F(LN'(a)) + a
    else      a = LN(A(x) + x)      y = LN'(F(a) + a)
    """
    attended = fused_attention(
        x, wq, wk, wv, wo, attention_gamma, attention_beta, bq, bk, bv, bo, mask, num_heads=num_heads,
        head_dim=head_dim, num_kv_heads=num_kv_heads, causal=causal, pre_ln=pre_ln, epsilon=epsilon, scale=scale,
        weight_layout=weight_layout, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return fused_ffn(
        attended, w1, w2, output_gamma, output_beta, b1, b2, activation=activation, pre_ln=pre_ln, epsilon=epsilon,
        weight_layout=weight_layout,
    )  # fmt: skip


def encoder_layers(
    x: Array, wq: Array, wk: Array | None, wv: Array | None, wo: Array, w1: Array, w2: Array, *,
    final_gamma: Array | None = None, final_beta: Array | None = None, epsilon: float = 1e-5,
    mask: Array | None = None, cu_seqlens: Array | None = None, **options: Any,
) -> Result:  # fmt: skip
    """`encoder_layer` for each entry of the weights' first axis, then a layer norm where it has weights.

    options: the other arguments of `encoder_layer`; arrays among them have an axis of layers in front too.
    """
    y, weights = _float64(x), {"wq": wq, "wk": wk, "wv": wv, "wo": wo, "w1": w1, "w2": w2, **options}
    for number in range(len(wq)):
        layer: dict[str, Any] = {
            name: value[number] if isinstance(value, np.ndarray) else value for name, value in weights.items()
        }
        y = encoder_layer(y, **layer, epsilon=epsilon, mask=mask, cu_seqlens=cu_seqlens)
    return y if final_gamma is None and final_beta is None else _norm(y, final_gamma, final_beta, epsilon)


def _sequences(x: Array, cu_seqlens: Array, block: Callable[[Array], Result]) -> Result:
    """`block` of each sequence as a batch of one."""
    y = np.zeros(np.asarray(x).shape)
    for start, end in zip(cu_seqlens, cu_seqlens[1:]):
        y[start:end] = block(x[None, start:end])[0]
    return y


def _attention_mask(mask: Array | None) -> Array | None:
    """[batch, keys] or [batch, queries, keys] with a head axis, which `attention` wants."""
    if mask is None or mask.ndim > 3:
        return mask
    return mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]


def _norm(x: Array, gamma: Array | None, beta: Array | None, epsilon: float) -> Result:
    y = layer_norm(x, gamma, beta, eps=epsilon)
    assert isinstance(y, np.ndarray)
    return y


def _float64(x: Array) -> Result:
    result: Result = np.asarray(x).astype(np.float64)
    return result
