"""Attention over packed sequences of any lengths, with keys packed too or in a paged cache.

The kernels are those of dense tensors (`cki.ops.attention`), compiled for packed sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from cki import config, dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.heuristics.attention import AttentionTiles
from cki.heuristics.attention_hopper import HopperTiles
from cki.kernel import KernelSpec
from cki.operand import Operand, dense
from cki.ops.attention import OPTIONS, PackedSequences, plan_attention
from cki.ops.attention_dropout import DROPOUT_INPUTS, dropout_of
from cki.ops.attention_e4m3 import DESCALE_INPUTS, Descales, descales_of, result_dtype, values_workspace
from cki.ops.attention_hopper import workspace_of
from cki.ops.cache_arguments import imported
from cki.ops.call import call
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.ops.varlen_rules import check_varlen, validate_varlen
from cki.plan import Plan

#: Tiles are the same for all longer sequences; a plan is kept for each value that reaches it.
_LONG = 128


def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    dropout_offset: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: str | None = None,
    block_table: Any = None,
    seq_lens: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """`cki.attention` of each of many sequences, of different lengths, packed one behind the other without padding.

    q: [tokens, heads, head_dim].  k: [tokens, kv_heads, head_dim].  v: [tokens, kv_heads, value_dim].  f32, f16, bf16
        or e4m3, all three alike; head dimensions 1 to 256; any strides.
    cu_seqlens_q: i32 or i64 [batch + 1]; sequence b has the queries from cu_seqlens_q[b] up to cu_seqlens_q[b + 1].
    cu_seqlens_k: likewise of the keys; None: those of the queries.
    max_seqlen_q, max_seqlen_k: the longest sequence, if known.  Hints: kernel and tiles are chosen for max_seqlen_q
        (else for the mean length); a wrong one costs time, and another kernel has other last bits.

    With a block_table the keys lie in a paged cache: a prefix from earlier calls and the new tokens themselves, which
    `cki.append_kv` has written (chunked prefill; decoding and prefill in one batch):

    k, v: [blocks, block_size, kv_heads, head_dim or value_dim], of q's dtype, any block size, any strides.
    block_table: i32 or i64 [batch, columns]; entries past a sequence's length are not read.
    seq_lens: i32 or i64 [batch], keys of each sequence, the new tokens included.

    causal, causal_alignment, scale, window, softcap, sinks, alibi_slopes, dropout_p, dropout_seed, dropout_offset,
    deterministic, return_lse, q_descale, k_descale, v_descale, out_dtype, out, stream: as for `cki.attention`, sequence
    by sequence: the last query of a sequence stands at its last key (bottom_right); for dropout and descales sequence
    b is batch b.

    Returns out [tokens, heads, value_dim], or (out, lse [heads, tokens]).  A query that sees no key, and a row that
    belongs to no sequence (past the last offset), gets 0, and lse -inf (with sinks: lse = sink).  Sequences without
    queries or keys are allowed.  By one kernel, a sequence's results are the bits that it gets alone, in any company.

    Lengths and tables are read on the device: nothing waits for the host, and a captured graph serves other lengths.
    Offsets and lengths beyond the tensors are cut off, an entry outside the cache stands for zeros, and of falling
    offsets the result is undefined; CKI_VALIDATE=1 raises instead.

    Raises InvalidArgumentError, InvalidTypeError or DeviceError before any launch, with every violated rule.
    """
    tensors = (k, v, cu_seqlens_q, cu_seqlens_k, seq_lens, block_table)
    if block_table is not None:
        tensors = tuple(imported(tensors, like=q))
    k, v, cu_seqlens_q, cu_seqlens_k, seq_lens, block_table = tensors
    if config.flag("CKI_VALIDATE") and cu_seqlens_q is not None:
        validate_varlen(
            q, k, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, window=window, bottom_right=str(causal_alignment) == "bottom_right",
        )  # fmt: skip
    longest = tuple(min(n, _LONG) if isinstance(n, Integral) else n for n in (max_seqlen_q, max_seqlen_k))
    inputs = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, seq_lens, block_table, sinks, alibi_slopes, dropout_seed, dropout_offset,
        q_descale, k_descale, v_descale,
    )  # fmt: skip
    attributes = (
        causal,
        causal_alignment,
        scale,
        window,
        softcap,
        return_lse,
        *longest,
        dropout_p,
        deterministic,
        out_dtype,
    )
    return call(VARLEN_ATTENTION, inputs, attributes, (out, None), stream)


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    tokens, heads, _ = problem["q"].shape
    outputs = {"out": OutputSpec((tokens, heads, problem["v"].shape[-1]), result_dtype(problem))}
    if problem.attribute("return_lse"):
        outputs["lse"] = OutputSpec((heads, tokens), dtypes.f32)
    return outputs


def _as_batch_of_one(tensor: Operand) -> Operand:
    return tensor if tensor.ndim == 4 else tensor.view((1, *tensor.shape), (0, *tensor.strides))


def plan(
    problem: Problem,
    outputs: Mapping[str, Operand],
    device: DeviceInfo,
    tiles: AttentionTiles | HopperTiles | None = None,
) -> Plan:
    """tiles: instead of the heuristics' choice (benchmarks, tests)."""
    q, k, v, out = (_as_batch_of_one(t) for t in (problem["q"], problem["k"], problem["v"], outputs["out"]))
    offsets, longest = problem["cu_seqlens_q"], problem.attribute("max_seqlen_q")
    packed = PackedSequences(
        offsets, problem.get("seq_lens") or problem.get("cu_seqlens_k") or offsets, problem.get("block_table"),
        -(-q.shape[1] // max(offsets.shape[0] - 1, 1)) if longest is None else longest,
    )  # fmt: skip
    options = {n: problem.attribute(n) for n in OPTIONS}
    steps = plan_attention(
        q, k, v, out, lse=outputs.get("lse"), device=device, packed=packed, sinks=problem.get("sinks"),
        alibi_slopes=problem.get("alibi_slopes"), dropout=dropout_of(problem), descales=descales_of(problem),
        tiles=tiles, **options,
    )  # fmt: skip
    return Plan(steps, (*workspace_of(steps), *values_workspace(steps)))


VARLEN_ATTENTION = OpSpec(
    name="varlen_attention",
    inputs=(
        Input("q"), Input("k"), Input("v"), Input("cu_seqlens_q"), Input("cu_seqlens_k", True), Input("seq_lens", True),
        Input("block_table", True), Input("sinks", True), Input("alibi_slopes", True),
        *DROPOUT_INPUTS, *DESCALE_INPUTS,
    ),
    attributes=(
        Attribute("causal", bool, False), Attribute("causal_alignment", str, "bottom_right"), Attribute("scale", float),
        Attribute("window", tuple, (-1, -1)), Attribute("softcap", float, 0.0), Attribute("return_lse", bool, False),
        Attribute("max_seqlen_q", int), Attribute("max_seqlen_k", int), Attribute("dropout_p", float, 0.0),
        Attribute("deterministic", bool, False), Attribute("out_dtype", str),
    ),
    outputs=("out", "lse"),
    check=check_varlen,
    infer=_infer,
    plan=plan,
)  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: types, head dimensions, packed and paged keys, few queries, features, copies."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}

    def add(
        dtype: DType,
        dim: int,
        *,
        block_size: int = 0,
        longest: int = 512,
        tokens: int = 4096,
        **features: Any,
    ) -> None:
        q = dense("q", (1, tokens, 8, dim), dtype)
        k = dense("k", (1024, block_size, 2, dim) if block_size else (1, 4096, 2, dim), dtype)
        table = dense("block_table", (8, 64), dtypes.i32) if block_size else None
        lengths = dense("seq_lens", (8,), dtypes.i32)
        packed = PackedSequences(dense("cu_seqlens_q", (9,), dtypes.i32), lengths, table, longest)
        descale, out = dense("descale", (8, 2), dtypes.f32), q
        if dtype == dtypes.e4m3:
            out, features["descales"] = dense("out", q.shape, dtypes.bf16), Descales(*(descale,) * 3)
        for step in plan_attention(q, k, k, out, device=device, packed=packed, **features):
            found[step.kernel] = None

    slopes = dense("alibi_slopes", (8,), dtypes.f32)
    everything: dict[str, Any] = {"alibi_slopes": slopes, "softcap": 30.0, "window": (100, 20)}
    bf16, f16, f32 = dtypes.bf16, dtypes.f16, dtypes.f32
    for dim in (64, 128, 256):
        for block_size in (0, 16):
            add(bf16, dim, block_size=block_size, causal=True)
    add(f16, 64, **everything)
    add(bf16, 128, block_size=16, **everything)
    add(bf16, 256, block_size=64, **everything)
    add(f32, 128, causal=True)
    add(f32, 256, block_size=16, **everything)
    add(f16, 64)
    for block_size in (0, 16, 64):
        add(bf16, 64, block_size=block_size, tokens=65536, causal=True)
    for dim in (64, 128):
        add(bf16, dim, longest=16, causal=True)
    add(f16, 96, block_size=16)
    add(bf16, 128, longest=1, block_size=16, causal=True)
    add(dtypes.e4m3, 128, causal=True)
    add(dtypes.e4m3, 128, block_size=16, **everything)
    add(f16, 5, block_size=3, causal=True)
    add(f16, 5, causal=True)
    return list(found)
