"""bench/gemm.py --hopper as far as it goes without a GPU: cells, a worker's words, summary, a variant's result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cki
import cki.reference
from cki.device import sim_device
from cki.heuristics.linear_hopper import CANDIDATES, HopperTile, tile_count


@pytest.fixture
def hopper(script):
    return script("gemm_hopper")


def problem_of(hopper, text: str):
    return hopper.LinearProblem(*hopper.gemm._shape(text), "bf16", "in_out")


def test_cells(hopper):
    problems = [problem_of(hopper, text) for text in hopper.SHAPES]
    assert [hopper.text_of(problem) for problem in problems] == list(hopper.SHAPES)
    assert all(hopper.chosen(problem) in hopper.candidates() for problem in problems)
    # Kernels to compile and check, two seconds each.
    assert len({problem.epilogue for problem in problems}) * len(CANDIDATES) <= 60


def test_the_checked_shape_exercises_every_candidate(hopper):
    small = hopper.check_problem(problem_of(hopper, "8192x1024x4096:gelu"))
    for tile in CANDIDATES:
        assert tile_count(tile, small.rows, small.columns) > sim_device("sm_90a").sm_count
        assert small.depth > 2 * tile.stages * 64
        assert small.rows % tile.block_m and small.columns % tile.block_n and small.depth % 64


def test_a_worker_s_words(hopper):
    verdicts = hopper.parse("BEGIN a\nSOUND a\nBEGIN b\nWRONG b: error 3\nBEGIN c\n")
    assert verdicts.sound == ["a"]
    assert verdicts.wrong == {"b": "b: error 3"}
    assert verdicts.unfinished == "c"


def test_a_worker_that_dies_costs_one_candidate(hopper, monkeypatch, capsys):
    monkeypatch.setattr(hopper, "Path", lambda _: Path("/nowhere/gemm_hopper.py"))
    assert hopper.sound(problem_of(hopper, "8192x1024x4096"), ["hopper a", "hopper b"]) == []
    assert capsys.readouterr().out.count("worker ended with 2") == 2


def test_summary(hopper):
    common = {"problem": "p", "dtype": "bf16", "layout": "in_out"}
    times = {"torch": (12.0, 1.0), "generic": (30.0, 0.4), "hopper a": (12.5, 0.96), "hopper b": (10.0, 1.2)}
    rows = [
        {**common, "implementation": n, "median_us": t, "vs_torch": r, "chosen": n == "hopper a"}
        for n, (t, r) in times.items()
    ]
    assert hopper.summary(rows) == [
        "1.200  p bf16 in_out: hopper b, 10.0 us; chosen: hopper a 0.960",
        "1.200  geometric mean of 1 shapes, least 1.200",
    ]


def test_a_variant_computes_the_layer(hopper):
    generator = np.random.default_rng(0)
    x, w, bias, residual = (
        generator.standard_normal(shape).astype(np.float16) for shape in ((70, 72), (72, 64), (64,), (70, 64))
    )
    y = np.full_like(residual, np.nan)
    problem = hopper.LinearProblem(70, 72, 64, "residual", "f16", "in_out")
    with cki.device("sim"):
        hopper.gemm.cki_call(problem, HopperTile(64, 64, 2, True))(x, w, bias, residual, y)
    expected = cki.reference.linear(x, w, bias, residual=residual)
    assert np.abs(y - expected).max() < np.abs(expected).max() * 2.0**-11
