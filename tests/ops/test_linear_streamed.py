"""The linear kernel for few rows whose weights come by TMA, asked for by its tile, against the float64 reference."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import cki
import cki.reference
import cki.sim
from cki.errors import UnsupportedError
from cki.heuristics.linear_skinny import TMA_CANDIDATES, SkinnyTile, fits, persistent_blocks
from tests.compare import assert_close
from tests.ops.linear_cases import BF16, DTYPES, F16, F32, linear_into, linear_with_tile, normal, plain

#: Rings of one stage a warp; K in one block, over two and over four.
WHOLE, PAIR, FOUR = (SkinnyTile(16, 64, 1, 4, 4, split, tma=True) for split in (1, 2, 4))
#: Two slabs of columns; two warps; more rows; no programmatic launch.
WIDE, TWO_WARPS = SkinnyTile(16, 128, 1, 4, 8, 2, tma=True), SkinnyTile(16, 64, 1, 2, 4, 1, False, True)
TALL = SkinnyTile(32, 64, 1, 4, 4, 2, tma=True)
TILES = pytest.mark.parametrize("tile", [WHOLE, PAIR, FOUR, WIDE, TWO_WARPS, TALL], ids=str)
LAYOUTS = ("in_out", "out_in")


@pytest.fixture(autouse=True)
def _only_where_it_runs(device: Any) -> None:
    if not fits(WHOLE, 2, device.info, along_n=True):
        pytest.skip("needs sm_90a")


def weight(depth: int, columns: int, dtype: Any, layout: str) -> np.ndarray:
    """Normal numbers of variance 1 / depth."""
    shape = (depth, columns) if layout == "in_out" else (columns, depth)
    return normal(shape, dtype, 2, scale=depth**-0.5)


def check(device: Any, tile: SkinnyTile, x: Any, w: Any, bias: Any = None, **options: Any) -> np.ndarray:
    """Runs the kernel on row-major copies and compares; returns the result."""
    on_device = {k: device.array(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    vector = None if bias is None else device.array(bias)
    got = device.numpy(linear_with_tile(tile, device.array(x), device.array(w), vector, **on_device))
    with np.errstate(invalid="ignore"):
        truth, same = cki.reference.linear(x, w, bias, **options), plain(x, w, bias, **options)
    assert_close(got, truth, same, f"{tile}, {x.shape} by {w.shape} of {x.dtype}")
    return got


@pytest.mark.parametrize("layout", LAYOUTS)
@TILES
def test_extents(device, tile, layout):
    """Fewer stages than warps or blocks, up to several rounds of the ring; rows and columns end inside tiles."""
    for dtype, rows, columns, depth in (
        (F16, 1, 8, 8), (BF16, 2, 72, 136), (F16, 3, 64, 512), (BF16, 16, 200, 72), (F16, 40, 8, 1000),
        (BF16, 9, 136, 2056),
    ):  # fmt: skip
        x, w = normal((rows, depth), dtype, 1), weight(depth, columns, dtype, layout)
        check(device, tile, x, w, weight_layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", TMA_CANDIDATES, ids=str)
def test_every_candidate(device, tile, layout):
    dtype, columns, depth = (
        (F16, BF16)[tile.split - 1],
        tile.block_n + 8,
        (tile.stages + 3) * tile.split * 64 + 8,
    )
    bias, residual = normal((columns,), dtype, 3), normal((13, columns), dtype, 4)
    x, w = normal((13, depth), dtype, 1), weight(depth, columns, dtype, layout)
    check(device, tile, x, w, bias, residual=residual, activation="gelu_tanh", weight_layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_computes_several_tiles(device, layout):
    """Stages of the next tile follow in the ring, from any place of it; the last round is not full."""
    tile = SkinnyTile(16, 64, 1, 4, 20, tma=True)
    columns, depth = 64 * (2 * device.info.sm_count + 3) - 8, 64 * 7 - 16
    assert persistent_blocks(tile, 3, columns, device.info) == (device.info.sm_count, 1, 1)
    x, w = normal((3, depth), F16, 1), weight(depth, columns, F16, layout)
    bias, residual = normal((columns,), F16, 3), normal((3, columns), F16, 4)
    check(device, tile, x, w, bias, residual=residual, activation="relu", weight_layout=layout)


@pytest.mark.parametrize(
    ("tile", "layout"),
    [
        (WHOLE, "in_out"),
        (PAIR, "out_in"),
        (FOUR, "in_out"),
        (WIDE, "in_out"),
        (TWO_WARPS, "out_in"),
        (TALL, "out_in"),
    ],
    ids=str,
)
def test_twenty_orders_of_every_check(device, tile, layout):
    """Every block's ring wraps; the result has the same bits in every order."""
    rows, columns, depth = tile.block_m + 1, 72, (2 * tile.stages + 3) * min(tile.split, 2) * 64 + 8
    x, w = normal((rows, depth), F16, 1), weight(depth, columns, F16, layout)
    bias, residual = normal((columns,), F16, 3), normal((rows, columns), F16, 4)
    tensors = [device.array(t) for t in (x, w, bias, residual)]
    options = {"activation": "silu", "weight_layout": layout}
    results = []
    for seed in range(20 if device.kind == "sim" else 2):
        checks = cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed)
        with checks if device.kind == "sim" else contextlib.nullcontext():
            results.append(device.numpy(linear_with_tile(tile, *tensors, **options)))
    assert all(np.array_equal(result, results[0]) for result in results)
    truth = cki.reference.linear(x, w, bias, residual=residual, **options)
    assert_close(results[0], truth, plain(x, w, bias, residual=residual, **options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orders_of_several_tiles_a_block(device, layout, monkeypatch):
    """Seven tiles of five stages by two blocks: the copies of the next tile run beside the finish of one."""
    monkeypatch.setattr("cki.ops.linear_streamed.persistent_blocks", lambda *_: (2, 1, 1))
    x, w = normal((5, 64 * 5), BF16, 1), weight(64 * 5, 64 * 7, BF16, layout)
    truth, same = cki.reference.linear(x, w, weight_layout=layout), plain(x, w, weight_layout=layout)
    for seed in range(20 if device.kind == "sim" else 1):
        checks = cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed)
        with checks if device.kind == "sim" else contextlib.nullcontext():
            got = linear_with_tile(WHOLE, device.array(x), device.array(w), weight_layout=layout)
        assert_close(device.numpy(got), truth, same)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_epilogues(device, dtype, activation):
    x, w = normal((5, 304), DTYPES[dtype], 1, scale=2.0), weight(304, 72, DTYPES[dtype], "in_out")
    residual = normal((5, 72), DTYPES[dtype], 4)
    check(device, PAIR, x, w, normal((72,), F32, 3), activation=activation, residual=residual)
    check(device, WHOLE, x, w, activation=activation)


def test_columns_of_every_remainder(device):
    """Items of four columns and pairs of them that end anywhere."""
    for columns in range(61, 72):
        bias, residual = normal((columns,), F16, 3), normal((3, columns), F16, 4)
        x, w = normal((3, 264), F16, 1), weight(264, columns, F16, "out_in")
        check(device, PAIR, x, w, bias, residual=residual, weight_layout="out_in")


def test_strided_operands(device):
    """Rows of wider tensors at multiples of 16 bytes; bias, residual and result anywhere.  What lies beside stays."""
    wide_x, wide_w = normal((5, 320), F16, 1), normal((160, 96), F16, 2, scale=0.1)
    wide, bias = normal((5, 150), F16, 4), normal((160,), F16, 3)
    x, w = wide_x[:, 8:152], wide_w[:144, 16:88]
    for view in (lambda t: t[:, 8:80], lambda t: t[:, 1:73], lambda t: t[:, 0:144:2]):
        for tile in (WHOLE, PAIR):
            memory = device.array(wide)
            on_device = (
                device.array(wide_x)[:, 8:152],
                device.array(wide_w)[:144, 16:88],
                device.array(bias)[:144:2],
            )
            linear_into(tile, view(memory), *on_device, residual=view(memory))
            options = {"residual": view(wide)}
            got = device.numpy(memory).copy()
            truth, same = (
                cki.reference.linear(x, w, bias[:144:2], **options),
                plain(x, w, bias[:144:2], **options),
            )
            assert_close(view(got), truth, same)
            view(got)[...] = view(wide)
            assert np.array_equal(got, wide)


@TILES
def test_a_row_does_not_depend_on_the_others(device, tile):
    x, w = normal((tile.block_m, 600), F16, 1), device.array(weight(600, 72, F16, "in_out"))
    together = device.numpy(linear_with_tile(tile, device.array(x), w))
    for rows in (slice(0, 1), slice(3, 9)):
        assert np.array_equal(together[rows], device.numpy(linear_with_tile(tile, device.array(x[rows]), w)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_infinities_and_nan(device, layout):
    """In x, in one block's part of K each; the other rows are as they would be without."""
    x, w = normal((10, 200), BF16, 1), np.abs(weight(200, 72, BF16, layout))
    x[3, 5], x[4, 199], x[7, 2], x[8, 1], x[8, 150] = np.inf, -np.inf, np.nan, np.inf, -np.inf
    for tile in (WHOLE, FOUR):
        got = check(device, tile, x, w, weight_layout=layout)
        assert np.all(got[3] == np.inf)
        assert np.all(got[4] == -np.inf)
        assert np.all(np.isnan(got[7:9].astype(np.float32)))


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (3, 0)])
def test_nothing_to_compute(device, rows, columns):
    x, w = device.array(np.zeros((rows, 8), F16)), device.array(np.zeros((8, columns), F16))
    assert linear_with_tile(PAIR, x, w).shape == (rows, columns)


def test_what_tma_cannot_describe_is_refused(device):
    with pytest.raises(UnsupportedError, match=r"(?s)x's rows do not begin.*w's rows do not begin"):
        linear_with_tile(PAIR, device.array(normal((3, 63), F16)), device.array(normal((63, 9), F16)))
    with pytest.raises(UnsupportedError, match="f16 and bf16"):
        linear_with_tile(PAIR, device.array(normal((3, 64), F32)), device.array(normal((64, 8), F32)))
    large = SkinnyTile(16, 64, 1, 4, 24, tma=True)
    with pytest.raises(UnsupportedError, match="cannot hold tile 16x64w1x4s24k1tma"):
        linear_with_tile(large, device.array(normal((3, 64), F16)), device.array(normal((64, 8), F16)))
    if device.kind == "sim":
        with cki.device("sim", arch="sm_80"), pytest.raises(UnsupportedError, match="needs sm_90a"):
            linear_with_tile(PAIR, normal((3, 64), F16), normal((64, 8), F16))
