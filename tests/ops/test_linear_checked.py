"""linear and encoder_layer under the simulated device's checks: late copies, poisoned memory, races, bounds."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.heuristics.linear import TILES_16BIT, TILES_FP32, Tile
from tests.compare import assert_close
from tests.ops.inputs import F16, F32, normal
from tests.ops.linear_cases import linear_with_tile, plain
from tests.orders import seeds_of

#: Rings of two and three stages in a small tile, and one whose warps split rows and columns.
SHALLOW = Tile(16, 64, 1, 4, 2, 3, 128, 1.0, 1.0)
CASES = {
    "f16, ring of two": (SHALLOW, F16, "in_out", (17, 66, 330), 0),
    "f16, copies of two bytes": (SHALLOW, F16, "out_in", (3, 65, 327), 0),
    "f16, copies of 8 and 4 bytes": (SHALLOW, F16, "in_out", (17, 66, 332), 0),
    "f16, strided x": (SHALLOW, F16, "out_in", (17, 64, 330), 2),
    "f16, four warps in a square": (TILES_16BIT[2], F16, "in_out", (65, 72, 584), 0),
    "f32, ring of two": (SHALLOW, F32, "in_out", (17, 66, 163), 0),
    "f32, four warps in a square": (TILES_FP32[2], F32, "out_in", (65, 70, 292), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_twenty_orders_of_every_check(case):
    """The ring wraps at least twice; the result has the same bits in every order."""
    tile, dtype, layout, (rows, columns, depth), step = CASES[case]
    assert depth * dtype.itemsize > 2 * tile.stages * 128
    x = normal((rows, depth * max(step, 1)), dtype, 1)[:, :: max(step, 1)]
    w = normal((depth, columns) if layout == "in_out" else (columns, depth), dtype, 2, scale=depth**-0.5)
    bias, residual = normal((columns,), dtype, 3), normal((rows, columns), dtype, 4)
    options = {"residual": residual, "activation": "gelu", "weight_layout": layout}
    with cki.device("sim"):
        with cki.sim.checks(
            races=True
        ):  # the same build as below: the host compiler contracts a*b + c as it likes
            expected = linear_with_tile(tile, x, w, bias, **options)
        for seed in seeds_of(list(CASES).index(case)):
            with cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed):
                got = linear_with_tile(tile, x, w, bias, **options)
            assert np.array_equal(got, expected), f"seed {seed}"
    assert_close(expected, cki.reference.linear(x, w, bias, **options), plain(x, w, bias, **options))


def test_repair_of_infinities_checked():
    x, w = normal((17, 163), F32, 1), np.abs(normal((163, 66), F32, 2))
    x[2, 7] = np.inf
    with cki.device("sim"), cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True):
        y = linear_with_tile(SHALLOW, x, w)
    assert np.all(y[2] == np.inf)
    assert np.all(np.isfinite(np.delete(y, 2, 0)))


@pytest.mark.parametrize("pre_ln", [False, True])
def test_encoder_layer_checked(pre_ln):
    """One workspace serves several launches: a step that read what another has overwritten would show."""
    batch, seq, hidden, heads = 2, 5, 48, 3
    shapes = [(hidden, hidden)] * 4 + [(hidden, 2 * hidden), (2 * hidden, hidden)]
    weights = [normal(shape, F16, seed, scale=shape[0] ** -0.5) for seed, shape in enumerate(shapes)]
    x = normal((batch, seq, hidden), F16, 9)
    mask = np.arange(seq) < np.array([[seq], [2]])
    options = {"mask": mask, "num_heads": heads, "head_dim": hidden // heads, "pre_ln": pre_ln}
    with cki.device("sim"):
        with cki.sim.checks(races=True):
            expected = cki.encoder_layer(x, *weights, **options)
        for seed in seeds_of(pre_ln):
            with cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed):
                assert np.array_equal(cki.encoder_layer(x, *weights, **options), expected), f"seed {seed}"
