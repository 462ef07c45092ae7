"""`jax.vmap` of CKI's operations: which of them take one more leading axis, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp


class _Rule(NamedTuple):
    """inputs: those that may carry the new axis; every other one must be shared by the batch.

    is_merged: the operation has one batch axis, so the new axis and that one become one; else it takes any number.
    """

    inputs: tuple[str, ...]
    is_merged: bool = False


_RULES = {
    "layer_norm": _Rule(("x", "residual")),
    "rms_norm": _Rule(("x", "residual")),
    "linear": _Rule(("x", "residual")),
    "gated_linear": _Rule(("x",)),
    "bias_activation": _Rule(("x", "multiplier")),
    "gated_activation": _Rule(("x",)),
    "softmax": _Rule(("x",)),
    "attention": _Rule(("q", "k", "v"), True),
    "fused_attention": _Rule(("x", "mask"), True),
    "fused_ffn": _Rule(("x",)),
    "encoder_layer": _Rule(("x", "mask"), True),
    "encoder_layers": _Rule(("x", "mask"), True),
    "mean_pool": _Rule(("x", "mask"), True),
    "apply_rope": _Rule(("x", "positions"), True),
}
#: With one of these given, the leading axes of the operation mean something else.
_EXCLUDED = {"attention": ("bias", "mask"), "softmax": ("mask",), "fused_attention": ("cu_seqlens",),
             "encoder_layer": ("cu_seqlens",), "encoder_layers": ("cu_seqlens",)}  # fmt: skip


def batch_leading(
    primitive: Any, arrays: Sequence[Any], is_batched: Sequence[bool], parameters: dict[str, Any]
) -> list[Any] | None:
    """The whole batch as one call, or None where the operation has no rule for these arguments.

    arrays: those that are batched have the batch as their first axis.
    """
    names = parameters["names"]
    rule = _RULES.get(parameters["operation"])
    if rule is None or set(_EXCLUDED.get(parameters["operation"], ())) & set(names):
        return None
    if any(batched and name not in rule.inputs for name, batched in zip(names, is_batched)):
        return None
    size = next(array.shape[0] for array, batched in zip(arrays, is_batched) if batched)
    carried = []
    for name, array, batched in zip(names, arrays, is_batched):
        if name in rule.inputs and not batched:
            array = jnp.broadcast_to(array, (size, *array.shape))
        if name in rule.inputs and rule.is_merged:
            array = array.reshape((math.prod(array.shape[:2]), *array.shape[2:]))
        carried.append(array)
    if rule.is_merged and len({a.shape[0] for name, a in zip(names, carried) if name in rule.inputs}) > 1:
        return None  # a mask of batch extent 1, which broadcasts only as it is
    results: list[Any] = primitive.bind(*carried, **parameters)
    if rule.is_merged:
        results = [
            result.reshape((size, result.shape[0] // size if size else 0, *result.shape[1:]))
            for result in results
        ]
    return results
