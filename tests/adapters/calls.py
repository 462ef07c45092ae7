"""One call made from every framework: the same inputs, and the same bits expected back in the caller's own type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cki
from cki.errors import CkiError

#: Element types that every framework has.
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def norm_inputs(dtype: np.dtype, rows: int = 5, width: int = 96) -> list[np.ndarray]:
    """x, weight, bias and residual of a layer norm."""
    rng = np.random.default_rng(7)
    shapes = [(rows, width), (width,), (width,), (rows, width)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def layer_norm(tensors: list[Any]) -> tuple[Any, Any]:
    """The call: y and x + residual."""
    x, weight, bias, residual = tensors
    y, total = cki.layer_norm(x, weight, bias, residual=residual)
    return y, total


def expected(dtype: np.dtype) -> list[np.ndarray]:
    """What the call gives for NumPy arrays on the simulated device."""
    with cki.device("sim"):
        return list(layer_norm(norm_inputs(dtype)))


def assert_same_bits(
    make: Callable[[np.ndarray], Any], read: Callable[[Any], np.ndarray], dtype: np.dtype
) -> list[Any]:
    """Make the call with `make`'s tensors on the simulated device; compare bits with NumPy's; return the results."""
    with cki.device("sim"):
        results = layer_norm([make(array) for array in norm_inputs(dtype)])
    for result, wanted in zip(results, expected(dtype)):
        found = read(result)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))
    return list(results)


def assert_attributes_are_told_apart_by_type(tensor: Any) -> None:
    """True == 1 == 1.0 in Python: what was remembered for right attributes must not serve wrong ones.

    tensor: f32[1, length, heads, dim].
    """
    right = {"causal": True, "window": (0, 1)}
    with cki.device("sim"):
        for _ in range(3):
            cki.attention(tensor, tensor, tensor, **right)
            for wrong in ({"causal": 1}, {"causal": 1.0}, {"window": (0.0, 1)}, {"window": (False, 1)}):
                with pytest.raises(CkiError, match=next(iter(wrong))):
                    cki.attention(tensor, tensor, tensor, **{**right, **wrong})


def plain_layer_norm(
    x: np.ndarray, weight: np.ndarray | None = None, bias: np.ndarray | None = None
) -> np.ndarray:
    """Layer norm over the last axis in float64."""
    x = np.asarray(x).astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    y = y if weight is None else y * np.asarray(weight).astype(np.float64)
    return y if bias is None else y + np.asarray(bias).astype(np.float64)
