"""bench/gemm.py --skinny as far as it goes without a GPU: cells, candidates, a worker's words, summary, a result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import cki
import cki.reference
from cki.device import sim_device
from cki.heuristics.linear_skinny import MAX_ROWS

H200 = sim_device("sm_90a")


@pytest.fixture
def skinny(script):
    return script("gemm_skinny")


def problem_of(skinny, text: str, layout: str = "in_out"):
    return skinny.LinearProblem(*skinny.gemm._shape(text), "bf16", layout)


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_cells(skinny, layout):
    for text in skinny.SHAPES:
        problem = problem_of(skinny, text, layout)
        assert skinny.text_of(problem) == text
        assert problem.rows <= MAX_ROWS
        tiles = skinny.candidates(problem, H200)
        assert f"skinny {skinny.chosen(problem, H200)}" in tiles
        serial = [name for name in tiles if name.endswith("serial")]
        assert {name.removesuffix("serial") for name in serial} < set(tiles)
        assert len(serial) >= 5


def test_a_worker_s_words(skinny):
    row = {"implementation": "torch", "median_us": 1.5}
    output = f"noise\nBEGIN a\nBEGIN b\nWRONG b: error 3\nBEGIN timing\nROW {json.dumps(row)}\n"
    assert skinny.parse(output) == ([row], ["b: error 3"], "timing")


def test_a_candidate_that_kills_the_worker_is_left_out(skinny, monkeypatch, capsys):
    started = []

    def run(script, **_):
        names = script[5:]
        started.append(names)
        row = json.dumps({"implementation": names[1]})
        output = f"BEGIN {names[1]}\n" if len(started) == 1 else f"BEGIN timing\nROW {row}\n"
        return skinny.subprocess.CompletedProcess(script, -11, output)

    monkeypatch.setattr(skinny.subprocess, "run", run)
    rows = skinny.measure(problem_of(skinny, "8x4096x4096"))
    assert started[1] == [name for name in started[0] if name != started[0][1]]
    assert rows == [{"implementation": started[1][1]}]
    assert f"{started[0][1]}: worker ended with -11" in capsys.readouterr().out


def test_a_worker_that_dies_by_itself_ends_its_shape(skinny, monkeypatch, capsys):
    monkeypatch.setattr(skinny, "Path", lambda _: Path("/nowhere/gemm_skinny.py"))
    assert skinny.measure(problem_of(skinny, "8x4096x4096")) == []
    assert "start: worker ended with 2" in capsys.readouterr().out


def test_summary(skinny):
    common = {"problem": "8x4096x4096", "dtype": "bf16", "layout": "in_out", "predicted_us": 10.1}
    figures = {"torch": (12.0, 1.0, 0.7), "skinny a": (10.0, 1.2, 0.84), "skinny b": (9.6, 1.25, 0.87)}
    rows = [
        {
            **common,
            "implementation": n,
            "median_us": t,
            "vs_torch": v,
            "of_copy": c,
            "chosen": n == "skinny a",
        }
        for n, (t, v, c) in figures.items()
    ]
    assert skinny.summary(rows) == [
        "1.250 of torch, 0.870 of copy  8x4096x4096 bf16 in_out: skinny b, 9.6 us; chosen: skinny a 10.0 us, "
        "predicted 10.1",
        "1.250 of torch: geometric mean of 1 shapes, least 1.250",
        "0.870 of copy: the least up to 16 rows",
    ]


def test_more_rows_are_refused(skinny, monkeypatch):
    monkeypatch.setattr(skinny.common, "require_gpu", lambda: None)
    with pytest.raises(SystemExit, match="65x4096x4096: the kernel is for up to 64 rows"):
        skinny.run([problem_of(skinny, "65x4096x4096")])


def test_a_variant_computes_the_layer(skinny):
    generator = np.random.default_rng(0)
    x, w, bias, residual = (
        generator.standard_normal(shape).astype(np.float16) for shape in ((7, 520), (520, 64), (64,), (7, 64))
    )
    y = np.full_like(residual, np.nan)
    problem = skinny.LinearProblem(7, 520, 64, "residual", "f16", "in_out")
    tile = skinny.chosen(problem, H200)
    with cki.device("sim"):
        skinny.gemm.cki_call(problem, tile)(x, w, bias, residual, y)
    expected = cki.reference.linear(x, w, bias, residual=residual)
    assert np.abs(y - expected).max() < np.abs(expected).max() * 2.0**-10
