"""The rules of `paged_attention` and `decode_attention`: every one that a call breaks is named."""

from __future__ import annotations

from typing import Any

import numpy as np

from cki import dtypes
from cki.errors import InvalidArgumentError
from cki.operand import Operand
from cki.ops.attention_rules import (
    FLOATS,
    INDICES,
    MAX_HEAD_DIM,
    check_per_head,
    check_scale,
    check_shape,
    check_softcap,
    check_window,
)  # fmt: skip
from cki.ops.cache_arguments import CACHE_DTYPES, check_cache
from cki.ops.spec import Problem
from cki.ops.validate import block_problems, host_values, reads_values, shape_of

MAX_QUERIES = 16


def copy_bytes(k: Operand, v: Operand) -> int:
    """The widest copy that all rows of keys and values allow: 16, 8 or 4 bytes; 0 where none does."""
    for nbytes in (16, 8, 4):
        if all(t.is_aligned(nbytes) and t.shape[-1] * t.dtype.itemsize % nbytes == 0 for t in (k, v)):
            return nbytes
    return 0


def counters_needed(q: Operand) -> int:
    """Counters that any configuration can use: one a sequence and query row of a KV head."""
    return q.shape[0] * q.shape[1] * q.shape[2]


@reads_values
def validate_paged(q: Any, k_cache: Any, block_table: Any, seq_lens: Any, window: Any) -> None:
    """CKI_VALIDATE=1: lengths within the table, and the entries that will be read within the cache.

    Tensors of wrong shapes or types are left to the rules.
    """
    left = window[0] if isinstance(window, (tuple, list)) and window else None
    ranks = [len(shape_of(tensor)) for tensor in (q, k_cache, block_table, seq_lens)]
    if ranks != [4, 4, 2, 1] or not isinstance(left, int):
        return
    table, lengths = host_values(block_table, "block_table"), host_values(seq_lens, "seq_lens")
    cache_shape = shape_of(k_cache)
    if (
        table.dtype.kind != "i"
        or lengths.dtype.kind != "i"
        or len(table) != len(lengths)
        or not cache_shape[1]
    ):
        return
    problems = block_problems(table, lengths, cache_shape, [q.shape[1]] * len(lengths), left)
    if problems:
        raise InvalidArgumentError(
            "paged_attention: lengths or blocks outside the cache", problems,
            "seq_lens from 0 to columns * block_size, blocks from 0 to blocks - 1",
        )  # fmt: skip


@reads_values
def validate_decode(k: Any, seq_lens: Any, cu_seqlens_k: Any) -> None:
    """CKI_VALIDATE=1: lengths within a dense cache's capacity, offsets of a ragged one rising within its tokens."""
    shape, problems = shape_of(k), []
    if cu_seqlens_k is None and len(shape) == 4 and len(shape_of(seq_lens)) == 1:
        lengths = host_values(seq_lens, "seq_lens")
        if lengths.dtype.kind == "i":
            outside = np.flatnonzero((lengths < 0) | (lengths > shape[1]))
            problems += [
                f"seq_lens[{at}] is {lengths[at]}, k has room for {shape[1]} tokens" for at in outside
            ]
    elif seq_lens is None and len(shape) == 3 and len(shape_of(cu_seqlens_k)) == 1:
        offsets = host_values(cu_seqlens_k, "cu_seqlens_k")
        if offsets.dtype.kind == "i" and offsets.size:
            values = offsets.astype(np.int64)
            falls = np.flatnonzero(np.diff(values) < 0)
            problems += [f"cu_seqlens_k falls from {values[at]} to {values[at + 1]}" for at in falls[:1]]
            if values.min() < 0 or values.max() > shape[0]:
                reach = f"{values.min()} to {values.max()}"
                problems.append(f"cu_seqlens_k holds {reach}, k has {shape[0]} tokens")
    if problems:
        raise InvalidArgumentError(
            "decode_attention: lengths outside the cache", problems,
            "seq_lens from 0 to k.shape[1]; 0 <= cu_seqlens_k[b] <= cu_seqlens_k[b + 1] <= k.shape[0]",
        )  # fmt: skip


def _check_queries(problem: Problem, k_name: str) -> bool:
    q, k = problem["q"], problem[k_name]
    if q.dtype not in FLOATS:
        problem.reject_type(f"q is {q.dtype}", "q of f32, f16 or bf16")
    if q.ndim != 4:
        problem.reject(f"q has shape {q.shape}", "q of shape [batch, queries, heads, head_dim]")
        return False
    if not 1 <= q.shape[1] <= MAX_QUERIES:
        problem.reject(f"q has {q.shape[1]} queries a sequence", f"1 to {MAX_QUERIES} queries")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        problem.reject(f"q has head_dim {q.shape[3]}", f"a head_dim of 1 to {MAX_HEAD_DIM}")
    if k.ndim >= 3 and (k.shape[-2] == 0 or q.shape[2] % k.shape[-2]):
        problem.reject(
            f"q has {q.shape[2]} heads, which is no multiple of {k_name}'s {k.shape[-2]}",
            "query heads a multiple of KV heads",
        )
    if k.dtype == dtypes.e4m3 and q.dtype == dtypes.f32:
        problem.reject_type("q is f32 beside e4m3 keys", "q of f16 or bf16 with e4m3 keys and values")
    if k.dtype in CACHE_DTYPES and k.dtype not in (q.dtype, dtypes.e4m3):
        problem.reject_type(
            f"q has dtype {q.dtype}, {k_name} has dtype {k.dtype}", f"{k_name} of dtype {q.dtype} or e4m3"
        )
    return True


