"""Linear layers: the chosen tile, every other tile, and PyTorch (cuBLASLt) in the same run.

    python bench/gemm.py                                    # usual shapes, the choice and torch
    python bench/gemm.py --shape 8192x1024x4096:gelu --all-tiles --tile 256x128w4x2s3
    python bench/gemm.py --shape 4096x4096x4096 --dtype f32 --layout out_in
    python bench/gemm.py --hopper                           # the Hopper kernel's tuning run (gemm_hopper.py)
    python bench/gemm.py --skinny                           # that of the kernel for few rows (gemm_skinny.py)

A shape is ROWSxDEPTHxCOLUMNS, with `:gelu` or `:residual` for a layer with that epilogue; all have a bias.  torch's
time is that of `addmm` and, where there is one, its separate GELU or addition.  `vs_torch` is torch's time over ours.
Every variant is compared with the float64 reference on some rows before it is timed; one that is wrong ends the
program.
Method: CUDA graph replays over inputs that together exceed the L2 cache three times (bench/common.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import common
import ml_dtypes
import numpy as np

import cki
from cki import reference
from cki.device import cuda_device
from cki.heuristics.linear import TILES_16BIT, TILES_FP32, Tile, choose_tile
from cki.heuristics.linear_hopper import HopperTile
from cki.heuristics.linear_skinny import SkinnyTile
from cki.ops.call import call
from cki.ops.linear import LINEAR, Activation, WeightLayout, plan_linear
from cki.ops.linear_fp32 import Fp32Tile
from cki.plan import Plan

#: BERT-large at 4 x 2048 and 4 x 128 tokens, all-MiniLM-L6-v2 at 16 and 96 tokens, and large squares.
SHAPES = (
    "8192x1024x3072", "8192x1024x1024:residual", "8192x1024x4096:gelu", "8192x4096x1024:residual",
    "512x1024x3072", "512x1024x4096:gelu", "512x4096x1024:residual",
    "16x384x1152", "16x384x1536:gelu", "96x384x1536:gelu", "96x1536x384:residual",
    "4096x4096x4096", "8192x8192x8192",
)  # fmt: skip
#: Of fp32 on Hopper.
FP32_TILES = (Fp32Tile(3), Fp32Tile(2))
NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
TORCH = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class LinearProblem(NamedTuple):
    """What is measured.  epilogue: "", "gelu" or "residual", after the bias."""

    rows: int
    depth: int
    columns: int
    epilogue: str
    dtype: str
    layout: WeightLayout

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.depth * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes that must move: operands and result once."""
        results = 2 if self.epilogue == "residual" else 1
        elements = self.depth * (self.rows + self.columns) + results * self.rows * self.columns
        return elements * int(NUMPY[self.dtype].itemsize)

    @property
    def activation(self) -> Activation | None:
        return "gelu" if self.epilogue == "gelu" else None


def cki_call(
    problem: LinearProblem, tile: Tile | HopperTile | SkinnyTile | Fp32Tile | None
) -> Callable[..., object]:
    """`f(x, w, bias, residual, y)` by CKI; tile None is the public function with the heuristic's choice."""
    spec = LINEAR
    if tile is not None:

        def plan(p: Any, outputs: Any, device: Any) -> Plan:
            return Plan(
                plan_linear(
                    p["x"],
                    p["w"],
                    p.get("bias"),
                    p.get("residual"),
                    outputs["out"],
                    device,
                    activation=problem.activation,
                    weight_layout=problem.layout,
                    tile=tile,
                )
            )

        spec = dataclasses.replace(LINEAR, plan=plan)

    def run(x: Any, w: Any, bias: Any, residual: Any, y: Any) -> object:
        if tile is None:
            return cki.linear(
                x,
                w,
                bias,
                activation=problem.activation,
                residual=residual,
                weight_layout=problem.layout,
                out=y,
            )
        return call(spec, (x, w, bias, residual), (problem.activation, problem.layout), (y,))

    return run


