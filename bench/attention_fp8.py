"""Attention of e4m3 codes beside our own bf16 kernel and FA3's FP8 and bf16 ones, 16384 tokens of width 2048.

    python bench/attention_fp8.py                                     # head dimensions 64, 128, 256: 2 minutes
    python bench/attention_fp8.py --dims 128 --variant stages=2 --variant lazy=True
    python bench/attention_fp8.py --others                            # what the e4m3 kernel does not serve

Codes and descales are of normal numbers, a head's largest at 448, as a quantiser gives them; the quantisation is in no
time, the launch that turns the values is in ours (`turning alone` is that launch by itself).  Every e4m3 call of ours
is compared with float64 over the codes first: `error_share` is its error over what the tests allow, and above 1 ends
the program where it is the chosen kernel.  All are replayed in turn.  `vs_bf16`: our bf16 time over the row's.
Writes results/attention_fp8.csv.

--others: masks, biases, dropout and other head dimensions, by the generic kernel, by the 16-bit Hopper kernel on codes
converted to f16, and by our bf16 of the same call; compared with each other.  Writes results/attention_fp8_others.csv.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attention
import common
import numpy as np
from attention import Shape

import cki
from cki import cache, dtypes
from cki.device import sim_device
from cki.heuristics.attention import AttentionTiles, choose_tiles, padded
from cki.heuristics.attention_dropout import tiles_with_dropout
from cki.heuristics.attention_e4m3 import E4m3Tiles, choose_e4m3_tiles
from cki.heuristics.attention_hopper import HopperTiles, choose_hopper_tiles
from cki.kernel import KernelSpec
from cki.operand import dense
from cki.ops import varlen
from cki.ops.attention import ATTENTION, plan_attention
from cki.ops.attention_dropout import dropout_of
from cki.ops.attention_e4m3 import Descales, descales_of, values_workspace
from cki.ops.attention_hopper import workspace_of
from cki.ops.call import call
from cki.ops.spec import OpSpec
from cki.ops.varlen import VARLEN_ATTENTION
from cki.plan import Plan

DIMS = (64, 128, 256)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)


def quantise(x: Any) -> tuple[Any, Any]:
    """(codes, descale [batch, heads]) of [batch, tokens, heads, dim]."""
    import torch

    descale = x.abs().amax(dim=(1, 3)).float() / 448
    return (x.float() / descale[:, None, :, None]).to(torch.float8_e4m3fn), descale


def make_inputs(shape: Shape, seed: int, shift: float = 0.0) -> tuple[Any, ...]:
    """(q, k, v, out) in bf16, then the three codes, then the three descales.  shift: added to all values."""
    q, k, v, out = attention.make_inputs(shape, seed)
    tensors = q, k, v + shift, out
    pairs = [quantise(t) for t in tensors[:3]]
    return (*tensors, *(codes for codes, _ in pairs), *(descale for _, descale in pairs))


@functools.cache
def spec_with_tiles(tiles: AttentionTiles | HopperTiles, only_first: bool = False) -> OpSpec:
    """cki.attention's operation with these tiles; only_first: its first launch alone."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        steps = plan_attention(
            problem["q"], problem["k"], problem["v"], outputs["out"], device=device, tiles=tiles,
            causal=problem.attribute("causal"), descales=descales_of(problem), dropout=dropout_of(problem),
            bias=problem.get("bias"), mask=problem.get("mask"),
        )  # fmt: skip
        steps = steps[:1] if only_first else steps
        return Plan(steps, (*workspace_of(steps), *values_workspace(steps)))

    return dataclasses.replace(ATTENTION, plan=plan)


def tiles_call(
    shape: Shape, tiles: AttentionTiles | HopperTiles, only_first: bool = False, **given: Any
) -> Callable[..., Any]:
    """A function of `make_inputs`.  given: mask, bias, dropout."""
    attributes = tuple(
        ({"causal": shape.causal} | given).get(item.name, item.default) for item in ATTENTION.attributes
    )
    spec = spec_with_tiles(tiles, only_first)

    def run(q: Any, k: Any, v: Any, out: Any, *codes: Any) -> Any:
        tensors = dict(zip(("q", "k", "v", "q_descale", "k_descale", "v_descale"), codes)) | given
        return call(spec, tuple(tensors.get(item.name) for item in ATTENTION.inputs), attributes, (out, None))

    return run


