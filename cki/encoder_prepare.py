"""Weights in another form: another type, joined, or with a norm in them.  Always new tensors, of the old's framework.

This is the one place where CKI copies weights, and only when it is asked to: the user's tensors are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cki.dtypes import DType
from cki.errors import UnsupportedError

_FRAMEWORKS = ("numpy", "cupy", "torch", "jax", "tensorflow")


def convert(framework: str, tensor: Any, dtype: DType) -> Any:
    """The tensor in another type; the tensor itself where it has that type.  framework: the adapter's name."""
    _require_known(framework)
    if framework == "torch":
        return tensor.to(_torch_dtype(dtype))
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.cast(tensor, tf.as_dtype(dtype.numpy.name))
    return tensor if tensor.dtype == dtype.numpy else tensor.astype(dtype.numpy)


def concatenate(framework: str, tensors: Sequence[Any], axis: int) -> Any:
    """Tensors of one type side by side along an axis, row-major."""
    _require_known(framework)
    if framework == "torch":
        import torch

        return torch.cat([*tensors], axis)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.concat([*tensors], axis)
    if framework == "jax":
        import jax.numpy

        return jax.numpy.concatenate([*tensors], axis)
    if framework == "cupy":
        import cupy

        return cupy.concatenate([*tensors], axis)
    import numpy as np

    return np.concatenate([*tensors], axis)


#: Rows of K that take up what rounding leaves of a column's sum.
_LEVELLED_ROWS = 16


def fold_layer_norm(
    framework: str,
    w: Any,
    gamma: Any = None,
    beta: Any = None,
    bias: Any = None,
    *,
    weight_layout: str = "in_out",
) -> tuple[Any, Any]:
    """(v, c) with LN(x) w + bias = N(x) v + c = rstd x v + c: N is the norm without weights, rstd its factor.

    w: [K, N], or [N, K] for weight_layout "out_in".  gamma, beta: [K], of the norm in front; None: 1 and 0.
    bias: [N] or None.  v: as w, of w's type: gamma w, less its mean over K, which a norm takes from x anyway; a few
    rows are moved by an ulp or so, that v's columns sum to zero as rounded.  So a mean of x adds nothing to x v.
    c: [N], f32.
    """
    _require_known(framework)
    axis = 0 if weight_layout == "in_out" else 1
    wide = _wide(framework, w)

    def along_k(vector: Any) -> Any:
        return _wide(framework, vector)[:, None] if axis == 0 else _wide(framework, vector)[None, :]

    def row(matrix: Any, first: int, last: int | None) -> Any:
        return matrix[first:last] if axis == 0 else matrix[:, first:last]

    shift = _sum(framework, wide * 0 if beta is None else wide * along_k(beta), axis)
    if bias is not None:
        shift = shift + _wide(framework, bias)
    product = wide if gamma is None else wide * along_k(gamma)
    depth = int(w.shape[axis])
    mean = _sum(framework, product, axis) / depth
    rounded = _like(framework, product - (mean[None, :] if axis == 0 else mean[:, None]), w)
    rest = _sum(framework, _wide(framework, rounded), axis)
    rest = rest[None, :] if axis == 0 else rest[:, None]
    count, rows = min(_LEVELLED_ROWS, depth), []
    for number in range(count):
        old = _wide(framework, row(rounded, number, number + 1))
        rows.append(_like(framework, old - rest / (count - number), w))
        rest = rest + (_wide(framework, rows[-1]) - old)
    return concatenate(framework, [*rows, row(rounded, count, None)], axis), shift


def _wide(framework: str, tensor: Any) -> Any:
    """In fp32."""
    if framework == "torch":
        return tensor.detach().float()
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.cast(tensor, tf.float32)
    return tensor.astype("float32")


def _like(framework: str, tensor: Any, other: Any) -> Any:
    """In the other's type."""
    if framework == "torch":
        return tensor.to(other.dtype)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.cast(tensor, other.dtype)
    return tensor.astype(other.dtype)


def _sum(framework: str, tensor: Any, axis: int) -> Any:
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.reduce_sum(tensor, axis)
    return tensor.sum(axis)


def _require_known(framework: str) -> None:
    if framework not in _FRAMEWORKS:
        raise UnsupportedError(
            f"weights of {framework} cannot be converted or joined",
            hint=f"weights of {', '.join(_FRAMEWORKS)}",
        )


def _torch_dtype(dtype: DType) -> Any:
    import torch

    return getattr(torch, dtype.numpy.name)
