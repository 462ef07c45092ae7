"""The norm kernels under every check of the simulated device, and every candidate configuration on both devices."""

from __future__ import annotations

import numpy as np
import pytest

from cki.device import sim_device
from cki.heuristics.norm import RowConfig, RowShape, candidates
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, normal
from tests.ops.norm_cases import plain, run_configured, truth
from tests.orders import every_check, orders

# Configurations that reach each path with few threads: (name, configuration, rows, width).
SMALL = [
    ("part of a warp, masked", RowConfig("test", 1, 8, 8, 4), 13, 29),
    ("part of a warp, full", RowConfig("test", 8, 4, 8, 1, full_row=True), 13, 32),
    ("warps, walking", RowConfig("test", 4, 32, 2, 1, prefetch=True, blocks_per_sm=1), 9, 100),
    ("block of 2 warps", RowConfig("test", 8, 64, 1, 1), 3, 480),
    ("block of 3 warps, walking", RowConfig("test", 1, 96, 1, 2, prefetch=True, blocks_per_sm=1), 5, 131),
    (
        "block, walking, held weights",
        RowConfig("test", 8, 64, 1, 1, True, prefetch=True, hold_weight=True, blocks_per_sm=2),
        7,
        512,
    ),
    ("block of 10 warps", RowConfig("test", 2, 320, 1, 1, blocks_per_sm=1), 4, 602),
    ("long rows", RowConfig("test", 2, 64, 1, 0, blocks_per_sm=1), 4, 602),
]


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("case", range(len(SMALL)), ids=[s[0] for s in SMALL])
def test_small_shapes_under_every_check(device, op, case):
    """With a residual, which takes every path of the input; seeds vary the order of threads and the poison."""
    _, config, rows, width = SMALL[case]
    x, residual = normal((rows, width), BF16, 1), normal((rows, width), BF16, 2)
    x[0] = 1e19  # one row whose squares overflow: the scaled path and its extra reductions
    weight = normal((width,), BF16, 3)
    affine = (weight, weight) if op == "layer_norm" else (weight,)
    expected, stored = truth(op, x, *affine, residual=residual)
    read = stored.astype(BF16)[1:]
    for seed in orders(device, case):
        with every_check(device, seed):
            tensors = (device.array(x), device.array(weight), device.array(residual))
            y, s = run_configured(op, config, *tensors)
        assert np.array_equal(device.numpy(s).astype(np.float64), stored)
        assert_close(device.numpy(y)[1:], expected[1:], plain(op, read, *affine), f"seed {seed}")
        if op == "rms_norm":  # a constant row has no scale of its own after the mean is taken off
            first = device.numpy(y)[0].astype(np.float64)
            assert np.abs(first - expected[0]).max() < 2**-7 * np.abs(expected[0]).max()


def _candidates() -> list[tuple[str, str, int, RowConfig]]:
    found = []
    for op in ("layer_norm", "rms_norm"):
        for width in (1024, 4096):
            shape = RowShape(4096, width, 8, 2, 2, 1, 2 if op == "layer_norm" else 1, op == "layer_norm")
            found += [(op, "bf16", width, config) for config in candidates(shape, sim_device("sm_90a"))[1:]]
    return found


@pytest.mark.parametrize(
    ("op", "dtype", "width", "config"),
    _candidates(),
    ids=lambda value: f"{value.name}-{value.threads}" if isinstance(value, RowConfig) else str(value),
)
def test_every_candidate_is_right(device, op, dtype, width, config):
    """What the benchmark may choose on a GPU gives the same answer as what is chosen now."""
    rows = 2 * config.rows_per_block * max(1, config.blocks_per_sm) + 1
    x, weight = normal((rows, width), DTYPES[dtype], 1), normal((width,), DTYPES[dtype], 2)
    y = device.numpy(run_configured(op, config, device.array(x), device.array(weight)))
    affine = (weight, weight) if op == "layer_norm" else (weight,)
    assert_close(y, truth(op, x, *affine), plain(op, x, *affine))
