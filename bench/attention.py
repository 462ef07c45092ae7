"""Attention of whole prompts: the chosen tiles, other tiles, and PyTorch's SDPA (flash, cuDNN) in the same run.

    python bench/attention.py                                   # BERT shapes, 16k tokens at head dimension 128
    python bench/attention.py --shape 4x2048x16x64:causal --dtype bf16
    python bench/attention.py --shape 4x4096x16x128 --all-tiles
    python bench/attention.py --hopper                          # the Hopper kernel's tuning run (attention_hopper.py)

A shape is BATCHxTOKENSxHEADSxHEAD_DIM, with `:causal`; the same number of KV heads.  FLOPs count the two products (a
causal one half); `vs_flash` and `vs_cudnn` are the others' time over ours.  Every variant is compared with a float64
computation on some rows before it is timed (the bound of the tests); one that is wrong ends the program.  fp32 is
compared with SDPA's memory-efficient kernel, since the other two refuse it.
Method: CUDA graph replays over inputs that together exceed the L2 cache three times (bench/common.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import common

import cki
from cki.heuristics.attention import AttentionTiles
from cki.heuristics.attention_hopper import HopperTiles
from cki.ops.attention import ATTENTION, plan_attention
from cki.ops.attention_hopper import workspace_of
from cki.ops.call import call
from cki.ops.spec import OpSpec
from cki.plan import Plan

#: (shape, dtype): BERT-large at 4 sequences; 16384 tokens of width 2048; the examples of the field's tutorials.
SHAPES = (
    *((f"4x{n}x16x64", "f16") for n in (128, 512, 1024, 2048, 4096)),
    *((f"{16384 // n}x{n}x16x128{c}", "bf16") for n in (512, 2048, 8192, 16384) for c in ("", ":causal")),
    *((f"8x2048x32x64{c}", "bf16") for c in ("", ":causal")),
    *((f"8x2048x8x256{c}", "bf16") for c in ("", ":causal")),
    ("2x512x16x64:causal", "f16"), ("4x4096x16x128", "bf16"), ("4x2048x16x64", "f32"), ("4x2048x16x128:causal", "f32"),
)  # fmt: skip
TORCH = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
BASELINES = {"f32": ("efficient",), "f16": ("flash", "cudnn"), "bf16": ("flash", "cudnn")}
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
TILES = tuple(
    AttentionTiles(warps, rows, keys)
    for warps, rows, keys in ((4, 2, 64), (4, 2, 32), (4, 1, 64), (4, 1, 32), (8, 1, 64), (8, 1, 32))
)


class Shape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    dim: int
    causal: bool
    dtype: str

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.tokens**2 * self.dim / (2 if self.causal else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of q, k, v and the output."""
        return 4 * self.batch * self.tokens * self.heads * self.dim * (4 if self.dtype == "f32" else 2)

    def __str__(self) -> str:
        text = f"batch={self.batch} tokens={self.tokens} heads={self.heads} head_dim={self.dim}"
        return text + (" causal" if self.causal else "")


def parse(text: str, dtype: str) -> Shape:
    """4x2048x16x64:causal"""
    numbers, _, mode = text.partition(":")
    batch, tokens, heads, dim = (int(part) for part in numbers.split("x"))
    if mode not in ("", "causal"):
        raise SystemExit(f"unknown mode {mode!r} in {text!r}: causal or nothing")
    return Shape(batch, tokens, heads, dim, mode == "causal", dtype)


def make_inputs(shape: Shape, seed: int) -> tuple[Any, ...]:
    """(q, k, v, out) as torch tensors [batch, tokens, heads, dim] on the GPU; out holds NaN."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    size = (shape.batch, shape.tokens, shape.heads, shape.dim)
    dtype = getattr(torch, TORCH[shape.dtype])
    q, k, v = (torch.randn(size, generator=generator, device="cuda").to(dtype) for _ in range(3))
    return q, k, v, torch.full(size, float("nan"), device="cuda", dtype=dtype)


@functools.cache
def spec_with_tiles(tiles: AttentionTiles | HopperTiles) -> OpSpec:
    """cki.attention's operation with these tiles; kept, because the plan cache knows an operation by its identity."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        operands = (problem["q"], problem["k"], problem["v"], outputs["out"])
        steps = plan_attention(*operands, device=device, causal=problem.attribute("causal"), tiles=tiles)
        return Plan(steps, workspace_of(steps))

    return dataclasses.replace(ATTENTION, plan=plan)


def cki_call(shape: Shape, tiles: AttentionTiles | HopperTiles | None = None) -> Callable[..., Any]:
    """`f(q, k, v, out)` by CKI; tiles None is the public function with the heuristics' choice."""
    if tiles is None:
        return lambda q, k, v, out: cki.attention(q, k, v, causal=shape.causal, out=out)
    spec = spec_with_tiles(tiles)
    attributes = (shape.causal, "bottom_right", None, (-1, -1), 0.0, False, 0.0, False, None)
    inputs = (None,) * 9  # bias, mask and so on
    return lambda q, k, v, out: call(spec, (q, k, v, *inputs), attributes, (out, None))


