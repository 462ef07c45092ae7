"""The Hopper GEMM: all candidates checked, then timed in turn with cuBLASLt (torch) and the generic kernel.

    python bench/gemm.py --hopper                                           # all cells, about 8 minutes on an H200
    python bench/gemm.py --hopper --shape 8192x1024x4096:gelu --dtype bf16 --layout out_in
    python bench/gemm.py --hopper --candidate 128x128s6pp --candidate 64x64s8pp

Two phases.  First each distinct kernel is checked in a worker process, on a shape whose tiles are more than an H200's
SMs and walk through the rings twice; a worker that dies or takes too long costs its candidate only, not the run.  Then
all sound candidates and the others of a shape are captured as graphs and replayed in turn, one replay each a round, so
that the clock's drift hits all alike.  A shape's rows are written when it is done: results/gemm_hopper.csv, with
`vs_torch` and `vs_generic` as their time over the candidate's.  The last lines name the best candidate of each shape,
and the model's choice beside it; then the geometric mean of the best candidates' `vs_torch`.

torch's time is that of `addmm` and, where there is one, its separate GELU or addition; `torch, no epilogue` is `addmm`
alone, and shows what a hidden epilogue would cost.
"""

from __future__ import annotations

import contextlib
import io
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

from cki.device import sim_device
from cki.heuristics.linear import Tile, choose_tile
from cki.heuristics.linear_hopper import CANDIDATES, HopperTile, choose_hopper_tile

#: BERT-large's products at 512 to 16384 tokens, Llama-8B's at 64 and 2048, and large squares.
SHAPES = (
    "4096x4096x4096", "8192x8192x8192",
    *(f"{rows}x{shape}" for rows in (512, 2048, 8192, 16384)
      for shape in ("1024x3072", "1024x1024:residual", "1024x4096:gelu", "4096x1024:residual")),
    *(f"{rows}x{shape}" for rows in (64, 2048)
      for shape in ("4096x6144", "4096x4096:residual", "4096x28672", "14336x4096:residual")),
)  # fmt: skip
#: Seconds for a worker to check its candidates, most of them for compiling.
WORKER_SECONDS = 240
ROUNDS = 20


def candidates() -> dict[str, HopperTile]:
    """Tiles by name."""
    return {f"hopper {tile}": tile for tile in CANDIDATES}


def chosen(problem: LinearProblem) -> str:
    """The name of the model's choice on an H200."""
    tile = choose_hopper_tile(
        problem.rows, problem.columns, problem.depth, sim_device("sm_90a"), activation=problem.epilogue == "gelu",
        residual=problem.epilogue == "residual",
    )  # fmt: skip
    return f"hopper {tile}"


def generic_tile(problem: LinearProblem) -> Tile:
    """The generic kernel's choice on an H200."""
    return choose_tile(problem.rows, [problem.columns], problem.depth, 2, sim_device("sm_90a"))


def check_problem(problem: LinearProblem) -> LinearProblem:
    """A product that compiles to the same kernels: ends of tiles on all three axes, several tiles a block."""
    return problem._replace(rows=3337, depth=1608, columns=2056)


def worker(problem: LinearProblem, names: Sequence[str]) -> None:
    """Checks the named candidates; one line before and one after each."""
    problem = check_problem(problem)
    tiles, inputs = candidates(), gemm.make_inputs(problem, 0)
    for name in names:
        print(f"BEGIN {name}", flush=True)
        try:
            for _ in range(3):
                gemm.check(problem, gemm.cki_call(problem, tiles[name]), inputs, name)
        except SystemExit as error:
            print(f"WRONG {name}: {error}", flush=True)
        else:
            print(f"SOUND {name}", flush=True)


def sound(problem: LinearProblem, names: Sequence[str]) -> list[str]:
    """The candidates that compute the right thing; prints what is wrong with the others."""
    left, good = list(names), []
    while left:
        script = [
            sys.executable,
            str(Path(__file__).with_name("gemm.py")),
            "--hopper-worker",
            text_of(problem),
        ]
        script += [problem.dtype, problem.layout, *left]
        try:
            done = subprocess.run(
                script, stdout=subprocess.PIPE, text=True, timeout=WORKER_SECONDS, check=False
            )
            output, failure = done.stdout, f"worker ended with {done.returncode}"
        except subprocess.TimeoutExpired as error:
            printed = error.stdout or b""
            output = printed.decode() if isinstance(printed, bytes) else printed
            failure = f"not done after {WORKER_SECONDS} s"
        verdicts = parse(output)
        good += verdicts.sound
        for complaint in verdicts.wrong.values():
            print(complaint, flush=True)
        left = [name for name in left if name not in verdicts.sound and name not in verdicts.wrong]
        if left:  # the worker did not come to its end: the candidate that it was at is to blame
            culprit = verdicts.unfinished or left[0]
            print(f"{text_of(problem)} {problem.dtype}: {culprit}: {failure}", flush=True)
            left.remove(culprit)
    return good


