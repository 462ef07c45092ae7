"""Llama-8B's four products at 1 to 2048 rows, weights in both orders: CKI's choice, its other kernels, and cuBLASLt.

    python bench/gemm_llama.py                                   # all 48 cells, about a minute and a half on an H200
    python bench/gemm_llama.py --rows 1 16 --layout in_out
    python bench/gemm_llama.py --without l0                      # candidates whose names contain that

No bias, so torch is `torch.matmul`. The candidates for few rows are the best tile of `skinny/linear.cu`, by its model,
and blocks of Hopper's GEMM, small and larger ones; each also EARLY. Kernels are compiled first,
several at a time. Then one worker process compares every implementation with a float64 product on the GPU before it
times all of a cell in turn, one graph replay each a round. Where it dies or falls silent, it is started again from
that cell on, without the candidate that it was at.

`vs_torch`: torch's time over ours.  `of_copy`: the weight's bytes a second over the rate of a copy in the same run.
Each cell's line is the fastest with the choice beside it; the last are geometric means.  Writes results/gemm_llama.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
import gemm
import gemm_skinny
import numpy as np
from gemm import LinearProblem

from cki import cache, dtypes
from cki.device import DeviceInfo, sim_device
from cki.heuristics.linear_hopper import SMALL_TILES, TILES, HopperTile, predicted_time
from cki.heuristics.linear_skinny import SkinnyTile, choose_skinny_tile
from cki.kernel import KernelSpec
from cki.operand import dense
from cki.ops.linear import plan_linear

#: Columns of Q, K and V; the attention's output; gate and up; down: DEPTHxCOLUMNS.
PRODUCTS = ("4096x6144", "4096x4096", "4096x28672", "14336x4096")
ROWS = (1, 8, 16, 32, 64, 2048)
LAYOUTS = ("in_out", "out_in")
#: (ahead, left): stages that a launch asks for ahead, copies that are left when it lets the next one begin.
EARLY = ((4, 0), (0, 4))
#: Of Hopper's GEMM with up to 64 rows, and how early a launch of them lets the next one begin.
LOW_TILES = (
    *SMALL_TILES, HopperTile(64, 64, 12, consumers=1), HopperTile(64, 128, 8, consumers=1),
    HopperTile(64, 128, 8, split=2),
)  # fmt: skip
LOW_EARLY = ((4, 0), (0, 4), (4, 8))
#: (columns, stages, ahead, left) of tiles whose warps have rings of their own, K whole.
OWN_RINGS = (
    (64, 5, 8, 0), (64, 5, 12, 0), (64, 5, 16, 0), (64, 5, 24, 0), (64, 5, 16, 2), (64, 5, 12, 4), (64, 5, 16, -1),
    (64, 4, 12, 0), (32, 4, 8, 0), (32, 4, 16, 0),
)  # fmt: skip
ROUNDS = 10
#: Without a word from the worker, it is ended.
SILENCE_SECONDS = 40.0
_DEVICE = sim_device("sm_90a")  # an H200's sizes


def candidates(
    problem: LinearProblem, device: DeviceInfo = _DEVICE
) -> dict[str, SkinnyTile | HopperTile | None]:
    """Tiles by name; None is the choice of `cki.linear`."""
    rows, columns, depth = problem.rows, problem.columns, problem.depth
    along_n = problem.layout == "in_out"
    tiles: list[SkinnyTile | HopperTile] = []
    if rows <= 64:
        copying = choose_skinny_tile(rows, columns, depth, 2, device, along_n=along_n)
        if copying is not None:
            tiles.append(copying)
        if copying is not None and rows <= 16:
            few = [copying, dataclasses.replace(copying, ahead=0, left=-1)]
            tiles += few + [
                dataclasses.replace(copying, ahead=a, left=n) for a, n in EARLY if copying.programmatic
            ]
            tiles += [
                SkinnyTile(16, across, 1, 4, stages, ahead=a, left=n, own_rings=True)
                for across, stages, a, n in OWN_RINGS
                if across > 32 or not along_n
            ]
    if 16 < rows <= 64:
        low = [dataclasses.replace(tile, rows_x=rows % 64) for tile in LOW_TILES]
        tiles += [*low, *(dataclasses.replace(t, ahead=a, left=n) for t in low for a, n in LOW_EARLY)]
    elif rows > 64:
        tiles += sorted(TILES, key=lambda tile: predicted_time(tile, rows, columns, depth, device))[:3]
    kinds = {SkinnyTile: "skinny", HopperTile: "hopper"}
    return {"cki": None, **{f"{kinds[type(tile)]} {tile}": tile for tile in tiles}}


def compile_ahead(problems: Sequence[LinearProblem], without: Sequence[str]) -> None:
    """Fills the cache, several kernels at a time."""
    specs: dict[KernelSpec, None] = {}
    for problem in problems:
        shape = (problem.depth, problem.columns)
        dtype = getattr(dtypes, problem.dtype)
        x = dense("x", (problem.rows, problem.depth), dtype)
        w = dense("w", shape if problem.layout == "in_out" else shape[::-1], dtype)
        y = dense("y", (problem.rows, problem.columns), dtype)
        for name, tile in candidates(problem).items():
            if not any(word in name for word in without):
                steps = plan_linear(x, w, None, None, y, _DEVICE, weight_layout=problem.layout, tile=tile)
                specs.update({step.kernel: None for step in steps})
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: cache.get(spec, _DEVICE.arch), specs))


def measure(problem: LinearProblem, without: Sequence[str], copy: float) -> list[dict[str, Any]]:
    """A cell, in the worker: checks each implementation, then times all in turn.  copy: GB/s."""
    import torch

    def make(seed: int) -> tuple[Any, ...]:
        x, w, _, residual, y = gemm.make_inputs(problem, seed)
        return x, w, None, residual, y

    def matmul(x: Any, w: Any, bias: Any, residual: Any, y: Any) -> object:
        return torch.matmul(x, w if problem.layout == "in_out" else w.T, out=y)

    inputs = common.rotated(make, problem.nbytes, limit=8)
    truth = gemm_skinny.expected(problem, inputs[0])
    variants: dict[str, Callable[..., object]] = {"torch": matmul}
    errors = {}
    for name, tile in candidates(problem).items():
        if any(word in name for word in without):
            continue
        print(f"BEGIN {name}", flush=True)
        run = gemm.cki_call(problem, tile)
        errors[name] = gemm_skinny.error_of(run, inputs[0], truth)
        if errors[name] <= 2.0**-8:
            variants[name] = run
        else:
            print(f"WRONG {name}: relative error {errors[name]:.2e}", flush=True)
    del truth
    print("BEGIN timing", flush=True)
    times = common.graph_times_in_turn(variants, inputs, rounds=ROUNDS)
    weight = gemm_skinny.weight_bytes(problem)
    return [
        common.row(
            "linear", gemm_skinny.text_of(problem), problem.dtype, name, timing, nbytes=problem.nbytes,
            flops=problem.flops, layout=problem.layout, error=f"{errors[name]:.1e}" if name in errors else "",
            vs_torch=round(times["torch"].median_us / timing.median_us, 3),
            of_copy=round(weight / timing.median_us / 1e3 / copy, 3),
        )
        for name, timing in times.items()
    ]  # fmt: skip


def worker(problems: Sequence[LinearProblem], without: Sequence[str]) -> None:
    """Measures cell after cell; BEGIN before each step, a ROW for each time, DONE after a cell."""
    print("BEGIN copy", flush=True)
    copy = common.copy_rate()
    for problem in problems:
        for row in measure(problem, without, copy):
            print(f"ROW {json.dumps(row)}", flush=True)
        print("DONE", flush=True)


def _forward(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def run_worker(
    problems: Sequence[LinearProblem], without: Sequence[str]
) -> tuple[list[dict[str, Any]], int, str]:
    """(rows of the cells that were done, how many those are, what the worker was at when it ended too early)."""
    script = [sys.executable, __file__, "--worker", json.dumps([problem._asdict() for problem in problems])]
    script += [argument for word in without for argument in ("--without", word)]
    process = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    rows: list[dict[str, Any]] = []
    cell: list[dict[str, Any]] = []
    done, at_work = 0, "start"
    try:
        while (line := lines.get(timeout=SILENCE_SECONDS)) is not None:
            word, _, rest = line.strip().partition(" ")
            if word == "BEGIN":
                at_work = rest
            elif word == "ROW":
                cell.append(json.loads(rest))
            elif word == "DONE":
                print(f"{cell[0]['problem']} {cell[0]['layout']}: {best(cell)}", flush=True)
                rows += cell
                cell, done = [], done + 1
            else:
                print(line.rstrip(), flush=True)
        process.wait()
    except queue.Empty:
        process.kill()
        process.wait()
        at_work += f" (silent for {SILENCE_SECONDS:.0f} s)"
    return rows, done, at_work


def best(cell: Sequence[dict[str, Any]]) -> str:
    """A line on a cell: the fastest of ours, and the choice."""
    ours = [row for row in cell if row["implementation"] != "torch"]
    fastest = min(ours, key=lambda row: float(row["median_us"]))
    choice = next((row for row in ours if row["implementation"] == "cki"), fastest)
    return (
        f"{fastest['implementation']} {fastest['median_us']} us, {fastest['vs_torch']:.3f} of torch, "
        f"{fastest['of_copy']:.3f} of copy; the choice {choice['median_us']} us, {choice['vs_torch']:.3f}"
    )


def means(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Geometric mean and least of the ratio to torch, of the choices and of the fastest, for each number of rows."""
    lines = []
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["problem"], row["layout"]), []).append(row)
    for count in dict.fromkeys(problem.split("x")[0] for problem, _ in cells):
        own = [cell for (problem, _), cell in cells.items() if problem.split("x")[0] == count]
        ours = [[row for row in cell if row["implementation"] != "torch"] for cell in own]
        for what, is_counted in (("choice", lambda name: name == "cki"), ("fastest", lambda name: True)):
            ratios = [
                max(row["vs_torch"] for row in cell if is_counted(row["implementation"])) for cell in ours
            ]
            mean = math.exp(float(np.mean(np.log(ratios))))
            lines.append(f"{count} rows, {what}: {mean:.3f} of torch in the mean, least {min(ratios):.3f}")
    return lines


