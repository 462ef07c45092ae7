"""Small problems for each operation: what `sanitize` and `selftest` run.

Sizes are awkward on purpose: they are no multiples of the tiles, wrap every ring of stages at least twice, and leave
tails in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cki.errors import InvalidArgumentError

Array = np.ndarray[Any, Any]
_FLOATS: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


class Example(NamedTuple):
    """arguments: keyword arguments of the operation `op`; arrays among them are NumPy's.  label: for reports."""

    op: str
    label: str
    arguments: dict[str, Any]


def _normal(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape) * scale


def _norm(op: str, *, width: int = 333, rows: int = 5) -> list[Mapping[str, Any]]:
    base = {"x": _normal(0, rows, width), "weight": _normal(1, width)}
    bias = {"bias": _normal(2, width)} if op == "layer_norm" else {}
    aligned = {"x": _normal(4, 3, 1024), "weight": _normal(5, 1024)}
    return [{**base, **bias}, {**base, "residual": _normal(3, rows, width)}, aligned]


def _attention() -> list[Mapping[str, Any]]:
    def heads(seed: int, length: int, count: int, dim: int) -> Array:
        return _normal(seed, 1, length, count, dim)

    return [
        {"q": heads(0, 65, 4, 64), "k": heads(1, 193, 2, 64), "v": heads(2, 193, 2, 64), "causal": True},
        {
            "q": heads(3, 33, 2, 40), "k": heads(4, 130, 2, 40), "v": heads(5, 130, 2, 40),
            "bias": _normal(6, 1, 1, 33, 130),
        },
    ]  # fmt: skip


def _linear() -> list[Mapping[str, Any]]:
    x, w = _normal(0, 67, 200), _normal(1, 200, 129, scale=0.1)
    return [
        {"x": x, "w": w},
        {"x": x, "w": w, "bias": _normal(2, 129), "activation": "gelu", "residual": _normal(3, 67, 129)},
    ]


def _block() -> dict[str, Any]:
    hidden = 64
    weights = {
        name: _normal(seed, hidden, hidden, scale=0.1)
        for seed, name in enumerate(("wq", "wk", "wv", "wo"), 1)
    }
    return {"x": _normal(0, 2, 17, hidden), **weights, "num_heads": 2, "head_dim": 32}


def _layer() -> dict[str, Any]:
    return {**_block(), "w1": _normal(5, 64, 256, scale=0.1), "w2": _normal(6, 256, 64, scale=0.1)}


def _feed_forward(pre_ln: bool) -> dict[str, Any]:
    layer = _layer()
    return {**{name: layer[name] for name in ("x", "w1", "w2")}, "gamma": _normal(7, 64), "pre_ln": pre_ln}


def _packed_layer() -> dict[str, Any]:
    """Sequences without padding, weights as torch stores them, Q, K and V in one."""
    layer = _layer()
    packed = {"wq": np.concatenate([layer[name].T for name in ("wq", "wk", "wv")]), "wk": None, "wv": None}
    stored = {name: np.ascontiguousarray(layer[name].T) for name in ("wo", "w1", "w2")}
    x, offsets = layer["x"].reshape(34, 64), np.array([0, 5, 5, 34])
    return {**layer, **packed, **stored, "x": x, "cu_seqlens": offsets, "weight_layout": "out_in"}


def _embedding() -> dict[str, Any]:
    return {
        "token_ids": np.random.default_rng(0).integers(0, 50, (2, 17), dtype=np.int64),
        "word_table": _normal(1, 50, 100), "position_table": _normal(2, 17, 100),
    }  # fmt: skip


def _states() -> dict[str, Any]:
    lses = np.array(_normal(1, 3, 5, 2), np.float32)
    lses[0, 2] = -np.inf
    return {"outs": _normal(0, 3, 5, 2, 100), "lses": lses}


def _pool() -> dict[str, Any]:
    return {"x": _normal(0, 2, 17, 100), "mask": np.arange(17)[None, :] < np.array([[17], [5]])}


def _activation(op: str) -> list[Mapping[str, Any]]:
    x, bias = _normal(0, 5, 334), _normal(1, 334)
    if op == "gated_activation":
        return [{"x": x, "bias": bias, "layout": "interleaved"}, {"x": _normal(2, 3, 9000)}]
    return [{"x": x, "bias": bias, "multiplier": _normal(3, 5, 334)}, {"x": _normal(2, 3, 9000)}]


def _gated_linear() -> list[Mapping[str, Any]]:
    x, w, bias = _normal(0, 300, 520), _normal(1, 520, 400, scale=0.05), _normal(2, 400)
    return [{"x": x, "w": w, "bias": bias}, {"x": x, "w": w, "activation": "gelu", "layout": "interleaved"}]


def _softmax() -> list[Mapping[str, Any]]:
    mask = np.random.default_rng(1).random((5, 333)) < 0.5
    return [{"x": _normal(0, 5, 333), "mask": mask}, {"x": _normal(2, 2, 40001)}]


def _quantize() -> list[Mapping[str, Any]]:
    return [
        {"x": _normal(0, *shape), "granularity": granularity, "out_dtype": "uint8"}
        for granularity in ("row", "block128")
        for shape in ((5, 333), (3, 1024), (2, 40001))
    ]


def _norm_quantize(op: str) -> list[Mapping[str, Any]]:
    return [
        {**problem, "granularity": granularity, "out_dtype": "uint8"}
        for granularity, width in (("row", 333), ("block128", 1000))
        for problem in _norm(op, width=width)[:2]
    ]


