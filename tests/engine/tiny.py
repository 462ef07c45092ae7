"""Small random decoders that stand for the real ones: every feature, few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cki.engine.config import ModelConfig, RopeScaling
from cki.engine.names import expected_weights
from cki.engine.token_stream import TokenStream

LLAMA = ModelConfig(
    architecture="llama", hidden_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16,
    intermediate_size=96, vocab_size=128, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, max_position=512,
    tie_word_embeddings=True, attention_bias=False, attention_output_bias=False, mlp_bias=False, qk_norm=False,
    sliding_window=None, window_layers=(False, False), activation="silu", dtype="f32", bos_id=1, eos_ids=(2,),
    pad_id=None,
)  # fmt: skip
#: Everything that Llama does not have.
FULL = replace(
    LLAMA, architecture="qwen3", num_layers=3, tie_word_embeddings=False, attention_bias=True,
    attention_output_bias=True, mlp_bias=True, qk_norm=True, sliding_window=7, window_layers=(True, False, True),
    rope_scaling=RopeScaling("yarn", 4.0, original_max_position=64),
)  # fmt: skip
MODELS = {"llama": LLAMA, "full": FULL}


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
        elif "embed_tokens" in name:
            values *= 0.3  # or a tied head would repeat the last token
        else:
            values *= 1.5 / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32).astype(dtype)
    return weights


class Letters:
    """A tokenizer of 128 tokens: the characters by their codes, 0 to 2 are special."""

    bos_id, eos_ids, vocab_size, has_chat = 1, (2,), 128, True

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [*([1] if special else []), *map(ord, text)]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return "".join(chr(token) for token in ids if token > 2)

    def stream(self) -> TokenStream:
        return TokenStream(self.decode)

    def chat(self, messages: Sequence[Mapping[str, str]], **variables: object) -> str:
        return "".join(f"{m['role']}:{m['content']}\n" for m in messages)
