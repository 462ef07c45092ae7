"""Small models of transformers, of random weights: one of each kind of attention that it has."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
DECODER: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 6
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": ("GptOss", {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
BATCHES = {
    "whole": torch.ones(2, 9, dtype=torch.int64),
    "left": torch.tensor([[0, 0, 0] + [1] * 6, [1] * 9]),
    "right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4]),
}


def ids(length: int = 9) -> torch.Tensor:
    """Two rows of token ids."""
    return torch.randint(2, 128, (2, length), generator=torch.Generator().manual_seed(5))


def make(family: str) -> Any:
    """A model of random weights, large enough that attention decides what comes next."""
    name, options = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    torch.manual_seed(11)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**DECODER, **options)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model
