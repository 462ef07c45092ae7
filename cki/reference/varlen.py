"""The definition of `cki.varlen_attention`, in float64 NumPy: attention of each sequence by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from cki.reference.attention import attention
from cki.reference.paged import gathered

_DESCALES = ("q_descale", "k_descale", "v_descale")


def _of_sequence(descale: Any, sequence: int) -> Any:
    """[kv_heads], or a sequence's row of [batch, kv_heads]."""
    return descale if np.ndim(descale) < 2 else np.asarray(descale)[sequence]


def varlen_attention(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, block_table: Any = None, seq_lens: Any = None, sinks: Any = None,
    return_lse: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """(out [tokens, heads, value_dim], lse [heads, tokens]) of packed q [tokens, heads, head_dim].

    Sequence b has the queries from cu_seqlens_q[b] up to cu_seqlens_q[b + 1], and the keys from cu_seqlens_k[b] (None:
    cu_seqlens_q[b]) up to cu_seqlens_k[b + 1]; or beside a block_table seq_lens[b] keys (cut off at what the table
    reaches), key j in block block_table[b, j // block_size], a block outside the cache standing for zeros.
    Rows of no sequence see no key.  options: of `attention`.  max_seqlen_q and max_seqlen_k change nothing.
    """
    q, k, v = (np.asarray(t).astype(np.float64) for t in (q, k, v))
    tokens, heads, _ = q.shape
    empty = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks).astype(np.float64)
    out = np.zeros((tokens, heads, v.shape[-1]))
    lse = np.repeat(empty[:, None], tokens, axis=1)
    starts = np.asarray(cu_seqlens_q).tolist()
    key_starts = starts if cu_seqlens_k is None else np.asarray(cu_seqlens_k).tolist()
    for b, (begin, end) in enumerate(zip(starts, starts[1:])):
        if block_table is None:
            keys, values = (t[key_starts[b] : key_starts[b + 1]] for t in (k, v))
        else:
            length = max(0, min(int(seq_lens[b]), np.shape(block_table)[1] * k.shape[1]))
            keys, values = (gathered(t, block_table[b], length) for t in (k, v))
        one_out, one_lse = attention(
            q[None, begin:end],
            keys[None],
            values[None],
            sinks=sinks,
            return_lse=True,
            first_batch=b,
            **{
                name: _of_sequence(option, b) if name in _DESCALES else option
                for name, option in options.items()
            },
        )
        out[begin:end], lse[:, begin:end] = one_out[0], one_lse[0]
    return (out, lse) if return_lse else out
