"""A sequence of 128k tokens on a tiny model: its logits against torch's, and the memory that it takes.

    python bench/engine_long.py [--tokens 131072]

A prompt is stored part by part and one token is decoded behind it.  Logits after both must be no farther from the same
model in torch's fp32, written plainly, than twice what torch's own bf16 is.  The memory that the model takes on the
device must be what its tensors add up to.

    long_prefill, long_decode   time of the whole prompt, and of a step behind it
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import common
import engine_models
import numpy as np
from engine_gates import found_type
from engine_models import as_torch

from cki import dtypes
from cki.device import DeviceInfo, cuda_device
from cki.engine import ModelConfig
from cki.engine.device_weights import DeviceWeights
from cki.engine.model import DecoderModel, ModelLimits, StepRow

TINY = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1000, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
_PART = 2048
#: Queries of the plain form at a time.
_QUERIES = 512
_MOST_DISTANCE = 2.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128 * 1024)
    arguments = parser.parse_args(argv)
    common.require_gpu()
    rows = long_rows(arguments.tokens, cuda_device(0))
    for row in rows:
        print(row, flush=True)
    common.write_csv("engine_long", rows)


def long_rows(tokens: int, device: DeviceInfo) -> list[dict[str, object]]:
    """Checks a prompt of so many tokens and a step behind it, and times both."""
    config = ModelConfig.from_hf({**TINY, "max_position_embeddings": tokens + 16})
    free = free_bytes(device)
    model = make_model(config, device, tokens + 16)
    taken = free - free_bytes(device)
    computed = model.weight_nbytes + cache_bytes(model)
    prompt = np.random.default_rng(0).integers(3, config.vocab_size, tokens + 1)
    samples, found = [], []
    for _ in range(2):
        sequence = model.cache.allocate_sequence()
        start = time.perf_counter()
        for first in range(0, tokens, _PART):
            model.prefill([StepRow(sequence, prompt[first : min(first + _PART, tokens)])]).wait()
        middle = time.perf_counter()
        found = [as_torch(model.logits())[0].double()]
        before = time.perf_counter()
        model.decode([StepRow(sequence, [int(prompt[-1])])]).wait()
        samples.append((middle - start, time.perf_counter() - before))
        found.append(as_torch(model.logits())[0].double())
        model.cache.free_sequence(sequence)
    import torch

    exact, plain = (
        [plain_logits(model, prompt[:count], dtype).double() for count in (tokens, tokens + 1)]
        for dtype in (torch.float32, found_type(model))
    )
    rows = []
    for place, name in enumerate(("long_prefill", "long_decode")):
        ours, theirs = (
            float((logits[place] - exact[place]).pow(2).mean().sqrt() / exact[place].std())
            for logits in (found, plain)
        )
        assert ours <= _MOST_DISTANCE * theirs + 1e-5, (
            f"{name}: logits are {ours:.2e} from torch's fp32, torch's own {theirs:.2e}"
        )
        rows.append(
            common.row(
                name, f"tiny model, {tokens} tokens", model.dtype.name, "cki", samples[-1][place] * 1e6,
                distance=round(ours, 5), distance_of_torch=round(theirs, 5), computed_mb=round(computed / 1e6, 1),
                taken_mb=round(taken / 1e6, 1),
            )
        )  # fmt: skip
    assert taken <= 1.1 * computed + 256e6, f"{taken} bytes are taken, weights and cache are {computed}"
    return rows


def make_model(config: ModelConfig, device: DeviceInfo, tokens: int) -> DecoderModel:
    """Random weights, and a cache of one sequence."""
    import torch

    torch.manual_seed(0)
    weights = DeviceWeights(config, engine_models.fill_at_random, dtypes.bf16, device, tokens)
    block = 16 * engine_models.token_bytes(config, dtypes.bf16, codes=False)
    return DecoderModel(
        config,
        weights,
        device=device,
        limits=ModelLimits(1, _PART, tokens),
        cache_nbytes=-(-tokens // 16) * block,
    )


def cache_bytes(model: DecoderModel) -> int:
    """Of keys and values of all blocks."""
    token = engine_models.token_bytes(model.config, model.dtype, codes=False)
    return model.cache.num_blocks * model.cache.block_size * token


def free_bytes(device: DeviceInfo) -> int:
    """Of a GPU's memory."""
    if device.kind == "sim":
        return 0
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def plain_logits(model: DecoderModel, tokens: np.ndarray, dtype: Any) -> Any:
    """Logits [vocabulary] after these tokens, computed whole in torch.  For models without biases, windows, norms of
    heads and scaled RoPE."""
    import torch

    c = model.config
    weights = {role: as_torch(tensor) for role, tensor in model.weights.items()}
    place = weights["embed"].device

    def norm(x: Any, role: str) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps)).to(dtype) * weights[
            role
        ].to(dtype)

    pairs = torch.arange(0, c.head_dim, 2, dtype=torch.float64, device=place) / c.head_dim
    angles = torch.arange(len(tokens), device=place)[:, None, None] * c.rope_theta**-pairs
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotated(x: Any) -> Any:
        low, high = x.chunk(2, -1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)

    def attention(q: Any, k: Any, v: Any) -> Any:
        """[tokens, heads, dim]."""
        group = c.num_heads // c.num_kv_heads
        k, v = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (k, v))
        found = []
        for first in range(0, len(tokens), _QUERIES):
            some = q[first : first + _QUERIES].transpose(0, 1)
            end = first + some.shape[1]
            scores = (some @ k[:, :end].mT).float() * c.head_dim**-0.5
            scores[:, :, first:].masked_fill_(
                torch.ones(end - first, end - first, dtype=torch.bool, device=place).triu(1), -torch.inf
            )
            found.append((scores.softmax(-1).to(dtype) @ v[:, :end]).transpose(0, 1))
        return torch.cat(found)

    x = weights["embed"][torch.from_numpy(tokens).to(place)].to(dtype)
    for number in range(c.num_layers):
        layer = f"layers.{number}."
        heads = (norm(x, layer + "norm1") @ weights[layer + "wqkv"].to(dtype).T).view(
            len(tokens), -1, c.head_dim
        )
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        x = (
            x
            + attention(rotated(q), rotated(k), v).reshape(len(tokens), -1)
            @ weights[layer + "wo"].to(dtype).T
        )
        gate, up = (norm(x, layer + "norm2") @ weights[layer + "wgu"].to(dtype).T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[layer + "wd"].to(dtype).T
    return norm(x[-1], "final_norm") @ weights["embed"].to(dtype).T


if __name__ == "__main__":
    main()
