"""bench/norms.py as far as it goes without a GPU: overrides, byte counts, and its variants on the simulated device."""

from __future__ import annotations

import numpy as np
import pytest

import cki
import cki.reference
from cki.device import sim_device
from cki.heuristics.norm import choose


@pytest.fixture
def norms(script):
    return script("norms")


def test_bytes_and_shape(norms):
    problem = norms.Problem("add_layer_norm", 4, 1000, "bf16")
    assert problem.nbytes == 4 * 1000 * 2 * 4
    shape = problem.row_shape()
    assert (shape.size, shape.inputs, shape.weights, shape.centred) == (8, 2, 2, True)


def test_overrides(norms):
    chosen = choose(norms.Problem("rms_norm", 16384, 4096, "bf16").row_shape(), sim_device("sm_90a"))
    config = norms.overridden(chosen, 4096, "threads_per_row=256,vectors_per_thread=2,prefetch=1")
    assert (config.threads, config.vectors_per_thread, config.prefetch, config.full_row) == (
        256,
        2,
        True,
        True,
    )
    with pytest.raises(SystemExit, match="no field 'warps'; there are: blocks_per_sm, hold_weight"):
        norms.overridden(chosen, 4096, "warps=3")
    with pytest.raises(SystemExit, match="covers 2048 of 4096 columns"):
        norms.overridden(chosen, 4096, "threads_per_row=64")


@pytest.mark.parametrize("op", ["rms_norm", "add_layer_norm"])
def test_variants_compute_the_norm(norms, op):
    problem = norms.Problem(op, 3, 64, "f32")
    x, residual = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    weight, y, s = x[0].copy(), np.empty_like(x), np.empty_like(x)
    affine = (weight,) * (2 if problem.norm == "layer_norm" else 1)
    added = {"residual": residual} if problem.adds else {}
    expected = getattr(cki.reference, problem.norm)(x, *affine, **added)
    expected = expected[0] if problem.adds else expected
    device = sim_device("sm_90a")
    for config in (None, choose(problem.row_shape(), device)):
        y.fill(np.nan)
        with cki.device("sim"):
            norms.cki_call(problem, config)(
                x, residual if problem.adds else None, weight, y, s if problem.adds else None
            )
        assert np.abs(y - expected).max() < 1e-5
