"""bench/gemm_llama.py as far as it goes without a GPU: candidates, a worker that dies, the lines about a cell."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cki.heuristics.linear_skinny import SkinnyTile


@pytest.fixture
def llama(script):
    return script("gemm_llama")


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 2048])
def test_candidates(llama, rows, layout):
    for depth, columns in ((int(e) for e in product.split("x")) for product in llama.PRODUCTS):
        found = llama.candidates(llama.LinearProblem(rows, depth, columns, "", "bf16", layout))
        assert found.pop("cki") is None
        few = [tile for tile in found.values() if isinstance(tile, SkinnyTile)]
        assert bool(few) == (rows <= 64)
        assert len(found) - len(few) == {1: 0, 16: 0, 32: 20, 64: 20, 2048: 3}[rows]


def row(implementation: str, us: float, ratio: float) -> dict[str, object]:
    return {
        "problem": "1x2x3", "layout": "in_out", "implementation": implementation, "median_us": us, "vs_torch": ratio,
        "of_copy": 0.5,
    }  # fmt: skip


def test_a_worker_that_dies(llama, monkeypatch, capsys):
    lines = [
        "BEGIN copy",
        "BEGIN cki",
        *(f"ROW {json.dumps(row(*r))}" for r in (("torch", 3, 1), ("cki", 2, 1.5))),
    ]
    script = "\n".join(
        [*(f"print({line!r})" for line in [*lines, "DONE", "BEGIN skinny x"]), "raise SystemExit(7)"]
    )

    def popen(command, **options):
        return real([sys.executable, "-c", script], **options)

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    problem = llama.LinearProblem(1, 2, 3, "", "bf16", "in_out")
    rows, done, at_work = llama.run_worker([problem, problem], [])
    assert [r["implementation"] for r in rows] == ["torch", "cki"]
    assert (done, at_work) == (1, "skinny x")
    assert "1x2x3 in_out: cki 2 us, 1.500 of torch" in capsys.readouterr().out


def test_means(llama):
    rows = [row("torch", 8, 1), row("cki", 8, 1.0), row("skinny a", 4, 2.0)]
    assert llama.means(rows) == [
        "1 rows, choice: 1.000 of torch in the mean, least 1.000",
        "1 rows, fastest: 2.000 of torch in the mean, least 2.000",
    ]
