"""Calls whose gradients are tested in every framework: one or more an operation that has an expression."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cki.ops.table import public_specs
from cki.reference.attention import attention
from cki.reference.encoder import encoder_layer, encoder_layers, fused_attention, fused_ffn
from cki.reference.linear import bias_activation, gated_activation, gated_linear, linear, softmax
from cki.reference.norm import layer_norm, rms_norm
from cki.reference.paged import apply_rope

REFERENCES = {
    "layer_norm": layer_norm, "rms_norm": rms_norm, "attention": attention, "linear": linear,
    "gated_linear": gated_linear, "gated_activation": gated_activation, "bias_activation": bias_activation,
    "softmax": softmax, "fused_attention": fused_attention, "fused_ffn": fused_ffn,
    "encoder_layer": encoder_layer, "apply_rope": apply_rope,
    "encoder_layers": encoder_layers,
}  # fmt: skip


class Case(NamedTuple):
    """inputs: shapes of floats, arrays, or None.  attributes: those that the call gives."""

    operation: str
    inputs: dict[str, Any]
    attributes: dict[str, Any]


_PADDING = np.array([[True] * 4 + [False], [True] * 5])
_NO_KEYS = np.array([[[[True]]], [[[False]]]])  # the second sequence sees nothing
_BIAS = np.where(np.arange(5) == 3, -np.inf, np.linspace(-1, 1, 5)).astype(np.float32)[None, None, None]
_QKV = {"q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 4)}
_BLOCK = {"num_heads": 2, "head_dim": 8}
_WEIGHTS = {"wq": (12, 16), "wk": (12, 16), "wv": (12, 16), "wo": (16, 12)}
_VECTORS = {"bq": (16,), "bk": (16,), "bv": (16,), "bo": (12,)}
_LAYER = {
    **_WEIGHTS, **_VECTORS, "w1": (12, 20), "w2": (20, 12), "b1": (20,), "b2": (12,), "attention_gamma": (12,),
    "attention_beta": (12,), "output_gamma": (12,), "output_beta": (12,),
}  # fmt: skip

CASES = {
    "layer_norm": Case("layer_norm", {"x": (3, 12), "weight": (12,), "bias": (12,)}, {"eps": 1e-3}),
    "layer_norm-residual": Case("layer_norm", {"x": (3, 12), "residual": (3, 12)}, {"normalize": "unrounded"}),
    "rms_norm": Case("rms_norm", {"x": (3, 12), "weight": (12,), "residual": (3, 12)}, {"weight_offset": 1.0}),
    "linear": Case("linear", {"x": (3, 12), "w": (12, 8), "bias": (8,), "residual": (3, 8)}, {"activation": "gelu"}),
    "linear-out_in": Case("linear", {"x": (3, 12), "w": (8, 12)}, {"activation": "relu", "weight_layout": "out_in"}),
    "gated_linear": Case("gated_linear", {"x": (3, 12), "w": (12, 8), "bias": (8,)}, {"activation": "silu"}),
    "gated_activation": Case(
        "gated_activation", {"x": (3, 12), "bias": (12,)}, {"activation": "gelu_tanh", "layout": "interleaved"}
    ),
    "gated_activation-up_first": Case(
        "gated_activation", {"x": (3, 12)}, {"activation": "sigmoid", "layout": "up_first"}
    ),
    "bias_activation": Case(
        "bias_activation", {"x": (3, 12), "bias": (12,), "multiplier": (3, 12)}, {"activation": "quick_gelu"}
    ),
    "bias_activation-relu2": Case("bias_activation", {"x": (3, 12)}, {"activation": "relu2"}),
    "bias_activation-tanh": Case("bias_activation", {"x": (3, 12)}, {"activation": "tanh"}),
    "softmax": Case("softmax", {"x": (2, 5), "mask": np.array([[True] * 5, [False] * 5])}, {"scale": 0.7}),
    "attention": Case("attention", _QKV, {"causal": True, "return_lse": True}),
    "attention-window": Case(
        "attention", {**_QKV, "sinks": (4,), "alibi_slopes": (4,)},
        {"window": (1, 1), "softcap": 3.0, "scale": 0.4, "causal_alignment": "top_left", "return_lse": True},
    ),
    "attention-masks": Case("attention", {**_QKV, "bias": _BIAS, "mask": _NO_KEYS}, {"return_lse": True}),
    "fused_attention": Case(
        "fused_attention", {"x": (2, 5, 12), **_WEIGHTS, **_VECTORS, "gamma": (12,), "beta": (12,), "mask": _PADDING},
        _BLOCK,
    ),
    "fused_attention-packed": Case(
        "fused_attention",
        {
            "x": (6, 12), "wq": (32, 12), "wk": None, "wv": None, "wo": (12, 16), "bq": (32,),
            "cu_seqlens": np.array([0, 2, 5], np.int32),
        },
        {"num_heads": 2, "head_dim": 8, "num_kv_heads": 1, "pre_ln": False, "weight_layout": "out_in", "causal": True},
    ),
    "fused_ffn": Case(
        "fused_ffn", {"x": (3, 12), "w1": (12, 16), "w2": (16, 12), "gamma": (12,), "beta": (12,), "b1": (16,)},
        {"pre_ln": False, "activation": "gelu"},
    ),
    "fused_ffn-pre": Case(
        "fused_ffn", {"x": (3, 12), "w1": (16, 12), "w2": (12, 16), "gamma": (12,), "b2": (12,)},
        {"residual": False, "activation": "silu", "weight_layout": "out_in"},
    ),
    "encoder_layer": Case("encoder_layer", {"x": (2, 5, 12), **_LAYER, "mask": _PADDING}, _BLOCK),
    "encoder_layer-post": Case(
        "encoder_layer", {"x": (2, 5, 12), **_LAYER}, {**_BLOCK, "pre_ln": False, "activation": "relu", "causal": True}
    ),
    "encoder_layers": Case(
        "encoder_layers",
        {
            "x": (2, 5, 12), **{name: (2, *shape) for name, shape in _LAYER.items()}, "mask": _PADDING,
            "final_gamma": (12,), "final_beta": (12,),
        },
        _BLOCK,
    ),
    "apply_rope": Case("apply_rope", {"x": (3, 2, 8), "positions": np.array([0, 7, 100])}, {"rotary_dim": 6}),
    "apply_rope-table": Case(
        "apply_rope", {"x": (3, 2, 8), "positions": np.array([1, 5, -1], np.int32), "cos_sin": (6, 8)},
        {"interleaved": True, "inverse": True},
    ),
}  # fmt: skip


def arrays_of(case: Case) -> dict[str, np.ndarray | None]:
    """The inputs; floats are float32."""
    rng = np.random.default_rng(3)
    return {
        name: (0.5 * rng.standard_normal(given)).astype(np.float32) if isinstance(given, tuple) else given
        for name, given in case.inputs.items()
    }


def first_cases() -> list[str]:
    """One for each operation."""
    return [name for name, case in CASES.items() if name == case.operation]


def attributes_of(case: Case) -> dict[str, Any]:
    """All attributes of the operation, with the public function's defaults."""
    defaults = {attribute.name: attribute.default for attribute in public_specs()[case.operation].attributes}
    if case.operation.startswith("encoder_layer"):
        defaults["activation"] = "gelu"
    return {**defaults, **case.attributes}


def call_of(case: Case) -> tuple[list[np.ndarray | None], list[Any]]:
    """Inputs and attributes in the order of the operation's table entry."""
    spec, arrays, attributes = public_specs()[case.operation], arrays_of(case), attributes_of(case)
    return [arrays.get(item.name) for item in spec.inputs], [attributes[a.name] for a in spec.attributes]


def torch_gradients(case: Case) -> dict[str, np.ndarray]:
    """By PyTorch, of the sum of the sines of the outputs' finite elements; by the inputs' names."""
    import torch

    from cki.adapters import gradient
    from cki.adapters.gradient_torch import ARRAYS

    tensors = {name: None if a is None else torch.from_numpy(a.copy()) for name, a in arrays_of(case).items()}
    variables = {
        name: t.requires_grad_() for name, t in tensors.items() if t is not None and t.is_floating_point()
    }
    outputs = gradient.expression(case.operation)(ARRAYS, tensors, attributes_of(case))
    total = sum(torch.where(torch.isfinite(y), y, 0.0).sin().sum() for y in outputs)
    return {
        name: g.numpy() for name, g in zip(variables, torch.autograd.grad(total, list(variables.values())))
    }
