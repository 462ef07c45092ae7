"""Blocks and encoder layers in float64: the specification of `cki.fused_attention`, `cki.fused_ffn`,
`cki.encoder_layer`, `cki.encoder_layers` and, over a whole encoder, of `cki.Encoder`.

Arguments may be of any float type, ml_dtypes' bfloat16 included; results are float64.  An encoder's weights go by CKI's
names (`Encoder.weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cki.reference.attention import attention
from cki.reference.embedding import embed_tokens, mean_pool
from cki.reference.linear import linear
from cki.reference.norm import layer_norm

if TYPE_CHECKING:
    from cki.encoder.config import EncoderConfig

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


def encoder(
    weights: Mapping[str, Array], config: EncoderConfig, input_ids: Array, attention_mask: Array | None = None,
    token_type_ids: Array | None = None, position_ids: Array | None = None, *, lengths: Array | None = None,
    cu_seqlens: Array | None = None,
) -> Result:  # fmt: skip
    """The last hidden state, [batch, seq, hidden] (packed: [tokens, hidden]); arguments as for a call of `cki.Encoder`.

    Rows that belong to no sequence are zero.
    """
    ids = np.asarray(input_ids)
    if cu_seqlens is not None:
        packed = np.zeros((*ids.shape, weights["words"].shape[1]))
        for start, end in zip(cu_seqlens, cu_seqlens[1:]):
            one = [None if a is None else a[None, start:end] for a in (token_type_ids, position_ids)]
            packed[start:end] = encoder(weights, config, ids[None, start:end], None, *one)[0]
        return packed
    mask = _mask(ids, attention_mask, lengths)
    positions = position_ids
    if positions is None and config.padding_id is not None:
        positions = token_positions(ids, config.padding_id)
    x: Any = embed_tokens(
        ids, weights["words"], weights["positions"], token_type_ids, weights.get("types"), positions
    )
    x = _named_norm(x, weights, "embedding", config.epsilon)
    for number in range(config.layers):
        start = f"layers.{number}."
        layer: dict[str, Any] = {
            name.removeprefix(start): value
            for name, value in weights.items()
            if name.startswith(start) and not name.startswith(f"{start}fused_")  # the others over again
        }
        matrices = [layer.pop(name, None) for name in ("wq", "wk", "wv", "wo", "w1", "w2")]
        x = encoder_layer(
            x, *matrices, **layer, mask=mask, num_heads=config.num_heads, head_dim=config.head_dim,
            pre_ln=config.pre_ln, activation=config.activation, epsilon=config.epsilon,
            weight_layout=config.weight_layout,
        )  # fmt: skip
    result: Result = _named_norm(x, weights, "final", config.epsilon)
    return result


def encoder_embed(
    weights: Mapping[str, Array], config: EncoderConfig, input_ids: Array, attention_mask: Array | None = None,
    token_type_ids: Array | None = None, position_ids: Array | None = None, *, lengths: Array | None = None,
    cu_seqlens: Array | None = None, pooling: str = "mean", normalize: bool = True,
) -> Result:  # fmt: skip
    """One vector a sequence, [batch, hidden]; arguments as for `Encoder.embed`."""
    hidden = encoder(
        weights, config, input_ids, attention_mask, token_type_ids, position_ids, lengths=lengths,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if cu_seqlens is not None:
        kept_each = None if pooling == "mean" else 1
        pieces = [hidden[None, start:end][:, :kept_each] for start, end in zip(cu_seqlens, cu_seqlens[1:])]
        return np.concatenate([mean_pool(x, np.ones(x.shape[:2]), normalize=normalize) for x in pieces])
    if pooling == "first":
        return mean_pool(hidden[:, :1], np.ones((len(hidden), 1), bool), normalize=normalize)
    mask = _mask(np.asarray(input_ids), attention_mask, lengths)
    kept = np.ones(hidden.shape[:2], bool) if mask is None else mask
    return mean_pool(hidden, kept, normalize=normalize)


def token_positions(input_ids: Array, padding_id: int) -> NDArray[np.int64]:
    """RoBERTa's positions: tokens are counted from padding_id + 1 on, and padding has the position padding_id."""
    counts = np.asarray(input_ids) != padding_id
    positions: NDArray[np.int64] = np.where(counts, padding_id + np.cumsum(counts, axis=1), padding_id)
    return positions


def _mask(ids: Array, attention_mask: Array | None, lengths: Array | None) -> Array | None:
    if lengths is not None:
        return np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    return None if attention_mask is None else np.asarray(attention_mask) != 0


def _named_norm(x: Any, weights: Mapping[str, Array], name: str, epsilon: float) -> Any:
    gamma = weights.get(f"{name}_gamma")
    return x if gamma is None else layer_norm(x, gamma, weights.get(f"{name}_beta"), eps=epsilon)