def torch_call(shape: Shape, backend: str) -> Callable[..., Any]:
    """The same by torch's scaled_dot_product_attention, held to one backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(q: Any, k: Any, v: Any, out: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
            swapped = (t.transpose(1, 2) for t in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(
                *swapped, is_causal=shape.causal
            ).transpose(1, 2)

    return run


def attend_rows(q: Any, k: Any, v: Any, rows: Sequence[int], causal: bool, dtype: Any) -> Any:
    """Some rows of the output, computed plainly in `dtype`, weights rounded to v's type unless that is float64."""
    import torch

    picked = q[:, rows].to(dtype)
    logits = torch.einsum("bihd,bjhd->bhij", picked, k.to(dtype)) / q.shape[3] ** 0.5
    if causal:
        position = torch.tensor(rows, device=q.device)
        logits.masked_fill_(torch.arange(k.shape[1], device=q.device) > position[:, None], float("-inf"))
    weights = torch.softmax(logits, dim=-1)
    if dtype != torch.float64:
        weights = weights.to(v.dtype).to(dtype)
    return torch.einsum("bhij,bjhd->bihd", weights, v.to(dtype))


def check(shape: Shape, run: Callable[..., Any], inputs: Sequence[Any], what: str) -> None:
    """Runs once and compares some rows with float64; ends the program when the tests' bound is broken."""
    import torch

    q, k, v, out = inputs
    out.fill_(float("nan"))
    result = run(q, k, v, out)
    rows = sorted(
        {*range(min(4, shape.tokens)), shape.tokens // 2, *range(max(0, shape.tokens - 4), shape.tokens)}
    )
    truth = attend_rows(q, k, v, rows, shape.causal, torch.float64)
    plain = attend_rows(q, k, v, rows, shape.causal, torch.float32).to(q.dtype)
    limit = 2 * (plain - truth).abs().max().item() + 1e-5 * truth.abs().max().item()
    error = (result[:, rows] - truth).abs().max().item()
    if not (error <= limit and bool(torch.isfinite(result).all())):
        raise SystemExit(f"{what}: {shape}: error {error:.3g}, allowed {limit:.3g}")


def measure(shape: Shape, all_tiles: bool) -> list[dict[str, object]]:
    """Rows of the result for one shape: cki first, then other tiles, then the baselines."""
    inputs = common.rotated(lambda seed: make_inputs(shape, seed), shape.nbytes, limit=16)
    variants = {"cki": cki_call(shape)}
    if all_tiles:
        for t in TILES:
            variants[f"cki {t.warps} warps x {t.row_tiles} x 16 rows, {t.block_keys} keys"] = cki_call(
                shape, t
            )
    for backend in BASELINES[shape.dtype]:
        variants[f"torch {backend}"] = torch_call(shape, backend)
    timings = {}
    for name, run in variants.items():
        if not name.startswith("torch"):  # a baseline need not meet our bound
            check(shape, run, inputs[0], name)
        timings[name] = common.graph_time(run, inputs, framework="torch")
    ours = timings["cki"].median_us
    ratios = {f"vs_{b}": round(timings[f"torch {b}"].median_us / ours, 3) for b in BASELINES[shape.dtype]}
    return [
        common.row(
            "attention", str(shape), shape.dtype, name, timing,
            nbytes=shape.nbytes, flops=shape.flops, **(ratios if name == "cki" else {}),
        )
        for name, timing in timings.items()
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", action="append", help="BATCHxTOKENSxHEADSxHEAD_DIM[:causal]; may be repeated"
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(TORCH),
        default="bf16",
        help="of the shapes given; with --hopper of the grid",
    )
    parser.add_argument("--all-tiles", action="store_true", help="time the other tile sizes too")
    parser.add_argument(
        "--hopper", action="store_true", help="check and time every variant of the Hopper kernel"
    )
    parser.add_argument("--chosen", action="store_true", help="with --hopper: the heuristics' choice alone")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="FIELD=VALUE[,...]",
        help="with --hopper: the choice with these fields changed, beside it; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--hopper-worker", nargs="+", help=argparse.SUPPRESS
    )  # shape, dtype, candidate; again
    options = parser.parse_args(argv)
    if options.hopper or options.hopper_worker:
        import attention_hopper

        if options.hopper_worker:
            words = options.hopper_worker
            kernels = [attention_hopper.Kernel(*words[i : i + 3]) for i in range(0, len(words), 3)]
            attention_hopper.worker(kernels, options.variant)
        else:
            given = [(text, options.dtype) for text in options.shape or ()]
            name = "attention_hopper_f16" if not given and options.dtype == "f16" else "attention_hopper"
            all_given = given or attention_hopper.cells(options.dtype)
            attention_hopper.run(all_given, options.chosen, options.variant, name)
        return
    common.require_gpu()
    wanted = [(text, options.dtype) for text in options.shape] if options.shape else SHAPES
    rows = []
    for text, dtype in wanted:
        rows += measure(parse(text, dtype), options.all_tiles)
        print(f"measured {text} {dtype}", flush=True)
    common.write_csv("attention", rows)


if __name__ == "__main__":
    main()
