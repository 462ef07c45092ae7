"""all-MiniLM-L6-v2's forward pass in plain NumPy float64, one sentence at a time, from the tensors of the file.

It shares no code with CKI (no kernel, no cki.reference, no weight layout of the demo), so that it can say
whether those are right.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

HEADS = 12
LAYERS = 6
EPSILON = 1e-12

_erf = np.frompyfunc(math.erf, 1, 1)


def _layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * weight + bias


def _gelu(x):
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(np.float64))


def embed(model_file: Path, ids: list[int]) -> np.ndarray:
    """The unit-length float64 embedding, [384], of one sentence's token ids."""
    from safetensors.numpy import load_file

    tensors = {name: value.astype(np.float64) for name, value in load_file(model_file).items()}

    def linear(x, name):
        return x @ tensors[name + ".weight"].T + tensors[name + ".bias"]

    def norm(x, name):
        return _layer_norm(x, tensors[name + ".weight"], tensors[name + ".bias"])

    x = tensors["embeddings.word_embeddings.weight"][ids]
    x = x + tensors["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + tensors["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}."
        q, k, v = (
            linear(x, f"{layer}attention.self.{name}").reshape(len(ids), HEADS, -1).transpose(1, 0, 2)
            for name in ("query", "key", "value")
        )
        logits = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        context = (weights / weights.sum(-1, keepdims=True)) @ v
        merged = context.transpose(1, 0, 2).reshape(len(ids), -1)
        x = norm(x + linear(merged, f"{layer}attention.output.dense"), f"{layer}attention.output.LayerNorm")
        hidden = _gelu(linear(x, f"{layer}intermediate.dense"))
        x = norm(x + linear(hidden, f"{layer}output.dense"), f"{layer}output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)