def _check_rows(problem: Problem, k_name: str, v_name: str) -> None:
    """What the copies of keys and values need."""
    k, v = problem[k_name], problem[v_name]
    for name, cache in ((k_name, k), (v_name, v)):
        if not 1 <= cache.shape[-1] <= MAX_HEAD_DIM:
            problem.reject(f"{name} has head_dim {cache.shape[-1]}", f"a head_dim of 1 to {MAX_HEAD_DIM}")
        if cache.strides[-1] != 1 and cache.shape[-1] > 1:
            problem.reject(
                f"{name} has stride {cache.strides[-1]} along its last axis", f"{name} with dense rows"
            )
    if not copy_bytes(k, v):
        problem.reject(
            f"rows of {k_name} and {v_name} are not all multiples of 4 bytes at multiples of 4 bytes",
            "head_dim * element size, strides and addresses multiples of 4 bytes (of 16 to be fast)",
        )


def _check_options(problem: Problem) -> None:
    """What needs no shape of q."""
    problem.require_dtypes(INDICES, "int32 or int64", "block_table", "seq_lens", "cu_seqlens_k")
    problem.require_dtypes((dtypes.f32,), "f32", "sinks", "alibi_slopes")
    problem.require_dtypes((dtypes.u32, dtypes.i32), "u32 or i32", "counters")
    window = problem.attribute("window")
    if check_window(problem) and window[0] >= 2**30:
        problem.reject(f"window is {window!r}", "a window below 2**30")
    check_scale(problem)
    check_softcap(problem)


def _check_per_head(problem: Problem) -> None:
    """Sinks and slopes, and counters of a call."""
    q = problem["q"]
    check_per_head(problem, "sinks")
    check_per_head(problem, "alibi_slopes")
    counters = problem.get("counters")
    if counters is None:
        return
    if not counters.is_contiguous():
        problem.reject(f"counters has strides {counters.strides}", "dense counters")
    if counters.size < counters_needed(q):
        problem.reject(f"counters has {counters.size} elements", f"{counters_needed(q)} counters")


def check_paged(problem: Problem) -> None:
    """Rules of `paged_attention`."""
    q, table = problem["q"], problem["block_table"]
    _check_options(problem)
    problem.require_dtypes(CACHE_DTYPES, "f32, f16, bf16 or e4m3", "k_cache", "v_cache")
    if not _check_queries(problem, "k_cache"):
        return
    if problem["k_cache"].ndim == 4 == problem["v_cache"].ndim:
        check_cache(problem, problem["k_cache"].shape[2], q.shape[3], None)
        _check_rows(problem, "k_cache", "v_cache")
    else:
        check_cache(problem, 0, q.shape[3], None)
    if table.ndim != 2:
        problem.reject(
            f"block_table has shape {table.shape}", f"block_table of shape ({q.shape[0]}, columns)"
        )
    else:
        check_shape(problem, "block_table", (q.shape[0], table.shape[1]))
    check_shape(problem, "seq_lens", q.shape[:1])
    _check_per_head(problem)


def check_decode(problem: Problem) -> None:
    """Rules of `decode_attention`."""
    q, k, v = problem["q"], problem["k"], problem["v"]
    _check_options(problem)
    problem.require_dtypes(CACHE_DTYPES, "f32, f16, bf16 or e4m3", "k", "v")
    problem.require_dtypes((dtypes.f32,), "f32", "k_scale", "v_scale")
    ranked = _check_queries(problem, "k")
    lengths, offsets = problem.get("seq_lens"), problem.get("cu_seqlens_k")
    if (lengths is None) == (offsets is None):
        problem.reject(
            "not exactly one of seq_lens and cu_seqlens_k is given",
            "seq_lens (dense) or cu_seqlens_k (ragged)",
        )
        return
    axes = 4 if offsets is None else 3
    form = "[batch, capacity, kv_heads, head_dim]" if axes == 4 else "[tokens, kv_heads, head_dim]"
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != axes:
            ranked = False
            problem.reject(f"{name} has shape {tensor.shape}", f"{name} of shape {form}")
    if not ranked:
        return
    if k.dtype != v.dtype:
        problem.reject_type(f"k is {k.dtype}, v is {v.dtype}", "k and v of one dtype")
    if k.shape[:-1] != v.shape[:-1]:
        problem.reject(f"k has shape {k.shape}, v has shape {v.shape}", "k and v alike but for the last axis")
    if k.shape[-1] != q.shape[3]:
        problem.reject(f"k has head_dim {k.shape[-1]}, q has {q.shape[3]}", "q and k of one head_dim")
    if axes == 4 and k.shape[0] != q.shape[0]:
        problem.reject(f"k has a batch of {k.shape[0]}, q of {q.shape[0]}", "one batch size")
    _check_rows(problem, "k", "v")
    if offsets is None:
        check_shape(problem, "seq_lens", q.shape[:1])
    else:
        check_shape(problem, "cu_seqlens_k", (q.shape[0] + 1,))
    scales = [problem.get("k_scale"), problem.get("v_scale")]
    wanted = f"k_scale and v_scale of f32 and shape {k.shape[:-1]} (dense), or {k.shape[-2:-1]}"
    if (k.dtype == dtypes.e4m3) != all(scale is not None for scale in scales) or (scales[0] is None) != (
        scales[1] is None
    ):
        problem.reject(f"k is {k.dtype}; scales go with e4m3, both of them", wanted)
    for name, scale in zip(("k_scale", "v_scale"), scales):
        if scale is None:
            continue
        if scale.shape not in (k.shape[:-1], k.shape[-2:-1]) or not scale.is_contiguous():
            problem.reject(f"{name} has shape {scale.shape} and strides {scale.strides}", wanted)
    if scales[0] is not None and scales[1] is not None and scales[0].ndim != scales[1].ndim:
        problem.reject("one of k_scale and v_scale is of tokens, the other of heads", wanted)
    _check_per_head(problem)