def e4m3_call(shape: Shape) -> Callable[..., Any]:
    """The public function."""

    def run(q: Any, k: Any, v: Any, out: Any, *codes: Any) -> Any:
        names = ("q_descale", "k_descale", "v_descale")
        return cki.attention(*codes[:3], **dict(zip(names, codes[3:])), causal=shape.causal, out=out)

    return run


def bf16_call(shape: Shape) -> Callable[..., Any]:
    """Our kernel on what was quantised."""
    return lambda q, k, v, out, *codes: cki.attention(q, k, v, causal=shape.causal, out=out)


def fa3_calls(shape: Shape) -> dict[str, Callable[..., Any]]:
    """FA3's functions that run here."""
    try:
        attend = importlib.import_module("flash_attn_interface").flash_attn_func
    except ImportError:
        return {}

    def fp8(q: Any, k: Any, v: Any, out: Any, *codes: Any) -> Any:
        names = ("q_descale", "k_descale", "v_descale")
        return attend(*codes[:3], **dict(zip(names, codes[3:])), causal=shape.causal)

    found: dict[str, Callable[..., Any]] = {
        "fa3 fp8": fp8,
        "fa3 bf16": lambda q, k, v, out, *codes: attend(q, k, v, causal=shape.causal),
    }
    for name in list(found):
        try:
            found[name](*make_inputs(shape._replace(batch=1, tokens=256), 0))
        except Exception as error:  # a build without FP8, or without this head dimension
            print(f"{name}: {shape}: {error}")
            del found[name]
    return found


def attend_rows(codes: Sequence[Any], rows: Sequence[int], causal: bool, exact: bool) -> Any:
    """Some rows: in float64, or plainly in fp32 with the exponentials rounded to e4m3."""
    import torch

    dtype = torch.float64 if exact else torch.float32
    q, k, v = (t.to(dtype) * descale.to(dtype)[:, None, :, None] for t, descale in zip(codes[:3], codes[3:]))
    logits = torch.einsum("bihd,bjhd->bhij", q[:, rows], k) / q.shape[3] ** 0.5
    if causal:
        position = torch.tensor(rows, device=q.device)
        logits.masked_fill_(torch.arange(k.shape[1], device=q.device) > position[:, None], float("-inf"))
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    total = weights.sum(dim=-1).transpose(1, 2)[..., None]
    if not exact:
        weights = weights.to(torch.float8_e4m3fn).to(dtype)
    return torch.einsum("bhij,bjhd->bihd", weights, v) / total


