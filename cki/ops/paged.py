"""Attention of a few new tokens over cached keys and values: `paged_attention` over blocks, `decode_attention` over
dense and ragged caches.

The kernel is `cuda_src/attention/decode.cu`: mma.sync and cp.async, for every GPU from sm_80 on (e4m3 from sm_89).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cki import config, dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.paged import (
    MERGE_WARPS,
    SERIAL_ARCHS,
    TILE_KEYS,
    DecodeConfig,
    DecodeShape,
    choose_decode,
    padded_dim,
    stage_bytes,
)
from cki.kernel import ARCHITECTURES, KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.cache_arguments import cache_tensors, imported
from cki.ops.call import call
from cki.ops.paged_rules import (
    check_decode,
    check_paged,
    copy_bytes,
    counters_needed,
    validate_decode,
    validate_paged,
)
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import ArgumentValue, NullPointer, Plan, Step

_PARAMS = "P" * 13 + "q" * 20 + "i" * 10 + "f" * 4
_MERGE_PARAMS = "P" * 5 + "q" * 6 + "i" * 8
_LOG2E = math.log2(math.e)
_PARTIALS = "partials"
_MAX_BLOCKS_Y = 65535
#: Lines of block tables that are fetched while lengths are awaited.
_MOST_TABLE_LINES = 1024
#: Bytes of keys and values that are read in the time which dealing tiles saves: about 0.7 us of an H200.
_DEALING_SAVES = 3 << 20
Choice = Callable[[DecodeShape, DeviceInfo], DecodeConfig]


def paged_attention(
    q: Any, cache: Any, block_table: Any, seq_lens: Any, *, scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None,
    deterministic: bool = False, return_lse: bool = False, counters: Any = None, out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """Attention of the newest 1 to 16 tokens of each sequence over a paged cache that holds them already.

    q: [batch, queries, heads, head_dim], f32, f16 or bf16, any strides.
    cache: a layer of a `PagedKVCache`, or (k_cache, v_cache), or with k_scale and v_scale; caches are [blocks,
    block_size, kv_heads, dim] by any strides whose last axis is dense, of q's dtype, or e4m3 beside f16 or bf16
    queries.  Any block size; head dimensions up to 256 whose rows are multiples of 4 bytes (of 16 to be fast).
    block_table: i32 or i64 [batch, columns]; entries past a sequence's length are not read.
    seq_lens: i32 or i64 [batch], keys of each sequence, the new tokens included; query i stands at position
    seq_lens - queries + i and sees the keys up to its own.  0 is an empty place in the batch.
    window: (left, right); left limits how far back a query sees; blocks before the window are not read.
    scale, softcap, sinks, alibi_slopes, return_lse, out, stream: as for `cki.attention`.
    deterministic: results do not depend on the rest of the batch either; each sequence and KV head is one block's work
    then, which leaves SMs idle where there are few.
    counters: u32 zeros, batch * queries * heads of them, which a call leaves zero; calls that share them must follow
    one another (one stream).  With them the blocks merge their parts themselves, which saves the second launch: worth
    it before sm_90, where that cannot begin while the first one runs.

    Lengths and tables are read on the device: nothing waits for the host, and a captured graph serves other lengths.
    A length outside the table's reach is cut off, an entry outside the cache stands for zeros; CKI_VALIDATE=1 raises
    instead.  Results repeat bit for bit for the same lengths and batch; how the work is cut, and so the last bits,
    depends on all lengths of the batch.

    Returns out [batch, queries, heads, value_dim], or (out, lse [batch, heads, queries]).  Raises InvalidArgumentError
    or InvalidTypeError before any launch, UnsupportedError for e4m3 before sm_89.
    """
    tensors = imported((*cache_tensors("paged_attention", cache), block_table, seq_lens), like=q)
    if config.flag("CKI_VALIDATE"):
        validate_paged(q, tensors[0], tensors[4], tensors[5], window)
    k_cache, v_cache, k_scale, v_scale, block_table, seq_lens = tensors
    inputs = (q, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale, sinks, alibi_slopes, counters)
    return call(
        PAGED_ATTENTION, inputs, (scale, window, softcap, deterministic, return_lse), (out, None), stream
    )


def decode_attention(
    q: Any, k: Any, v: Any, seq_lens: Any = None, *, cu_seqlens_k: Any = None, scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None,
    k_scale: Any = None, v_scale: Any = None, deterministic: bool = False, return_lse: bool = False,
    counters: Any = None, out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """`paged_attention` over caches without blocks.

    Dense: k [batch, capacity, kv_heads, head_dim], v likewise, seq_lens [batch].  Ragged: k [tokens, kv_heads,
    head_dim], v likewise, cu_seqlens_k i32 or i64 [batch + 1]: sequence b has the tokens from cu_seqlens_k[b] up to
    cu_seqlens_k[b + 1].
    k_scale, v_scale: for e4m3, f32 [kv_heads] or one a token and head, k's shape without its last axis, dense.
    CKI_VALIDATE=1 raises for lengths beyond k's capacity, and for offsets that fall or lie outside k.
    Everything else as for `paged_attention`.
    """
    if config.flag("CKI_VALIDATE"):
        validate_decode(k, seq_lens, cu_seqlens_k)
    inputs = (q, k, v, seq_lens, cu_seqlens_k, k_scale, v_scale, sinks, alibi_slopes, counters)
    return call(
        DECODE_ATTENTION, inputs, (scale, window, softcap, deterministic, return_lse), (out, None), stream
    )


# ---------------------------------------------------------------------------------------------------------------------
# plan


def plan_paged_attention(
    q: Operand, k: Operand, v: Operand, lengths: Operand, out: Operand, device: DeviceInfo, *,
    block_table: Operand | None = None, scales: tuple[Operand, Operand] | None = None, scale: float | None = None,
    left: int = -1, softcap: float = 0.0, sinks: Operand | None = None, alibi_slopes: Operand | None = None,
    deterministic: bool = False, lse: Operand | None = None, counters: Operand | None = None,
    choose: Choice = choose_decode, overlaps: bool = False, keys_early: bool = False,
    codes: tuple[Operand, Operand] | None = None,
) -> Plan:  # fmt: skip
    """The launches of `paged_attention` or `decode_attention` on checked operands.

    k, v: blocks with a block_table, dense of four axes without, ragged of three (lengths are then cu_seqlens_k).
    choose: instead of the heuristic (benchmarks, tests).
    overlaps: the launches may begin while the one before ends, and let the next begin (sm_90 and later; no effect
        before): for a chain of launches each of which waits for the one before.
    keys_early: with overlaps: of what this launch reads, those that may still run write q and each sequence's newest
        `queries` keys and values alone; it reads the rest before they end, where its copies are of 16 bytes and have no
        scales of tokens beside them.
    codes: dense e4m3 [batch, heads * 128] and f32 [batch, heads] that are written instead of out, as
        `quantize_fp8(granularity="block128")` of it would, or codes [64, heads * 128] of two parts
        (`few_rows.Rows`): for one query, rows of 128, with counters; else UnsupportedError.
    """
    batch, queries, heads, head_dim = q.shape
    if not batch * queries * heads:
        return Plan(())
    paging = 0 if block_table is not None else 4 - k.ndim + 1
    itemsize, value_dim, kv_heads = k.dtype.itemsize, v.shape[-1], k.shape[-2]
    group = heads // kv_heads
    if k.dtype == dtypes.e4m3 and device.arch == "sm_80":
        raise UnsupportedError(
            "paged_attention: e4m3 on sm_80", ["conversions from e4m3 need sm_89"], "an f16 or bf16 cache"
        )
    block_size = k.shape[1] if paging < 2 else 1
    columns = block_table.shape[1] if block_table is not None else 1
    capacity = min(k.shape[0] if paging == 2 else block_size * columns, 2**30)
    token_scales = scales is not None and scales[0].ndim > 1
    rows = queries * group
    whole_tiles = paging > 0 or block_size % TILE_KEYS == 0
    most_tiles = (-(-capacity // TILE_KEYS) + (batch if paging == 2 else 0)) * (1 if paging == 2 else batch)
    shape = DecodeShape(
        batch, rows, kv_heads, head_dim, value_dim, itemsize, token_scales, max(batch, most_tiles), deterministic,
        left >= 0, not whole_tiles or copy_bytes(k, v) < 16, codes is not None,
    )  # fmt: skip
    chosen = choose(shape, device)
    row_blocks = -(-rows // chosen.rows)
    units = kv_heads * row_blocks  # of a sequence
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    scale_first = softcap > 0 or alibi_slopes is not None or scale <= 0
    merges_elsewhere = chosen.split and not chosen.cluster and counters is None
    if codes is not None and (queries > 1 or value_dim != 128 or merges_elsewhere):
        raise UnsupportedError("paged_attention: codes", ["no warp writes rows of 128 at once"], "out")
    merge_here = chosen.split and counters is not None and not chosen.cluster
    # On later architectures the merging launch is under way when the parts are written.
    merge_later = chosen.split and chosen.groups > 1 and not merge_here and not chosen.cluster
    programmatic = merge_later and device.arch not in SERIAL_ARCHS
    overlaps = overlaps and device.arch not in SERIAL_ARCHS
    keys_early = overlaps and keys_early and copy_bytes(k, v) == 16 and not token_scales
    dense_out = out.strides[3] == 1 and value_dim % 4 == 0 and out.is_aligned(min(16, 4 * out.dtype.itemsize))
    common: dict[str, Any] = {
        "Element": q.dtype, "LengthIndex": lengths.dtype, "kPaging": paging, "kLimitLeft": left >= 0,
        "kRows": chosen.rows, "kRowBlocks": row_blocks, "kGroup": group, "kValueDim": value_dim,
        "kPaddedValueDim": padded_dim(value_dim, itemsize),
        "kDenseOut": dense_out, "kProgrammatic": programmatic, "kDealt": chosen.dealt,
        "kByLengths": chosen.by_lengths, "kOverlaps": overlaps,
    }  # fmt: skip
    archs = tuple(
        arch for arch in ARCHITECTURES
        if not (itemsize == 1 and arch == "sm_80")
        and not ((programmatic or overlaps or chosen.cluster) and arch in SERIAL_ARCHS)
    )  # fmt: skip
    kernel = kernel_spec(
        "attention/decode.cu", "paged_attention", _PARAMS, archs=archs, kWarps=chosen.warps, kPrefetch=chosen.prefetch,
        CacheElement=k.dtype, TableIndex=block_table.dtype if block_table is not None else dtypes.i32,
        kHeadDim=head_dim, kPaddedDim=padded_dim(head_dim, itemsize),
        kRowTiles=chosen.row_tiles, kStages=chosen.stages, kMinBlocks=chosen.min_blocks, kSplit=chosen.split,
        kMergeHere=merge_here, kClusterBlocks=chosen.groups if chosen.cluster else 0, kTokenScales=token_scales,
        kSameStrides=k.strides[:-1] == v.strides[:-1],
        kWholeTiles=whole_tiles,
        kBlockShift=block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1,
        kCopyBytes=copy_bytes(k, v), kQueryPairs=q.strides[3] == 1 and head_dim % 2 == 0 and q.is_aligned(4),
        kSoftcap=softcap > 0, kAlibi=alibi_slopes is not None, kScaleFirst=scale_first, kKeysEarly=keys_early,
        kOutCodes=0 if codes is None else 1 if codes[0].shape[0] == batch else 2, **common,
    )  # fmt: skip
    partials: ArgumentValue = NullPointer()
    workspace: tuple[tuple[str, int], ...] = ()
    if merge_here or merge_later:
        floats = 2 * chosen.blocks * chosen.state_floats(value_dim, itemsize)
        partials, workspace = dense(_PARTIALS, (floats,), dtypes.f32), ((_PARTIALS, 4 * floats),)

    def optional(*tensors: Operand | None) -> tuple[ArgumentValue, ...]:
        return tuple(NullPointer() if tensor is None else tensor for tensor in tensors)

    k_strides, v_strides = ((0, *t.strides[:-1])[-3:] for t in (k, v))
    table_strides = (0, 0) if block_table is None else block_table.strides
    passes = units // chosen.together if chosen.split else 1
    slack = _DEALING_SAVES // (units * stage_bytes(shape))
    sizes = (capacity, batch, queries, kv_heads, max(left, 0))
    division = (passes, chosen.least_positions, slack)
    sinks_stride = 0 if sinks is None else sinks.strides[0]
    result = (out, *optional(lse)) if codes is None else codes
    arguments: tuple[ArgumentValue, ...] = (
        q, k, v, *result, *optional(block_table), lengths, *optional(*(scales or (None, None)), sinks, alibi_slopes),
        partials, *optional(counters), *q.strides, *out.strides, *k_strides, *v_strides, *table_strides,
        lengths.strides[0], sinks_stride, 0 if alibi_slopes is None else alibi_slopes.strides[0],
        min(k.shape[0], 2**31 - 1), block_size, _table_lines(block_table), *sizes, *division,
        scale, _LOG2E if scale_first else scale * _LOG2E, softcap,
        2 * _LOG2E * scale / softcap if softcap > 0 else 0.0,
    )  # fmt: skip
    sequences = batch if chosen.dealt else 1
    grid = (chosen.together, chosen.groups // (sequences if chosen.by_lengths else 1), sequences)
    if not chosen.split:
        grid = (units, min(batch, _MAX_BLOCKS_Y), -(-batch // _MAX_BLOCKS_Y))
    if grid[2] > _MAX_BLOCKS_Y:
        raise UnsupportedError(
            f"paged_attention: batch {batch}", ["at most 65535**2 sequences"], "a smaller batch"
        )
    reason = (
        f"{chosen.rows} rows, {chosen.warps} warps of {chosen.stages} stages, "
        f"copies of {kernel.constant('kCopyBytes')} bytes, "
        f"{f'{chosen.groups} equal groups of {chosen.together} blocks' if chosen.split else 'a block a unit'}"
    )
    threads = (chosen.threads, 1, 1)
    cluster = (1, grid[1], grid[2] if chosen.by_lengths else 1) if chosen.cluster else (1, 1, 1)
    steps = [
        Step(
            kernel, grid, threads, arguments, chosen.shared_memory(shape), cluster=cluster, programmatic=overlaps,
            reason=reason,
        )
    ]  # fmt: skip
    if merge_later:
        merge = kernel_spec(
            "attention/decode_merge.cu",
            "merge_partials",
            _MERGE_PARAMS,
            archs=archs,
            kWarps=MERGE_WARPS,
            **common,
        )
        merge_arguments: tuple[ArgumentValue, ...] = (
            partials, out, *optional(lse), lengths, *optional(sinks), *out.strides, lengths.strides[0], sinks_stride,
            *sizes, *division,
        )  # fmt: skip
        steps.append(
            Step(
                merge, grid, (MERGE_WARPS * 32, 1, 1), merge_arguments,
                chosen.schedule_bytes(batch), programmatic=programmatic, reason="units of several blocks",
            )
        )  # fmt: skip
    return Plan(tuple(steps), workspace)


def _table_lines(table: Operand | None) -> int:
    """Lines of 128 bytes of one sequence's row that the kernel fetches before it knows which it needs; 0 for none."""
    if table is None or table.strides[1] != 1:
        return 0
    lines = -(-table.shape[1] * table.dtype.itemsize // 128)
    return lines if lines * table.shape[0] <= _MOST_TABLE_LINES else 0


def plan_problem(
    problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo, choose: Choice = choose_decode
) -> Plan:
    """The plan of a call of `PAGED_ATTENTION` or `DECODE_ATTENTION`."""
    k_scale, v_scale = problem.get("k_scale"), problem.get("v_scale")
    k = problem.get("k_cache") or problem["k"]
    lengths = problem.get("seq_lens") or problem["cu_seqlens_k"]
    return plan_paged_attention(
        problem["q"], k, problem.get("v_cache") or problem["v"], lengths, outputs["out"], device,
        block_table=problem.get("block_table"), scale=problem.attribute("scale"),
        scales=None if k_scale is None or v_scale is None else (k_scale, v_scale),
        deterministic=problem.attribute("deterministic"), left=problem.attribute("window")[0],
        softcap=problem.attribute("softcap"), sinks=problem.get("sinks"),
        alibi_slopes=problem.get("alibi_slopes"), lse=outputs.get("lse"), counters=problem.get("counters"),
        choose=choose,
    )  # fmt: skip


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    q, v = problem["q"], problem.get("v_cache") or problem["v"]
    batch, queries, heads, _ = q.shape
    outputs = {"out": OutputSpec((batch, queries, heads, v.shape[-1]), q.dtype)}
    if problem.attribute("return_lse"):
        outputs["lse"] = OutputSpec((batch, heads, queries), dtypes.f32)
    return outputs


_ATTRIBUTES = (
    Attribute("scale", float), Attribute("window", tuple, (-1, -1)), Attribute("softcap", float, 0.0),
    Attribute("deterministic", bool, False), Attribute("return_lse", bool, False),
)  # fmt: skip
_OPTIONAL = (
    Input("k_scale", True), Input("v_scale", True), Input("sinks", True), Input("alibi_slopes", True),
    Input("counters", True, written=True),
)  # fmt: skip

PAGED_ATTENTION = OpSpec(
    name="paged_attention",
    inputs=(
        Input("q"),
        Input("k_cache"),
        Input("v_cache"),
        Input("block_table"),
        Input("seq_lens"),
        *_OPTIONAL,
    ),
    attributes=_ATTRIBUTES,
    outputs=("out", "lse"),
    check=check_paged,
    infer=_infer,
    plan=plan_problem,
)

DECODE_ATTENTION = OpSpec(
    name="decode_attention",
    inputs=(
        Input("q"),
        Input("k"),
        Input("v"),
        Input("seq_lens", True),
        Input("cu_seqlens_k", True),
        *_OPTIONAL,
    ),
    attributes=_ATTRIBUTES,
    outputs=("out", "lse"),
    check=check_decode,
    infer=_infer,
    plan=plan_problem,
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: types, head dimensions, block sizes, row counts, features, every merge."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}

    def add(
        dtype: DType, dim: int, *, queries: int = 1, group: int = 4, block_size: int = 16, cache: DType | None = None,
        scale_axes: int = 0, count: bool = False, features: bool = False, batch: int = 8,
        columns: int = 4096, overlaps: bool = False, rows_of_codes: int = 0,
    ) -> None:  # fmt: skip
        if cache == dtypes.e4m3 and arch == "sm_80":
            return
        q = dense("q", (batch, queries, 8 * group, dim), dtype)
        pages = dense("k_cache", (4096, block_size, 8, dim), cache or dtype)
        scale = dense("k_scale", pages.shape[:3] if scale_axes == 3 else (8,), dtypes.f32)
        per_head = dense("sinks", (8 * group,), dtypes.f32)
        options: dict[str, Any] = {"alibi_slopes": per_head, "softcap": 30.0, "left": 100} if features else {}
        plan = plan_paged_attention(
            q, pages, pages, dense("seq_lens", (batch,), dtypes.i32), q, device, sinks=per_head,
            block_table=dense("block_table", (batch, columns), dtypes.i32),
            scales=(scale, scale) if scale_axes else None,
            counters=dense("counters", (counters_needed(q),), dtypes.u32) if count else None, overlaps=overlaps,
            keys_early=overlaps, codes=(
                dense("codes", (rows_of_codes, 8 * group * dim), dtypes.e4m3),
                dense("scales", (batch, 8 * group), dtypes.f32),
            ) if rows_of_codes else None, **options,
        )  # fmt: skip
        for step in plan.steps:
            found[step.kernel] = None

    add(dtypes.bf16, 128, count=True)
    add(dtypes.bf16, 128, batch=1)
    add(dtypes.bf16, 128, batch=1, columns=256)
    add(dtypes.bf16, 128, batch=4, columns=256)
    add(dtypes.bf16, 128, batch=6, columns=32)
    add(dtypes.bf16, 128, overlaps=True)
    if arch == "sm_90a":
        add(dtypes.bf16, 128, batch=4, columns=512, count=True, overlaps=True, rows_of_codes=64)
        add(dtypes.bf16, 128, batch=16, columns=512, count=True, overlaps=True, rows_of_codes=64)
        add(dtypes.bf16, 128, batch=64, columns=512, count=True, overlaps=True, rows_of_codes=64)
    add(dtypes.bf16, 128, block_size=1, queries=4)
    add(dtypes.f16, 64, group=8, queries=4, features=True, count=True)
    add(dtypes.bf16, 256, features=True, count=True)
    add(dtypes.bf16, 96, batch=2048)
    add(dtypes.f32, 128)
    add(dtypes.bf16, 128, cache=dtypes.e4m3, scale_axes=3, count=True)
    add(dtypes.f16, 256, cache=dtypes.e4m3, scale_axes=1, block_size=8, count=True)
    add(dtypes.bf16, 256, group=8, cache=dtypes.e4m3, scale_axes=3, features=True, batch=64)
    add(dtypes.bf16, 256, group=8, queries=4, cache=dtypes.e4m3, scale_axes=3, block_size=1, features=True)
    return list(found)
