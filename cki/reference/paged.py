"""The definitions of attention over caches and packed sequences (`cki.varlen_attention`: each sequence by itself), of
appending to a cache, of rotary positions, and of merging attention states, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cki.reference.attention import attention

#: The largest e4m3 value.
E4M3_MAX = 448.0


def merge_states(outs: Any, lses: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out [..., dim], lse [...]) of outs [states, ..., dim] and lses [states, ...]; see `cki.merge_states`.

    lse = ln sum_i exp(lses_i),  out = sum_i exp(lses_i - lse) outs_i  over the states with lses_i > -inf; 0 and -inf
    where there is none.
    """
    outs, lses = np.asarray(outs).astype(np.float64), np.asarray(lses).astype(np.float64)
    largest = lses.max(axis=0)
    subtract = np.where(largest == -np.inf, 0.0, largest)
    weights = np.exp(lses - subtract)
    total = weights.sum(axis=0)
    used = np.where((lses == -np.inf)[..., None], 0.0, outs)
    out = (weights[..., None] * used).sum(axis=0) / np.where(total == 0, 1.0, total)[..., None]
    with np.errstate(divide="ignore"):
        return out, subtract + np.log(total)


def _unit_rms(x: np.ndarray, weight: Any, eps: float, offset: float) -> np.ndarray:
    if weight is None:
        return x
    rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normed: np.ndarray = x / rms * (np.asarray(weight).astype(np.float64) + offset)
    return normed


