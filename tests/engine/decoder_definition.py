"""A whole decoder of the Llama family in float64: the specification of the engine's forward pass.

Written over the definitions of its parts; weights by Hugging Face's names, of any float type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cki.reference.attention import attention
from cki.reference.linear import gated_linear, linear
from cki.reference.norm import rms_norm
from cki.reference.paged import apply_rope

if TYPE_CHECKING:
    from cki.engine.config import ModelConfig

Array = NDArray[Any]
Result = NDArray[np.float64]


def decoder(weights: Mapping[str, Array], config: ModelConfig, tokens: Array) -> Result:
    """Logits [tokens, vocab_size] of one sequence of ids: row i is what follows after tokens[: i + 1].

    Sequences that grow by and by, in any parts and beside any others, have the same logits.
    """
    x: Result = np.asarray(weights["model.embed_tokens.weight"]).astype(np.float64)[np.asarray(tokens)]
    for number in range(config.num_layers):
        layer = _Layer(weights, config, number)
        x = x + layer.attention(_norm(x, layer.weight("input_layernorm.weight"), config))
        x = x + layer.feed_forward(_norm(x, layer.weight("post_attention_layernorm.weight"), config))
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return linear(_norm(x, weights["model.norm.weight"], config), weights[head], weight_layout="out_in")


def _norm(x: Array, weight: Array, config: ModelConfig) -> Result:
    normed = rms_norm(x, weight, eps=config.rms_norm_eps)
    assert not isinstance(normed, tuple)
    return normed


class _Layer:
    def __init__(self, weights: Mapping[str, Array], config: ModelConfig, number: int) -> None:
        self._weights, self._config, self._number = weights, config, number

    def weight(self, name: str) -> Array:
        return self._weights[f"model.layers.{self._number}.{name}"]

    def _linear(self, x: Array, name: str) -> Result:
        bias = self._weights.get(f"model.layers.{self._number}.{name}.bias")
        return linear(x, self.weight(f"{name}.weight"), bias, weight_layout="out_in")

    def attention(self, x: Array) -> Result:
        from cki.engine.rope import cos_sin_table

        c = self._config
        tokens = len(x)
        q, k, v = (
            self._linear(x, f"self_attn.{name}_proj").reshape(tokens, -1, c.head_dim) for name in "qkv"
        )
        if c.qk_norm:
            q = _norm(q, self.weight("self_attn.q_norm.weight"), c)
            k = _norm(k, self.weight("self_attn.k_norm.weight"), c)
        table = cos_sin_table(c, tokens)
        q, k = (apply_rope(heads, np.arange(tokens), cos_sin=table, base=c.rope_theta) for heads in (q, k))
        window = c.sliding_window if c.window_layers[self._number] else None
        attended = attention(
            q[None], k[None], v[None], causal=True, window=(-1 if window is None else window - 1, -1)
        )
        return self._linear(np.asarray(attended)[0].reshape(tokens, -1), "self_attn.o_proj")

    def feed_forward(self, x: Array) -> Result:
        gate_up = np.concatenate([self.weight(f"mlp.{name}_proj.weight") for name in ("gate", "up")])
        bias = None
        if self._config.mlp_bias:
            bias = np.concatenate([self.weight(f"mlp.{name}_proj.bias") for name in ("gate", "up")])
        inner = gated_linear(
            x, gate_up, bias, activation=self._config.activation, layout="gate_first", weight_layout="out_in"
        )
        return self._linear(inner, "mlp.down_proj")
