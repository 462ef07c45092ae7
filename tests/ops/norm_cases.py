"""What the norm tests share: inputs, the plain computation in the input's type, and running a chosen configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import cki
from cki.heuristics.norm import RowConfig
from cki.ops.call import call
from cki.ops.norm import LAYER_NORM, RMS_NORM, plan_layer_norm, plan_rms_norm
from cki.plan import Plan


def plain(op: str, x: np.ndarray, weight: Any = None, bias: Any = None, **options: Any) -> np.ndarray:
    """The norm as frameworks compute it: fp32 inside, one rounding to x's type."""
    v = x.astype(np.float32)
    eps = np.float32(options.get("eps", 1e-5 if op == "layer_norm" else 1e-6))
    if op == "layer_norm":
        v = v - v.mean(-1, keepdims=True, dtype=np.float32)
    v = v / np.sqrt(np.mean(v * v, -1, keepdims=True, dtype=np.float32) + eps)
    if weight is not None:
        v = v * (weight.astype(np.float32) + np.float32(options.get("weight_offset", 0.0)))
    if bias is not None:
        v = v + bias.astype(np.float32)
    return v.astype(x.dtype)


def run_configured(
    op: str, config: RowConfig, x: Any, weight: Any, residual: Any = None, *, sm_count: int = 1
) -> Any:
    """`cki.layer_norm(x, weight, weight)` or `cki.rms_norm(x, weight)` by a given configuration, on a device of few SMs
    so that walking blocks have several rows each."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        device = dataclasses.replace(device, sm_count=sm_count)
        common = {
            "residual": problem.get("residual"),
            "residual_out": outputs.get("residual_out"),
            "config": config,
        }
        if op == "layer_norm":
            return Plan(plan_layer_norm(
                problem["x"], problem.get("weight"), problem.get("bias"), outputs["out"], device, **common
            ))  # fmt: skip
        return Plan(plan_rms_norm(problem["x"], problem.get("weight"), outputs["out"], device, **common))

    spec = dataclasses.replace(LAYER_NORM if op == "layer_norm" else RMS_NORM, plan=plan)
    _KEPT.append(spec)
    tensors = (x, weight, weight, residual) if op == "layer_norm" else (x, weight, residual)
    attributes = (1e-5, "rounded") if op == "layer_norm" else (1e-6, 0.0, "rounded")
    return call(spec, tensors, attributes, (None, None))


_KEPT: list[Any] = []  # remembered calls are keyed by the identity of their spec


def truth(op: str, *args: Any, **options: Any) -> Any:
    """The float64 reference of that name."""
    return getattr(cki.reference, op)(*args, **options)