def append_kv(
    k: Any, v: Any, cache: Any, slot_mapping: Any, *, q: Any = None, positions: Any = None, cos_sin: Any = None,
    rope_base: float | None = None, rotary_dim: int | None = None, interleaved: bool = False,
    q_norm_weight: Any = None, k_norm_weight: Any = None, norm_eps: float = 1e-6, norm_weight_offset: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:  # fmt: skip
    """(keys, values, queries) in float64 as `cki.append_kv` computes them before they are stored.

    keys, values: [blocks, block_size, kv_heads, dim], the caches' values (codes times scales, for e4m3) with the new
    tokens in their slots, not rounded to the cache's type.  queries: None without q.
    """
    k, v = np.asarray(k).astype(np.float64), np.asarray(v).astype(np.float64)
    queries = None if q is None else np.asarray(q).astype(np.float64)
    k = _unit_rms(k, k_norm_weight, norm_eps, norm_weight_offset)
    if queries is not None:
        queries = _unit_rms(queries, q_norm_weight, norm_eps, norm_weight_offset)
    if cos_sin is not None or rope_base is not None:
        options: dict[str, Any] = {"rotary_dim": rotary_dim, "interleaved": interleaved, "cos_sin": cos_sin}
        options["base"] = rope_base or 1.0
        k = apply_rope(k, positions, **options)
        queries = None if queries is None else apply_rope(queries, positions, **options)
    keys, values = dequantized(*cache)
    block_size = keys.shape[1]
    for token, slot in enumerate(np.asarray(slot_mapping).tolist()):
        if 0 <= slot < keys.shape[0] * block_size:
            keys[divmod(slot, block_size)], values[divmod(slot, block_size)] = k[token], v[token]
    return keys, values, queries


def dequantized(
    k_cache: Any, v_cache: Any, k_scale: Any = None, v_scale: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of caches in float64; scales [blocks, block_size, kv_heads] or [kv_heads], or None."""
    pair = []
    for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
        values = np.array(cache).astype(np.float64)
        pair.append(values if scale is None else values * np.asarray(scale).astype(np.float64)[..., None])
    return pair[0], pair[1]


def quantize_e4m3(x: Any, scale: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """(codes as ml_dtypes.float8_e4m3fn, scale) of rows x [..., dim].

    scale [...]: largest magnitude / 448, 1 for a row of zeros, where none is given.  Codes round to nearest even and
    saturate at 448; NaN stays NaN.
    """
    x = np.asarray(x).astype(np.float64)
    if scale is None:
        largest = np.abs(x).max(axis=-1)
        scale = np.where(largest > 0, largest / E4M3_MAX, 1.0)
    scale = np.asarray(scale).astype(np.float64)
    codes = np.clip(x / scale[..., None], -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return codes, scale


def gathered(cache: np.ndarray, table_row: Any, length: int) -> np.ndarray:
    """Rows [length, kv_heads, dim] of one sequence; 0 where the table names a block outside the cache."""
    blocks, block_size = cache.shape[:2]
    places = [divmod(token, block_size) for token in range(length)]
    ids = np.array([int(table_row[column]) for column, _ in places], np.int64).reshape(length)
    inside = (ids >= 0) & (ids < blocks)
    offsets = np.array([offset for _, offset in places], np.int64).reshape(length)
    rows = cache[np.where(inside, ids, 0), offsets]
    return np.where(inside[:, None, None], rows, 0.0)


def paged_attention(
    q: Any, cache: Any, block_table: Any, seq_lens: Any, *, scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None,
    deterministic: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Causal, bottom-right aligned attention of q [batch, queries, heads, dim] over each sequence's keys in the cache.

    cache: (k_cache, v_cache) or with (k_scale, v_scale).  Sequence b has seq_lens[b] keys (cut off at what the table
    reaches), key j in block block_table[b, j // block_size]; a block outside the cache stands for zeros.
    See `cki.paged_attention`; logits as in `attention`.  deterministic changes nothing here.
    """
    q = np.asarray(q)
    keys, values = dequantized(*cache)
    batch, queries, heads, _ = q.shape
    out, lse = np.zeros((batch, queries, heads, values.shape[3])), np.full((batch, heads, queries), -np.inf)
    reach = np.shape(block_table)[1] * keys.shape[1]
    for b in range(batch):
        length = max(0, min(int(seq_lens[b]), reach))
        k, v = (gathered(t, block_table[b], length) for t in (keys, values))
        out[b], lse[b] = (
            part[0] for part in attention(
                q[b : b + 1], k[None], v[None], causal=True, scale=scale, window=(window[0], -1), softcap=softcap,
                sinks=sinks, alibi_slopes=alibi_slopes, return_lse=True,
            )
        )  # fmt: skip
    return (out, lse) if return_lse else out


def decode_attention(
    q: Any, k: Any, v: Any, seq_lens: Any = None, *, cu_seqlens_k: Any = None, k_scale: Any = None, v_scale: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """`paged_attention` over dense k, v [batch, capacity, kv_heads, dim] with seq_lens, or over ragged ones [tokens,
    kv_heads, dim] with cu_seqlens_k [batch + 1]."""
    k, v = dequantized(k, v, k_scale, v_scale)
    if cu_seqlens_k is not None:
        starts = np.asarray(cu_seqlens_k).astype(np.int64)
        seq_lens = np.diff(starts)
        longest = max(1, int(seq_lens.max(initial=1)))
        padded = [np.zeros((len(seq_lens), longest, *t.shape[1:])) for t in (k, v)]
        for target, source in zip(padded, (k, v)):
            for b, length in enumerate(seq_lens):
                target[b, :length] = source[starts[b] : starts[b] + length]
        k, v = padded
    return paged_attention(q, (k, v), np.arange(len(q))[:, None], seq_lens, **options)


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


def apply_rope(
    x: Any, positions: Any, *, cos_sin: Any = None, base: float = 10000.0, rotary_dim: int | None = None,
    interleaved: bool = False, inverse: bool = False,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Each pair (a, b) of the first rotary_dim elements becomes (a cos t - b sin t, a sin t + b cos t).

    x [tokens, heads, head_dim], positions [tokens].  t = position * base^(-2i / rotary_dim) for pair i, or cosines and
    sines from cos_sin [positions, rotary_dim]; a position outside it turns nothing.  Pairs are (i, i + rotary_dim / 2),
    or (2i, 2i + 1).  inverse turns back.
    """
    x = np.array(x, np.float64)
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    pairs = rotary_dim // 2
    positions = np.asarray(positions).astype(np.int64)
    if cos_sin is None:
        angles = positions[:, None] * float(base) ** (-2.0 * np.arange(pairs) / rotary_dim)
        cosine, sine = np.cos(angles), np.sin(angles)
    else:
        table = np.asarray(cos_sin).astype(np.float64)
        inside = (positions >= 0) & (positions < len(table))
        rows = table[np.where(inside, positions, 0)]
        cosine = np.where(inside[:, None], rows[:, :pairs], 1.0)
        sine = np.where(inside[:, None], rows[:, pairs:], 0.0)
    cosine, sine = cosine[:, None], (-sine if inverse else sine)[:, None]
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, pairs)
    second = slice(1, rotary_dim, 2) if interleaved else slice(pairs, rotary_dim)
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * cosine - b * sine, a * sine + b * cosine
    turned: np.ndarray[Any, Any] = x
    return turned
