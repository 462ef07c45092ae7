"""Linear layers of few rows: every candidate of the kernel for them, torch.matmul and the generic kernel, in turn.

    python bench/gemm.py --skinny                                  # Llama-8B at 1, 8, 16 and 64 rows, both orders
    python bench/gemm.py --skinny --shape 8x4096x28672 --dtype bf16 --layout out_in

A shape is ROWSxDEPTHxCOLUMNS, as in gemm.py; without an epilogue there is no bias either, and torch's time is that of
`torch.matmul` (cuBLASLt).  Each shape is measured in a worker process: one that dies or takes too long is started anew
without the candidate that it was at.  A worker compares every implementation with a float64 product on the GPU, on each
of the input sets that it walks through, then captures all as graphs and replays them in turn.

The candidates are the tiles of the choice's height with K whole or over two blocks, each with and without programmatic
launch (`serial`: in a graph of such calls the others overlap), and the choice.

`of_copy` is the weight's bytes a second over the rate of a copy in the same run (bytes read and written), `vs_torch`
torch's time over ours, `predicted_us` the model's time.  A shape's rows are written when it is done
(results/gemm_skinny.csv); the last lines are the best candidate of each shape with the choice beside it, and the
least figures of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import gemm
import numpy as np
from gemm import LinearProblem

from cki.device import DeviceInfo, sim_device
from cki.heuristics.linear import choose_tile
from cki.heuristics.linear_skinny import (
    CANDIDATES,
    DEFAULT_ROWS,
    MAX_ROWS,
    SkinnyTile,
    choose_skinny_tile,
    fits,
    predicted_time,
)

#: Llama-8B's products: Q, K and V; the attention's output; gate and up; down.
SHAPES = tuple(
    f"{rows}x{shape}"
    for rows in (1, 8, 16, 64)
    for shape in ("4096x6144", "4096x4096", "4096x28672", "14336x4096")
)
#: Seconds for a worker, most of them for compiling.
WORKER_SECONDS = 240
ROUNDS = 20
#: Of a cluster, in a candidate: of 4 and 8 none was ever the fastest (results/gemm_skinny.csv).
MOST_BLOCKS = 2
_LIMITS = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 1e-5}


def text_of(problem: LinearProblem) -> str:
    """The shape as `--shape` takes it."""
    extents = f"{problem.rows}x{problem.depth}x{problem.columns}"
    return f"{extents}:{problem.epilogue}" if problem.epilogue else extents


def weight_bytes(problem: LinearProblem) -> int:
    return problem.depth * problem.columns * int(gemm.NUMPY[problem.dtype].itemsize)


def chosen(problem: LinearProblem, device: DeviceInfo) -> SkinnyTile:
    """The model's choice."""
    itemsize = int(gemm.NUMPY[problem.dtype].itemsize)
    along_n = problem.layout == "in_out"
    tile = choose_skinny_tile(problem.rows, problem.columns, problem.depth, itemsize, device, along_n=along_n)
    if tile is None:
        raise SystemExit(f"{text_of(problem)} {problem.dtype}: no tile for {device}")
    return tile


def candidates(problem: LinearProblem, device: DeviceInfo) -> dict[str, SkinnyTile]:
    """Tiles by name: those of the choice's height, with and without programmatic launch, the choice among them."""
    choice = chosen(problem, device)
    itemsize = int(gemm.NUMPY[problem.dtype].itemsize)
    tiles = [
        dataclasses.replace(tile, programmatic=programmatic)
        for tile in CANDIDATES
        if tile.block_m == choice.block_m and tile.split <= MOST_BLOCKS
        if fits(tile, itemsize, device, along_n=problem.layout == "in_out")
        for programmatic in (True, False)
    ]
    return {f"skinny {tile}": tile for tile in (*tiles, choice)}


def implementations(
    problem: LinearProblem, names: Sequence[str], device: DeviceInfo
) -> dict[str, Callable[..., object]]:
    """`f(x, w, bias, residual, y)` by name: torch, the generic kernel, and the named candidates."""
    import torch

    tiles, itemsize = candidates(problem, device), int(gemm.NUMPY[problem.dtype].itemsize)

    def matmul(x: Any, w: Any, bias: Any, residual: Any, y: Any) -> object:
        return torch.matmul(x, w if problem.layout == "in_out" else w.T, out=y)

    generic = choose_tile(problem.rows, [problem.columns], problem.depth, itemsize, device)
    return {
        "torch": gemm.torch_call(problem) if problem.epilogue else matmul,
        "generic": gemm.cki_call(problem, generic),
        **{name: gemm.cki_call(problem, tiles[name]) for name in names},
    }


def expected(problem: LinearProblem, inputs: Sequence[Any]) -> Any:
    """The layer in float64, on the GPU."""
    import torch

    x, w, bias, residual, _ = inputs
    y = x.double() @ (w if problem.layout == "in_out" else w.T).double()
    if bias is not None:
        y += bias.double()
    if problem.epilogue == "gelu":
        y = torch.nn.functional.gelu(y)
    return y if residual is None else y + residual.double()


def error_of(run: Callable[..., Any], inputs: Sequence[Any], truth: Any) -> float:
    """Largest error of a call, relative to the largest value; NaN where something is not written."""
    inputs[-1].fill_(float("nan"))
    return float((run(*inputs).double() - truth).abs().max() / truth.abs().max())


