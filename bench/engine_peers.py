"""transformers on the shapes of `bench/engine.py`: random weights, SDPA, greedy; eager, or compiled, cache static."""

from __future__ import annotations

import time
from typing import Any

import common

from cki.engine import ModelConfig

#: New tokens of the two runs whose difference is the time of the steps between.
_FEW, _MANY = 8, 40


def make(config: ModelConfig) -> Any:
    """The model in bf16 on the GPU."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    kind = Qwen3Config if config.architecture == "qwen3" else LlamaConfig
    peer = kind(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position, tie_word_embeddings=config.tie_word_embeddings,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(peer, attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(before)


def step_time(peer: Any, batch: int, context: int, *, compiled: bool) -> common.Timing:
    """Microseconds of a decode step: the slope between answers of few and of more tokens.

    compiled: `generate` compiles the step itself when its cache is static.
    """
    import torch

    options = {"cache_implementation": "static"} if compiled else {}
    ids = torch.randint(0, peer.config.vocab_size, (batch, context), device="cuda")

    def seconds(new: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            peer.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                pad_token_id=0, **options,
            )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - start

    # A static cache keeps the length of the longest answer so far, and is compiled for it once.
    for new in (_MANY, _FEW) if compiled else (_FEW,):
        seconds(new)
    slopes = [(seconds(_MANY) - seconds(_FEW)) / (_MANY - _FEW) * 1e6 for _ in range(2)]
    return common.summary(slopes)
