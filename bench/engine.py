"""The engine: time of decode steps, prefill and a mix of requests.

    python bench/engine.py                            # SmolLM2's weights, and the shapes of Qwen3-8B with random ones
    python bench/engine.py --models smollm2 --batches 1 4 --transformers

Every row is preceded by its gate.  Where a decode step has written the keys of a sequence token by token, its logits
must be those of a prefill of the same tokens, which other kernels compute; with `--transformers` greedy texts of
SmolLM2 in f32 must be those of transformers.  A row that fails its gate is not measured.

    step    wall clock of chained decode steps, host work and tables included, median over steps
    device  the step's graph alone, replayed between two events
    leak    10 000 random requests on a tiny model: no block is lost
    perplexity  of SmolLM2 by element type
    of_copy bytes that the step must read (weights once, keys and values) a second, over the rate of a device copy
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np

from cki.engine import LLM, ModelConfig, SamplingParams
from cki.engine.model import DecoderModel, StepRow
from cki.memory.views import CacheTensor

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip
#: Greedy texts that are compared with transformers'.
PROMPTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time", "The sky is blue because",
    "1, 1, 2, 3, 5, 8,", "My favourite colour is", "Photosynthesis is", "In 1969,", "To bake bread you need",
    "The opposite of hot is", "A haiku about rain:", "SELECT name FROM", "Dear Sir or Madam,", "The mitochondria",
    "E = mc^2 means",
]  # fmt: skip
STEPS = 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=("smollm2", "qwen3-8b"), default=["smollm2", "qwen3-8b"]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=36, help="of Qwen3-8B's shapes (fewer: a quick look)")
    parser.add_argument("--transformers", action="store_true", help="compare with transformers, eager")
    arguments = parser.parse_args(argv)
    common.require_gpu()
    copy = common.copy_rate()
    rows: list[dict[str, object]] = list(leak_rows())
    if "smollm2" in arguments.models:
        rows += perplexity_rows()
    for name in arguments.models:
        llm = load(name, arguments)
        if arguments.transformers and name == "smollm2":
            gate_against_transformers()
        for batch in arguments.batches:
            rows += decode_rows(name, llm.model, batch, arguments.context, copy)
        rows += prefill_rows(name, llm.model)
        rows += mix_rows(name, llm)
        del llm
    common.write_csv("engine", rows)


def load(name: str, arguments: argparse.Namespace) -> LLM:
    """A model on the GPU, in bf16."""
    sizes: dict[str, Any] = {
        "dtype": "bf16",
        "device": "cuda",
        "max_sequences": 64,
        "max_length": 8192 + STEPS + 16,
    }
    if name == "smollm2":
        return LLM("smollm2", **sizes)
    config = ModelConfig.from_hf({**QWEN3_8B, "num_hidden_layers": arguments.layers})
    return LLM.from_weights(config, fill_at_random, **sizes)


def fill_at_random(role: str, tensor: CacheTensor) -> None:
    """bf16 weights of a size that keeps activations near 1, made on the device; norms' around 1, biases' small."""
    import cupy

    view = tensor.view
    memory = cupy.cuda.UnownedMemory(view.ptr, 2 * view.size, tensor)
    bits = cupy.ndarray((view.size,), cupy.uint16, cupy.cuda.MemoryPointer(memory, 0))
    scale = 1.0 if role == "embed" or view.ndim == 1 else view.shape[-1] ** -0.5
    generator = cupy.random.default_rng(len(role) + view.size)
    for first in range(0, view.size, 1 << 26):
        part = bits[first : first + (1 << 26)]
        values = generator.standard_normal(part.size, dtype=cupy.float32) * scale
        if view.ndim == 1:
            values = values * 0.1 + (1 if "norm" in role else 0)
        part[:] = (values.view(cupy.uint32) >> 16).astype(cupy.uint16)
    cupy.cuda.Device().synchronize()


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


def decode_rows(
    name: str, model: DecoderModel, batch: int, context: int, copy: float
) -> Iterator[dict[str, object]]:
    """A step of `batch` sequences of `context` tokens."""
    rng = np.random.default_rng(batch)
    prompts = [rng.integers(0, model.config.vocab_size, context) for _ in range(batch)]
    difference = gate(model, prompts[0], rng.integers(0, model.config.vocab_size, 8).tolist())
    print(f"{name} batch {batch}: decoding differs from prefill by {difference:.4f} of the logits' spread")
    assert difference < 0.1, "decoding and prefill disagree"

    sequences = sequences_of(model, prompts)
    rows = [StepRow(sequence, [7]) for sequence in sequences]
    result = model.decode(rows)
    samples = []
    for _ in range(STEPS):
        start = time.perf_counter()
        following = model.decode(rows, chained=True)
        result.wait()  # one step behind, as the engine reads
        result = following
        samples.append((time.perf_counter() - start) * 1e6)
    result.wait()
    program = model.program(model._decode_shape(batch))
    device = replay_time(model, lambda: program.launch(model.stream))
    c = model.config
    cached = 2 * batch * (context + STEPS) * c.num_layers * c.num_kv_heads * c.head_dim * model.dtype.itemsize
    table = c.vocab_size * c.hidden_size * model.dtype.itemsize  # of an untied embedding only a row is read
    nbytes = model.weight_nbytes - (0 if c.tie_word_embeddings else table) + cached
    for kind, timing in (("step", common.summary(samples[8:])), ("device", device)):
        yield common.row(
            f"decode_{kind}", f"{name} batch={batch} context={context}", model.dtype.name, "cki", timing, nbytes=nbytes,
            tokens_per_s=round(batch / timing.median_us * 1e6, 1), launches=program.num_kernels,
            of_copy=round(nbytes / timing.median_us / 1e3 / copy, 3), copy_gb_per_s=round(copy, 1),
        )  # fmt: skip
    for sequence in sequences:
        model.cache.free_sequence(sequence)


def replay_time(model: DecoderModel, launch: Callable[[], None], replays: int = 30) -> common.Timing:
    """Of a compiled step over the tables of the last one, between events on the model's stream."""
    import cupy

    stream = cupy.cuda.ExternalStream(model.stream)
    samples = []
    for _ in range(replays):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        launch()
        stop.record(stream)
        stop.synchronize()
        samples.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    return common.summary(samples[3:])


