"""Checks of plain arguments that the memory classes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cki.errors import InvalidArgumentError

#: What `is_size` accepts, in words.
SIZE = "an integer from 1 to 2^31 - 1"


def is_integer(value: Any) -> bool:
    """Whether a value is a Python or NumPy integer (True and False are none)."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    """Whether a value is an integer from 1 to 2^31 - 1."""
    return is_integer(value) and 1 <= value < 2**31


def require_sizes(what: str, sizes: Mapping[str, Any]) -> None:
    """InvalidArgumentError naming every value that is no size."""
    problems = [f"{name}={value!r}" for name, value in sizes.items() if not is_size(value)]
    if problems:
        raise InvalidArgumentError(f"{what}: sizes out of range", problems, f"each {SIZE}")


def token_counts(
    counts: int | Sequence[int] | np.ndarray, length: int, what: str = "new tokens"
) -> np.ndarray:
    """int64 [length]: a number of tokens for each sequence, from one number or `length` of them."""
    if is_integer(counts) and counts >= 0:  # type: ignore[operator]
        return np.full(length, counts, np.int64)
    array = np.asarray(counts)
    if (array.dtype.kind not in "iu" and array.size) or array.shape != (length,) or array.min(initial=0) < 0:
        raise InvalidArgumentError(
            f"{what}: {counts!r}", hint=f"one integer, 0 or more, for all sequences, or {length} of them"
        )
    return array.astype(np.int64)


def token_ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [tokens]: the ids of tokens."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgumentError(
            f"tokens: {ids.dtype} of shape {ids.shape}", hint="integers, one for each token, or their number"
        )
    return ids.astype("<i8")
