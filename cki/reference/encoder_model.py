"""A whole encoder in float64: the specification of `cki.Encoder`.

Written over the definitions of its parts; weights by CKI's names (`Encoder.weights`), of any float type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cki.reference.embedding import embed_tokens, mean_pool
from cki.reference.encoder import encoder_layer
from cki.reference.norm import layer_norm

if TYPE_CHECKING:
    from cki.encoder.config import EncoderConfig

Array = NDArray[Any]
Result = NDArray[np.float64]


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
    x = _norm(x, weights, "embedding", config.epsilon)
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
    result: Result = _norm(x, weights, "final", config.epsilon)
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


def _norm(x: Any, weights: Mapping[str, Array], name: str, epsilon: float) -> Any:
    gamma = weights.get(f"{name}_gamma")
    return x if gamma is None else layer_norm(x, gamma, weights.get(f"{name}_beta"), eps=epsilon)