def main() -> None:
    """Measures and writes gemm_llama.csv."""
    parser = argparse.ArgumentParser(description="time of Llama-8B's products")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--product", nargs="+", default=list(PRODUCTS), help="DEPTHxCOLUMNS")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--dtype", choices=("bf16", "f16"), default="bf16")
    parser.add_argument("--without", action="append", default=[], help="part of a candidate's name")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    without: list[str] = arguments.without
    if arguments.worker:
        worker([LinearProblem(**fields) for fields in json.loads(arguments.worker)], without)
        return
    common.require_gpu()
    problems = []
    for rows, layout, product in itertools.product(arguments.rows, arguments.layout, arguments.product):
        depth, columns = (int(extent) for extent in product.split("x"))
        problems.append(LinearProblem(rows, depth, columns, "", arguments.dtype, layout))
    compile_ahead(problems, without)
    measured: list[dict[str, Any]] = []
    while problems:
        found, done, at_work = run_worker(problems, without)
        measured += found
        problems = problems[done:]
        if problems:
            print(f"{gemm_skinny.text_of(problems[0])} {problems[0].layout}: ended at {at_work}", flush=True)
            culprit = at_work.partition(" (")[0]
            if culprit in candidates(problems[0]) and culprit not in without:
                without = [*without, culprit]
            else:
                problems = problems[1:]
    common.write_csv("gemm_llama", measured)
    print("\n".join(means(measured)))


if __name__ == "__main__":
    main()
