"""Shared by the linear and encoder tests: inputs, the plain computation in the input's type, a call by a given tile."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from cki.heuristics.linear import Tile
from cki.heuristics.linear_skinny import SkinnyTile
from cki.ops.call import call
from cki.ops.linear import LINEAR, plan_linear
from cki.plan import Plan

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}
_erf = np.vectorize(math.erf, otypes=[np.float32])


def normal(shape: tuple[int, ...], dtype: Any, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normal random numbers, rounded to dtype."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def activate(v: np.ndarray, activation: str | None) -> np.ndarray:
    """An activation in fp32, by the formulas that frameworks use."""
    one, half = np.float32(1), np.float32(0.5)
    if activation == "gelu":
        return half * v * (one + _erf(v * np.float32(math.sqrt(0.5))))
    if activation == "gelu_tanh":
        return (
            half * v * (one + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (v + np.float32(0.044715) * v**3)))
        )
    if activation == "silu":
        return v / (one + np.exp(-v))
    if activation == "relu":
        return np.maximum(v, np.float32(0))
    return v


def plain(
    x: np.ndarray, w: np.ndarray, bias: Any = None, *, activation: str | None = None, residual: Any = None,
    weight_layout: str = "in_out",
) -> np.ndarray:  # fmt: skip
    """The layer with fp32 sums and one rounding to x's type."""
    weight = w.astype(np.float32) if weight_layout == "in_out" else w.astype(np.float32).T
    y = x.astype(np.float32) @ weight
    if bias is not None:
        y = y + bias.astype(np.float32)
    y = activate(y, activation)
    if residual is not None:
        y = y + residual.astype(np.float32)
    return y.astype(x.dtype)


def linear_with_tile(
    tile: Tile | SkinnyTile, x: Any, w: Any, bias: Any = None, residual: Any = None, **options: Any
) -> Any:
    """`cki.linear` by a given tile."""
    return linear_into(tile, None, x, w, bias, residual, **options)


def linear_into(
    tile: Tile | SkinnyTile, out: Any, x: Any, w: Any, bias: Any = None, residual: Any = None, **options: Any
) -> Any:
    """The same with a place for the result."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        return Plan(plan_linear(
            problem["x"], problem["w"], problem.get("bias"), problem.get("residual"), outputs["out"], device,
            activation=problem.attribute("activation"), weight_layout=problem.attribute("weight_layout"), tile=tile,
        ))  # fmt: skip

    spec = dataclasses.replace(LINEAR, plan=plan)
    _KEPT.append(spec)
    attributes = (options.get("activation"), options.get("weight_layout", "in_out"))
    return call(spec, (x, w, bias, residual), attributes, (out,))


_KEPT: list[Any] = []  # remembered calls are keyed by the identity of their spec
