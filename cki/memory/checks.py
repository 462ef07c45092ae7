"""Checks of plain arguments that the memory classes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def table_problems(max_sequences: int, max_blocks_per_sequence: int) -> list[str]:
    """What is wrong with a block table of these extents: one of 2^31 entries or more takes 8 GiB."""
    entries = max_sequences * max_blocks_per_sequence
    if entries < 2**31:
        return []
    product = f"max_sequences={max_sequences} * max_blocks_per_sequence={max_blocks_per_sequence}"
    return [f"{product} = {entries} entries of the block table, not below 2^31"]


def listed(sequences: Any) -> tuple[Any, ...]:
    """Several sequences, or one, as a tuple of what ought to be their ids."""
    if isinstance(sequences, (np.ndarray, np.generic)):
        sequences = sequences.tolist()
    is_one = isinstance(sequences, (str, bytes, bytearray)) or not isinstance(sequences, Iterable)
    return (sequences,) if is_one or getattr(sequences, "ndim", 1) == 0 else tuple(sequences)


def token_counts(
    counts: int | Sequence[int] | np.ndarray, length: int, what: str = "new tokens"
) -> np.ndarray:
    """int64 [length]: a number of tokens for each sequence, from one number or `length` of them.

    None is above 2^31 - 1, so no sum with lengths, and none over a batch, leaves 64 bits.
    """
    if is_integer(counts) and 0 <= counts < 2**31:  # type: ignore[operator]
        return np.full(length, counts, np.int64)
    array = _array(counts)
    if (
        array is None or (array.dtype.kind not in "iu" and array.size) or array.shape != (length,)
        or (array.size and not 0 <= array.min() <= array.max() < 2**31)
    ):  # fmt: skip
        raise InvalidArgumentError(
            f"{what}: {counts!r}",
            hint=f"one integer, 0 or more and below 2^31, for all sequences, or {length} of them",
        )
    return array.astype(np.int64)


def token_ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [tokens]: the ids of tokens."""
    ids, hint = _array(tokens), "integers, one for each token, or their number"
    if ids is None:
        raise InvalidArgumentError(f"tokens: {tokens!r}", hint=hint)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"tokens: {ids.dtype} of shape {ids.shape}", hint=hint)
    if ids.dtype.kind == "u" and ids.max(initial=0) >= 2**63:
        raise InvalidArgumentError(f"tokens: {ids.max()} among them", hint="ids below 2^63")
    return ids.astype("<i8")


def _array(given: Any) -> np.ndarray | None:
    """As an array; None where it is none (lists of unequal lengths, a tensor on a GPU)."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        return None
