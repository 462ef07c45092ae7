"""Differentiable expressions of the operations on rows: norms, products, activations, softmax, rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cki.adapters.gradient import Arrays, Attributes, Expression, Inputs

_Activation = Callable[[Arrays, Any], Any]


def _gelu(a: Arrays, x: Any) -> Any:
    return 0.5 * x * (1.0 + a.erf(x * math.sqrt(0.5)))


def _gelu_tanh(a: Arrays, x: Any) -> Any:
    return 0.5 * x * (1.0 + a.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _relu(a: Arrays, x: Any) -> Any:
    return a.where(x > 0, x, 0.0)


#: As in `cki.heuristics.pointwise.ACTIVATIONS`.
_ACTIVATIONS: dict[str | None, _Activation] = {
    None: lambda a, x: x,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda a, x: x * a.sigmoid(x),
    "relu": _relu,
    "sigmoid": lambda a, x: a.sigmoid(x),
    "tanh": lambda a, x: a.tanh(x),
    "quick_gelu": lambda a, x: x * a.sigmoid(1.702 * x),
    "relu2": lambda a, x: _relu(a, x) * _relu(a, x),
}


def layer_norm(a: Arrays, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in fp32."""
    v = a.wide(x)
    deviation = v - a.mean(v)
    y = deviation * a.rsqrt(a.mean(deviation * deviation) + eps)
    y = y if weight is None else y * a.wide(weight)
    return y if bias is None else y + a.wide(bias)


def linear(
    a: Arrays, x: Any, w: Any, bias: Any = None, *, activation: str | None = None, residual: Any = None,
    weight_layout: str = "in_out",
) -> Any:  # fmt: skip
    """activation(x @ w + bias) + residual in x's type."""
    y = a.wide(a.matmul(x, w if weight_layout == "in_out" else a.transpose(w, (1, 0))))
    y = y if bias is None else y + a.wide(bias)
    y = _ACTIVATIONS[activation](a, y)
    return a.like(y if residual is None else y + a.wide(residual), x)


def _sum_of(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, tuple[Any, ...]]:
    """What a norm reads, and (x + residual,) as it is stored, or () without a residual."""
    x, residual = inputs["x"], inputs.get("residual")
    if residual is None:
        return x, ()
    exact = a.wide(x) + a.wide(residual)
    stored = a.like(exact, x)
    return (stored if attributes["normalize"] == "rounded" else exact), (stored,)


