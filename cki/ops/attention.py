"""Attention over dense tensors: `attention` for users, `plan_attention` for fused operations.

The kernel is `cuda_src/attention/attention.cu`: tensor cores by mma.sync, for every GPU from sm_80 on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from cki import dtypes
from cki.device import DeviceInfo
from cki.errors import UnsupportedError
from cki.heuristics.attention import AttentionTiles, choose_tiles, heads_per_block, padded
from cki.heuristics.attention_dropout import tiles_with_dropout
from cki.heuristics.attention_e4m3 import E4m3Tiles
from cki.heuristics.attention_hopper import HopperTiles
from cki.kernel import kernel_spec
from cki.operand import Operand
from cki.ops.attention_dropout import DROPOUT_INPUTS, NO_DROPOUT, AttentionDropout, dropout_of
from cki.ops.attention_e4m3 import (
    DESCALE_INPUTS,
    NO_DESCALES,
    Descales,
    as_e4m3,
    converts,
    descales_of,
    plan_codes_to_f16,
    plan_hopper_e4m3,
    preferred_e4m3,
    result_dtype,
    values_workspace,
)
from cki.ops.attention_hopper import (
    part_results,
    plan_hopper,
    plan_merge,
    preferred,
    preferred_packed,
    workspace_of,
)
from cki.ops.attention_rules import MAX_HEAD_DIM as MAX_HEAD_DIM
from cki.ops.attention_rules import check_attention
from cki.ops.call import call
from cki.ops.packed_sequences import DENSE_ARGUMENTS, DENSE_CONSTANTS
from cki.ops.packed_sequences import PackedSequences as PackedSequences
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import ArgumentValue, NullPointer, Plan, Step

_PARAMS = "P" * 9 + "q" * 26 + "i" * 9 + "f" * 4 + "P" * 3 + "q" * 4 + "i" * 3 + "PPIf" + "PPP" + "q" * 6
_LOG2E = math.log2(math.e)
#: Attributes that `plan_attention` takes by name.
OPTIONS = ("causal", "causal_alignment", "scale", "window", "softcap", "deterministic")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
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
    out_dtype: Literal["bf16", "f16"] | None = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """softmax(logits) v, with fp32 accumulation, in one kernel and without a matrix of logits in memory.

    q: [batch, queries, heads, head_dim].  k: [batch, keys, kv_heads, head_dim].
    v: [batch, keys, kv_heads, value_dim].  f32, f16, bf16 or e4m3, all three alike; head dimensions 1 to 256; any
        strides.  heads is a multiple of kv_heads; query head h reads KV head h // (heads // kv_heads).

    The logit of query i and key j is scale * q.k, then softcap * tanh(x / softcap), then minus ALiBi, plus bias;
    then hidden keys are left out.  With p = i + keys - queries (bottom_right: the last query stands at the last key)
    or p = i (top_left: the first query stands at the first key):

    causal: key j is visible when j <= p.  For 2 queries and 4 keys, bottom_right and top_left:

        1 1 1 0      1 0 0 0
        1 1 1 1      1 1 0 0

    window: (left, right); key j is visible when p - left <= j <= p + right; -1 is no limit on that side.
    scale: None is 1/sqrt(head_dim); may be 0 or negative; else of a magnitude from 1e-30 to 1e30.
    softcap: 0 is off.
    bias: f32, f16 or bf16, broadcastable to [batch, heads, queries, keys], any strides; -inf hides a key.
    mask: bool or u8, broadcastable likewise; True (not 0) keeps a key.
    alibi_slopes: f32 [heads]; slope * |p - j| is subtracted.
    sinks: f32 [heads]; one more logit in the denominator, without a value, not scaled.
    dropout_p, dropout_seed, dropout_offset: each weight is 0 with probability dropout_p (0 to below 1), else divided
        by 1 - dropout_p; the denominator and lse are those without dropout.  Seed and offset are one int64 or uint64
        each in device memory, given together with a dropout_p above 0.  A weight's fate depends on seed, offset
        (modulo 2**32), batch, head, query and key alone (`cki.reference.dropout.attention_keeps`): a captured graph
        that adds to the offset drops others at each replay.
    deterministic: one kernel and tile of keys for all numbers of queries and keys, so that a query's bits are those
        that it has in a longer or shorter call (chunks of a prompt, one token at a time).  Slower below 64 queries
        over many keys, which are else cut into parts.
    return_lse: also return the natural logarithm of the sum of exponentials, f32 [batch, heads, queries].
    q_descale, k_descale, v_descale: with e4m3 (or uint8 with its bits), and only then, all three: f32 [batch, kv_heads]
        or [kv_heads], positive; q stands for q * q_descale of its KV head, and so on.  In device memory.
    out_dtype: of the result of e4m3, "bf16" (None too) or "f16".
    out: a tensor of the output's shape and dtype to write into.
    stream: default is the framework's current stream.

    Returns out [batch, queries, heads, value_dim], or (out, lse).  A query that sees no key gets 0, and lse -inf
    (with sinks: lse = sink).  What lies behind a hidden key, NaN included, has no influence.  Results are the same
    bits from run to run.  They do not depend on the rest of the batch, except that on sm_90a, without `deterministic`,
    up to 128 queries may have their keys (256 and more) cut into parts, by sizes of batch and heads.

    Raises InvalidArgumentError, InvalidTypeError or DeviceError before any launch, with every violated rule.
    FlashAttention-2: Dao, arXiv 2307.08691.
    """
    inputs = (
        q,
        k,
        v,
        bias,
        mask,
        sinks,
        alibi_slopes,
        dropout_seed,
        dropout_offset,
        q_descale,
        k_descale,
        v_descale,
    )
    attributes = (
        causal,
        causal_alignment,
        scale,
        window,
        softcap,
        return_lse,
        dropout_p,
        deterministic,
        out_dtype,
    )
    return call(ATTENTION, inputs, attributes, (out, None), stream)


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    batch, queries, heads, _ = problem["q"].shape
    outputs = {"out": OutputSpec((batch, queries, heads, problem["v"].shape[3]), result_dtype(problem))}
    if problem.attribute("return_lse"):
        outputs["lse"] = OutputSpec((batch, heads, queries), dtypes.f32)
    return outputs


# ---------------------------------------------------------------------------------------------------------------------
# plan


def _copy_bytes(*tensors: Operand) -> int:
    """The widest copy that all rows of all tensors allow: 16, 8 or 4 bytes, or one element at a time.

    Bytes in shared memory, where e4m3 is converted to twice as many.
    """
    itemsize = tensors[0].dtype.itemsize
    converted = max(itemsize, 2)
    for nbytes in (16, 8, 4):
        read = nbytes * itemsize // converted
        if nbytes > converted and all(
            (t.strides[3] == 1 or t.shape[3] == 1)
            and t.is_aligned(read)
            and t.shape[3] * itemsize % read == 0
            for t in tensors
        ):
            return nbytes
    return converted


def _broadcast_strides(tensor: Operand | None) -> tuple[int, ...]:
    """Strides over [batch, heads, queries, keys]; 0 along broadcast axes."""
    if tensor is None:
        return (0, 0, 0, 0)
    own = tuple(0 if extent == 1 else stride for extent, stride in zip(tensor.shape, tensor.strides))
    return (0,) * (4 - tensor.ndim) + own


def _limits(
    queries: int, keys: int, causal: bool, alignment: str, window: tuple[int, int]
) -> tuple[int, int | None, int | None]:
    """(shift, left, right) of `common/key_band.cuh`; a limit that hides no key is None, and costs nothing then."""
    shift = keys - queries if alignment == "bottom_right" else 0
    left: int | None = window[0] if 0 <= window[0] < queries - 1 + shift else None
    wanted = 0 if causal else window[1]
    right: int | None = wanted if 0 <= wanted < keys - 1 - shift else None
    return shift, left, right


def plan_attention(
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    *,
    device: DeviceInfo,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Operand | None = None,
    mask: Operand | None = None,
    sinks: Operand | None = None,
    alibi_slopes: Operand | None = None,
    lse: Operand | None = None,
    dropout: AttentionDropout | None = None,
    deterministic: bool = False,
    tiles: AttentionTiles | HopperTiles | None = None,
    packed: PackedSequences | None = None,
    descales: Descales | None = None,
) -> tuple[Step, ...]:
    """The launch that computes `attention` on operands; none for an empty output.

    Arguments are those of `attention`, already checked.  lse: row-major f32 [batch, heads, queries], or None.
    dropout: None where nothing is dropped.
    tiles: instead of the heuristics' choice (benchmarks).  HopperTiles select the Hopper kernel,
        E4m3Tiles that of e4m3.
    descales: of e4m3 codes, else None.
    The plan needs the workspace of `attention_hopper.workspace_of(steps)`, and of e4m3 that of `values_workspace`.
    packed: q and out are packed sequences as a batch of one, [1, tokens, heads, dim]; k and v likewise, or blocks of a
    cache; lse is [heads, tokens].
    """
    batch, queries, heads, head_dim = q.shape
    if not batch * queries * heads:
        return ()
    if descales is None and not (k.strides[2] or v.strides[2]):  # heads that share memory are one head
        k, v = (t.view((*t.shape[:2], 1, t.shape[3]), t.strides) for t in (k, v))
    keys, kv_heads, value_dim = v.shape[1:]
    group = heads // kv_heads
    q, k, v = as_e4m3(q), as_e4m3(k), as_e4m3(v)
    element = dtypes.f16 if descales else q.dtype  # of the generic kernel's products
    itemsize = element.itemsize
    if packed is None:
        shift, left, right = _limits(queries, keys, causal, causal_alignment, window)
        pack = heads_per_block(queries, group)
        rows = queries * pack
    else:
        shift, keys = 0, packed.key_length(k)
        left, right = packed.limits(causal, window)
        pack = heads_per_block(packed.typical_queries, group) if queries * group < 2**31 else 1
        rows = packed.typical_queries * pack
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    scale_first = softcap > 0 or bias is not None or alibi_slopes is not None or scale <= 0
    conversion: tuple[Step, ...] = ()
    as_f16 = (q, k, v)
    if descales is not None:
        conversion, as_f16 = plan_codes_to_f16(q, k, v)
    if tiles is None:
        choice = {
            # By what is asked, or by what limits hide: a limit that hides nothing costs nothing.
            "has_limits": causal or max(window) >= 0
            if deterministic
            else left is not None or right is not None,
            "is_plain": not scale_first and mask is None,
            "any_length": deterministic,
        }
        if descales is not None and not (bias or mask or packed or dropout):
            limited, any_length = choice["has_limits"], choice["any_length"]
            tiles = preferred_e4m3(q, k, v, device, has_limits=limited, any_length=any_length)
        if tiles is None and (descales is None or converts(queries, packed, deterministic)):
            by_q, by_k, by_v = as_f16
            if packed is None:
                may_split = dropout is None
                tiles = preferred(by_q, by_k, by_v, bias, mask, device=device, may_split=may_split, **choice)
            else:
                tiles = preferred_packed(by_q, by_k, by_v, packed, device=device, **choice)
        if tiles is not None and dropout is not None:
            tiles = tiles_with_dropout(tiles, padded(value_dim), packed is not None)
    # The generic kernel takes descales of either sign and 0: it multiplies before it looks for the largest.
    scale_first |= descales is not None and not isinstance(tiles, HopperTiles)
    converted: tuple[Step, ...] = ()
    if descales is not None and isinstance(tiles, HopperTiles) and not isinstance(tiles, E4m3Tiles):
        if packed is not None and packed.block_table is not None:
            raise UnsupportedError("attention: codes as f16", ["they lie in a cache"], "the generic kernel")
        converted, (q, k, v) = conversion, as_f16
    if tiles is None:
        plain = not scale_first and mask is None and window[0] < 0
        # Numbers are drawn in registers, of which two row tiles of heads wider than 64 leave none.
        plain &= dropout is None or not 64 < max(head_dim, value_dim) <= 128
        paged = packed is not None and packed.block_table is not None
        tiles = choose_tiles(rows, padded(head_dim), padded(value_dim), itemsize, plain, device, paged)
    merge: tuple[Step, ...] = ()
    if isinstance(tiles, HopperTiles) and tiles.splits > 1:
        parts = part_results(out, keys, tiles)
        merge = plan_merge(parts, out, lse)
        out, lse = parts
    features: dict[str, Any] = {
        "kLimitLeft": left is not None, "kLimitRight": right is not None, "kSoftcap": softcap > 0,
        "kAlibi": alibi_slopes is not None, "kScaleFirst": scale_first,
        "kPairStore": out.strides[3] == 1 and value_dim % 2 == 0 and out.is_aligned(2 * out.dtype.itemsize),
    }  # fmt: skip
    softcap_rate = 2 * _LOG2E * scale / softcap if softcap > 0 else 0.0
    if isinstance(tiles, E4m3Tiles):
        assert descales is not None
        assert dropout is None, "the e4m3 kernel has no dropout"
        vectors = {"lse": lse, "sinks": sinks, "alibi_slopes": alibi_slopes}
        numbers = (shift, left or 0, right or 0, scale, softcap, softcap_rate)
        return plan_hopper_e4m3(q, k, v, out, tiles, descales, vectors, features, numbers, device)
    features |= {
        "Element": element, "BiasElement": dtypes.f32 if bias is None else bias.dtype,
        "kBias": bias is not None, "kMask": mask is not None, "kDropout": dropout is not None,
    }  # fmt: skip
    optional: tuple[ArgumentValue, ...] = tuple(
        NullPointer() if tensor is None else tensor for tensor in (lse, bias, mask, sinks, alibi_slopes)
    )
    args: tuple[ArgumentValue, ...] = (
        q, k, v, out, *optional,
        *q.strides, *k.strides, *v.strides, *out.strides, *_broadcast_strides(bias), *_broadcast_strides(mask),
        sinks.strides[0] if sinks else 0, alibi_slopes.strides[0] if alibi_slopes else 0,
        queries, keys, heads, group, head_dim, value_dim, shift, left or 0, right or 0,
        scale, _LOG2E if scale_first else scale * _LOG2E, softcap, softcap_rate,
    )  # fmt: skip
    packing = DENSE_CONSTANTS if packed is None else packed.constants(causal_alignment)
    args += DENSE_ARGUMENTS if packed is None else packed.arguments(k)
    args += NO_DROPOUT if dropout is None else dropout.arguments()
    of_codes = NO_DESCALES if descales is None else descales.arguments()
    if isinstance(tiles, HopperTiles):
        features |= packing | {"kDescaled": descales is not None}
        steps = plan_hopper(q, k, v, out, tiles, bias, mask, packed, features, args, of_codes, device)
        return converted + steps + merge
    if packed is None:
        blocks = -(-rows // tiles.block_rows) * (heads // pack) * batch
    else:
        blocks = packed.slots(queries * pack, tiles.block_rows) * (heads // pack)
    if blocks >= 2**31:
        raise UnsupportedError(
            f"attention: {blocks} blocks", ["a grid holds 2**31 - 1 blocks"], "a smaller batch"
        )
    kernel = kernel_spec(
        "attention/attention.cu", "attention", _PARAMS, max_registers=tiles.registers, **features, **packing,
        kHeadDim=padded(head_dim), kValueDim=padded(value_dim),
        kWarps=tiles.warps, kRowTiles=tiles.row_tiles, kBlockKeys=tiles.block_keys, kMinBlocks=tiles.min_blocks,
        kCopyBytes=_copy_bytes(q, k, v), kPackHeads=pack > 1,
        Source=q.dtype, Result=out.dtype, kDescaled=descales is not None,
    )  # fmt: skip
    reason = (
        f"mma.sync, {tiles.block_rows} rows x {tiles.block_keys} keys a tile, "
        f"{pack} heads a block, copies of {kernel.constant('kCopyBytes')} bytes"
    )
    smem = tiles.shared_memory(padded(head_dim), padded(value_dim), itemsize, packing["kPaged"])
    return (Step(kernel, (blocks, 1, 1), (tiles.threads, 1, 1), (*args, *of_codes), smem, reason=reason),)


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    tensors: dict[str, Any] = {name: problem.get(name) for name in ("bias", "mask", "sinks", "alibi_slopes")}
    options = {n: problem.attribute(n) for n in OPTIONS}
    steps = plan_attention(
        problem["q"], problem["k"], problem["v"], outputs["out"],
        lse=outputs.get("lse"), device=device, dropout=dropout_of(problem), descales=descales_of(problem),
        **tensors, **options,
    )  # fmt: skip
    return Plan(steps, (*workspace_of(steps), *values_workspace(steps)))


ATTENTION = OpSpec(
    name="attention",
    inputs=(
        Input("q"), Input("k"), Input("v"), Input("bias", optional=True), Input("mask", optional=True),
        Input("sinks", optional=True), Input("alibi_slopes", optional=True), *DROPOUT_INPUTS, *DESCALE_INPUTS,
    ),
    attributes=(
        Attribute("causal", bool, False), Attribute("causal_alignment", str, "bottom_right"), Attribute("scale", float),
        Attribute("window", tuple, (-1, -1)), Attribute("softcap", float, 0.0), Attribute("return_lse", bool, False),
        Attribute("dropout_p", float, 0.0), Attribute("deterministic", bool, False),
        Attribute("out_dtype", str),
    ),
    outputs=("out", "lse"),
    check=check_attention,
    infer=_infer,
    plan=_plan,
)  # fmt: skip
