"""What the Keras layers need of the backend that Keras runs on: its operations, its plain arrays, its masks."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from cki.adapters.gradient import Arrays
from cki.errors import UnsupportedError

#: Keras's backends, and the class of each one's plain operations.
_ARRAYS = {"tensorflow": "TensorFlowArrays", "jax": "JaxArrays", "torch": "TorchArrays"}


def name() -> str:
    """The backend, which is the module below `cki.adapters` too.  UnsupportedError for one that CKI has not."""
    found: str = keras.backend.backend()
    if found not in _ARRAYS:
        raise UnsupportedError(
            f"Keras runs on its {found} backend, which CKI has no operations for",
            hint=f"KERAS_BACKEND of {', '.join(_ARRAYS)}",
        )
    return found


def arrays() -> Arrays:
    """The backend's functions, in which the plain expressions are written."""
    backend = name()
    found: Arrays = getattr(importlib.import_module(f"cki.adapters.gradient_{backend}"), "ARRAYS")  # noqa: B009
    return found


def call(operation: str, x: Any, tensors: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """The operation as a part of the backend's program; a gradient of it is that of the plain expression."""
    backend = name()
    function = getattr(importlib.import_module(f"cki.adapters.{backend}"), operation)
    return function(x, **tensors, **attributes, recompute_gradient=_may_differentiate(backend))


def _may_differentiate(backend: str) -> bool:
    if backend != "torch":
        return True
    import torch

    return bool(torch.is_grad_enabled())


def joined_masks(mask: Any, attention_mask: Any) -> Any:
    """One mask of bool: of tokens [batch, seq], or of queries and keys; None where neither is given."""
    if mask is not None:
        mask = keras.ops.cast(mask, "bool")
    if attention_mask is None:
        return mask
    attention_mask = keras.ops.cast(attention_mask, "bool")
    if mask is None:
        return attention_mask
    over_keys = mask[:, None, :] if len(attention_mask.shape) == 3 else mask[:, None, None, :]
    return keras.ops.logical_and(attention_mask, over_keys)
