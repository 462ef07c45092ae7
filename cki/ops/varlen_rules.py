"""The rules of `varlen_attention`: every one that a call breaks is named."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from cki.errors import InvalidArgumentError
from cki.ops.attention_e4m3 import CODES, check_descales, is_e4m3_call
from cki.ops.attention_rules import (
    FLOATS,
    INDICES,
    check_attributes,
    check_heads,
    check_per_head,
    check_shape,
    check_tensors,
)  # fmt: skip
from cki.ops.spec import Problem
from cki.ops.validate import block_problems, host_values, reads_values, shape_of

_PACKED = "tokens, kv_heads, head_dim"
_BLOCKS = "blocks, block_size, kv_heads, head_dim"


def _check_packed_keys(problem: Problem, offsets: tuple[int, ...]) -> None:
    q, k, v = problem["q"], problem["k"], problem["v"]
    if problem.get("seq_lens") is not None:
        problem.reject(
            "seq_lens is given without block_table", "seq_lens with a block_table, or cu_seqlens_k alone"
        )
    if problem.get("cu_seqlens_k") is not None:
        check_shape(problem, "cu_seqlens_k", offsets)
    elif q.shape[0] != k.shape[0]:
        problem.reject(
            f"q has {q.shape[0]} tokens, k has {k.shape[0]}, and there is no cu_seqlens_k",
            "as many keys as queries (axis 0), or cu_seqlens_k",
        )
    if k.shape[0] != v.shape[0]:
        problem.reject(f"k has {k.shape[0]} tokens, v has {v.shape[0]}", "k and v of one length (axis 0)")
    if q.shape[0] + k.shape[0] >= 2**30:
        problem.reject(
            f"{q.shape[0]} queries and {k.shape[0]} keys", "fewer than 2**30 queries and keys together"
        )


def _check_paged_keys(problem: Problem, batch: int) -> None:
    q, k, v, table = problem["q"], problem["k"], problem["v"], problem["block_table"]
    if problem.get("cu_seqlens_k") is not None:
        problem.reject("cu_seqlens_k is given beside block_table", "seq_lens with a block_table")
    if problem.get("seq_lens") is None:
        problem.reject(
            "block_table is given without seq_lens", f"seq_lens of shape ({batch},) with a block_table"
        )
    else:
        check_shape(problem, "seq_lens", (batch,))
    check_shape(problem, "block_table", (batch, table.shape[1] if table.ndim == 2 else 0))
    if k.shape[:2] != v.shape[:2]:
        problem.reject(
            f"k holds {k.shape[:2]} blocks and places, v {v.shape[:2]}", "k and v with the same blocks"
        )
    if k.shape[1] == 0:
        problem.reject("k has blocks of 0 places", "a block_size of at least 1")
    if k.shape[0] >= 2**31:
        problem.reject(f"k has {k.shape[0]} blocks", "fewer than 2**31 blocks")
    if q.shape[0] >= 2**30:
        problem.reject(f"{q.shape[0]} queries", "fewer than 2**30 queries")


def check_varlen(problem: Problem) -> None:
    """Rules of `varlen_attention`."""
    check_attributes(problem)
    problem.require_dtypes(
        INDICES, "int32 or int64", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seq_lens"
    )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = problem.attribute(name)
        if longest is not None and longest < 0:
            problem.reject(f"{name} is {longest}", f"{name} of at least 0, or None")
    paged = problem.get("block_table") is not None
    offsets = problem["cu_seqlens_q"]
    types = CODES if is_e4m3_call(problem) else FLOATS
    ranked = check_tensors(problem, "tokens, heads, head_dim", _BLOCKS if paged else _PACKED, types)
    if offsets.ndim != 1 or not offsets.shape[0]:
        problem.reject(f"cu_seqlens_q has shape {offsets.shape}", "cu_seqlens_q of shape (batch + 1,)")
        return
    if not ranked:
        return
    check_descales(problem, offsets.shape[0] - 1)
    check_shape(problem, "cu_seqlens_q", offsets.shape)
    if paged:
        _check_paged_keys(problem, offsets.shape[0] - 1)
    else:
        _check_packed_keys(problem, offsets.shape)
    check_heads(problem)
    check_per_head(problem, "sinks")
    check_per_head(problem, "alibi_slopes")


def _offset_problems(name: str, offsets: np.ndarray[Any, Any], total: int, longest: Any) -> list[str]:
    problems = []
    for i in np.flatnonzero(np.diff(offsets) < 0)[:1].tolist():
        problems.append(f"{name} goes down: [{i}] is {offsets[i]}, [{i + 1}] is {offsets[i + 1]}")
    outside = offsets[(offsets < 0) | (offsets > total)]
    if outside.size:
        problems.append(f"{name} holds {outside[0]}, there are {total} tokens")
    lengths = np.diff(offsets)
    if longest is not None and lengths.size and lengths.max() > longest:
        problems.append(
            f"{name} holds a sequence of {lengths.max()} tokens, the maximum is said to be {longest}"
        )
    return problems


@reads_values
def validate_varlen(
    q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, block_table: Any, seq_lens: Any, *,
    max_seqlen_q: Any, max_seqlen_k: Any, window: Any, bottom_right: bool,
) -> None:  # fmt: skip
    """CKI_VALIDATE=1: offsets that rise within the tokens, lengths within the table, entries within the cache.

    Tensors of wrong shapes or types are left to the rules.
    """
    tensors = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seq_lens": seq_lens}
    if any(len(shape_of(t)) != 1 for t in tensors.values() if t is not None):
        return
    if not shape_of(q) or not shape_of(k):
        return
    host = {name: host_values(t, name) for name, t in tensors.items() if t is not None}
    if any(values.dtype.kind != "i" for values in host.values()):
        return
    max_seqlen_q, max_seqlen_k = (
        n if isinstance(n, Integral) else None for n in (max_seqlen_q, max_seqlen_k)
    )
    problems = _offset_problems("cu_seqlens_q", host["cu_seqlens_q"], int(q.shape[0]), max_seqlen_q)
    if cu_seqlens_k is not None:
        problems += _offset_problems("cu_seqlens_k", host["cu_seqlens_k"], int(k.shape[0]), max_seqlen_k)
    if seq_lens is not None and len(shape_of(block_table)) == 2 and len(k.shape) == 4:
        table = host_values(block_table, "block_table")
        batch = len(host["seq_lens"])
        if table.dtype.kind == "i" and len(table) == batch == len(host["cu_seqlens_q"]) - 1 and k.shape[1]:
            left = window[0] if isinstance(window, (tuple, list)) and window else None
            # Aligned top-left, the first query stands before the first key, and no window ends behind that one.
            limit = int(left) if isinstance(left, Integral) and bottom_right else -1
            queries = np.diff(host["cu_seqlens_q"]).tolist()
            problems += block_problems(table, host["seq_lens"], shape_of(k), queries, limit)
            if max_seqlen_k is not None and batch and host["seq_lens"].max() > max_seqlen_k:
                problems.append(
                    f"seq_lens holds {host['seq_lens'].max()}, the maximum is said to be {max_seqlen_k}"
                )
    if problems:
        raise InvalidArgumentError(
            "varlen_attention: lengths or blocks outside the tensors", problems,
            "offsets that rise from 0 to the number of tokens, seq_lens from 0 to columns * block_size, "
            "blocks from 0 to blocks - 1",
        )  # fmt: skip