def _layer_norm(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    v, stored = _sum_of(a, inputs, attributes)
    y = layer_norm(a, v, inputs.get("weight"), inputs.get("bias"), attributes["eps"])
    return (a.like(y, inputs["x"]), *stored)


def _rms_norm(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    v, stored = _sum_of(a, inputs, attributes)
    v, weight = a.wide(v), inputs.get("weight")
    y = v * a.rsqrt(a.mean(v * v) + attributes["eps"])
    if weight is not None:
        y = y * (a.wide(weight) + attributes["weight_offset"])
    return (a.like(y, inputs["x"]), *stored)


def _linear(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    return (
        linear(
            a, inputs["x"], inputs["w"], inputs.get("bias"), activation=attributes["activation"],
            residual=inputs.get("residual"), weight_layout=attributes["weight_layout"],
        ),
    )  # fmt: skip


def _gated(a: Arrays, both: Any, attributes: Attributes) -> Any:
    """activation(gate) * up in fp32.  both: gate and up along the last axis, in fp32."""
    width, layout = both.shape[-1] // 2, attributes["layout"]
    if layout == "interleaved":
        gate, up = both[..., 0::2], both[..., 1::2]
    else:
        gate, up = both[..., :width], both[..., width:]
        gate, up = (gate, up) if layout == "gate_first" else (up, gate)
    return _ACTIVATIONS[attributes["activation"]](a, gate) * up


def _gated_linear(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    x, w, bias = inputs["x"], inputs["w"], inputs.get("bias")
    both = a.wide(a.matmul(x, w if attributes["weight_layout"] == "in_out" else a.transpose(w, (1, 0))))
    return (a.like(_gated(a, both if bias is None else both + a.wide(bias), attributes), x),)


def _biased(a: Arrays, inputs: Inputs) -> Any:
    x, bias = a.wide(inputs["x"]), inputs.get("bias")
    return x if bias is None else x + a.wide(bias)


def _gated_activation(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    return (a.like(_gated(a, _biased(a, inputs), attributes), inputs["x"]),)


def _bias_activation(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    y, multiplier = _ACTIVATIONS[attributes["activation"]](a, _biased(a, inputs)), inputs.get("multiplier")
    return (a.like(y if multiplier is None else y * a.wide(multiplier), inputs["x"]),)


def _softmax(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    x, mask = inputs["x"], inputs.get("mask")
    v = a.wide(x) * attributes["scale"]
    visible = v > -math.inf
    weights, total, _ = masked_exponentials(a, v, visible if mask is None else visible & a.as_bool(mask))
    return (a.like(weights / total, x),)


def masked_exponentials(a: Arrays, logits: Any, visible: Any, sink: Any = None) -> tuple[Any, Any, Any]:
    """(exp(logits - m) where visible, else 0; their sum, with exp(sink - m), or 1 where that is 0; m), m the largest.

    visible: None where everything is; sink: one more logit, broadcastable to [..., 1].
    """
    if visible is None:
        largest = a.max(logits)
    else:
        logits = a.where(visible, logits, 0.0)  # no infinity may reach what is differentiated
        largest = a.max(a.where(visible, logits, -1e30))
    if sink is not None:
        largest = a.maximum(largest, sink)
    largest = a.constant(largest)
    if visible is None:
        weights = a.exp(logits - largest)
    else:
        weights = a.where(visible, a.exp(a.where(visible, logits - largest, 0.0)), 0.0)
    total = a.sum(weights)
    if sink is not None:
        total = total + a.exp(sink - largest)
    return weights, a.where(total > 0, total, 1.0), largest


def _apply_rope(a: Arrays, inputs: Inputs, attributes: Attributes) -> tuple[Any, ...]:
    x, positions, table = inputs["x"], inputs["positions"], inputs.get("cos_sin")
    rotary = attributes["rotary_dim"] or x.shape[-1]
    pairs = rotary // 2
    if table is None:
        frequencies = [float(attributes["base"]) ** (-2.0 * pair / rotary) for pair in range(pairs)]
        angles = a.stack([a.widest(positions) * frequency for frequency in frequencies])
        cosine, sine = a.like(a.cos(angles), a.wide(x)), a.like(a.sin(angles), a.wide(x))
    else:
        rows = a.shape(table)[0]
        inside = (positions >= 0) & (positions < rows)
        found = a.wide(a.take(table, a.where(inside, positions, 0)))
        inside = inside[:, None]
        cosine, sine = found[:, :pairs], found[:, pairs:]
        cosine, sine = a.where(inside, cosine, 1.0), a.where(inside, sine, 0.0)
    cosine, sine = cosine[:, None, :], (-sine if attributes["inverse"] else sine)[:, None, :]
    v = a.wide(x)
    turned, rest = v[..., :rotary], v[..., rotary:]
    if attributes["interleaved"]:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    parts = [first * cosine - second * sine, first * sine + second * cosine]
    if attributes["interleaved"]:
        parts = [a.reshape(a.stack(parts), a.shape(turned))]
    return (a.like(a.concatenate([*parts, rest]), x),)


EXPRESSIONS: dict[str, Expression] = {
    "layer_norm": _layer_norm, "rms_norm": _rms_norm, "linear": _linear, "gated_linear": _gated_linear,
    "gated_activation": _gated_activation, "bias_activation": _bias_activation, "softmax": _softmax,
    "apply_rope": _apply_rope,
}  # fmt: skip
