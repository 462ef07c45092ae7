"""What the linear kernel for few rows must do, asked for by its tiles, against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

import cki
import cki.reference
from cki.errors import UnsupportedError
from tests.compare import assert_close
from tests.ops.few_rows_cases import (
    EIGHT,
    FEW,
    FOUR,
    FULL,
    LAYOUTS,
    NARROW,
    OWN,
    REFILLED,
    SQUARE,
    WHOLE,
    check,
    require,
    weight,
)
from tests.ops.inputs import BF16, DTYPES, F16, F32, normal
from tests.ops.linear_cases import linear_into, linear_with_tile, plain
from tests.orders import every_check, orders

TILES = pytest.mark.parametrize("tile", FEW, ids=str)
DTYPE = pytest.mark.parametrize("dtype", list(DTYPES))

#: Rows, columns and K: less than a stage for each block, up to several rounds of the ring; ends inside tiles.
EXTENTS = ((1, 1, 1), (2, 7, 129), (3, 66, 33), (17, 130, 100), (8, 72, 1000), (40, 8, 72), (16, 63, 31))


@TILES
def test_extents(device, tile):
    """Types and weight orders in turn, so that each meets every extent in one tile or another."""
    dtypes, number = (F16, BF16, F32), FEW.index(tile)
    for i, (rows, columns, depth) in enumerate(EXTENTS):
        dtype, layout = dtypes[(number + i // 2) % len(dtypes)], LAYOUTS[(number + i) % 2]
        x, w = normal((rows, depth), dtype, 1), weight(depth, columns, dtype, layout)
        check(device, tile, x, w, weight_layout=layout)


@pytest.mark.parametrize("tile", [NARROW, FULL], ids=str)
def test_narrow_tiles(device, tile):
    """Their columns do not fill a multiple of 32, nor their warps a power of two; weights along K alone."""
    for rows, columns, depth in EXTENTS[1:]:
        dtype = BF16 if columns % 2 else F16
        bias, residual = normal((columns,), F32, 3), normal((rows, columns), dtype, 4)
        x, w = normal((rows, depth), dtype, 1), weight(depth, columns, dtype, "out_in")
        check(device, tile, x, w, bias, residual=residual, activation="gelu", weight_layout="out_in")
    with pytest.raises(UnsupportedError, match="another tile"):
        check(device, tile, normal((3, 64), F16, 1), weight(64, 96, F16, "in_out"))


CASES = [
    (WHOLE, "in_out", "f16"), (WHOLE, "out_in", "f32"), (FOUR, "in_out", "f32"), (FOUR, "out_in", "f16"),
    (EIGHT, "in_out", "f16"), (SQUARE, "out_in", "f32"), (OWN, "out_in", "f16"), (OWN, "in_out", "f32"),
    (NARROW, "out_in", "bf16"), (FULL, "out_in", "f16"), (REFILLED, "in_out", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "tile", "layout", "dtype"),
    [(i, *case) for i, case in enumerate(CASES)],
    ids=str,
)
def test_orders_of_every_check(device, case, tile, layout, dtype):
    """Every block's ring wraps more than twice; the result has the same bits in every order."""
    require(device, tile)
    size = DTYPES[dtype].itemsize
    rows, columns = tile.block_m + 1, 72
    rings = tile.warps_k if tile.own_rings else 1
    depth = (2 * tile.stages * rings + 1) * min(tile.split, 4) * 128 // size + 8
    x, w = normal((rows, depth), DTYPES[dtype], 1), weight(depth, columns, DTYPES[dtype], layout)
    bias, residual = normal((columns,), DTYPES[dtype], 3), normal((rows, columns), DTYPES[dtype], 4)
    tensors = [device.array(t) for t in (x, w, bias, residual)]
    options = {"activation": "silu", "weight_layout": layout}
    results = []
    for seed in orders(device, case, on_gpu=2):
        with every_check(device, seed):
            results.append(device.numpy(linear_with_tile(tile, *tensors, **options)))
    assert all(np.array_equal(result, results[0]) for result in results)
    truth = cki.reference.linear(x, w, bias, residual=residual, **options)
    assert_close(results[0], truth, plain(x, w, bias, residual=residual, **options))


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "relu"])
@DTYPE
def test_epilogues(device, dtype, activation):
    """With bias and residual, and without."""
    x, w = normal((5, 304), DTYPES[dtype], 1, scale=2.0), weight(304, 72, DTYPES[dtype], "in_out")
    residual = normal((5, 72), DTYPES[dtype], 4)
    check(device, FOUR, x, w, normal((72,), F32, 3), activation=activation, residual=residual)
    if dtype == "f16":
        check(device, WHOLE, x, w, activation=activation)


