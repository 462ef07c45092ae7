"""Shared by the linear and encoder tests: inputs, the plain computation in the input's type, a call by a given tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from cki.heuristics.linear import Tile
from cki.heuristics.linear_skinny import SkinnyTile
from cki.ops.call import call
from cki.ops.linear import LINEAR, plan_linear
from cki.plan import Plan
from tests.ops.pointwise_cases import plain_activation

#: How a weight of 24 rows may lie in an [80, 96] tensor.
WEIGHT_VIEWS: dict[str, Callable[[Any], Any]] = {
    "columns of a wider tensor": lambda t: t[:24, 16:56],
    "from an odd column on": lambda t: t[:24, 3:43],
    "transposed": lambda t: t[:40, :24].T,
    "transposed, from an odd column on": lambda t: t[:40, 5:29].T,
    "both axes strided": lambda t: t[:48:2, :80:2],
    "one column": lambda t: t[:24, 7:8],
}


def plain(
    x: np.ndarray, w: np.ndarray, bias: Any = None, *, activation: str | None = None, residual: Any = None,
    weight_layout: str = "in_out",
) -> np.ndarray:  # fmt: skip
    """The layer with fp32 sums and one rounding to x's type."""
    weight = w.astype(np.float32) if weight_layout == "in_out" else w.astype(np.float32).T
    y = x.astype(np.float32) @ weight
    if bias is not None:
        y = y + bias.astype(np.float32)
    y = plain_activation(activation, y)
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
