"""The linear kernel for few rows whose threads copy: what the one by TMA does not do (test_linear_few_rows.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cki
import cki.sim
from cki.errors import UnsupportedError
from cki.heuristics.linear_skinny import CANDIDATES, PAIR_TILE, ROUNDS_TILE, SkinnyTile, fits, preferred_tile
from tests.compare import assert_close
from tests.ops.few_rows_cases import FEW, LAYOUTS, PAIR, check, weight
from tests.ops.inputs import BF16, DTYPES, F16, F32, normal
from tests.ops.linear_cases import WEIGHT_VIEWS, linear_with_tile, plain

SMALL = pytest.mark.parametrize("tile", FEW, ids=str)

TILES = (*CANDIDATES, ROUNDS_TILE, PAIR_TILE)
SHAPES = list(dict.fromkeys(dataclasses.replace(tile, split=1) for tile in TILES))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_the_candidates(device, shape):
    """Its ring wraps in every block; rows and columns end inside a tile.  Splits, types and weight orders in turn."""
    index = SHAPES.index(shape)
    splits = [tile.split for tile in TILES if dataclasses.replace(tile, split=1) == shape]
    tile = dataclasses.replace(shape, split=splits[index % len(splits)])
    dtype, layout = (F16, BF16, F32)[index % 3], LAYOUTS[index // 3 % 2]
    if not fits(tile, dtype.itemsize, device.info, along_n=layout == "in_out"):
        dtype, layout = BF16, "out_in"
    if not fits(tile, dtype.itemsize, device.info, along_n=False):
        pytest.skip("not for this device")
    rows, columns = tile.block_m - 3, tile.block_n + 8
    depth = (tile.stages + 1) * tile.split * 128 // dtype.itemsize + 8
    bias, residual = normal((columns,), dtype, 3), normal((rows, columns), dtype, 4)
    x, w = normal((rows, depth), dtype, 1), weight(depth, columns, dtype, layout)
    check(device, tile, x, w, bias, residual=residual, activation="gelu_tanh", weight_layout=layout)


def test_the_architectures_before_clusters():
    x, w, bias = normal((9, 530), F16, 1), weight(530, 70, F16, "in_out"), normal((70,), F16, 3)
    for arch in ("sm_80", "sm_89"):
        with cki.device("sim", arch=arch), cki.sim.checks(adversarial=True, hazards=True, races=True):
            y = linear_with_tile(SkinnyTile(16, 64, 1, 4, 5), x, w, bias)
        assert_close(y, cki.reference.linear(x, w, bias), plain(x, w, bias))


# --- places -----------------------------------------------------------------------------------------------------------


@SMALL
def test_strided_x(device, tile):
    w, wide = weight(24, 40, F16, "in_out"), normal((4, 6, 5, 64), F16, 1)
    views = {
        "columns of a wider tensor": lambda t: t[0, 0, :, 8:32],
        "from an odd element on": lambda t: t[0, 0, :, 1:25],
        "every second column": lambda t: t[0, :2, :, 4:52:2],
        "a slice of the middle axis": lambda t: t[:2, 1:3, :, :24],
        "permuted leading axes": lambda t: t[:2, :2].transpose(2, 0, 1, 3)[..., :24],
        "one row": lambda t: t[3, 2, 1, :24],
    }
    for what, view in views.items():
        y = linear_with_tile(tile, view(device.array(wide)), device.array(w))
        x = view(wide)
        assert_close(device.numpy(y), cki.reference.linear(x, w), plain(x, w), what)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_strided_weight(device, dtype):
    x, wide = normal((5, 24), DTYPES[dtype], 1), normal((80, 96), DTYPES[dtype], 2, scale=0.2)
    for what, view in WEIGHT_VIEWS.items():
        w = view(wide)
        y = linear_with_tile(PAIR, device.array(x), view(device.array(wide)))
        assert_close(device.numpy(y), cki.reference.linear(x, w), plain(x, w), what)


def test_more_row_axes_than_a_launch_indexes(device):
    wide, w, order = normal((2, 3, 2, 3, 2, 16), F16, 1), weight(16, 8, F16, "in_out"), (4, 1, 3, 0, 2, 5)
    bias, residual = normal((8,), F16, 3), normal((2, 3, 3, 2, 2, 8), F16, 4)
    y = linear_with_tile(PAIR, device.array(wide).transpose(order), *map(device.array, (w, bias, residual)))
    x = wide.transpose(order)
    options = {"residual": residual}
    assert_close(device.numpy(y), cki.reference.linear(x, w, bias, **options), plain(x, w, bias, **options))


def test_strided_bias(device):
    x, w, wide = normal((5, 72), F16, 1), weight(72, 40, F16, "in_out"), normal((80,), F16, 3)
    y = linear_with_tile(PAIR, device.array(x), device.array(w), device.array(wide)[::2])
    assert_close(device.numpy(y), cki.reference.linear(x, w, wide[::2]), plain(x, w, wide[::2]))


# --- nothing to do ----------------------------------------------------------------------------------------------------


@SMALL
def test_no_depth(device, tile):
    bias, residual = normal((6,), F32, 3), normal((3, 6), F32, 4)
    zeros = np.zeros((3, 0), F32), np.zeros((0, 6), F32)
    check(device, tile, *zeros, bias, activation="gelu", residual=residual)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_largest_fp32_numbers(device):
    """tf32 rounds these to infinity."""
    largest = np.float32(np.finfo(np.float32).max)
    w = device.array(np.array([[1.0, 0.5, -1.0]], F32))
    got = device.numpy(linear_with_tile(PAIR, device.array(np.full((1, 1), largest)), w))
    assert np.array_equal(got, [[largest, largest / 2, -largest]])


def test_fp32_is_accurate_over_a_long_depth(device):
    """Sums of one sign: an accumulator that truncates would lose in proportion to the depth."""
    x, w = np.abs(normal((3, 20000), F32, 1)), np.abs(weight(20000, 4, F32, "out_in"))
    y = linear_with_tile(PAIR, device.array(x), device.array(w), weight_layout="out_in")
    truth = cki.reference.linear(x, w, weight_layout="out_in")
    assert np.max(np.abs(device.numpy(y) - truth) / truth) < 2e-6


def test_large_magnitudes_stay_finite(device):
    """Products and sums past fp16's range, of either sign in either block's part, whose result is inside it."""
    x = np.full((3, 512), 200.0, F16)
    w = np.concatenate([np.full((256, 8), 200.0, F16), np.full((256, 8), -200.0, F16)])
    assert np.all(check(device, PAIR, x, w) == 0)


# --- the choice and refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_taken_unasked(device, layout):
    """4 MB of weight, one row: cki.linear's result has the bits of this kernel's by the chosen tile."""
    x, w = normal((1, 2048), F16, 1), weight(2048, 1024, F16, layout)
    options = {"weight_layout": layout}
    tile = preferred_tile(1, 1024, 2048, 2, device.info, along_n=layout == "in_out", copy_width=16)
    assert tile is not None
    tensors = device.array(x), device.array(w)
    got = device.numpy(cki.linear(*tensors, **options))
    assert np.array_equal(got, device.numpy(linear_with_tile(tile, *tensors, **options)))
    assert_close(got, cki.reference.linear(x, w, **options), plain(x, w, **options))


def test_tiles_that_a_device_cannot_run_are_refused():
    x, w = normal((2, 64), F16, 1), weight(64, 64, F16, "in_out")
    with cki.device("sim", arch="sm_80"), pytest.raises(UnsupportedError, match="sm_80"):
        linear_with_tile(PAIR, x, w)
    with cki.device("sim"), pytest.raises(UnsupportedError, match="16x32"):
        linear_with_tile(SkinnyTile(16, 32, 1, 4, 4), x, w)
    with cki.device("sim", arch="sm_89"), pytest.raises(UnsupportedError, match="101376 bytes"):
        linear_with_tile(SkinnyTile(16, 64, 1, 4, 16), x, w)
