"""What a decode step must pass before `bench/engine.py` times it.

- Its replayed graph leaves the logits and tokens that its launches leave one by one, bit for bit.
- Its logits are those of the same step written plainly in torch in fp32 over the same cache: no farther from them than
  twice what torch's own step in the model's type is (of codes: on what they stand for; where our step rounds
  activations to e4m3 for W8A8, torch's does, too).  That is asked of a model of few layers and the full shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import engine_models
import numpy as np
from engine_models import as_torch

from cki.engine.model import DecoderModel, StepRow


def replay_equals_launches(model: DecoderModel, sequences: Sequence[int]) -> bool:
    """Whether a step's graph does what its launches do: equal bits of logits, equal tokens."""
    rows = [StepRow(sequence, [7 + number]) for number, sequence in enumerate(sequences)]
    replayed_tokens = model.decode(rows).wait().tokens
    replayed = model.logits().numpy()[: len(rows)].copy()
    as_torch(model.logits()).zero_()
    engine_models.synchronize(model.device)
    tokens = model.relaunch(rows).wait().tokens
    launched = model.logits().numpy()[: len(rows)]
    return replayed.tobytes() == launched.tobytes() and np.array_equal(tokens, replayed_tokens)


def distance_from_torch(model: DecoderModel, sequences: Sequence[int]) -> tuple[float, float]:
    """RMS distance to torch's logits in fp32, over their spread: of a step's, and of torch's in the model's type."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, len(sequences))
    model.decode([StepRow(sequence, [int(token)]) for sequence, token in zip(sequences, tokens)]).wait()
    found = as_torch(model.logits())[: len(sequences)].double()
    import torch

    exact = torch_step(model, sequences, tokens, torch.float32).double()
    kernels = [step.kernel for step in model.plan(model.decode_shape(len(sequences))).steps]
    is_w8a8 = any(k.entry == "linear_fp8" or dict(k.constants).get("kTwoParts") is False for k in kernels)
    plain = torch_step(
        model,
        sequences,
        tokens,
        found_type(model),
        w8a8=is_w8a8,
        stores_codes=model.cache.dtype.name == "e4m3",
    ).double()

    def distance(logits: Any) -> float:
        return float((logits - exact).pow(2).mean().sqrt() / exact.std())

    return distance(found), distance(plain)


def found_type(model: DecoderModel) -> Any:
    """torch's name of the model's element type."""
    import torch

    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[model.dtype.name]


def torch_step(
    model: DecoderModel, sequences: Sequence[int], tokens: np.ndarray, dtype: Any, *, w8a8: bool = False,
    stores_codes: bool = False,
) -> Any:  # fmt: skip
    """Logits [rows, vocabulary] after sequences of equal length whose last tokens are `tokens`, in torch.

    What lies before the last token is read from the cache.  For models without biases, windows and scaled RoPE.
    w8a8: what the layers' matrices multiply goes through e4m3, by 128 neighbours.  stores_codes: the last token's keys
    and values do, by heads of up to 128.
    """
    import torch

    c, cache = model.config, model.cache
    weights = {role: as_torch(tensor) for role, tensor in model.weights.items()}
    length = cache.length(sequences[0])
    table = torch.tensor([cache.blocks(s) for s in sequences], device=weights["embed"].device)

    def weight(role: str) -> Any:
        scales = weights.get(f"{role}.scales")
        if scales is None:
            return weights[role].to(dtype)
        rows, depth = weights[role].shape
        wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :depth]
        return (weights[role].float() * wide).to(dtype)

    def product(x: Any, role: str) -> Any:
        if w8a8:
            x = through_e4m3(x)
        return x @ weight(role).T

    def norm(x: Any, role: str) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps)).to(dtype) * weight(
            role
        )

    pairs = torch.arange(0, c.head_dim, 2, dtype=torch.float64, device=table.device) / c.head_dim
    angles = (length - 1) * c.rope_theta**-pairs
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotated(x: Any) -> Any:
        low, high = x.chunk(2, -1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)

    def cached(tensor: Any, scale: Any) -> Any:
        whole = as_torch(tensor)  # [blocks, block_size, kv_heads, dim], by the table [rows, blocks, ...]
        if scale is None:
            blocks = whole[table]
        else:  # codes are indexed as bytes
            codes = whole.view(torch.uint8)[table].view(whole.dtype)
            blocks = codes.float() * as_torch(scale)[table][..., None]
        return blocks.flatten(1, 2)[:, : length - 1].to(dtype)

    rows, group = len(sequences), c.num_heads // c.num_kv_heads
    ids = torch.from_numpy(tokens).to(table.device)
    x = weights["embed"][ids].to(dtype)
    for number in range(c.num_layers):
        of_layer = f"layers.{number}."
        qkv = product(norm(x, of_layer + "norm1"), of_layer + "wqkv")
        heads = qkv.view(rows, -1, c.head_dim).split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        q, k, v = heads
        if c.qk_norm:
            q, k = norm(q, of_layer + "q_norm"), norm(k, of_layer + "k_norm")
        layer = cache.layer(number)
        q, k = rotated(q), rotated(k)
        if stores_codes:
            k, v = through_e4m3(k), through_e4m3(v)
        keys = torch.cat([cached(layer.k, layer.k_scale), k[:, None]], 1)
        values = torch.cat([cached(layer.v, layer.v_scale), v[:, None]], 1)
        grouped = q.view(rows, c.num_kv_heads, group, c.head_dim)
        scores = torch.einsum("bhgd,blhd->bhgl", grouped, keys).float() * c.head_dim**-0.5
        attended = torch.einsum("bhgl,blhd->bhgd", scores.softmax(-1).to(dtype), values)
        x = x + product(attended.reshape(rows, -1), of_layer + "wo")
        gate, up = product(norm(x, of_layer + "norm2"), of_layer + "wgu").chunk(2, -1)
        x = x + product(torch.nn.functional.silu(gate) * up, of_layer + "wd")
    return norm(x, "final_norm") @ weight("embed" if c.tie_word_embeddings else "head").T


def through_e4m3(x: Any) -> Any:
    """Rows rounded to e4m3 with a scale for each 128 neighbours."""
    import torch

    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -width % 128)).unflatten(-1, (-1, 128))
    scales = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    return (codes.float() * scales).flatten(-2)[..., :width].to(x.dtype)
