"""Small random decoders that stand for the real ones: every feature, few numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cki.engine.config import ModelConfig, RopeScaling
from cki.engine.names import expected_weights

LLAMA = ModelConfig(
    architecture="llama", hidden_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16,
    intermediate_size=96, vocab_size=128, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, max_position=512,
    tie_word_embeddings=True, attention_bias=False, attention_output_bias=False, mlp_bias=False, qk_norm=False,
    sliding_window=None, window_layers=(False, False), activation="silu", dtype="f32", bos_id=1, eos_ids=(2,),
    pad_id=None,
)  # fmt: skip
MISTRAL = replace(
    LLAMA, architecture="mistral", sliding_window=7, window_layers=(True, False), tie_word_embeddings=False
)
QWEN2 = replace(
    LLAMA,
    architecture="qwen2",
    attention_bias=True,
    rope_scaling=RopeScaling("yarn", 4.0, original_max_position=64),
)
QWEN3 = replace(
    LLAMA, architecture="qwen3", qk_norm=True, tie_word_embeddings=False, head_dim=32, num_heads=4, num_kv_heads=4,
    rope_scaling=RopeScaling("llama3", 8.0, original_max_position=64),
)  # fmt: skip
BIASED = replace(
    LLAMA,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    rope_scaling=RopeScaling("linear", 2.0),
)
MODELS = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "biased": BIASED}


def random_weights(config: ModelConfig, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Weights under which logits depend on every token, every layer and every bias."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_weights(config).items():
        values = rng.normal(size=shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values *= 0.2
        elif "embed_tokens" not in name:
            values /= np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32).astype(dtype)
    return weights