def torch_call(problem: LinearProblem) -> Callable[..., object]:
    """The same by PyTorch: addmm, then GELU or addition in place."""
    import torch

    def run(x: Any, w: Any, bias: Any, residual: Any, y: Any) -> object:
        torch.addmm(bias, x, w if problem.layout == "in_out" else w.T, out=y)
        if problem.epilogue == "gelu":
            return torch.nn.functional.gelu(y)
        return y.add_(residual) if problem.epilogue == "residual" else y

    return run


def make_inputs(problem: LinearProblem, seed: int) -> tuple[Any, ...]:
    """(x, w, bias, residual, y) as torch tensors on the GPU; y holds NaN."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype = getattr(torch, TORCH[problem.dtype])

    def normal(*size: int, scale: float = 1.0) -> Any:
        return (torch.randn(*size, generator=generator, device="cuda") * scale).to(dtype)

    weight_shape = (problem.depth, problem.columns)
    weight = normal(
        *(weight_shape if problem.layout == "in_out" else weight_shape[::-1]), scale=problem.depth**-0.5
    )
    y = torch.full((problem.rows, problem.columns), float("nan"), device="cuda", dtype=dtype)
    residual = normal(problem.rows, problem.columns) if problem.epilogue == "residual" else None
    return normal(problem.rows, problem.depth), weight, normal(problem.columns), residual, y


def check(problem: LinearProblem, run: Callable[..., object], inputs: Sequence[Any], what: str) -> float:
    """Runs once; the largest error over some rows, relative to the largest value.  Ends when it is too large."""
    x, w, bias, residual, y = inputs
    y.fill_(float("nan"))
    run(*inputs)
    picked = sorted({*range(min(24, problem.rows)), *range(max(0, problem.rows - 24), problem.rows)})

    def host(tensor: Any) -> np.ndarray[Any, Any]:
        return np.asarray(tensor.double().cpu().numpy())

    added = None if residual is None else host(residual[picked])
    expected = reference.linear(
        host(x[picked]),
        host(w),
        host(bias),
        activation=problem.activation,
        residual=added,
        weight_layout=problem.layout,
    )
    error = float(np.abs(host(y[picked]) - expected).max() / np.abs(expected).max())
    limit = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 1e-5}[problem.dtype]
    if not error <= limit:
        raise SystemExit(
            f"{what}: relative error {error:.2e} against the reference, at most {limit:.2e} is right"
        )
    if bool(y.isnan().any()):
        raise SystemExit(f"{what}: parts of the result are not written")
    return error


def name_of(tile: Tile) -> str:
    """For a table: block shape, warps, stages."""
    return f"{tile.block_m}x{tile.block_n}w{tile.warps_m}x{tile.warps_n}s{tile.stages}"


def _tile(text: str) -> Tile:
    """A tile from the form that tables show: "128x256w2x4s3"."""
    match = re.fullmatch(r"(\d+)x(\d+)w(\d+)x(\d+)s(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 128x256w2x4s3")
    block_m, block_n, warps_m, warps_n, stages = (int(number) for number in match.groups())
    min_blocks = max(1, 8 // (warps_m * warps_n))
    return Tile(block_m, block_n, warps_m, warps_n, stages, min_blocks, 255, 1.0, 1.0)


def measure(problem: LinearProblem, all_tiles: bool, tiles: Sequence[Tile]) -> list[dict[str, object]]:
    """One row a variant: torch, the choice, and the other tiles where wanted."""
    import cupy

    inputs = common.rotated(functools.partial(make_inputs, problem), problem.nbytes, limit=24)
    device = cuda_device(cupy.cuda.Device().id)
    itemsize = NUMPY[problem.dtype].itemsize
    chosen = choose_tile(problem.rows, [problem.columns], problem.depth, itemsize, device)
    variants: list[tuple[str, Callable[..., object]]] = [
        ("torch", torch_call(problem)),
        ("cki", cki_call(problem, None)),
    ]
    others = [*((TILES_FP32 if itemsize == 4 else TILES_16BIT) if all_tiles else ()), *tiles]
    variants += [(f"cki {name_of(tile)}", cki_call(problem, tile)) for tile in others if tile != chosen]
    if problem.dtype == "f32" and device.arch == "sm_90a":
        variants += [(f"cki wgmma {tile}", cki_call(problem, tile)) for tile in FP32_TILES]
    rows, torch_us = [], 0.0
    for name, run in variants:
        what = (
            f"{problem.rows}x{problem.depth}x{problem.columns}{problem.epilogue and ':' + problem.epilogue}"
        )
        error = check(problem, run, inputs[0], f"{what} {name}") if name != "torch" else 0.0
        timing = common.graph_time(run, inputs, framework="torch", replays=15)
        if name == "torch":
            torch_us = timing.median_us
        rows.append(common.row(
            "linear", what, problem.dtype, name, timing, nbytes=problem.nbytes, flops=problem.flops,
            vs_torch=round(torch_us / timing.median_us, 3), layout=problem.layout, error=f"{error:.1e}",
            tile=name_of(chosen) if name == "cki" else "",
        ))  # fmt: skip
    return rows


def _shape(text: str) -> tuple[int, int, int, str]:
    extents, _, epilogue = text.partition(":")
    rows, depth, columns = (int(extent) for extent in extents.split("x"))
    if epilogue not in ("", "gelu", "residual"):
        raise argparse.ArgumentTypeError(f"epilogue {epilogue!r}; there are gelu and residual")
    return rows, depth, columns, epilogue


def main() -> None:
    """Measures and writes gemm.csv."""
    parser = argparse.ArgumentParser(description="time of linear layers")
    parser.add_argument(
        "--shape", type=_shape, action="append", help="ROWSxDEPTHxCOLUMNS[:EPILOGUE]; may be repeated"
    )
    parser.add_argument(
        "--dtype", choices=sorted(NUMPY), action="append", help="may be repeated; default f16"
    )
    parser.add_argument("--layout", choices=("in_out", "out_in"), action="append", help="default in_out")
    parser.add_argument("--all-tiles", action="store_true", help="also the tiles that were not chosen")
    parser.add_argument(
        "--tile", type=_tile, action="append", default=[], help="also this one, as 128x256w2x4s3"
    )
    parser.add_argument(
        "--hopper", action="store_true", help="check and time every tile of the Hopper kernel"
    )
    parser.add_argument(
        "--skinny", action="store_true", help="check and time every tile of the kernel for few rows"
    )
    parser.add_argument(
        "--candidate", action="append", help="of --hopper only this tile, as 128x128s6pp; may be repeated"
    )
    parser.add_argument("--hopper-worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--skinny-worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tuned: Any = None  # the module of a tuning run
    if arguments.hopper_worker or arguments.hopper:
        import gemm_hopper as tuned
    elif arguments.skinny_worker or arguments.skinny:
        import gemm_skinny as tuned
    if arguments.hopper_worker or arguments.skinny_worker:
        text, dtype, layout, *names = arguments.hopper_worker or arguments.skinny_worker
        rows, depth, columns, epilogue = _shape(text)
        tuned.worker(LinearProblem(rows, depth, columns, epilogue, dtype, layout), names)
        return
    problems = [
        LinearProblem(rows, depth, columns, epilogue, dtype, layout)
        for dtype in arguments.dtype or (["bf16"] if tuned else ["f16"])
        for layout in arguments.layout or (["in_out", "out_in"] if arguments.skinny else ["in_out"])
        for rows, depth, columns, epilogue in arguments.shape
        or [_shape(text) for text in (tuned.SHAPES if tuned else SHAPES)]
    ]
    if arguments.hopper:
        tuned.run(problems, arguments.candidate)
        return
    if tuned:
        tuned.run(problems)
        return
    common.require_gpu()
    measured = [row for problem in problems for row in measure(problem, arguments.all_tiles, arguments.tile)]
    common.write_csv("gemm", measured)


if __name__ == "__main__":
    main()
