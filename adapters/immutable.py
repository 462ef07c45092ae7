"""Arguments of frameworks whose tensors cannot be written in place, JAX and TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cki.errors import InvalidTypeError
from cki.memory.views import CacheTensor


def framework_tensors(
    operation: str, value: Any, convert: Callable[[Any], Any], tensors: str, hint: str
) -> Any:
    """An argument with NumPy arrays converted, also inside a cache's tuple; a PagedKVCache's own tensors are refused.

    tensors: the framework's tensors by name, for the refusal; hint: what to give in place of such a cache.
    """
    if isinstance(value, np.ndarray):
        return convert(value)
    if isinstance(value, CacheTensor) or (
        isinstance(value, tuple) and any(isinstance(item, CacheTensor) for item in value)
    ):
        raise InvalidTypeError(
            f"{operation}: a cache of PagedKVCache, which is written in place; {tensors} are immutable",
            hint=hint,
        )
    if type(value) in (tuple, list) and any(isinstance(item, np.ndarray) for item in value):
        return tuple(framework_tensors(operation, item, convert, tensors, hint) for item in value)
    return value
