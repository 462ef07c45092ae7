"""Weights in another form: another type, or several joined into one.  Always new tensors, of the framework of the old.

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


def _require_known(framework: str) -> None:
    if framework not in _FRAMEWORKS:
        raise UnsupportedError(
            f"weights of {framework} cannot be converted or joined",
            hint=f"weights of {', '.join(_FRAMEWORKS)}",
        )


def _torch_dtype(dtype: DType) -> Any:
    import torch

    return getattr(torch, dtype.numpy.name)
