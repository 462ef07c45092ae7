"""The Hopper attention kernel: all candidates checked, then timed in turn with the generic kernel, cuDNN and FA3.

    python bench/attention.py --hopper                                 # all cells, about 8 minutes on an H200
    python bench/attention.py --hopper --chosen                        # the heuristics' choices alone, 2 minutes
    python bench/attention.py --hopper --chosen --dtype f16            # in f16: results/attention_hopper_f16.csv
    python bench/attention.py --hopper --shape 2x8192x16x128:causal --dtype bf16
    python bench/attention.py --hopper --variant block_keys=112   # the choices, beside them with a field changed

Two phases.  First each distinct kernel is checked in a worker process (the bound of the tests, on a shape that wraps
the rings); a worker that dies or is silent for a minute costs its candidate only, not the run.  Then all sound
candidates and the others of a shape are captured as graphs and replayed in turn, one replay each a round, so that the
clock's drift hits all alike.  A shape's rows are written when it is done: results/attention_hopper.csv, with
`vs_generic`, `vs_cudnn`, `vs_fa3` as their time over the candidate's, and `of_gemm` as the share of cuBLAS's rate with
products of 8192 x 8192 matrices, in turn with them.  The last lines name the best candidate of each shape
and the geometric mean over shapes of the best peer's time over ours.

FA3 is measured where `flash_attn_interface` can be imported.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import math
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import attention
import common
import numpy as np
from attention import Shape

from cki import cache, dtypes
from cki.device import DeviceInfo, sim_device
from cki.heuristics.attention import choose_tiles, padded
from cki.heuristics.attention_hopper import SCHEDULES, HopperTiles, choose_hopper_tiles
from cki.operand import dense
from cki.ops.attention import plan_attention

DIMS = (64, 128, 256)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
SILENCE_SECONDS = 60
ROUNDS = 20


def cells(dtype: str = "bf16") -> list[tuple[str, str]]:
    """(shape, dtype): 16384 tokens of width 2048, then in f16 BERT-large at 4 sequences."""
    grid = [(d, c, n) for d in DIMS for c in ("", ":causal") for n in TOKENS]
    found = [(f"{16384 // n}x{n}x{2048 // d}x{d}{c}", dtype) for d, c, n in grid]
    return found + [(f"4x{n}x16x64", "f16") for n in (128, 512, 1024, 2048, 4096)]


def with_field(tiles: HopperTiles, text: str) -> HopperTiles:
    """Tiles with a field changed: `block_keys=160`, `ping_pong=False`, `schedule='fixed'`."""
    name, _, value = text.partition("=")
    return dataclasses.replace(tiles, **{name: ast.literal_eval(value)})


def tuning_candidates(
    head_dim: int, value_dim: int, has_limits: bool, device: DeviceInfo
) -> tuple[HopperTiles, ...]:
    """For padded head dimensions: tiles, stages, turns, schedules."""
    widest = max(head_dim, value_dim)
    shapes: tuple[tuple[int, int, int], ...]
    if widest <= 64:
        shapes = ((3, 128, 2), (3, 128, 3), (2, 192, 2), (2, 128, 3), (3, 112, 2))
    elif widest <= 96:
        shapes = ((2, 176, 2), (2, 128, 2), (2, 144, 2))
    elif widest <= 128:
        shapes = ((2, 176, 2), (2, 128, 2), (2, 160, 2), (2, 144, 2))
    elif widest <= 192:
        shapes = ((2, 128, 2), (2, 112, 2), (2, 96, 2), (2, 80, 2))
    else:
        shapes = ((2, 80, 2), (2, 64, 2))
    best = choose_hopper_tiles(16384, 16, head_dim, value_dim, has_limits, True, device)
    candidates = [best, *(HopperTiles(*shape, schedule=best.schedule) for shape in shapes)]
    candidates += [dataclasses.replace(best, schedule=other) for other in SCHEDULES if other != best.schedule]
    candidates += [dataclasses.replace(best, ping_pong=False)]
    if (
        widest <= 128
    ):  # short sequences: small tiles, whose blocks overlap each other instead of their own warpgroups
        keys = 128 if widest <= 64 else 64
        candidates += [HopperTiles(1, keys, 2, False, schedule, 2) for schedule in ("single", best.schedule)]
    candidates = list(dict.fromkeys(candidates))
    return tuple(
        c for c in candidates if c.shared_memory(head_dim, value_dim) * c.blocks_per_sm <= 227 * 1024
    )


def candidates(shape: Shape, variants: Sequence[str] = ()) -> dict[str, HopperTiles]:
    """Tiles by name, the heuristics' own choice first, then its variants (fields to change, joined by commas) as far as
    they fit an SM, or without variants all tuning candidates."""
    dim, device = padded(shape.dim), sim_device("sm_90a")  # the sizes of an H200
    chosen = choose_hopper_tiles(
        shape.tokens, shape.batch * shape.heads, dim, dim, shape.causal, True, device
    )
    varied = [functools.reduce(with_field, text.split(","), chosen) for text in variants]
    fitting = [
        t
        for t in varied
        if t.shared_memory(dim, dim) * t.blocks_per_sm <= device.shared_memory_per_block
        and t.weights_ahead(dim, False) <= t.weights_before_values <= t.block_keys // 2
    ]
    others = fitting if variants else tuning_candidates(dim, dim, shape.causal, device)
    return {f"hopper {tiles}": tiles for tiles in (chosen, *others)}


def check_shape(shape: Shape) -> Shape:
    """A small shape that compiles to the same kernels: several tiles of queries for a few blocks, rings wrapped."""
    return shape._replace(batch=2, tokens=1111)


class Kernel(NamedTuple):
    """A candidate of a shape, to be checked."""

    text: str
    dtype: str
    name: str

    @property
    def distinct(self) -> tuple[int, bool, str, str]:
        """The same for shapes that take the same kernel."""
        shape = attention.parse(self.text, self.dtype)
        return shape.dim, shape.causal, self.dtype, self.name


def compile_ahead(kernels: Sequence[Kernel], variants: Sequence[str]) -> None:
    """Fills the cache with the kernels, several at a time: the worker would compile one after the other."""
    device = sim_device("sm_90a")  # an H200's sizes

    def compile_one(kernel: Kernel) -> None:
        shape = check_shape(attention.parse(kernel.text, kernel.dtype))
        size = (shape.batch, shape.tokens, shape.heads, shape.dim)
        q, k, v, out = (dense(name, size, getattr(dtypes, kernel.dtype)) for name in ("q", "k", "v", "out"))
        tiles = candidates(attention.parse(kernel.text, kernel.dtype), variants)[kernel.name]
        for step in plan_attention(q, k, v, out, device=device, causal=shape.causal, tiles=tiles):
            cache.get(step.kernel, "sm_90a")

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, kernels))


def worker(kernels: Sequence[Kernel], variants: Sequence[str]) -> None:
    """Checks candidates; one line before and one after each."""
    for index, (text, dtype, name) in enumerate(kernels):
        print(f"BEGIN {index}", flush=True)
        shape = check_shape(attention.parse(text, dtype))
        inputs = attention.make_inputs(shape, 0)
        run = attention.cki_call(shape, candidates(attention.parse(text, dtype), variants)[name])
        try:
            for _ in range(3):  # the dynamic schedule's counter is used again
                attention.check(shape, run, inputs, name)
        except SystemExit as error:
            print(f"WRONG {index} {error}", flush=True)
        else:
            print(f"SOUND {index}", flush=True)


def sound(kernels: Sequence[Kernel], variants: Sequence[str]) -> list[Kernel]:
    """The candidates that compute the right thing; prints what is wrong with the others."""
    left, good = list(kernels), []
    while left:
        script = [sys.executable, str(Path(__file__).with_name("attention.py"))]
        script += [argument for text in variants for argument in ("--variant", text)]
        words = [word for kernel in left for word in kernel]
        process = subprocess.Popen([*script, "--hopper-worker", *words], stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        asked, current = list(left), left[0]
        try:
            while (line := lines.get(timeout=SILENCE_SECONDS)) is not None:
                word, _, rest = line.strip().partition(" ")
                if word not in ("BEGIN", "SOUND", "WRONG"):
                    continue
                index, _, problem = rest.partition(" ")
                current = asked[int(index)]
                if word != "BEGIN":
                    left.remove(current)
                    good += [current] if word == "SOUND" else []
                if word == "WRONG":
                    print(f"{current.text} {current.dtype}: {problem}", flush=True)
            failure = f"worker ended with {process.wait()}"
        except queue.Empty:
            process.kill()
            failure = f"silent for {SILENCE_SECONDS} s"
        if left:
            print(f"{current.text} {current.dtype}: {current.name}: {failure}", flush=True)
            left.remove(current)
    return good


def _forward(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def fa3_call(shape: Shape) -> Callable[..., Any] | None:
    """FlashAttention-3's function, or None where it is not installed."""
    try:
        attend = importlib.import_module("flash_attn_interface").flash_attn_func
    except ImportError:
        return None
    return lambda q, k, v, out: attend(q, k, v, causal=shape.causal)


