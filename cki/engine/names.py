"""The weights that a decoder needs: their names, as Hugging Face has them, and their shapes."""

from __future__ import annotations

from collections.abc import Iterable

from cki.engine.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
#: Endings of what checkpoints hold beside weights: buffers that are computed.
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".masked_bias")


def expected_weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight by name, with its shape; matrices are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (q, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q, config.attention_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        start = f"model.layers.{layer}."
        shapes[f"{start}input_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{start}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{start}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{start}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{start}self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{start}post_attention_layernorm.weight"] = (hidden,)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def canonical(name: str, names: Iterable[str]) -> str:
    """A name of a file as a causal model has it.  A bare decoder (LlamaModel) lacks the "model." before its names.

    names: of `expected_weights`.
    """
    longer = f"model.{name}"
    return longer if name not in names and longer in names else name


def is_computed(name: str, config: ModelConfig) -> bool:
    """Whether a file's tensor is none that the model reads: a buffer, or the head's copy of a tied embedding."""
    return name.endswith(_COMPUTED) or (config.tie_word_embeddings and name == HEAD)
