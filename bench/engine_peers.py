"""transformers on the shapes of `bench/engine.py`: random weights, SDPA, greedy; eager, or compiled, cache static."""

from __future__ import annotations

import time
from typing import Any

import common

from cki.engine import ModelConfig

#: New tokens of a run, and of those the first that do not count; runs.
_TOKENS, _FIRST, _RUNS = 28, 6, 2


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
    """Microseconds of a decode step: of the wall clock from one token to the next, some 40 of them.

    compiled: `generate` compiles the step itself when its cache is static.
    """
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    stamps: list[float] = []

    class Stamp(StoppingCriteria):  # type: ignore[misc]
        """Asked after each token, when the host has waited for it; stops nothing."""

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    options = {"cache_implementation": "static"} if compiled else {}
    ids = torch.randint(0, peer.config.vocab_size, (batch, context), device=peer.device)
    steps: list[float] = []
    for run in range(_RUNS + 1):  # the first one compiles, and warms up
        stamps.clear()
        with torch.inference_mode():
            peer.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=_TOKENS, min_new_tokens=_TOKENS,
                do_sample=False, pad_token_id=0, stopping_criteria=StoppingCriteriaList([Stamp()]), **options,
            )  # fmt: skip
        assert len(stamps) == _TOKENS
        if run:
            steps += [(after - before) * 1e6 for before, after in zip(stamps[_FIRST:], stamps[_FIRST + 1 :])]
    return common.summary(steps)
