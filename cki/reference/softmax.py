"""Softmax in float64: the specification of `cki.softmax`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def softmax(x: Array, mask: Array | None = None, *, scale: float = 1.0) -> NDArray[np.float64]:
    """exp(scale * x) / sum(exp(scale * x)) over the last axis, of the elements that mask (True keeps) leaves.

    Hidden elements give 0.  A row whose elements are all hidden or -infinity gives zeros; one with a NaN or +infinity
    that is not hidden gives NaN where it is not hidden.
    """
    keep = np.broadcast_to(True if mask is None else np.asarray(mask), np.shape(x))
    values = np.where(keep, np.asarray(x).astype(np.float64), -np.inf)
    largest = values.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scale * (values - np.where(largest == -np.inf, 0.0, largest)))
    weights = np.where(keep, weights, 0.0)
    total = weights.sum(-1, keepdims=True)
    result: NDArray[np.float64] = weights / np.where(total == 0, 1.0, total)
    return result
