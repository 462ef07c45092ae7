"""Linear layers of e4m3 codes with block scales, in turn with our bf16 kernel, and with torch's products of both types.

    python bench/gemm_fp8.py                         # of Llama-8B at 1024 and 4096 rows, 4096^3, of Qwen3-8B at 64 rows
    python bench/gemm_fp8.py --shape 8192x8192x8192            # ROWSxDEPTHxCOLUMNS
    python bench/gemm_fp8.py --shape 64x4096x4096 --tiles      # other tiles of few rows beside the chosen one

"torch bf16" is `torch.matmul` (cuBLASLt) of bf16 tensors, "torch fp8" `torch._scaled_mm` with one scale for a tensor,
where it runs: a simpler product, without scales of blocks.  Before timing, rows of our result are compared with
float64.  `vs_bf16`: our bf16 kernel's time over this one's.  Writes results/gemm_fp8.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import common
import numpy as np

import cki
import cki.reference
from cki.device import DeviceInfo
from cki.heuristics.linear_hopper import HopperTile
from cki.operand import Operand
from cki.ops.call import call
from cki.ops.linear_fp8 import LINEAR_FP8, choose_fp8_tile, plan_linear_fp8
from cki.ops.spec import Problem
from cki.plan import Plan

SHAPES = (
    *(f"{rows}x{shape}" for rows in (1024, 4096) for shape in ("4096x6144", "4096x4096", "4096x28672", "14336x4096")),
    *(f"64x{shape}" for shape in ("4096x6144", "4096x4096", "4096x24576", "12288x4096")),
)  # fmt: skip
ROUNDS = 20


def make_inputs(rows: int, depth: int, columns: int, seed: int) -> tuple[Any, ...]:
    """(codes, scales, w codes, w scales, x, w, y): torch tensors; x and w are bf16 and of other values."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*size: int) -> Any:
        return torch.randn(*size, generator=generator, device="cuda")

    def scales(*size: int) -> Any:
        return torch.rand(*size, generator=generator, device="cuda") + 0.5

    blocks = -(-depth // 128)
    x, w = normal(rows, depth), normal(columns, depth)
    y = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    e4m3 = torch.float8_e4m3fn
    return (
        x.to(e4m3), scales(rows, blocks), w.to(e4m3), scales(-(-columns // 128), blocks), x.bfloat16(), w.bfloat16(), y
    )  # fmt: skip


def check(inputs: tuple[Any, ...]) -> float:
    """The largest error of some rows, relative to the largest value.  Ends when it is too large."""
    import torch

    x, x_scale, w, w_scale, _, _, y = inputs
    cki.linear_fp8(x, x_scale, w, w_scale, out=y)
    picked = sorted({*range(min(16, y.shape[0])), *range(max(0, y.shape[0] - 16), y.shape[0])})

    def host(tensor: Any) -> Any:
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.view(torch.uint8).cpu().numpy()
        return tensor.double().cpu().numpy()

    expected = cki.reference.linear_fp8(host(x)[picked], host(x_scale)[picked], host(w), host(w_scale))
    error = float(np.abs(host(y)[picked] - expected).max() / np.abs(expected).max())
    if not error <= 2.0**-8 or bool(y.isnan().any()):
        raise SystemExit(f"linear_fp8: relative error {error:.2e}, at most {2.0**-8:.2e} is right")
    return error


def with_tile(tile: HopperTile) -> Callable[..., Any]:
    """linear_fp8 by a tile that may not be the chosen one."""

    def plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
        x, x_scale, w, w_scale = (problem[name] for name in ("x", "x_scale", "w", "w_scale"))
        return Plan(plan_linear_fp8(x, x_scale, w, w_scale, None, outputs["out"], device, tile=tile))

    spec = replace(LINEAR_FP8, name=f"linear_fp8_{tile}", plan=plan)
    return lambda x, xs, w, ws, a, b, y: call(spec, (x, xs, w, ws, None), ("bf16",), (y,), None)


def other_tiles(rows: int, depth: int, columns: int) -> dict[str, Callable[..., Any]]:
    """By name: the tile of many rows, and K of few rows in other parts."""
    few = choose_fp8_tile(1, depth, columns, 132)
    tiles = [replace(few, split=split) for split in (1, 2, 4)] if rows <= few.block_m else []
    return {f"cki {tile}": with_tile(tile) for tile in (choose_fp8_tile(65, depth, columns, 132), *tiles)}


def measure(rows: int, depth: int, columns: int, tiles: bool = False) -> list[dict[str, object]]:
    """Rows of one shape, all in turn.  tiles: others too."""
    import torch

    nbytes = depth * (rows + columns) + 2 * rows * columns
    inputs = common.rotated(lambda seed: make_inputs(rows, depth, columns, seed), 3 * nbytes, limit=8)
    error, one = check(inputs[0]), torch.ones((), device="cuda")
    variants: dict[str, Callable[..., Any]] = {
        "cki": lambda x, xs, w, ws, a, b, y: cki.linear_fp8(x, xs, w, ws, out=y),
        "cki bf16": lambda x, xs, w, ws, a, b, y: cki.linear(a, b, weight_layout="out_in", out=y),
        "torch bf16": lambda x, xs, w, ws, a, b, y: torch.matmul(a, b.T, out=y),
        "torch fp8": lambda x, xs, w, ws, a, b, y: torch._scaled_mm(
            x, w.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        ),
    }
    try:
        variants["torch fp8"](*inputs[0])
    except (RuntimeError, TypeError) as refused:
        print(f"torch fp8 left out: {refused}")
        del variants["torch fp8"]
    others = other_tiles(rows, depth, columns) if tiles else {}
    for name, other in others.items():
        other(*inputs[0])
        chosen = cki.linear_fp8(*inputs[0][:4])
        apart = float((inputs[0][-1].float() - chosen.float()).abs().max() / chosen.float().abs().max())
        if not apart <= 2.0**-7:
            raise SystemExit(f"{name}: {apart:.2e} of the largest value from the chosen tile's result")
    variants |= others
    times = common.graph_times_in_turn(variants, inputs, rounds=ROUNDS)
    return [
        common.row(
            "linear_fp8", f"{rows}x{depth}x{columns}", "e4m3", name, timing, nbytes=nbytes,
            flops=2.0 * rows * depth * columns, error=f"{error:.1e}" if name == "cki" else "",
            vs_bf16=round(times["cki bf16"].median_us / timing.median_us, 3),
            vs_torch_bf16=round(times["torch bf16"].median_us / timing.median_us, 3),
        )
        for name, timing in times.items()
    ]  # fmt: skip


def main() -> None:
    """Measures and writes gemm_fp8.csv."""
    parser = argparse.ArgumentParser(description="time of linear layers of e4m3 codes")
    parser.add_argument("--shape", action="append", help="ROWSxDEPTHxCOLUMNS; may be repeated")
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    arguments = parser.parse_args()
    common.require_gpu()
    rows: list[dict[str, object]] = []
    for shape in arguments.shape or SHAPES:
        m, k, n = (int(extent) for extent in shape.split("x"))
        rows += measure(m, k, n, arguments.tiles)
    common.write_csv("gemm_fp8", rows)


if __name__ == "__main__":
    main()
