"""The operations that bench/pointwise.py measures: how CKI and torch are called, and what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cki import reference
from cki.ops.norm_quantize import LAYER_NORM_QUANTIZE, RMS_NORM_QUANTIZE, plan_norm_quantize
from cki.ops.pointwise import BIAS_ACTIVATION, GATED_ACTIVATION, plan_bias_activation, plan_gated_activation
from cki.ops.pointwise_dropout import DROPOUT_ADD, plan_dropout_add
from cki.ops.pointwise_quantize import QUANTIZE_FP8, plan_quantize_fp8
from cki.ops.pointwise_softmax import SOFTMAX, plan_softmax
from cki.ops.rope import APPLY_ROPE
from cki.ops.spec import OpSpec

HEAD_DIM = 128
_P, _BASE = 0.1, 10000.0


class Op(NamedTuple):
    """One operation to measure.

    spec, attributes: how CKI is called, with the tensors that `make` gives, then the outputs.
    inputs: of what kind each tensor is: x, wide (twice the width), heads (x as heads of HEAD_DIM), positions (of rows),
        vector, wide_vector (a bias of wide), bits (seed, offset), one (a scale), None.
    outputs: of what kind: y, heads_out, codes, rows (a scale each), blocks.
    torch: the same, on the inputs.  expected: outputs in float64 of chosen rows.
    plan: the steps of one problem with a given configuration; None where there are no others.
    """

    spec: OpSpec
    attributes: tuple[Any, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    torch: Callable[..., object]
    expected: Callable[..., Any]
    plan: Callable[..., Any] | None


def _functional() -> Any:
    import torch

    return torch.nn.functional


def _torch_gated(x: Any, activation: str, layout: str) -> object:
    gate, up = (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)
    if layout == "up_first":
        gate, up = up, gate
    return getattr(_functional(), activation)(gate) * up


def _torch_quantize(x: Any, block: int) -> object:
    import torch

    blocks = x.float().view(x.shape[0], -1, block)
    scale = blocks.abs().amax(-1, keepdim=True) / 448.0
    return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _torch_quantize_tensor(x: Any, scale: Any) -> object:
    import torch

    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _torch_rope(x: Any, positions: Any) -> object:
    import torch

    places = torch.arange(HEAD_DIM // 2, device=x.device) / (HEAD_DIM // 2)
    angles = positions[:, None, None] * _BASE**-places
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * torch.cat([angles.cos()] * 2, -1).to(x.dtype) + turned * torch.cat([angles.sin()] * 2, -1).to(
        x.dtype
    )


def _norm_quantize(op: str, granularity: str, scale: str) -> Op:
    """x + residual and the codes of its norm, with a weight, and for a layer norm a bias."""
    centred = op == "layer_norm_quantize"
    epsilon, affine = (1e-5, ("vector", "vector")) if centred else (1e-6, ("vector",))

    def by_torch(x: Any, *rest: Any) -> object:
        total = x + rest[-1]
        norm = _functional().layer_norm if centred else _functional().rms_norm
        normal = norm(total, total.shape[-1:], *rest[:-1], eps=epsilon)
        return _torch_quantize(normal, x.shape[-1] if granularity == "row" else 128), total

    def expected(x: Any, *rest: Any) -> Any:
        return getattr(reference, op)(x, *rest[:-1], residual=rest[-1], granularity=granularity)

    def plan(p: Any, o: Any, device: Any, config: Any) -> Any:
        return plan_norm_quantize(
            p["x"], (p["weight"], p.get("bias") if centred else None), o["out"], o["scale_out"], device,
            centred=centred, residual=p["residual"], residual_out=o["residual_out"], granularity=granularity,
            eps=epsilon, normalize="unrounded", config=config,
        )  # fmt: skip

    attributes = (granularity, "e4m3", epsilon, "unrounded")
    return Op(
        LAYER_NORM_QUANTIZE if centred else RMS_NORM_QUANTIZE, attributes if centred else (*attributes, 0.0),
        ("x", *affine, "x"), ("codes", scale, "y"), by_torch, expected, plan,
    )  # fmt: skip


def _gated(activation: str, layout: str, *, biased: bool = False) -> Op:
    options: dict[str, Any] = {"activation": activation, "layout": layout}
    return Op(
        GATED_ACTIVATION, (activation, layout), ("wide", "wide_vector" if biased else None), ("y",),
        lambda x, bias: _torch_gated(x if bias is None else x + bias, **options),
        lambda x, bias: (reference.gated_activation(x, bias, **options),),
        lambda p, o, d, c: plan_gated_activation(p["x"], p.get("bias"), o["out"], d, **options, config=c),
    )  # fmt: skip


def _quantize(granularity: str, scale: str) -> Op:
    def plan(problem: Any, outputs: Any, device: Any, config: Any) -> Any:
        scales = outputs["scale_out"] if granularity != "tensor" else problem["scale"]
        return plan_quantize_fp8(
            problem["x"], outputs["out"], scales, device, granularity=granularity, config=config
        )

    def expected(x: Any, given: Any) -> Any:
        found = reference.quantize_fp8(x, scale=given, granularity=granularity)
        return found if isinstance(found, tuple) else (found,)

    tensor = granularity == "tensor"
    torch_calls: dict[str, Callable[..., object]] = {
        "row": lambda x, _: _torch_quantize(x, x.shape[-1]), "block128": lambda x, _: _torch_quantize(x, 128),
        "tensor": _torch_quantize_tensor,
    }  # fmt: skip
    return Op(
        QUANTIZE_FP8, (granularity, "e4m3"), ("x", "one" if tensor else None),
        ("codes",) if tensor else ("codes", scale), torch_calls[granularity], expected, plan,
    )  # fmt: skip


OPS: dict[str, Op] = {
    "swiglu": _gated("silu", "gate_first"),
    "swiglu_up_first": _gated("silu", "up_first"),
    "swiglu_interleaved": _gated("silu", "interleaved"),
    "geglu": _gated("gelu", "gate_first"),
    "reglu": _gated("relu", "gate_first"),
    "bias_swiglu": _gated("silu", "gate_first", biased=True),
    "bias_geglu_up_first": _gated("gelu", "up_first", biased=True),
    "bias_geglu_interleaved": _gated("gelu", "interleaved", biased=True),
    "bias_gelu": Op(
        BIAS_ACTIVATION, ("gelu",), ("x", "vector", None), ("y",), lambda x, bias, _: _functional().gelu(x + bias),
        lambda x, bias, _: (reference.bias_activation(x, bias),),
        lambda p, o, d, c: plan_bias_activation(p["x"], p["bias"], o["out"], d, config=c),
    ),
    "silu_multiply": Op(
        BIAS_ACTIVATION, ("silu",), ("x", None, "x"), ("y",), lambda x, _, up: _functional().silu(x) * up,
        lambda x, _, up: (reference.bias_activation(x, activation="silu", multiplier=up),),
        lambda p, o, d, c: plan_bias_activation(
            p["x"], None, o["out"], d, activation="silu", multiplier=p["multiplier"], config=c
        ),
    ),
    "softmax": Op(
        SOFTMAX, (1.0,), ("x", None), ("y",), lambda x, _: _functional().softmax(x, -1),
        lambda x, _: (reference.softmax(x),), lambda p, o, d, c: plan_softmax(p["x"], None, o["out"], d, config=c),
    ),
    "quantize_row": _quantize("row", "rows"),
    "quantize_block128": _quantize("block128", "blocks"),
    "quantize_tensor": _quantize("tensor", ""),
    "add_rms_norm_quantize": _norm_quantize("rms_norm_quantize", "row", "rows"),
    "add_rms_norm_quantize_block128": _norm_quantize("rms_norm_quantize", "block128", "blocks"),
    "add_layer_norm_quantize": _norm_quantize("layer_norm_quantize", "row", "rows"),
    "add_layer_norm_quantize_block128": _norm_quantize("layer_norm_quantize", "block128", "blocks"),
    "rope": Op(
        APPLY_ROPE, (_BASE, None, False, False), ("heads", "positions", None), ("heads_out",),
        lambda x, positions, _: _torch_rope(x, positions),
        lambda x, positions, _: (reference.apply_rope(x, positions, base=_BASE),), None,
    ),
    "dropout_add": Op(
        DROPOUT_ADD, (_P,), ("x", "x", "bits", "bits"), ("y",),
        lambda x, residual, *_: _functional().dropout(x, _P) + residual,
        lambda x, residual, seed, offset: (reference.dropout_add(x, residual, _P, seed, offset),),
        lambda p, o, d, c: plan_dropout_add(
            p["x"], p["residual"], p["seed"], p["offset"], o["out"], d, p=_P, config=c
        ),
    ),
}  # fmt: skip
