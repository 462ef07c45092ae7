"""What the tests of packed sequences share: inputs, caches, the plain computation, one checked call."""

from __future__ import annotations

from typing import Any

import numpy as np

import cki
from cki import reference
from cki.reference.paged import gathered
from tests.compare import assert_close
from tests.ops.attention_cases import plain
from tests.ops.inputs import normal
from tests.ops.paged_cases import paged_cache

TENSORS = (
    "cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table", "sinks", "alibi_slopes",
    "dropout_seed", "dropout_offset",
)  # fmt: skip


def offsets(lengths: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def packed(
    dtype: Any, query_lengths: Any, key_lengths: Any = None, *, heads: int = 2, kv_heads: int = 1, dim: int = 16,
    value_dim: int = 0, padding: int = 0, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The tensors of a call.  padding: rows of NaN behind the last sequence."""
    keys = query_lengths if key_lengths is None else key_lengths
    tensors: dict[str, Any] = {}
    for i, (name, lengths, count, width, spread) in enumerate((
        ("q", query_lengths, heads, dim, 1.5), ("k", keys, kv_heads, dim, 1.5),
        ("v", keys, kv_heads, value_dim or dim, 1.0),
    )):  # fmt: skip
        tensors[name] = normal((sum(lengths) + padding, count, width), dtype, 3 * seed + i, spread)
        tensors[name][sum(lengths) :] = np.nan
    tensors["cu_seqlens_q"] = offsets(query_lengths)
    if key_lengths is not None:
        tensors["cu_seqlens_k"] = offsets(key_lengths)
    return tensors


def chunked(
    dtype: Any, query_lengths: Any, key_lengths: Any, block_size: int, *, heads: int = 2, kv_heads: int = 1,
    dim: int = 16, value_dim: int = 0, padding: int = 0, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The same with keys in a cache: blocks in random order, NaN in unused slots, garbage in unused entries."""
    q = packed(dtype, query_lengths, heads=heads, dim=dim, padding=padding, seed=seed)["q"]
    cache, table = paged_cache(key_lengths, block_size, kv_heads, dim, dtype, value_dim=value_dim, seed=seed)
    lengths = np.asarray(key_lengths, np.int32)
    return {
        "q": q, "k": cache[0], "v": cache[1], "cu_seqlens_q": offsets(query_lengths), "block_table": table,
        "seq_lens": lengths,
    }  # fmt: skip


def sequences_of(tensors: dict[str, Any]) -> list[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
    """(rows, q, k, v) of each sequence, each a batch of one."""
    q, k, v, starts = (tensors[name] for name in ("q", "k", "v", "cu_seqlens_q"))
    key_starts = tensors.get("cu_seqlens_k", starts)
    found = []
    for b in range(len(starts) - 1):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        if "block_table" in tensors:
            table = tensors["block_table"]
            length = max(0, min(int(tensors["seq_lens"][b]), table.shape[1] * k.shape[1]))
            keys, values = (gathered(t, table[b], length).astype(q.dtype) for t in (k, v))
        else:
            keys, values = (t[int(key_starts[b]) : int(key_starts[b + 1])] for t in (k, v))
        found.append((rows, q[None, rows], keys[None], values[None]))
    return found


def plain_varlen(tensors: dict[str, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) as one computes it sequence by sequence in q's type."""
    q, v, sinks = tensors["q"], tensors["v"], options.get("sinks")
    out = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf, np.float32)
    if sinks is not None:
        lse[:] = np.asarray(sinks)[:, None]
    for b, (rows, one_q, one_k, one_v) in enumerate(sequences_of(tensors)):
        one_out, one_lse = plain(one_q, one_k, one_v, first_batch=b, **options)
        out[rows], lse[:, rows] = one_out[0], one_lse[0]
    return out, lse


def run(device: Any, tensors: dict[str, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of `cki.varlen_attention` in host memory."""
    on_device = {n: device.array(t) if isinstance(t, np.ndarray) else t for n, t in tensors.items()}
    on_device |= {n: device.array(o) if n in TENSORS else o for n, o in options.items()}
    out, lse = cki.varlen_attention(**on_device, return_lse=True)
    return device.numpy(out), device.numpy(lse)


def check(device: Any, tensors: dict[str, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """One call against the reference."""
    out, lse = run(device, tensors, **options)
    truth, truth_lse = reference.varlen_attention(**tensors, return_lse=True, **options)
    options = {n: o for n, o in options.items() if not n.startswith("max_seqlen")}
    plain_out, plain_lse = plain_varlen(tensors, **options)
    assert out.dtype == tensors["q"].dtype
    assert_close(out, truth, plain_out, "out")
    assert_close(lse, truth_lse, plain_lse, "lse")
    return out, lse
