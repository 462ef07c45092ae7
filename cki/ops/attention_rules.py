"""The rules of `attention`, and those that `varlen_attention` shares with it: every one that a call breaks is named."""

from __future__ import annotations

from cki import dtypes
from cki.dtypes import DType
from cki.ops.attention_dropout import check_dropout
from cki.ops.attention_e4m3 import CODES, check_descales, is_e4m3_call
from cki.ops.spec import Problem

MAX_HEAD_DIM = 256
FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)
INDICES = (dtypes.i32, dtypes.i64)
#: Between them products with logits and log2(e), and the scale's reciprocal, are numbers of fp32.
_SCALES = (1e-30, 1e30)
_LARGEST_SOFTCAP = 1e38
_ALIGNMENTS = ("bottom_right", "top_left")


def check_tensors(
    problem: Problem, query_axes: str, key_axes: str, allowed: tuple[DType, ...] = FLOATS
) -> bool:
    """Ranks and element types of q, k and v; whether shapes can be compared at all.

    query_axes, key_axes: the axes by name, "batch, queries, heads, head_dim".
    """
    q, k, v = problem["q"], problem["k"], problem["v"]
    ranked = True
    for name, tensor, axes in (("q", q, query_axes), ("k", k, key_axes), ("v", v, key_axes)):
        wanted = axes.count(",") + 1
        if tensor.ndim != wanted:
            ranked = False
            problem.reject(
                f"{name} has shape {tensor.shape}, which has {tensor.ndim} axes, not {wanted}",
                f"q [{query_axes}], k and v [{key_axes}]",
            )
        if tensor.dtype not in allowed:
            names = "e4m3, or uint8 with its bits" if allowed == CODES else "f32, f16 or bf16"
            problem.reject_type(f"{name} has dtype {tensor.dtype}", f"q, k and v of dtype {names}")
    if not q.dtype == k.dtype == v.dtype:
        problem.reject_type(
            f"q has dtype {q.dtype}, k has dtype {k.dtype}, v has dtype {v.dtype}", "q, k and v of one dtype"
        )
    return ranked


def check_heads(problem: Problem) -> None:
    """Heads and head dimensions, the last two axes of q, k and v."""
    q, k, v = problem["q"], problem["k"], problem["v"]
    if k.shape[-2] != v.shape[-2]:
        problem.reject(
            f"k has {k.shape[-2]} heads, v has {v.shape[-2]}",
            f"k and v with the same heads (axis {k.ndim - 2})",
        )
    if q.shape[-2] and (k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]):
        problem.reject(
            f"q has {q.shape[-2]} heads, which is no multiple of k's {k.shape[-2]}",
            "query heads a multiple of KV heads",
        )
    if q.shape[-2] >= 2**31:
        problem.reject(f"q has {q.shape[-2]} heads", "fewer than 2**31 heads")
    if q.shape[-1] != k.shape[-1]:
        problem.reject(
            f"q has head_dim {q.shape[-1]}, k has head_dim {k.shape[-1]}",
            "q and k of one head_dim (last axis)",
        )
    for name, tensor in (("q", q), ("v", v)):
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            problem.reject(f"{name} has head_dim {tensor.shape[-1]}", f"a head_dim of 1 to {MAX_HEAD_DIM}")


def check_per_head(problem: Problem, name: str) -> None:
    """sinks or alibi_slopes, where given: one a query head."""
    tensor = problem.get(name)
    if tensor is None:
        return
    heads = problem["q"].shape[-2]
    if tensor.shape != (heads,):
        problem.reject(f"{name} has shape {tensor.shape}, q has {heads} heads", f"{name} of shape ({heads},)")


def check_shape(problem: Problem, name: str, shape: tuple[int, ...]) -> None:
    """One tensor of offsets, lengths or blocks."""
    found = problem[name].shape
    if found != shape:
        problem.reject(f"{name} has shape {found}", f"{name} of shape {shape}")


def check_window(problem: Problem) -> bool:
    """window: two integers; whether it is that."""
    window = problem.attribute("window")
    right = len(window) == 2 and all(
        isinstance(w, int) and not isinstance(w, bool) and w >= -1 for w in window
    )
    if not right:
        problem.reject(
            f"window is {window!r}", "window a pair (left, right) of integers, each at least -1 (no limit)"
        )
    return right


def check_scale(problem: Problem) -> None:
    """scale: 0, or far from the ends of fp32."""
    scale, (least, most) = problem.attribute("scale"), _SCALES
    if scale and not least <= abs(scale) <= most:
        problem.reject(f"scale is {scale}", f"scale of 0, or of a magnitude from {least:g} to {most:g}")


def check_softcap(problem: Problem) -> None:
    """softcap: twice it, and 2 log2(e) scale / softcap, are numbers of fp32."""
    scale, softcap = problem.attribute("scale"), problem.attribute("softcap")
    least = abs(1.0 if scale is None else scale) / _LARGEST_SOFTCAP
    if softcap and not least <= softcap <= _LARGEST_SOFTCAP:
        problem.reject(
            f"softcap is {softcap}", f"softcap of 0 (off), or from {least:g} to {_LARGEST_SOFTCAP:g}"
        )


def check_attributes(problem: Problem) -> None:
    """causal_alignment, window and softcap, and what else needs no shapes."""
    problem.require_dtypes((dtypes.f32,), "f32", "sinks", "alibi_slopes")
    check_dropout(problem)
    alignment = problem.attribute("causal_alignment")
    if alignment not in _ALIGNMENTS:
        problem.reject(f"causal_alignment is {alignment!r}", 'causal_alignment "bottom_right" or "top_left"')
    check_window(problem)
    check_scale(problem)
    check_softcap(problem)


def _check_lengths(problem: Problem) -> None:
    q, k, v = problem["q"], problem["k"], problem["v"]
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        problem.reject(
            f"batch sizes differ: q has {q.shape[0]}, k has {k.shape[0]}, v has {v.shape[0]}",
            "one batch size",
        )
    if k.shape[1] != v.shape[1]:
        problem.reject(f"k has {k.shape[1]} keys, v has {v.shape[1]}", "k and v of one length (axis 1)")
    if q.shape[1] + k.shape[1] >= 2**30:
        problem.reject(
            f"{q.shape[1]} queries and {k.shape[1]} keys", "fewer than 2**30 queries and keys together"
        )


def _check_broadcast(problem: Problem, name: str) -> None:
    tensor = problem.get(name)
    if tensor is None:
        return
    q, k = problem["q"], problem["k"]
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    aligned = (1,) * (4 - tensor.ndim) + tensor.shape
    if tensor.ndim > 4 or any(have not in (1, want) for have, want in zip(aligned, full)):
        problem.reject(
            f"{name} has shape {tensor.shape}, which does not broadcast to {full}",
            f"{name} broadcastable to [batch, heads, queries, keys]",
        )


def check_attention(problem: Problem) -> None:
    """Rules of `attention`."""
    check_attributes(problem)
    problem.require_dtypes(FLOATS, "f32, f16 or bf16", "bias")
    problem.require_dtypes((dtypes.bool_, dtypes.u8), "bool or u8", "mask")
    check_descales(problem, problem["k"].shape[0] if problem["k"].ndim else 0)
    types = CODES if is_e4m3_call(problem) else FLOATS
    if not check_tensors(
        problem, "batch, queries, heads, head_dim", "batch, keys, kv_heads, head_dim", types
    ):
        return
    _check_lengths(problem)
    check_heads(problem)
    _check_broadcast(problem, "bias")
    _check_broadcast(problem, "mask")
    check_per_head(problem, "sinks")
    check_per_head(problem, "alibi_slopes")