def generic_call(shape: Shape) -> Callable[..., Any]:
    """The kernel for every GPU, which the heuristics no longer choose here."""
    dim, itemsize = padded(shape.dim), 2
    return attention.cki_call(
        shape, choose_tiles(shape.tokens, dim, dim, itemsize, True, sim_device("sm_90a"))
    )


GEMM, GEMM_SIZE = "cublas", 8192


def gemm_call(dtype: str) -> Callable[..., Any]:
    """One product of square matrices, whatever the arguments."""
    import torch

    a, b = (
        torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").to(getattr(torch, attention.TORCH[dtype]))
        for _ in "ab"
    )
    out = torch.empty_like(a)
    return lambda *_: torch.matmul(a, b, out=out)


def measure(
    text: str, dtype: str, names: Sequence[str], variants_asked: Sequence[str], with_generic: bool
) -> list[dict[str, object]]:
    """Rows of one shape, all implementations in turn."""
    shape = attention.parse(text, dtype)
    tiles = candidates(shape, variants_asked)
    variants: dict[str, Callable[..., Any]] = {"generic": generic_call(shape)} if with_generic else {}
    variants |= {name: attention.cki_call(shape, tiles[name]) for name in names}
    variants["cudnn"] = attention.torch_call(shape, "cudnn")
    if (fa3 := fa3_call(shape)) is not None:
        variants["fa3"] = fa3
    inputs = common.rotated(lambda seed: attention.make_inputs(shape, seed), shape.nbytes, limit=8)
    times = common.graph_times_in_turn(variants | {GEMM: gemm_call(dtype)}, inputs, rounds=ROUNDS)
    gemm_rate = 2 * GEMM_SIZE**3 / times.pop(GEMM).median_us
    rows = []
    for name, timing in times.items():
        ratios = {
            f"vs_{other}": round(times[other].median_us / timing.median_us, 3)
            for other in ("generic", "cudnn", "fa3")
            if other in times and other != name
        }
        rows.append(
            common.row(
                "attention",
                str(shape),
                dtype,
                name,
                timing,
                nbytes=shape.nbytes,
                flops=shape.flops,
                **ratios,
                of_gemm=round(shape.flops / timing.median_us / gemm_rate, 3),
            )
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The best candidate of each shape, its ratio to the best peer, and the geometric mean of these ratios."""
    lines, ratios = [], []
    for key in dict.fromkeys((row["problem"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["problem"], row["dtype"]) == key]
        peers = [row["median_us"] for row in own if row["implementation"] in ("cudnn", "fa3")]
        ours = [row for row in own if str(row["implementation"]).startswith("hopper")]
        if not ours or not peers:
            continue
        best = min(ours, key=lambda row: row["median_us"])
        ratios.append(min(peers) / best["median_us"])
        share = f", {best['of_gemm']:.0%} of the GEMM rate" if "of_gemm" in best else ""
        lines.append(
            f"{ratios[-1]:.3f}  {key[0]} {key[1]}: {best['implementation']}, {best['median_us']} us{share}"
        )
    if ratios:
        lines.append(
            f"{math.exp(float(np.mean(np.log(ratios)))):.3f}  geometric mean of {len(ratios)} shapes"
        )
    return lines


def comparison(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each shape the best peer's time over each candidate's, medians and 10th percentiles."""
    lines = []
    for key in dict.fromkeys((row["problem"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["problem"], row["dtype"]) == key]
        peers = [row for row in own if row["implementation"] in ("cudnn", "fa3")]
        times = ", ".join(f"{row['implementation']} {row['median_us']} us" for row in peers)
        lines.append(f"{key[0]} {key[1]}: {times}")
        for row in own:
            if peers and row not in peers:
                median, least = (
                    min(peer[column] for peer in peers) / row[column] for column in ("median_us", "p10_us")
                )
                lines.append(f"  {median:.3f} {least:.3f}  {row['implementation']}")
    return lines


def run(
    wanted: Sequence[tuple[str, str]],
    only_chosen: bool = False,
    variants: Sequence[str] = (),
    name: str = "attention_hopper",
) -> None:
    """Checks, times, writes the CSV of that name after every shape, prints the summary.

    only_chosen: the heuristics' choice alone, or with `variants` of it."""
    common.require_gpu()
    count = 1 if only_chosen and not variants else None
    kernels = {
        (text, dtype): [
            Kernel(text, dtype, name)
            for name in list(candidates(attention.parse(text, dtype), variants))[:count]
        ]
        for text, dtype in wanted
    }
    distinct = {kernel.distinct: kernel for found in kernels.values() for kernel in found}
    compile_ahead(list(distinct.values()), variants)
    good = {kernel.distinct for kernel in sound(list(distinct.values()), variants)}
    rows: list[dict[str, object]] = []
    for text, dtype in wanted:
        names = [kernel.name for kernel in kernels[text, dtype] if kernel.distinct in good]
        rows += measure(text, dtype, names, variants, with_generic=not (only_chosen or variants))
        with contextlib.redirect_stdout(io.StringIO()):  # the table grows with every shape
            common.write_csv(name, rows)
        print(f"measured {text} {dtype}", flush=True)
    print("\n".join((comparison(rows) if variants else []) + summary(rows)))
