"""What a decoder is besides its weights: the numbers of Llama, Mistral, Qwen2, Qwen3 and their like.

SmolLM2 and many others are Llamas by architecture.  One dataclass serves them all: they differ in biases, in norms of
queries and keys, and in which layers see a window only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cki.errors import InvalidTypeError

#: model_type of a Hugging Face configuration that the engine runs.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are stretched beyond the positions that the model was first trained on.

    kind: "linear" divides all frequencies by factor.  "llama3" divides the low ones (Llama 3.1).  "yarn" (Peng et al.
    2023) ramps between both, and scales cos and sin by attention_factor; None there is 0.1 ln(factor) + 1.
    "factors" divides frequency i by frequency_factors[i] (GGUF files of Llama 3.1 tell no more than these).
    truncate: whether YaRN's ramp begins and ends at whole dimensions.
    """

    kind: str
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's numbers.

    vocab_size: rows of the embedding.  max_position: the longest sequence the model was made for.
    attention_bias, attention_output_bias, mlp_bias: whether q, k, v; the output projection; the feed-forward's three
    matrices have biases.  qk_norm: RMS norm of each head's query and key.  sliding_window: tokens a query sees, itself
    included, in layers where window_layers is True; None: no limit.  activation: of `cki.gated_linear`.
    dtype: "f32", "f16" or "bf16", what the model's authors keep weights in (8-bit and 4-bit files: bf16).
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    window_layers: tuple[bool, ...]
    activation: str
    dtype: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """From the content of a config.json, or from a transformers configuration.

        Raises InvalidArgumentError with every missing or impossible value, UnsupportedError with every value that
        asks for what the engine does not do.
        """
        from cki.engine.config_reader import read_config

        if not isinstance(config, Mapping):
            to_dict = getattr(config, "to_dict", None)
            config = to_dict() if callable(to_dict) else config
        if not isinstance(config, Mapping):
            raise InvalidTypeError(f"config is a {type(config).__name__}, not a mapping or a configuration")
        return read_config(config)