def prefill_rows(name: str, model: DecoderModel) -> Iterator[dict[str, object]]:
    """Time to first token of prompts of 1k and 8k tokens, in parts of max_step_tokens."""
    c = model.config
    parameters = model.weight_nbytes / model.dtype.itemsize - (1 if c.tie_word_embeddings else 2) * (
        c.vocab_size * c.hidden_size
    )
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
            tokens_per_s=round(length / timing.median_us * 1e6, 1),
        )  # fmt: skip


def mix_rows(name: str, llm: LLM) -> Iterator[dict[str, object]]:
    """64 requests of 16 to 2048 tokens that bring 16 to 256 each, all submitted at once."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, llm.config.vocab_size, int(n)).tolist() for n in rng.integers(16, 2049, 64)]
    params = [SamplingParams(int(n), ignore_eos=True) for n in rng.integers(16, 257, 64)]
    llm.generate(prompts[:2], [SamplingParams(4, ignore_eos=True)] * 2)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed = time.perf_counter() - start
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
        preemptions=sum(output.stats.preemptions for output in outputs),
    )  # fmt: skip


def leak_rows(count: int = 10_000) -> Iterator[dict[str, object]]:
    """Random requests on a tiny model with a small cache: preempted, shared, and at the end nothing is left."""
    sizes = {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": 2,
    }  # fmt: skip
    llm = LLM.from_weights(
        ModelConfig.from_hf(sizes), fill_at_random, dtype="bf16", device="cuda", max_length=256, max_sequences=32,
        cache_nbytes=150 * 2 * 2 * 16 * 2 * 64 * 2,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    stem = rng.integers(3, 1000, 60).tolist()
    start, new, preempted, shared = time.perf_counter(), 0, 0, 0
    for first in range(0, count, 500):
        prompts = [
            stem[: int(rng.integers(0, 60))] + rng.integers(3, 1000, int(rng.integers(1, 60))).tolist()
            for _ in range(500)
        ]
        params = [
            SamplingParams(int(n), temperature=float(rng.choice([0.0, 1.0])), seed=first, ignore_eos=True)
            for n in rng.integers(1, 60, 500)
        ]
        outputs = llm.generate(prompts, params)
        assert all(len(output.token_ids) == wanted.max_tokens for output, wanted in zip(outputs, params))
        new += sum(output.new_tokens for output in outputs)
        preempted += sum(output.stats.preemptions for output in outputs)
        shared += sum(output.stats.cached_tokens for output in outputs)
    cache = llm.model.cache
    assert (cache.blocks_used, cache.blocks_free) == (0, cache.num_blocks), "blocks are lost"
    elapsed = time.perf_counter() - start
    yield common.row(
        "leak", f"tiny model, {count} requests", "bf16", "cki", elapsed * 1e6, tokens_per_s=round(new / elapsed, 1),
        preemptions=preempted, cached_tokens=shared,
    )  # fmt: skip


def perplexity_rows() -> Iterator[dict[str, object]]:
    """Of SmolLM2 on this file's own text, token by token through decode steps, by element type."""
    text = Path(__file__).read_text(encoding="utf-8")
    for dtype in ("f32", "f16", "bf16"):
        llm = LLM(
            "smollm2", dtype=dtype, device="cuda", max_length=1024, max_sequences=1, cache_nbytes=1 << 28
        )
        assert llm.tokenizer is not None
        tokens = llm.tokenizer.encode(text)[:600]
        sequence = llm.model.cache.allocate_sequence()
        surprise = 0.0
        for token, following in zip(tokens, tokens[1:]):
            llm.model.decode([StepRow(sequence, [token])]).wait()
            logits = llm.model.logits().numpy()[0].astype(np.float64)
            surprise -= logits[following] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        value = float(np.exp(surprise / (len(tokens) - 1)))
        assert 1 < value < 100, "no language model"
        yield common.row(
            "perplexity", f"smollm2, {len(tokens)} tokens", dtype, "cki", 0.0, perplexity=round(value, 4)
        )


def gate_against_transformers() -> None:
    """SmolLM2 in f32: 64 greedy tokens on each prompt are those of transformers."""
    from cki.engine import open_model

    llm = LLM("smollm2", dtype="f32", device="cuda", max_length=512, max_sequences=16, cache_nbytes=1 << 30)
    outputs = llm.generate(PROMPTS, SamplingParams(64, ignore_eos=True))
    peer = transformers_model(open_model("smollm2"))
    peer.generation_config.eos_token_id = None  # the engine's answers go on, too
    import torch

    for prompt, output in zip(PROMPTS, outputs):
        ids = torch.tensor([output.prompt_token_ids], device="cuda")
        with torch.inference_mode():
            theirs = peer.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=0)
        expected = theirs[0, ids.shape[1] :].tolist()
        same = next((n for n, (a, b) in enumerate(zip(output.token_ids, expected)) if a != b), 64)
        print(f"{prompt!r}: the first {same} of 64 tokens are those of transformers")
        assert same == 64, "greedy texts in f32 differ"


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
