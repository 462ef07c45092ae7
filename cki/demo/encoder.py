"""The forward pass of a BERT encoder, from token ids to unit-length sentence embeddings.

It is written once, over a namespace of operations: with `cki` itself every operation is a kernel; with
`cki.reference`, whose functions have the same names and arguments, it is the float64 definition of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cki.demo.minilm import BertConfig, BertWeights

#: Calls of `ops` in a forward pass, besides one for each layer.
CALLS_BESIDE_LAYERS = 3


def forward(
    ops: Any,
    config: BertConfig,
    weights: BertWeights,
    ids: Any,
    mask: Any,
    on_call: Callable[[str], object] = lambda what: None,
) -> Any:
    """Embeds a batch of sentences.

    ops: `cki`, or `cki.reference`.  weights: arrays that `ops` takes.
    ids: int32 [batch, seq].  mask: bool [batch, seq], True where a token is.
    on_call: told what comes next, before each call of an operation.

    Returns [batch, hidden], each row of length 1.
    """
    on_call("embeddings")
    x = ops.embed_tokens(ids, weights.words, position_table=weights.positions, type_table=weights.types)
    on_call("layer norm")
    x = ops.layer_norm(x, weights.gamma, weights.beta, eps=config.epsilon)
    for number, layer in enumerate(weights.layers, 1):
        on_call(f"layer {number} of {config.layers}")
        x = ops.encoder_layer(
            x, layer.wq, layer.wk, layer.wv, layer.wo, layer.w1, layer.w2,
            attention_gamma=layer.attention_gamma, attention_beta=layer.attention_beta,
            bq=layer.bq, bk=layer.bk, bv=layer.bv, bo=layer.bo, b1=layer.b1, b2=layer.b2,
            output_gamma=layer.output_gamma, output_beta=layer.output_beta, mask=mask,
            num_heads=config.heads, head_dim=config.head_dim, pre_ln=False, epsilon=config.epsilon, activation="gelu",
        )  # fmt: skip
    on_call("mean pooling")
    return ops.mean_pool(x, mask, normalize=True)
