"""From one decode step to the next: the specification of `cki.ops.advance`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Advanced(NamedTuple):
    """What the next step reads, [rows] each."""

    tokens: Array
    seq_lens: Array
    positions: Array
    slots: Array


def advance(
    chosen: Array, ends: Array, limits: Array, block_table: Array, seq_lens: Array, *, block_size: int
) -> Advanced:
    """Each row of seq_lens stored tokens has chosen one more.

    It is empty from then on (length 0, position 0, slot -1) when it was, when the token is one of its `ends`, when it
    has `limits` tokens with it, or when its block table holds no more.  Else the token is stored next.
    """
    length = np.asarray(seq_lens).astype(np.int64)
    place = length // block_size
    ended = (np.asarray(ends) == np.asarray(chosen)[:, None]).any(1) | (length + 1 >= limits)
    goes_on = (length > 0) & ~ended & (place < block_table.shape[1])
    row = np.arange(len(length))
    block = np.asarray(block_table)[row, np.minimum(place, block_table.shape[1] - 1)].astype(np.int64)
    return Advanced(
        np.where(length > 0, chosen, 0), np.where(goes_on, length + 1, 0), np.where(goes_on, length, 0),
        np.where(goes_on, block * block_size + length % block_size, -1),
    )  # fmt: skip