def _dropout() -> list[Mapping[str, Any]]:
    counters = {"seed": np.array([7]), "offset": np.array([9]), "p": 0.3}
    return [
        {"x": _normal(0, 5, width), "residual": _normal(1, 5, width), **counters} for width in (333, 1024)
    ]


def _varlen() -> list[Mapping[str, Any]]:
    """Packed keys for the generic kernel and for Hopper's (64 queries a sequence and more), then a cache in blocks."""
    queries, keys = np.array([0, 5, 5, 143], np.int32), np.array([0, 30, 30, 240], np.int32)
    q, k, v = _normal(0, 143, 4, 64), _normal(1, 240, 2, 64), _normal(2, 240, 2, 64)
    packed = {"q": q, "k": k, "v": v, "cu_seqlens_q": queries, "cu_seqlens_k": keys, "causal": True}
    cache = {"k": _normal(3, 30, 16, 2, 64), "v": _normal(4, 30, 16, 2, 64)}
    paged = {"block_table": _table(3, 14), "seq_lens": np.array([30, 0, 210], np.int32)}
    return [
        packed, {**packed, "max_seqlen_q": 138},
        {"q": q, **cache, "cu_seqlens_q": queries, **paged, "causal": True, "max_seqlen_q": 138},
    ]  # fmt: skip


def _table(sequences: int, blocks: int) -> Array:
    """Blocks of a cache of 30 in random order; what a sequence shares with another is read only."""
    generator = np.random.default_rng(7)
    return np.stack([generator.permutation(30)[:blocks] for _ in range(sequences)]).astype(np.int32)


def _paged() -> list[Mapping[str, Any]]:
    cache = {"cache": (_normal(1, 30, 16, 2, 64), _normal(2, 30, 16, 2, 64))}
    lengths = {"block_table": _table(3, 14), "seq_lens": np.array([200, 0, 31], np.int32)}
    return [{"q": _normal(0, 3, new, 8, 64), **cache, **lengths} for new in (1, 4)]


def _decode() -> list[Mapping[str, Any]]:
    keys = {"k": _normal(1, 3, 300, 2, 96), "v": _normal(2, 3, 300, 2, 96)}
    return [{"q": _normal(0, 3, 1, 8, 96), **keys, "seq_lens": np.array([300, 0, 77], np.int32)}]


def _append() -> list[Mapping[str, Any]]:
    cache = {"cache": (_normal(1, 4, 16, 2, 64), _normal(2, 4, 16, 2, 64))}
    new = {"k": _normal(3, 5, 2, 64), "v": _normal(4, 5, 2, 64), "q": _normal(5, 5, 8, 64)}
    slots = {
        "slot_mapping": np.array([3, 60, -1, 17, 0], np.int32),
        "positions": np.arange(5, dtype=np.int32),
    }
    return [{**new, **cache, **slots, "rope_base": 1e4}]


def _rope() -> list[Mapping[str, Any]]:
    return [{"x": _normal(0, 5, 3, 80), "positions": np.arange(5, dtype=np.int32), "rotary_dim": 40}]


_PROBLEMS: dict[str, Callable[[], list[Mapping[str, Any]]]] = {
    "layer_norm": lambda: _norm("layer_norm"),
    "layer_norm_long": lambda: _norm("layer_norm", width=40001, rows=2)[:2],
    "rms_norm": lambda: _norm("rms_norm"),
    "rms_norm_long": lambda: _norm("rms_norm", width=40001, rows=2)[:2],
    "attention": _attention,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "fused_attention": lambda: [_block()],
    "fused_ffn": lambda: [_feed_forward(True), _feed_forward(False)],
    "encoder_layer": lambda: [_layer(), _packed_layer()],
    "embed_tokens": lambda: [_embedding()],
    "mean_pool": lambda: [_pool()],
    "varlen_attention": _varlen,
    "paged_attention": _paged,
    "decode_attention": _decode,
    "append_kv": _append,
    "apply_rope": _rope,
    "merge_states": lambda: [_states()],
    "gated_activation": lambda: _activation("gated_activation"),
    "bias_activation": lambda: _activation("bias_activation"),
    "softmax": _softmax,
    "quantize_fp8": _quantize,
    "rms_norm_quantize": lambda: _norm_quantize("rms_norm"),
    "layer_norm_quantize": lambda: _norm_quantize("layer_norm"),
    "dropout_add": _dropout,
}
NAMES = tuple(_PROBLEMS)


def examples(name: str, dtypes: tuple[str, ...] = ("f32", "f16", "bf16")) -> list[Example]:
    """The problems of an operation or kernel, in each element type."""
    if name not in _PROBLEMS:
        raise InvalidArgumentError(f"there is no kernel {name!r}", hint=f"one of {', '.join(NAMES)}")
    found = []
    for dtype in dtypes:
        for problem in _PROBLEMS[name]():
            arguments = {key: _cast(value, _FLOATS[dtype]) for key, value in problem.items()}
            shapes = ", ".join(
                f"{key} {list(value.shape)}"
                for key, value in arguments.items()
                if isinstance(value, np.ndarray)
            )
            options = "".join(
                f", {k}={v}" for k, v in arguments.items() if not isinstance(v, (np.ndarray, tuple))
            )
            found.append(Example(name.removesuffix("_long"), f"{dtype}: {shapes}{options}", arguments))
    return found


def _cast(value: Any, dtype: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], np.ndarray):
        return tuple(_cast(part, dtype) for part in value)
    is_float = isinstance(value, np.ndarray) and value.dtype == np.float64
    return value.astype(dtype) if is_float else value