def test_columns_of_every_remainder(device):
    """Items of four columns and pairs of them that end anywhere."""
    for columns in range(61, 72):
        bias, residual = normal((columns,), F16, 3), normal((3, columns), F16, 4)
        x, w = normal((3, 264), F16, 1), weight(264, columns, F16, "out_in")
        check(device, FOUR, x, w, bias, residual=residual, weight_layout="out_in")


@TILES
def test_a_row_does_not_depend_on_the_others(device, tile):
    require(device, tile)
    x, w = normal((tile.block_m, 600), F16, 1), device.array(weight(600, 72, F16, "in_out"))
    together = device.numpy(linear_with_tile(tile, device.array(x), w))
    for rows in (slice(0, 1), slice(3, 9)):
        assert np.array_equal(together[rows], device.numpy(linear_with_tile(tile, device.array(x[rows]), w)))


@pytest.mark.parametrize("layout", LAYOUTS)
@DTYPE
def test_infinities_and_nan(device, dtype, layout):
    """In x, in one block's part of K each; the other rows are as they would be without."""
    x, w = normal((10, 200), DTYPES[dtype], 1), np.abs(weight(200, 72, DTYPES[dtype], layout))
    x[3, 5], x[4, 199], x[7, 2], x[8, 1], x[8, 150] = np.inf, -np.inf, np.nan, np.inf, -np.inf
    for tile in (WHOLE, FOUR):
        got = check(device, tile, x, w, weight_layout=layout)
        assert np.all(got[3] == np.inf)
        assert np.all(got[4] == -np.inf)
        assert np.all(np.isnan(got[7:9].astype(np.float32)))


@DTYPE
def test_strided_results_and_residual_in_place(device, dtype):
    """Rows of wider tensors at multiples of 16 bytes; bias, residual and result anywhere.  What lies beside stays."""
    require(device, FOUR)
    wide_x, wide_w = normal((5, 320), DTYPES[dtype], 1), normal((160, 96), DTYPES[dtype], 2, scale=0.1)
    wide, wide_bias = normal((5, 150), DTYPES[dtype], 4), normal((160,), DTYPES[dtype], 3)
    x, w, bias = wide_x[:, 8:152], wide_w[:144, 16:88], wide_bias[:144:2]
    for view in (lambda t: t[:, 8:80], lambda t: t[:, 1:73], lambda t: t[:, 0:144:2]):
        for tile in (WHOLE, FOUR):
            memory = device.array(wide)
            there = [device.array(t) for t in (wide_x, wide_w, wide_bias)]
            given = there[0][:, 8:152], there[1][:144, 16:88], there[2][:144:2]
            linear_into(tile, view(memory), *given, residual=view(memory))
            options = {"residual": view(wide)}
            got = device.numpy(memory).copy()
            assert_close(view(got), cki.reference.linear(x, w, bias, **options), plain(x, w, bias, **options))
            view(got)[...] = view(wide)
            assert np.array_equal(got, wide)


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (3, 0)])
def test_nothing_to_compute(device, rows, columns):
    require(device, FOUR)
    x, w = device.array(np.zeros((rows, 8), F16)), device.array(np.zeros((8, columns), F16))
    assert linear_with_tile(FOUR, x, w).shape == (rows, columns)
