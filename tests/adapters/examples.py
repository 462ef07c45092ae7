"""An example call of each public operation: arrays by name, and keyword arguments; NumPy's results are the expected.

And of what an operation does besides, where other arguments or element types are in play.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


X = normal(5, 96)
HEADS = normal(2, 9, 4, 16)
KV = normal(2, 11, 2, 16)
INDEX = np.int32
_BLOCK = {
    "wq": normal(32, 32),
    "wk": normal(32, 32, seed=1),
    "wv": normal(32, 32, seed=2),
    "wo": normal(32, 32, seed=3),
}

EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer_norm": ({"x": X, "weight": X[0], "bias": X[1], "residual": X + 1}, {}),
    "rms_norm": ({"x": X, "weight": X[0]}, {"weight_offset": 1.0}),
    "layer_norm_quantize": ({"x": X, "weight": X[0]}, {}),
    "rms_norm_quantize": ({"x": X, "residual": X}, {"granularity": "block128"}),
    "linear": ({"x": X, "w": normal(96, 40), "bias": normal(40)}, {"activation": "gelu"}),
    "linear_fp8": (
        {"x": normal(4, 128, dtype=E4M3), "x_scale": np.ones((4, 1), np.float32), "w": normal(16, 128, dtype=E4M3),
         "w_scale": np.full((1, 1), 0.5, np.float32)}, {},
    ),
    "gated_linear": ({"x": X, "w": normal(96, 40)}, {}),
    "gated_activation": ({"x": X}, {"activation": "silu"}),
    "bias_activation": ({"x": X, "bias": X[0], "multiplier": X}, {"activation": "relu"}),
    "softmax": ({"x": X}, {"scale": 0.5}),
    "quantize_fp8": ({"x": X}, {}),
    "dropout_add": (
        {"x": X, "residual": X, "seed": np.array([7]), "offset": np.array([3])}, {"p": 0.5},
    ),
    "attention": ({"q": HEADS, "k": KV, "v": KV}, {"causal": True, "window": (5, -1), "return_lse": True}),
    "varlen_attention": (
        {"q": HEADS[0], "k": KV[0], "v": KV[0], "cu_seqlens_q": np.array([0, 4, 9], INDEX),
         "cu_seqlens_k": np.array([0, 6, 11], INDEX)}, {"causal": True},
    ),
    "decode_attention": (
        {"q": HEADS[:, :1], "k": KV, "v": KV, "seq_lens": np.array([7, 11], INDEX)}, {"return_lse": True},
    ),
    "paged_attention": (
        {"q": HEADS[:, :2], "cache": (normal(6, 8, 2, 16), normal(6, 8, 2, 16, seed=1)),
         "block_table": np.array([[3, 1], [0, 5]], INDEX), "seq_lens": np.array([10, 16], INDEX)}, {},
    ),
    "merge_states": ({"outs": normal(3, 5, 16), "lses": normal(3, 5)}, {}),
    "apply_rope": ({"x": HEADS[0], "positions": np.arange(9, dtype=INDEX)}, {"rotary_dim": 8}),
    "fused_attention": (
        {"x": normal(2, 7, 32), **_BLOCK, "gamma": normal(32)}, {"num_heads": 2, "head_dim": 16},
    ),
    "fused_ffn": ({"x": normal(2, 7, 32), "w1": normal(32, 64), "w2": normal(64, 32), "gamma": normal(32)}, {}),
    "encoder_layer": (
        {"x": normal(2, 7, 32), **_BLOCK, "w1": normal(32, 64), "w2": normal(64, 32)},
        {"num_heads": 2, "head_dim": 16, "pre_ln": False},
    ),
    "encoder_layers": (
        {"x": normal(2, 7, 32), "wq": normal(2, 32, 96), "wk": None, "wv": None, "wo": normal(2, 32, 32, seed=3),
         "w1": normal(2, 32, 64), "w2": normal(2, 64, 32), "final_gamma": normal(32)},
        {"num_heads": 2, "head_dim": 16},
    ),
    "embed_tokens": ({"token_ids": np.array([[3, 1, 4]], INDEX), "word_table": normal(6, 24)}, {}),
    "mean_pool": ({"x": normal(3, 5, 24), "mask": np.ones((3, 5), bool)}, {}),
}  # fmt: skip

_HALF = np.float16
_NUMBER = np.ones(1, np.int64)

#: (operation, arrays, keyword arguments) of options that came later than their operation, by what they do.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "attention of codes": (
        "attention",
        {"q": normal(1, 5, 2, 32, dtype=E4M3), "k": normal(1, 7, 1, 32, dtype=E4M3),
         "v": normal(1, 7, 1, 32, dtype=E4M3, seed=1), "q_descale": np.full(1, 0.5, np.float32),
         "k_descale": np.ones(1, np.float32), "v_descale": np.full((1, 1), 2, np.float32)},
        {"out_dtype": "f16"},
    ),
    "attention with dropout": (
        "attention",
        {"q": HEADS, "k": KV, "v": KV, "dropout_seed": 7 * _NUMBER, "dropout_offset": 3 * _NUMBER}, {"dropout_p": 0.5},
    ),
    "deterministic attention": (
        "attention", {"q": HEADS.astype(_HALF), "k": KV.astype(_HALF), "v": KV.astype(_HALF)},
        {"causal": True, "deterministic": True},
    ),
    "deterministic paged attention": (
        "paged_attention",
        {"q": HEADS[:, :2], "cache": (normal(6, 8, 2, 16), normal(6, 8, 2, 16, seed=1)),
         "block_table": np.array([[3, 1], [0, 5]], INDEX), "seq_lens": np.array([10, 16], INDEX)},
        {"deterministic": True},
    ),
    "packed sequences in an encoder": (
        "fused_attention",
        {"x": normal(9, 32), **_BLOCK, "cu_seqlens": np.array([0, 4, 9], INDEX)}, {"num_heads": 2, "head_dim": 16},
    ),
    "softmax with a mask": (
        "softmax", {"x": normal(2, 3, 8), "mask": np.arange(8) < 5}, {"scale": 2.0},
    ),
}  # fmt: skip
