"""Rotary positions: `append_kv` (new keys and values into a paged cache, with all that happens on the way) and
`apply_rope`.  Kernel: `cuda_src/kv/append_kv.cu`, for every GPU from sm_80 on (e4m3 from sm_89).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cki import config, dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.paged import SERIAL_ARCHS, append_blocks_per_token
from cki.kernel import ARCHITECTURES, KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.cache_arguments import cache_tensors, imported
from cki.ops.call import call
from cki.ops.rope_rules import check_append, check_apply, validate
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import ArgumentValue, NullPointer, Plan, Step

_THREADS = 128
_PARAMS = "P" * 13 + "q" * 27 + "i" * 3 + "dff"


def append_kv(
    k: Any, v: Any, cache: Any, slot_mapping: Any, *, q: Any = None, positions: Any = None, cos_sin: Any = None,
    rope_base: float | None = None, rotary_dim: int | None = None, interleaved: bool = False,
    q_norm_weight: Any = None, k_norm_weight: Any = None, norm_eps: float = 1e-6, norm_weight_offset: float = 0.0,
    q_out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """Write new keys and values into a paged cache: norm, rotation, quantisation and scatter in one launch.

    k: [tokens, kv_heads, head_dim].  v: [tokens, kv_heads, value_dim].  q: [tokens, q_heads, head_dim].  f32, f16 or
    bf16, all alike, head dimensions 1 to 256, any strides: slices of one fused projection need no copy.
    cache: a layer of a `PagedKVCache`, or (k_cache, v_cache) or (k_cache, v_cache, k_scale, v_scale).  Caches are
    [blocks, block_size, kv_heads, dim] of f32, f16, bf16 or e4m3, any strides.  For e4m3, scales are f32, either dense
    [blocks, block_size, kv_heads], which are written (largest magnitude of the row / 448), or [kv_heads], which are
    read.  What is stored times its scale is the value.
    slot_mapping: i32 or i64 [tokens], block * block_size + place in the block.  -1 skips a token; so does every slot
    outside the cache (with CKI_VALIDATE=1 an error).
    positions: i32 or i64 [tokens], needed for rotation.
    cos_sin: f32 [positions, rotary_dim], cosines then sines; a position outside turns nothing (with CKI_VALIDATE=1 an
    error).  rope_base: instead, angles position * rope_base^(-2i / rotary_dim), exact at any position.
    With neither there is no rotation.  rotary_dim: the first elements of a head that turn; default head_dim.
    interleaved: pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    q_norm_weight, k_norm_weight: [head_dim]; RMS norm of each head before rotation, weights plus norm_weight_offset.
    q_out: where rotated queries go; may be q.

    Returns q rotated and normalised (None without q).  JAX arrays are not written: the new values of such caches (and
    of scales that are written) are returned behind q, or alone.  Arithmetic is fp32, rounded once.  Raises
    InvalidArgumentError or InvalidTypeError before any launch, UnsupportedError for e4m3 before sm_89.
    RoPE: Su et al., arXiv 2104.09864.
    """
    tensors = imported((*cache_tensors("append_kv", cache), slot_mapping, positions, cos_sin), like=k)
    k_cache, v_cache, k_scale, v_scale, slot_mapping, positions, cos_sin = tensors
    if config.flag("CKI_VALIDATE"):
        validate(slot_mapping, positions, cos_sin, k_cache)
    inputs = (
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        q,
        positions,
        cos_sin,
        q_norm_weight,
        k_norm_weight,
        k_scale,
        v_scale,
    )
    attributes = (rope_base, rotary_dim, interleaved, norm_eps, norm_weight_offset)
    result = call(APPEND_KV, inputs, attributes, (q_out,), stream)
    # Without q only JAX returns anything: a tuple of the caches.
    return result if q is not None or (isinstance(result, tuple) and result) else None


def apply_rope(
    x: Any, positions: Any, *, cos_sin: Any = None, base: float = 10000.0, rotary_dim: int | None = None,
    interleaved: bool = False, inverse: bool = False, out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """Turn each pair of the first rotary_dim elements of every head by position * base^(-2i / rotary_dim).

    x: [tokens, heads, head_dim], f32, f16 or bf16, head_dim 1 to 256, any strides.  positions: i32 or i64 [tokens].
    cos_sin, rotary_dim, interleaved: as for `append_kv`; base is used where there is no cos_sin.
    inverse: turn back.  out: where to write; may be x.

    Returns x's shape and type.  Arithmetic is fp32, rounded once.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    Su et al., arXiv 2104.09864.
    """
    if cos_sin is not None and config.flag("CKI_VALIDATE"):
        validate(None, positions, cos_sin)
    attributes = (base, rotary_dim, interleaved, inverse)
    return call(APPLY_ROPE, (x, positions, cos_sin), attributes, (out,), stream)


# ---------------------------------------------------------------------------------------------------------------------
# plan


@dataclass(frozen=True)
class Rotation:
    """How heads turn.  dim: elements that turn, 0 for none.  table: f32 [positions, dim], or None for `base`."""

    dim: int = 0
    table: Operand | None = None
    base: float = 10000.0
    interleaved: bool = False
    inverse: bool = False


def _vectors(tensors: list[Operand]) -> bool:
    """Whether eight elements at multiples of eight of every row are one or more aligned accesses."""
    return all(
        t.shape[-1] % 8 == 0 and t.strides[-1] == 1 and t.is_aligned(min(16, 8 * t.dtype.itemsize))
        for t in tensors
    )


def _strides(tensor: Operand | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if tensor is None else tensor.strides


def plan_append_kv(
    k: Operand | None, v: Operand | None, caches: tuple[Operand, Operand] | None, slots: Operand | None,
    device: DeviceInfo, *, q: Operand | None = None, q_out: Operand | None = None, positions: Operand | None = None,
    rotation: Rotation | None = None, q_norm_weight: Operand | None = None, k_norm_weight: Operand | None = None,
    norm_eps: float = 1e-6, norm_weight_offset: float = 0.0, scales: tuple[Operand, Operand] | None = None,
    overlaps: bool = False,
) -> tuple[Step, ...]:  # fmt: skip
    """The launch of `append_kv`, or with q alone of `apply_rope`, on checked operands; none without tokens.

    q and q_out: [tokens, heads, head_dim], both or neither.  k, v, caches, slots: all or none.
    scales: of an e4m3 cache, see `append_kv`.
    overlaps: the launch may begin while the one before ends, and lets the next begin (sm_90 and later): for chains of
        such launches.  By itself it is slower so.
    """
    first = k if k is not None else q
    assert first is not None
    tokens, _, head_dim = first.shape
    if not tokens:
        return ()
    k_cache, v_cache = caches or (None, None)
    rotation = rotation or Rotation()
    cache_dtype = first.dtype if k_cache is None else k_cache.dtype
    fp8 = cache_dtype == dtypes.e4m3
    if fp8 and device.arch == "sm_80":
        raise UnsupportedError(
            "append_kv: e4m3 on sm_80", ["conversions to and from e4m3 need sm_89"], "an f16 or bf16 cache"
        )
    kv_heads = 0 if k is None else k.shape[1]
    q_heads = 0 if q is None else q.shape[1]
    value_dim = head_dim if v is None else v.shape[2]
    lanes = max(1, 1 << (-(-max(head_dim, value_dim) // 8) - 1).bit_length())
    parts = append_blocks_per_token(tokens, q_heads + 2 * kv_heads, _THREADS // lanes, device)
    norm_weight = q_norm_weight or k_norm_weight
    num_slots, block_size = (
        (0, 1) if k_cache is None else (k_cache.shape[0] * k_cache.shape[1], max(k_cache.shape[1], 1))
    )
    programmatic = overlaps and device.arch not in SERIAL_ARCHS
    kernel = kernel_spec(
        "kv/append_kv.cu", "append_kv", _PARAMS, max_registers=96,
        archs=tuple(a for a in ARCHITECTURES[1 if fp8 else 0 :] if not (programmatic and a in SERIAL_ARCHS)),
        Element=first.dtype, CacheElement=cache_dtype, SlotIndex=dtypes.i64 if slots is None else slots.dtype,
        PositionIndex=dtypes.i64 if positions is None else positions.dtype,
        NormWeight=first.dtype if norm_weight is None else norm_weight.dtype,
        kHeadDim=head_dim, kValueDim=value_dim, kThreads=_THREADS, kRotaryDim=rotation.dim,
        kHasTable=rotation.table is not None, kInterleaved=rotation.interleaved, kInverse=rotation.inverse,
        kHasQuery=q is not None, kHasCache=k is not None, kNormQuery=q_norm_weight is not None,
        kNormKey=k_norm_weight is not None, kTokenScales=fp8 and scales is not None and scales[0].ndim == 3,
        kVectorLoads=_vectors([t for t in (q, k, v) if t is not None]),
        kVectorStores=_vectors([t for t in (q_out, k_cache, v_cache) if t is not None]),
        kVectorWeights=_vectors([t for t in (q_norm_weight, k_norm_weight) if t is not None]),
        kBlockShift=block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1,
        kProgrammatic=programmatic,
    )  # fmt: skip
    pointers: tuple[ArgumentValue, ...] = tuple(
        NullPointer() if tensor is None else tensor
        for tensor in (
            q, k, v, q_out, k_cache, v_cache, *(scales or (None, None)), slots, positions, rotation.table,
            q_norm_weight, k_norm_weight,
        )
    )  # fmt: skip
    table_stride, table_rows = (
        (0, 0) if rotation.table is None else (rotation.table.strides[0], rotation.table.shape[0])
    )
    arguments: tuple[ArgumentValue, ...] = (
        *pointers, *_strides(q, 3), *_strides(k, 3), *_strides(v, 3), *_strides(q_out, 3), *_strides(k_cache, 4),
        *_strides(v_cache, 4), *_strides(slots, 1), *_strides(positions, 1), table_stride,
        *_strides(q_norm_weight, 1), *_strides(k_norm_weight, 1), num_slots, table_rows, block_size, q_heads,
        kv_heads, math.log2(rotation.base), norm_eps, norm_weight_offset,
    )  # fmt: skip
    if tokens >= 2**31:
        raise UnsupportedError(
            f"append_kv: {tokens} tokens", ["a grid holds 2**31 - 1 blocks"], "fewer tokens"
        )
    reason = f"{parts} blocks a token, {_THREADS // lanes} heads at a time"
    return (
        Step(
            kernel, (tokens, parts, 1), (_THREADS, 1, 1), arguments, programmatic=programmatic, reason=reason
        ),
    )


def _plan_append(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    k, table, base = problem["k"], problem.get("cos_sin"), problem.attribute("rope_base")
    rotation = Rotation()
    if table is not None or base is not None:
        dim = problem.attribute("rotary_dim") or k.shape[2]
        rotation = Rotation(dim, table, base or 1.0, problem.attribute("interleaved"))
    k_scale, v_scale = problem.get("k_scale"), problem.get("v_scale")
    return Plan(plan_append_kv(
        k, problem["v"], (problem["k_cache"], problem["v_cache"]), problem["slot_mapping"], device,
        q=problem.get("q"), q_out=outputs.get("q_out"), positions=problem.get("positions"), rotation=rotation,
        q_norm_weight=problem.get("q_norm_weight"), k_norm_weight=problem.get("k_norm_weight"),
        norm_eps=problem.attribute("norm_eps"), norm_weight_offset=problem.attribute("norm_weight_offset"),
        scales=None if k_scale is None or v_scale is None else (k_scale, v_scale),
    ))  # fmt: skip


def _plan_apply(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    x = problem["x"]
    rotation = Rotation(
        problem.attribute("rotary_dim") or x.shape[2], problem.get("cos_sin"), problem.attribute("base"),
        problem.attribute("interleaved"), problem.attribute("inverse"),
    )  # fmt: skip
    return Plan(plan_append_kv(
        None, None, None, None, device, q=x, q_out=outputs["out"], positions=problem["positions"], rotation=rotation
    ))  # fmt: skip


def _infer_append(problem: Problem) -> Mapping[str, OutputSpec]:
    q = problem.get("q")
    return {} if q is None else {"q_out": OutputSpec(q.shape, q.dtype)}


def _infer_apply(problem: Problem) -> Mapping[str, OutputSpec]:
    return {"out": OutputSpec(problem["x"].shape, problem["x"].dtype)}


APPEND_KV = OpSpec(
    name="append_kv",
    inputs=(
        Input("k"), Input("v"), Input("k_cache", written=True), Input("v_cache", written=True), Input("slot_mapping"),
        Input("q", True), Input("positions", True), Input("cos_sin", True), Input("q_norm_weight", True),
        Input("k_norm_weight", True), Input("k_scale", True, written_axes=3), Input("v_scale", True, written_axes=3),
    ),
    attributes=(
        Attribute("rope_base", float), Attribute("rotary_dim", int), Attribute("interleaved", bool, False),
        Attribute("norm_eps", float, 1e-6), Attribute("norm_weight_offset", float, 0.0),
    ),
    outputs=("q_out",),
    check=check_append,
    infer=_infer_append,
    plan=_plan_append,
    in_place=(("q_out", "q"),),
)  # fmt: skip

APPLY_ROPE = OpSpec(
    name="apply_rope",
    inputs=(Input("x"), Input("positions"), Input("cos_sin", True)),
    attributes=(
        Attribute("base", float, 10000.0), Attribute("rotary_dim", int), Attribute("interleaved", bool, False),
        Attribute("inverse", bool, False),
    ),
    outputs=("out",),
    check=check_apply,
    infer=_infer_apply,
    plan=_plan_apply,
    in_place=(("out", "x"),),
)  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: everything on, plain, e4m3 with either scales, odd dimensions, rotation alone."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}

    def add(
        dtype: DType, dim: int, cache: DType, scales: int = 0, *, rotation: Rotation, norm: bool = False
    ) -> None:
        if cache == dtypes.e4m3 and arch == "sm_80":
            return
        heads, q = dense("k", (64, 8, dim), dtype), dense("q", (64, 32, dim), dtype)
        pages = dense("k_cache", (100, 16, 8, dim), cache)
        scale = dense("k_scale", (100, 16, 8) if scales == 3 else (8,), dtypes.f32)
        weight = dense("q_norm_weight", (dim,), dtype) if norm else None
        index = dense("slot_mapping", (64,), dtypes.i64)
        for step in plan_append_kv(
            heads, heads, (pages, pages), index, device, q=q, q_out=q, positions=index, rotation=rotation,
            q_norm_weight=weight, k_norm_weight=weight, scales=(scale, scale) if scales else None,
        ):  # fmt: skip
            found[step.kernel] = None

    table = dense("cos_sin", (4096, 128), dtypes.f32)
    add(dtypes.bf16, 128, dtypes.bf16, rotation=Rotation(128, table), norm=True)
    add(dtypes.bf16, 128, dtypes.bf16, rotation=Rotation())
    add(dtypes.f16, 64, dtypes.f16, rotation=Rotation(64))
    add(dtypes.bf16, 128, dtypes.e4m3, 3, rotation=Rotation(128, table))
    add(dtypes.bf16, 256, dtypes.e4m3, 1, rotation=Rotation(64), norm=True)
    add(dtypes.f32, 7, dtypes.f32, rotation=Rotation(6, interleaved=True))
    x = dense("x", (64, 32, 128), dtypes.bf16)
    for overlaps in (False, True):
        for step in plan_append_kv(
            None, None, None, None, device, q=x, q_out=x, positions=dense("positions", (64,), dtypes.i32),
            rotation=Rotation(128), overlaps=overlaps,
        ):  # fmt: skip
            found[step.kernel] = None
    return list(found)