def error_share(shape: Shape, run: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """Runs once and compares some rows with float64: the largest error over what the tests allow."""
    import torch

    out, codes = inputs[3], inputs[4:]
    out.fill_(float("nan"))
    result = run(*inputs)
    result = result[0] if isinstance(result, tuple) else result
    last = shape.tokens - 1
    rows = sorted({0, 1, last // 3, last // 2, last - 1, last})
    truth = attend_rows(codes, rows, shape.causal, True)
    plain = attend_rows(codes, rows, shape.causal, False).to(out.dtype)
    limit = 2 * (plain - truth).abs().max().item() + 1e-5 * truth.abs().max().item()
    error: float = (result[:, rows] - truth).abs().max().item()
    return error / limit if bool(torch.isfinite(result).all()) else math.inf


def check(shape: Shape, run: Callable[..., Any], inputs: Sequence[Any], what: str) -> float:
    """`error_share`; ends the program when it is above 1."""
    share = error_share(shape, run, inputs)
    if not share <= 1:
        raise SystemExit(f"{what}: {shape}: error {share:.3g} of what is allowed")
    return share


def chosen_tiles(shape: Shape) -> E4m3Tiles:
    return choose_e4m3_tiles(
        shape.tokens, shape.batch * shape.heads, shape.dim, shape.dim, shape.causal, sim_device("sm_90a")
    )


def with_fields(tiles: E4m3Tiles, text: str) -> E4m3Tiles:
    """Tiles with fields changed: `stages=2,lazy=True`."""
    pairs = (part.split("=") for part in text.split(","))
    return dataclasses.replace(tiles, **{name: ast.literal_eval(value) for name, value in pairs})


def compile_ahead(shapes: Sequence[Shape], variants: Sequence[str]) -> None:
    """Fills the cache with the kernels, several at a time."""
    kernels: dict[KernelSpec, None] = {}
    for shape in shapes:
        size, device = (shape.batch, shape.tokens, shape.heads, shape.dim), sim_device("sm_90a")
        q, k, v = (dense(name, size, dtypes.e4m3) for name in "qkv")
        out, descale = dense("out", size, dtypes.bf16), dense("descale", (shape.heads,), dtypes.f32)
        descales = Descales(descale, descale, descale)
        for tiles in (chosen_tiles(shape), *(with_fields(chosen_tiles(shape), text) for text in variants)):
            steps = plan_attention(
                q, k, v, out, device=device, tiles=tiles, causal=shape.causal, descales=descales
            )
            kernels |= {step.kernel: None for step in steps}
        for step in plan_attention(*(dense(n, size, dtypes.bf16) for n in ("q", "k", "v", "out")), device=device,
                                   causal=shape.causal):  # fmt: skip
            kernels[step.kernel] = None
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: cache.get(kernel, "sm_90a"), kernels))


def measure(shape: Shape, variants: Sequence[str], rounds: int, shift: float) -> list[dict[str, object]]:
    """Rows of one shape."""
    tiles = chosen_tiles(shape)
    runs: dict[str, Callable[..., Any]] = {"cki e4m3": e4m3_call(shape)}
    for text in variants:
        runs[f"cki e4m3 {text}"] = tiles_call(shape, with_fields(tiles, text))
    inputs = common.rotated(lambda seed: make_inputs(shape, seed, shift), shape.nbytes // 2, limit=4)
    check(shape, runs["cki e4m3"], inputs[0], "cki e4m3")
    peers = fa3_calls(shape)
    shares = {
        name: error_share(shape, run, inputs[0]) for name, run in (runs | peers).items() if "bf16" not in name
    }
    runs |= {"turning alone": tiles_call(shape, tiles, only_first=True), "cki bf16": bf16_call(shape)}
    runs |= peers
    times = common.graph_times_in_turn(runs, inputs, rounds=rounds)
    return [
        common.row(
            "attention", str(shape), "e4m3" if "bf16" not in name else "bf16", name, timing, flops=shape.flops,
            vs_bf16=round(times["cki bf16"].median_us / timing.median_us, 3),
            error_share=round(shares[name], 3) if name in shares else "",
        )
        for name, timing in times.items()
    ]  # fmt: skip


OTHERS = ("mask", "bias", "dropout", "head dimension 72", "packed")


def other_call(what: str, tokens: int) -> tuple[Shape, dict[str, Any]]:
    """(shape, what is given besides) of a call that the e4m3 kernel does not serve."""
    import torch

    shape = Shape(16384 // tokens, tokens, 16, 128, False, "bf16")
    generator = torch.Generator(device="cuda").manual_seed(1)
    if what == "mask":
        kept = torch.rand((shape.batch, 1, 1, tokens), generator=generator, device="cuda") > 0.1
        return shape, {"mask": kept}
    if what == "bias":
        return shape, {"bias": torch.randn((1, 1, tokens, tokens), generator=generator, device="cuda")}
    if what == "dropout":
        seed, offset = (torch.tensor([n], device="cuda") for n in (1, 2))
        return shape, {"dropout_p": 0.1, "dropout_seed": seed, "dropout_offset": offset}
    return (shape if what == "packed" else shape._replace(heads=28, dim=72)), {}


def packed_calls(shape: Shape, generic: AttentionTiles) -> dict[str, Callable[..., Any]]:
    """The batch as packed sequences of one length: by the generic kernel, by the choice, and our bf16."""
    import torch

    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * shape.tokens
    spec = dataclasses.replace(VARLEN_ATTENTION, plan=functools.partial(varlen.plan, tiles=generic))
    names = ("q_descale", "k_descale", "v_descale")

    def flat(tensors: Sequence[Any]) -> tuple[Any, Any, Any]:
        q, k, v = (t.flatten(0, 1) for t in tensors)
        return q, k, v

    def by_tiles(q: Any, k: Any, v: Any, out: Any, *codes: Any) -> Any:
        tensors = dict(zip(("q", "k", "v", *names), (*flat(codes[:3]), *codes[3:]))) | {
            "cu_seqlens_q": starts
        }
        given = tuple(tensors.get(item.name) for item in spec.inputs)
        call(spec, given, tuple(item.default for item in spec.attributes), (out.flatten(0, 1), None))
        return out

    def public(q: Any, k: Any, v: Any, out: Any, *codes: Any) -> Any:
        q, k, v = flat(codes[:3])
        cki.varlen_attention(q, k, v, starts, **dict(zip(names, codes[3:])), out=out.flatten(0, 1))
        return out

    def bf16(q: Any, k: Any, v: Any, out: Any, *codes: Any) -> Any:
        q, k, v = flat((q, k, v))
        cki.varlen_attention(q, k, v, starts, out=out.flatten(0, 1))
        return out

    return {"cki e4m3 generic": by_tiles, "cki e4m3 as f16": public, "cki bf16": bf16}


def measure_other(what: str, tokens: int, rounds: int) -> list[dict[str, object]]:
    """Rows of one such call."""
    shape, given = other_call(what, tokens)
    inputs = [make_inputs(shape, seed) for seed in range(2)]
    device, dim = sim_device("sm_90a"), padded(shape.dim)
    plain = "mask" not in given and "bias" not in given
    tiles = choose_hopper_tiles(tokens, shape.batch * shape.heads, dim, dim, shape.causal, plain, device)
    if "dropout_p" in given:
        tiles = tiles_with_dropout(tiles, dim, False)
    generic = choose_tiles(tokens, dim, dim, 2, False, device)
    runs: dict[str, Callable[..., Any]] = {
        "cki e4m3 generic": tiles_call(shape, generic, **given),
        "cki e4m3 as f16": tiles_call(shape, tiles, **given),
    }
    runs["cki bf16"] = lambda q, k, v, out, *_: cki.attention(q, k, v, causal=shape.causal, out=out, **given)
    runs = packed_calls(shape, generic) if what == "packed" else runs
    found = [run(*inputs[0]).float().clone() for run in runs.values()]
    for name, result in zip(runs, found):
        error = ((result - found[0]).norm() / found[0].norm()).item()
        if not error < (0.1 if name == "cki bf16" else 0.01):
            raise SystemExit(f"{name}: {what}, {shape}: off by {error:.3g} of the generic kernel's result")
    times = common.graph_times_in_turn(runs, inputs, rounds=rounds)
    return [
        common.row(
            "attention", f"{shape} {what}", "bf16" if "bf16" in name else "e4m3", name, timing, flops=shape.flops,
            vs_bf16=round(times["cki bf16"].median_us / timing.median_us, 3),
        )
        for name, timing in times.items()
    ]  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of each e4m3 kernel: our bf16 time over its, geometric mean and least, over the shapes that have it."""
    lines = []
    for name in dict.fromkeys(row["implementation"] for row in rows if row["dtype"] == "e4m3"):
        ratios = [row["vs_bf16"] for row in rows if row["implementation"] == name]
        mean = math.exp(float(np.mean(np.log(ratios))))
        lines.append(f"{mean:.3f} of our bf16, least {min(ratios):.3f}, {len(ratios)} shapes: {name}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shift", type=float, default=0.0, help="mean of the values")
    parser.add_argument("--variant", action="append", default=[], metavar="FIELD=VALUE[,...]")
    parser.add_argument("--others", action="store_true", help="what the e4m3 kernel does not serve")
    options = parser.parse_args(argv)
    common.require_gpu()
    if options.others:
        found = [
            row for what in OTHERS for n in (512, 4096) for row in measure_other(what, n, options.rounds)
        ]
        common.write_csv("attention_fp8_others", found)
        return
    shapes = [
        Shape(16384 // n, n, 2048 // dim, dim, causal, "bf16")
        for dim in options.dims
        for causal in (False, True)
        for n in options.tokens
    ]
    compile_ahead(shapes, options.variant)
    rows: list[dict[str, object]] = []
    for shape in shapes:
        found = measure(shape, options.variant, options.rounds, options.shift)
        rows += found
        line = ", ".join(
            f"{row['implementation']} {row['median_us']} ({row['error_share']})" for row in found
        )
        print(f"{shape}: {line}", flush=True)
    common.write_csv("attention_fp8", rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
