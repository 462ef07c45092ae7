"""The encoder's first and last steps in float64: the specification of `cki.embed_tokens` and `cki.mean_pool`.

Arguments may be of any float type, ml_dtypes' bfloat16 included; results are float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def embed_tokens(
    token_ids: Array, word_table: Array, position_table: Array | None = None, token_type_ids: Array | None = None,
    type_table: Array | None = None, positions: Array | None = None,
) -> NDArray[np.float64]:  # fmt: skip
    """word_table[token_ids] + position_table[positions] + type_table[token_type_ids], the last two where given.

    token_ids: [..., seq].  Tables: [entries, width].  positions: the shape of token_ids, or [seq]; None counts
    0, 1, ... along the sequence.  token_type_ids: as token_ids; None with a type_table means type 0.  An id outside
    its table adds zeros.  Returns [..., seq, width].
    """
    ids = np.asarray(token_ids)
    result = _rows(word_table, ids)
    if position_table is not None:
        where = np.arange(ids.shape[-1]) if positions is None else np.asarray(positions)
        result = result + _rows(position_table, np.broadcast_to(where, ids.shape))
    if type_table is not None:
        types = np.zeros_like(ids) if token_type_ids is None else np.asarray(token_type_ids)
        result = result + _rows(type_table, types)
    return result


def _rows(table: Array, ids: Array) -> NDArray[np.float64]:
    inside = (ids >= 0) & (ids < len(table))
    rows = np.asarray(table).astype(np.float64)[np.where(inside, ids, 0)]
    return np.where(inside[..., None], rows, 0.0)


def mean_pool(x: Array, mask: Array, *, normalize: bool = True) -> NDArray[np.float64]:
    """The mean over the kept tokens of each sequence, then (normalize) divided by max(its L2 norm, 1e-12).

    x: [batch, seq, width].  mask: [batch, seq], nonzero keeps, or lengths [batch]: the first tokens are kept.
    Hidden tokens do not matter, NaN included.  A sequence with none kept gives zeros.  Returns [batch, width].
    """
    values = np.asarray(x).astype(np.float64)
    given = np.asarray(mask)
    kept = np.arange(values.shape[1]) < given[:, None] if given.ndim == 1 else given != 0
    total = np.where(kept[..., None], values, 0.0).sum(1)
    pooled: NDArray[np.float64] = total / np.maximum(kept.sum(1), 1)[:, None]
    if normalize:
        pooled = pooled / np.maximum(np.sqrt((pooled * pooled).sum(-1, keepdims=True)), 1e-12)
    return pooled