def worker(problem: LinearProblem, names: Sequence[str]) -> None:
    """Checks, measures, and prints: BEGIN before each check, WRONG after a bad one, a ROW for each sound one."""
    import cupy

    from cki.device import cuda_device

    def make(seed: int) -> tuple[Any, ...]:
        x, w, bias, residual, y = gemm.make_inputs(problem, seed)
        return x, w, bias if problem.epilogue else None, residual, y

    device = cuda_device(cupy.cuda.Device().id)
    inputs = common.rotated(make, weight_bytes(problem), limit=24)
    truths = [expected(problem, one) for one in inputs]
    variants = implementations(problem, names, device)
    errors = {}
    for name, run in list(variants.items()):
        print(f"BEGIN {name}", flush=True)
        limit = _LIMITS[problem.dtype] * (2 if name == "torch" and problem.epilogue else 1)
        errors[name] = max((error_of(run, *pair) for pair in zip(inputs, truths)), key=lambda e: (e != e, e))
        if not errors[name] <= limit:
            print(
                f"WRONG {name}: relative error {errors[name]:.2e}, at most {limit:.2e} is right", flush=True
            )
            if name != "torch":
                del variants[name]
    print("BEGIN timing", flush=True)
    times = common.graph_times_in_turn(variants, inputs, rounds=ROUNDS)
    copy = common.copy_rate()
    choice, tiles = f"skinny {chosen(problem, device)}", candidates(problem, device)
    itemsize = int(gemm.NUMPY[problem.dtype].itemsize)
    for name, timing in times.items():
        extents = problem.rows, problem.columns, problem.depth, itemsize, device
        row = common.row(
            "linear", text_of(problem), problem.dtype, name, timing, nbytes=weight_bytes(problem),
            flops=problem.flops, layout=problem.layout, error=f"{errors[name]:.1e}", chosen=name == choice,
            vs_torch=round(times["torch"].median_us / timing.median_us, 3),
            of_copy=round(weight_bytes(problem) / timing.median_us / 1e3 / copy, 3), copy_gb_per_s=round(copy, 1),
            predicted_us=round(predicted_time(tiles[name], *extents), 2) if name in tiles else "",
        )  # fmt: skip
        print(f"ROW {json.dumps(row)}", flush=True)


def measure(problem: LinearProblem) -> list[dict[str, Any]]:
    """Rows of one shape; says what is wrong or has died."""
    left = list(candidates(problem, sim_device("sm_90a")))
    script = [sys.executable, str(Path(__file__).with_name("gemm.py")), "--skinny-worker"]
    while True:
        arguments = [text_of(problem), problem.dtype, problem.layout, *left]
        try:
            done = subprocess.run(
                script + arguments, stdout=subprocess.PIPE, text=True, timeout=WORKER_SECONDS, check=False
            )
            output, failure = done.stdout, f"worker ended with {done.returncode}"
        except subprocess.TimeoutExpired as error:
            printed = error.stdout or b""
            output = printed.decode() if isinstance(printed, bytes) else printed
            failure = f"not done after {WORKER_SECONDS} s"
        rows, wrong, at_work = parse(output)
        for complaint in wrong:
            print(f"{text_of(problem)} {problem.dtype} {problem.layout}: {complaint}", flush=True)
        if rows:
            return rows
        print(f"{text_of(problem)} {problem.dtype} {problem.layout}: {at_work}: {failure}", flush=True)
        if at_work not in left:  # not a candidate's fault: nothing to leave out
            return []
        left.remove(at_work)


def parse(output: str) -> tuple[list[dict[str, Any]], list[str], str]:
    """A worker's rows, its complaints, and what it began last."""
    rows, wrong, at_work = [], [], "start"
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word == "BEGIN":
            at_work = rest
        elif word == "WRONG":
            wrong.append(rest)
        elif word == "ROW":
            rows.append(json.loads(rest))
    return rows, wrong, at_work


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each shape the best candidate, its ratios and the choice's; then the mean and the least of each ratio."""
    lines, best_rows = [], []
    for key in dict.fromkeys((row["problem"], row["dtype"], row["layout"]) for row in rows):
        own = [row for row in rows if (row["problem"], row["dtype"], row["layout"]) == key]
        ours = [row for row in own if str(row["implementation"]).startswith("skinny")]
        if not ours:
            continue
        best = min(ours, key=lambda row: row["median_us"])
        best_rows.append(best)
        choice = "".join(
            f"; chosen: {r['implementation']} {r['median_us']} us, predicted {r['predicted_us']}"
            for r in ours
            if r["chosen"]
        )
        lines.append(
            f"{best['vs_torch']:.3f} of torch, {best['of_copy']:.3f} of copy  {' '.join(key)}: "
            f"{best['implementation']}, {best['median_us']} us{choice}"
        )
    if best_rows:
        ratios = [row["vs_torch"] for row in best_rows]
        mean = math.exp(float(np.mean(np.log(ratios))))
        lines.append(f"{mean:.3f} of torch: geometric mean of {len(ratios)} shapes, least {min(ratios):.3f}")
        few = [row["of_copy"] for row in best_rows if int(row["problem"].split("x")[0]) <= DEFAULT_ROWS]
        if few:
            lines.append(f"{min(few):.3f} of copy: the least up to {DEFAULT_ROWS} rows")
    return lines


def run(problems: Sequence[LinearProblem]) -> None:
    """Measures shape by shape, writes the CSV after each, prints the summary."""
    common.require_gpu()
    high = [text_of(problem) for problem in problems if problem.rows > MAX_ROWS]
    if high:
        raise SystemExit(f"{', '.join(high)}: the kernel is for up to {MAX_ROWS} rows")
    rows: list[dict[str, Any]] = []
    for problem in problems:
        rows += measure(problem)
        if rows:
            with contextlib.redirect_stdout(io.StringIO()):  # the table grows with every shape
                common.write_csv("gemm_skinny", rows)
        print(f"measured {text_of(problem)} {problem.dtype} {problem.layout}", flush=True)
    print("\n".join(summary(rows)))
