"""The kernels that stand for all of attention, for compile checks."""

from __future__ import annotations

from typing import Any

from cki import dtypes
from cki.device import sim_device
from cki.dtypes import DType
from cki.heuristics.attention_e4m3 import E4m3Tiles
from cki.heuristics.attention_hopper import HopperTiles, choose_hopper_tiles
from cki.kernel import KernelSpec
from cki.operand import Operand, dense
from cki.ops.attention import plan_attention
from cki.ops.attention_dropout import AttentionDropout
from cki.ops.attention_e4m3 import Descales


def representative_specs(arch: str) -> list[KernelSpec]:
    """Specialisations that stand for all, for compile checks: head dimensions, row counts, types, features, copies."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}

    def add(
        dtype: DType, head_dim: int, queries: int = 512, value_dim: int = 0, stride: int = 1, **features: Any
    ) -> None:
        def tensor(name: str, length: int, heads: int, dim: int) -> Operand:
            row = heads * dim * stride
            return Operand(name, (2, length, heads, dim), (length * row, row, dim * stride, stride), dtype)

        value_dim = value_dim or head_dim
        q, k = tensor("q", queries, 4, head_dim), tensor("k", 640, 2, head_dim)
        v, out = tensor("v", 640, 2, value_dim), dense("out", (2, queries, 4, value_dim), dtype)
        for step in plan_attention(q, k, v, out, device=device, **features):
            found[step.kernel] = None

    bias = dense("bias", (1, 1, 512, 640), dtypes.f32)
    mask = dense("mask", (2, 1, 1, 640), dtypes.bool_)
    slopes = dense("alibi_slopes", (4,), dtypes.f32)
    everything: dict[str, Any] = {"bias": bias, "mask": mask, "alibi_slopes": slopes}
    everything |= {"softcap": 30.0, "window": (100, 20)}
    bf16, f16, f32 = dtypes.bf16, dtypes.f16, dtypes.f32
    for head_dim in (32, 64, 80, 96, 128, 160, 192, 256):
        add(bf16, head_dim)
    for head_dim in (64, 96, 128, 256):
        add(bf16, head_dim, causal=True)
    for head_dim in (64, 128, 256):
        add(bf16, head_dim, **everything)
        add(f32, head_dim, **everything)
    add(f16, 128, **everything)
    for head_dim in (64, 128):
        add(f16, head_dim, causal=True)
        add(f32, head_dim, causal=True)
    for head_dim in (32, 64, 80, 128, 256):
        add(f32, head_dim)
    for head_dim in (64, 128):
        add(f32, head_dim, 128, causal=True)  # too few queries for the Hopper kernel
    for head_dim, queries in ((64, 1), (128, 1), (128, 16), (64, 32)):
        add(bf16, head_dim, queries)
    add(f16, 64, mask=mask)
    add(bf16, 64, bias=bias)
    add(bf16, 192, value_dim=128, causal=True)
    add(bf16, 100)
    for dtype in (bf16, f32):
        add(dtype, 5, causal=True)
        add(dtype, 64, stride=2, causal=True)
    counter = dense("dropout_seed", (1,), dtypes.i64)
    dropout = AttentionDropout(0.1, counter, counter)
    for head_dim in (64, 128, 256):
        add(bf16, head_dim, dropout=dropout)
    add(f32, 128, dropout=dropout)
    add(bf16, 128, dropout=dropout, **everything)
    if arch == "sm_90a":  # the Hopper kernel
        for dim, causal in [(d, c) for d in (64, 80, 128, 256) for c in (False, True) if d != 80 or c]:
            add(
                bf16,
                dim,
                causal=causal,
                tiles=choose_hopper_tiles(4096, 64, dim, dim, causal, True, device),
            )
        for dim in (64, 128, 256):  # packed heads, keys in parts
            add(bf16, dim, 16, causal=True)
        for dim, keys in ((64, 128), (128, 128), (256, 80)):
            add(bf16, dim, causal=True, dropout=dropout, tiles=HopperTiles(2, keys, schedule="dynamic"))
        tiles = choose_hopper_tiles(4096, 64, 128, 128, True, False, device)
        every: dict[str, Any] = {"bias": bias, "mask": mask, "alibi_slopes": slopes, "tiles": tiles}
        add(f16, 128, window=(100, 20), softcap=30.0, **every)
    for options in _e4m3_calls(arch):
        for step in plan_attention(**options, device=device):
            found[step.kernel] = None
    return list(found)


def _e4m3_calls(arch: str) -> list[dict[str, Any]]:
    """Arguments of `plan_attention` for e4m3: the generic kernel by head dimension and copies, the Hopper one too."""
    dims = ((64, 512), (128, 512), (256, 512), (128, 1), (40, 20), (5, 20))
    calls: list[dict[str, Any]] = [_e4m3_call(dim, queries, bool(dim % 3)) for dim, queries in dims]
    if arch == "sm_90a":
        calls = calls[3:]  # the others are the Hopper kernel's
        slopes = dense("alibi_slopes", (4,), dtypes.f32)
        for dim in (64, 128, 192, 256):
            calls += [_e4m3_call(dim, 4096, causal) for causal in (False, True)]
            calls += [_e4m3_call(dim, 4096, True) | {"tiles": E4m3Tiles(2, 128, lazy=True)}]
        features: dict[str, Any] = {"window": (100, 20), "softcap": 30.0, "alibi_slopes": slopes}
        features["lse"] = dense("lse", (2, 4, 4096), dtypes.f32)
        calls += [_e4m3_call(dim, 4096, False) | features for dim in (64, 128, 256)]
        calls += [_e4m3_call(128, 64, False)]
    return calls


def _e4m3_call(dim: int, queries: int, causal: bool) -> dict[str, Any]:
    q, out = dense("q", (2, queries, 4, dim), dtypes.e4m3), dense("out", (2, queries, 4, dim), dtypes.bf16)
    k, v = (dense(name, (2, 4096, 2, dim), dtypes.e4m3) for name in "kv")
    scale = dense("descale", (2, 2), dtypes.f32)
    return {"q": q, "k": k, "v": v, "out": out, "descales": Descales(scale, scale, scale), "causal": causal}