class Verdicts:
    """What a worker said.  unfinished: the candidate that it began and gave no verdict on."""

    def __init__(self) -> None:
        self.sound: list[str] = []
        self.wrong: dict[str, str] = {}
        self.unfinished = ""


def parse(output: str) -> Verdicts:
    """A worker's lines."""
    verdicts = Verdicts()
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word == "BEGIN":
            verdicts.unfinished = rest
        elif word == "SOUND":
            verdicts.sound.append(rest)
            verdicts.unfinished = ""
        elif word == "WRONG":
            verdicts.wrong[verdicts.unfinished] = rest
            verdicts.unfinished = ""
    return verdicts


def text_of(problem: LinearProblem) -> str:
    """The shape as `--shape` takes it."""
    extents = f"{problem.rows}x{problem.depth}x{problem.columns}"
    return f"{extents}:{problem.epilogue}" if problem.epilogue else extents


def measure(problem: LinearProblem, names: Sequence[str]) -> list[dict[str, object]]:
    """Rows of one shape, all implementations in turn."""
    tiles = candidates()
    variants: dict[str, Callable[..., Any]] = {
        "torch": gemm.torch_call(problem), "generic": gemm.cki_call(problem, generic_tile(problem)),
    }  # fmt: skip
    if problem.epilogue:
        variants["torch, no epilogue"] = gemm.torch_call(problem._replace(epilogue=""))
    variants |= {name: gemm.cki_call(problem, tiles[name]) for name in names}
    inputs = common.rotated(lambda seed: gemm.make_inputs(problem, seed), problem.nbytes, limit=8)
    times = common.graph_times_in_turn(variants, inputs, rounds=ROUNDS)
    return [
        common.row(
            "linear", text_of(problem), problem.dtype, name, timing, nbytes=problem.nbytes, flops=problem.flops,
            layout=problem.layout, chosen=name == chosen(problem),
            vs_torch=round(times["torch"].median_us / timing.median_us, 3),
            vs_generic=round(times["generic"].median_us / timing.median_us, 3),
        )
        for name, timing in times.items()
    ]  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The best candidate of each shape with its ratio to torch, the model's choice, and the ratios' geometric mean."""
    lines, ratios = [], []
    for key in dict.fromkeys((row["problem"], row["dtype"], row["layout"]) for row in rows):
        own = [row for row in rows if (row["problem"], row["dtype"], row["layout"]) == key]
        ours = [row for row in own if str(row["implementation"]).startswith("hopper")]
        if not ours:
            continue
        best = min(ours, key=lambda row: row["median_us"])
        ratios.append(best["vs_torch"])
        guess = next(
            (f"; chosen: {r['implementation']} {r['vs_torch']:.3f}" for r in ours if r["chosen"]), ""
        )
        lines.append(
            f"{ratios[-1]:.3f}  {' '.join(key)}: {best['implementation']}, {best['median_us']} us{guess}"
        )
    if ratios:
        mean = math.exp(float(np.mean(np.log(ratios))))
        lines.append(f"{mean:.3f}  geometric mean of {len(ratios)} shapes, least {min(ratios):.3f}")
    return lines


def run(problems: Sequence[LinearProblem], tiles: Sequence[str] | None = None) -> None:
    """Checks, times, writes the CSV after every shape, prints the summary.  tiles: names of candidates; None: all."""
    common.require_gpu()
    wanted = list(candidates()) if tiles is None else [f"hopper {tile}" for tile in tiles]
    unknown = [name for name in wanted if name not in candidates()]
    if unknown:
        raise SystemExit(f"no candidate {', '.join(unknown)}; there are {', '.join(candidates())}")
    checked: dict[tuple[str, str, str], list[str]] = {}
    rows: list[dict[str, object]] = []
    for problem in problems:
        kernels = (problem.epilogue, problem.dtype, problem.layout)
        if kernels not in checked:
            checked[kernels] = sound(problem, wanted)
        rows += measure(problem, checked[kernels])
        with contextlib.redirect_stdout(io.StringIO()):  # the table grows with every shape
            common.write_csv("gemm_hopper", rows)
        print(f"measured {text_of(problem)} {problem.dtype} {problem.layout}", flush=True)
    print("\n".join(summary(rows)))
