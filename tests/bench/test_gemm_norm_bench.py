"""bench/gemm_norm.py as far as it goes without a GPU: every implementation of ours is what it says."""

from __future__ import annotations

import pytest

import cki
from cki.heuristics.linear_hopper import HopperTile

pytest.importorskip("torch")


@pytest.fixture
def norm(script, monkeypatch):
    gemm_norm = script("gemm_norm")
    # Small products would not take the kernel.
    monkeypatch.setattr(gemm_norm, "fused_norm_tile", lambda *_, **__: HopperTile(64, 64, 2, True))
    return gemm_norm


def test_shapes_take_the_folded_kernel(norm):
    for rows, depth, columns, epilogue in map(norm.gemm._shape, norm.SHAPES):
        assert depth % norm.STATISTICS_COLUMNS == 0 and rows >= 512
        assert (epilogue == "gelu") == (columns == 4 * depth)  # as compile_ahead takes it


@pytest.mark.parametrize("epilogue", ["", "gelu"])
def test_implementations(norm, epilogue):
    problem = norm.LinearProblem(70, 128, 192, epilogue, "f16", "in_out")
    inputs = norm.make_inputs(problem, 0, "cpu")
    with cki.device("sim"):
        for name, run in norm.implementations(problem).items():
            norm.check(problem, name, run, inputs)
        inputs.x[3] *= 2
        with pytest.raises(SystemExit, match="relative error"):
            norm.check(problem, "folded", norm.implementations(problem)["folded"], inputs)
