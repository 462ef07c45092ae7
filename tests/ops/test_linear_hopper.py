"""The Hopper GEMM, asked for by its tile, against the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cki
from cki import reference
from cki.errors import UnsupportedError
from cki.heuristics.linear_hopper import CANDIDATES, WIDE_TILES, HopperTile
from cki.ops.call import call
from cki.ops.linear import LINEAR, plan_linear
from cki.plan import Plan
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, F16, F32, normal
from tests.ops.linear_cases import plain
from tests.orders import every_check, orders

#: The smallest tiles, with the shallowest ring: taken in turn, and shared.
TURNS, SHARED = HopperTile(64, 64, 2, True), HopperTile(128, 64, 2)
SMALL = pytest.mark.parametrize("tile", [TURNS, SHARED, HopperTile(64, 64, 2, consumers=1)], ids=str)
FETCHING = HopperTile(128, 128, 2, True, fetches=True)
#: K over the blocks of a cluster: consumers that share columns, and rows; a small block.
SPLIT = pytest.mark.parametrize(
    "tile",
    [
        HopperTile(64, 128, 2, split=2),
        HopperTile(128, 64, 3, split=2),
        HopperTile(64, 64, 2, split=2, consumers=1, ahead=3, left=1),
    ],
    ids=str,
)
LAYOUTS = ("in_out", "out_in")
_specs: dict[tuple[HopperTile, int], Any] = {}


def spec_of(tile: HopperTile, sm_count: int) -> Any:
    """cki.linear's operation with the Hopper kernel and this tile; one object each, because it is a cache key.

    The device counts as one of few SMs, so that a block has many tiles.
    """

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        return Plan(plan_linear(
            problem["x"], problem["w"], problem.get("bias"), problem.get("residual"), outputs["out"],
            dataclasses.replace(device, sm_count=sm_count), activation=problem.attribute("activation"),
            weight_layout=problem.attribute("weight_layout"), tile=tile,
        ))  # fmt: skip

    return _specs.setdefault((tile, sm_count), dataclasses.replace(LINEAR, plan=plan))


def hopper(
    tile: HopperTile, x: Any, w: Any, bias: Any = None, *, residual: Any = None, activation: Any = None,
    weight_layout: str = "in_out", out: Any = None, sm_count: int = 2,
) -> Any:  # fmt: skip
    return call(spec_of(tile, sm_count), (x, w, bias, residual), (activation, weight_layout), (out,))


def weight(depth: int, columns: int, dtype: Any, layout: str) -> np.ndarray:
    """Normal numbers of variance 1 / depth."""
    return normal((depth, columns) if layout == "in_out" else (columns, depth), dtype, 2, scale=depth**-0.5)


def check(device: Any, tile: HopperTile, x: Any, w: Any, bias: Any = None, **options: Any) -> np.ndarray:
    """Runs the kernel on row-major copies and compares; returns the result."""
    on_device = {k: device.array(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    vector = None if bias is None else device.array(bias)
    got = device.numpy(hopper(tile, device.array(x), device.array(w), vector, **on_device))
    truth, same = reference.linear(x, w, bias, **options), plain(x, w, bias, **options)
    assert_close(got, truth, same, f"{tile}, {x.shape} by {w.shape}")
    return got


# Extents around the tiles'; K of less than a stage, of exactly three, and of a part more; several rounds of tiles.
@pytest.mark.parametrize("layout", LAYOUTS)
@SMALL
def test_extents(device, tile, layout):
    for dtype, rows, columns, depth in (
        (F16, 1, 8, 8), (BF16, 63, 72, 64), (F16, 65, 64, 72), (BF16, 129, 200, 192), (F16, 300, 136, 200),
    ):  # fmt: skip
        x, w = normal((rows, depth), dtype, 1), weight(depth, columns, dtype, layout)
        check(device, tile, x, w, weight_layout=layout)


@SMALL
def test_columns_that_tma_cannot_store(device, tile):
    """Rows of y that are no whole units of 16 bytes are stored by the lanes: in pairs, or one by one."""
    for columns in (1, 7, 66, 130):
        bias, residual = normal((columns,), F16, 3), normal((70, columns), F16, 4)
        x, w = normal((70, 72), F16, 1), weight(72, columns, F16, "out_in")
        check(device, tile, x, w, bias, residual=residual, weight_layout="out_in")


@pytest.mark.parametrize(
    "tile",
    [
        HopperTile(64, 64, 2, split=2, consumers=1, rows_x=16),
        HopperTile(64, 64, 2, True, rows_x=16),
        HopperTile(64, 128, 3, consumers=1, rows_x=16, ahead=4, left=8),
    ],
    ids=str,
)
def test_fewer_rows_of_x_than_a_tile_has(device, tile):
    """The others multiply what the ring holds."""
    x, w = normal((13, 64 * 9 + 8), F16, 1), weight(64 * 9 + 8, 136, F16, "in_out")
    with every_check(device, 1):
        check(device, tile, x, w)
    with pytest.raises(UnsupportedError, match="x has no more"):
        check(device, tile, normal((17, 64), F16, 1), normal((64, 64), F16, 2))


@pytest.mark.parametrize("tile", [FETCHING, HopperTile(64, 128, 2, fetches=True)], ids=str)
def test_a_residual_by_tma(device, tile):
    """Tiles whose slabs end outside on both axes, several a block; also where the residual is the result."""
    rows, columns = 420, 328
    x, w = normal((rows, 72), F16, 1), weight(72, columns, F16, "in_out")
    bias, residual = normal((columns,), F16, 3), normal((rows, columns), F16, 4)
    expected = check(device, tile, x, w, bias, residual=residual, activation="gelu")
    tensors = [device.array(t) for t in (x, w, bias)]
    y = device.array(residual)
    with every_check(device, 1):
        hopper(tile, *tensors, residual=y, activation="gelu", out=y)
    assert np.array_equal(device.numpy(y), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@SPLIT
def test_split_depths(device, tile, layout):
    """As many stages as blocks, uneven shares, a last stage of a part; ends of rows and columns; many clusters."""
    for rows, columns, depth in ((63, 72, 64 * tile.split), (65, 200, 64 * 5 + 8), (130, 66, 520)):
        if layout == "in_out" and columns % 8:  # rows of w that TMA cannot describe
            continue
        x, w = normal((rows, depth), F16, 1), weight(depth, columns, F16, layout)
        bias, residual = normal((columns,), F32, 3), normal((rows, columns), F16, 4)
        check(device, tile, x, w, bias, residual=residual, activation="gelu", weight_layout=layout)


@SPLIT
def test_split_depths_under_every_check(device, tile):
    """The same bits in every run, also where the residual is the result."""
    rows, columns, depth = 130, 136, 64 * 9
    x, w = normal((rows, depth), F16, 1), weight(depth, columns, F16, "out_in")
    bias, residual = normal((columns,), F16, 3), normal((rows, columns), F16, 4)
    tensors = [device.array(t) for t in (x, w, bias)]
    results = []
    for seed in range(3 if device.kind == "sim" else 2):
        y = device.array(residual)
        with every_check(device, seed):
            hopper(tile, *tensors, residual=y, weight_layout="out_in", out=y)
        results.append(device.numpy(y))
    assert all(np.array_equal(result, results[0]) for result in results)
    options: dict[str, Any] = {"weight_layout": "out_in", "residual": residual}
    assert_close(results[0], reference.linear(x, w, bias, **options), plain(x, w, bias, **options))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "tile", [HopperTile(64, 64, 2, True, sharers=2), HopperTile(128, 128, 2, sharers=2)], ids=str
)
def test_shared_weights_under_every_check(device, tile, layout):
    """An odd number of tiles below each other, several for each cluster, rings walked through more than twice."""
    rows, columns, depth = 4 * tile.block_m + 10, 200, 264
    x, w = normal((rows, depth), F16, 1), weight(depth, columns, F16, layout)
    bias, residual = normal((columns,), F16, 3), normal((rows, columns), F16, 4)
    tensors = [device.array(t) for t in (x, w, bias, residual)]
    results = []
    for seed in range(4 if device.kind == "sim" else 2):
        with every_check(device, seed):
            y = hopper(tile, *tensors[:3], residual=tensors[3], weight_layout=layout)
        results.append(device.numpy(y))
    assert all(np.array_equal(result, results[0]) for result in results)
    options: dict[str, Any] = {"weight_layout": layout, "residual": residual}
    assert_close(results[0], reference.linear(x, w, bias, **options), plain(x, w, bias, **options))


@pytest.mark.parametrize("tile", [HopperTile(192, 64, 2, True), HopperTile(256, 64, 2, True)], ids=str)
def test_consumers_with_more_than_two_row_tiles(device, tile):
    x, w, bias = normal((420, 136), F16, 1), weight(136, 200, F16, "in_out"), normal((200,), F16, 3)
    check(device, tile, x, w, bias, activation="gelu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_consumers_that_share_columns(device, layout):
    x, w, bias = normal((200, 264), F16, 1), weight(264, 392, F16, layout), normal((392,), F16, 3)
    check(device, HopperTile(64, 128, 2), x, w, bias, activation="relu", weight_layout=layout)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_epilogues(device, dtype, activation):
    x, w = normal((70, 72), DTYPES[dtype], 1, scale=2.0), weight(72, 72, DTYPES[dtype], "in_out")
    residual = normal((70, 72), DTYPES[dtype], 4)
    check(device, TURNS, x, w, normal((72,), F32, 3), activation=activation, residual=residual)


@pytest.mark.parametrize("bias_dtype", ["f16", "f32"])
@pytest.mark.parametrize("tile", [TURNS, SHARED, HopperTile(128, 128, 2, fetches=True)], ids=str)
def test_a_bias_that_cancels_the_products(device, tile, bias_dtype):
    """Whether the sums start from it (consumers that share a tile) or end with it."""
    x, w = (np.abs(normal(shape, F16, seed)) for seed, shape in ((1, (70, 1032)), (2, (1032, 136))))
    mean = reference.linear(x, w).mean(axis=0)
    residual = normal((70, 136), F16, 3) if tile.fetches else None
    check(device, tile, x, w, (-mean).astype(DTYPES[bias_dtype]), residual=residual)


def test_gelu_keeps_its_tail(device):
    """Every result within the rounding of f16 and a fifth more, also where 1 + erf(x) cancels."""
    values = np.linspace(-8, 8, 80 * 64).astype(F16)
    x, w = np.zeros((80 * 64 // 8, 8), F16), np.eye(8, dtype=F16)
    x[:] = values.reshape(x.shape)
    got = device.numpy(hopper(TURNS, device.array(x), device.array(w), activation="gelu")).astype(np.float64)
    truth = reference.linear(x, w, activation="gelu")
    assert np.all(np.abs(got - truth) <= 1.2 * 2.0**-11 * np.abs(truth) + 2.0**-24)


def test_gelu_of_pairs(device):
    """Every f16: the largest error is that of rounding's, nearly, and small results are right to 2 %."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.abs(values) <= 60]
    x, w = values[: values.size // 8 * 8].reshape(-1, 8), np.eye(8, dtype=np.float16)
    tile = dataclasses.replace(TURNS, pairs=True)
    got = device.numpy(hopper(tile, device.array(x), device.array(w), activation="gelu")).astype(np.float64)
    truth = reference.linear(x, w, activation="gelu")
    error = np.abs(got - truth)
    near = np.abs(x.astype(np.float64)) < 6
    assert error[near].max() <= 1.1 * np.abs(truth[near].astype(np.float16) - truth[near]).max()
    assert np.all(error <= 2.0**-11 * np.abs(truth) + 3e-4)
    assert np.all(error <= 0.02 * np.abs(truth) + 2.0**-17)
    special = np.zeros((8, 8), np.float16)
    special[:, 0] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 60000, -60000, 20]
    with np.errstate(all="ignore"):
        got = device.numpy(hopper(tile, device.array(special), device.array(w), activation="gelu"))
    np.testing.assert_array_equal(got[:, 0], np.array([np.inf, 0, np.nan, 0, 0, 60000, 0, 20], np.float16))


@pytest.mark.parametrize("layout", LAYOUTS)
@SMALL
def test_rings_and_turns_under_every_check(device, tile, layout):
    """Rings of two stages and of two output buffers walked through more than twice: a block with 9 or 6 tiles, 5 stages
    of K each."""
    rows, columns, depth = 130, 136, 264
    assert depth > 64 * 2 * tile.stages
    x, w = normal((rows, depth), F16, 1), weight(depth, columns, F16, layout)
    bias, residual = normal((columns,), F16, 3), normal((rows, columns), F16, 4)
    tensors = [device.array(t) for t in (x, w, bias)]
    options: dict[str, Any] = {"activation": "relu", "weight_layout": layout, "sm_count": 1}
    results = []
    for seed in orders(device, LAYOUTS.index(layout) + 2 * (tile is SHARED), on_gpu=2):
        with every_check(device, seed):
            results.append(device.numpy(hopper(tile, *tensors, residual=device.array(residual), **options)))
    assert all(np.array_equal(result, results[0]) for result in results)
    options = {"activation": "relu", "weight_layout": layout, "residual": residual}
    assert_close(results[0], reference.linear(x, w, bias, **options), plain(x, w, bias, **options))


@pytest.mark.parametrize("tile", CANDIDATES, ids=str)
def test_real_tiles(device, tile):
    """Every candidate, in both weight orders in turn, with more tiles than blocks."""
    layout = LAYOUTS[CANDIDATES.index(tile) % 2]
    rows, columns, depth = 2 * tile.block_m + 8, tile.block_n + 8, 64 * (tile.stages + 1) + 8
    x, w, bias = (
        normal((rows, depth), BF16, 1),
        weight(depth, columns, BF16, layout),
        normal((columns,), BF16, 3),
    )
    check(device, tile, x, w, bias, residual=normal((rows, columns), BF16, 4), weight_layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", WIDE_TILES, ids=str)
def test_wide_tiles(device, tile, layout):
    """A residual of more slabs than there are buffers, some outside; and GELU.  Several tiles a consumer."""
    rows, columns, depth = 3 * tile.block_m + 72, 2 * tile.block_n + 72, 200
    x, w = normal((rows, depth), BF16, 1), weight(depth, columns, BF16, layout)
    bias, residual = normal((columns,), BF16, 3), normal((rows, columns), BF16, 4) if tile.fetches else None
    options = {"residual": residual} if tile.fetches else {"activation": "gelu"}
    check(device, tile, x, w, bias, weight_layout=layout, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", WIDE_TILES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "sm_count"), [(200, 704, 2), (130, 360, 3), (300, 576, 2), (129, 392, 1)]
)
def test_narrower_tiles_come_last(device, tile, layout, rows, columns, sm_count):
    """Some of each, one of either, none of them narrow; columns and rows that no tile ends with."""
    narrow, depth = dataclasses.replace(tile, narrow=128), 136
    x, w, bias = (
        normal((rows, depth), BF16, 1),
        weight(depth, columns, BF16, layout),
        normal((columns,), BF16, 3),
    )
    options = {"residual": normal((rows, columns), BF16, 4)} if tile.fetches else {"activation": "gelu"}
    given = {name: device.array(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
    given |= {"weight_layout": layout, "sm_count": sm_count}
    tensors = [device.array(tensor) for tensor in (x, w, bias)]
    with every_check(device, 0):
        got, same = (device.numpy(hopper(one, *tensors, **given)) for one in (narrow, tile))
    options["weight_layout"] = layout
    assert_close(got, reference.linear(x, w, bias, **options), plain(x, w, bias, **options))
    assert np.array_equal(got, same)


@SMALL
def test_same_bits_whatever_the_tile(device, tile):
    x, w = normal((150, 136), F16, 1), weight(136, 80, F16, "in_out")
    assert np.array_equal(check(device, tile, x, w), check(device, HopperTile(64, 128, 3, True), x, w))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_takes_it_unasked(device, layout):
    """The public function, where it is the faster kernel."""
    x, w, residual = normal((250, 648), BF16, 1), weight(648, 264, BF16, layout), normal((250, 264), BF16, 4)
    options = {"activation": "gelu", "weight_layout": layout}
    got = cki.linear(device.array(x), device.array(w), residual=device.array(residual), **options)
    options["residual"] = residual
    assert_close(device.numpy(got), reference.linear(x, w, **options), plain(x, w, **options))


# --- places -----------------------------------------------------------------------------------------------------------


@SMALL
def test_views(device, tile):
    """Slices of wider tensors, transposed weights, merged leading axes; what lies beside the result stays as it was."""
    wide_x, wide_w = normal((3, 40, 96), F16, 1), normal((96, 160), F16, 2)
    wide_y = normal((3, 40, 120), F16, 4)
    for transposed in (False, True):
        options = {"weight_layout": "out_in" if transposed else "in_out"}
        x, w = wide_x[..., 8:80], wide_w[:72, 16:88]
        given_w, y = device.array(wide_w)[:72, 16:88], device.array(wide_y)
        if transposed:
            w, given_w = w.T, given_w.T
        hopper(tile, device.array(wide_x)[..., 8:80], given_w, out=y[..., 24:96], **options)
        got = device.numpy(y)
        assert_close(got[..., 24:96], reference.linear(x, w, **options), plain(x, w, **options))
        assert np.array_equal(got[..., :24], wide_y[..., :24])
        assert np.array_equal(got[..., 96:], wide_y[..., 96:])


def test_a_narrow_result_beside_others(device):
    """9 columns inside wider rows: TMA would write 16."""
    wide = normal((70, 32), F16, 4)
    x, w, y = normal((70, 72), F16, 1), weight(72, 9, F16, "out_in"), device.array(wide)
    hopper(TURNS, device.array(x), device.array(w), weight_layout="out_in", out=y[:, 8:17])
    got = device.numpy(y)
    options = {"weight_layout": "out_in"}
    assert_close(got[:, 8:17], reference.linear(x, w, **options), plain(x, w, **options))
    assert np.array_equal(got[:, 17:], wide[:, 17:])


@SMALL
def test_residual_in_place_and_strided_bias(device, tile):
    x, w, residual = normal((150, 72), F16, 1), weight(72, 80, F16, "in_out"), normal((150, 80), F16, 4)
    bias = normal((160,), F16, 3)
    y = device.array(residual)
    hopper(
        tile, device.array(x), device.array(w), device.array(bias)[::2], residual=y, activation="gelu", out=y
    )
    options = {"residual": residual, "activation": "gelu"}
    assert_close(
        device.numpy(y), reference.linear(x, w, bias[::2], **options), plain(x, w, bias[::2], **options)
    )


def test_infinities_and_nans_stay_in_their_rows(device):
    x, w = normal((70, 72), F16, 1), np.abs(weight(72, 64, F16, "in_out"))
    x[3, 5], x[66, 71] = np.inf, np.nan
    y = device.numpy(hopper(TURNS, device.array(x), device.array(w)))
    assert np.all(y[3] == np.inf)
    assert np.all(np.isnan(y[66]))
    assert np.all(np.isfinite(np.delete(y, (3, 66), 0)))


def test_empty_results(device):
    assert hopper(TURNS, device.array(normal((0, 8), F16)), device.array(normal((8, 8), F16))).shape == (0, 8)


def test_refusals_name_every_obstacle(device):
    x, w = device.array(normal((4, 9), F16)), device.array(normal((9, 8), F16))
    with pytest.raises(UnsupportedError, match="x's rows do not begin at multiples of 16 bytes"):
        hopper(TURNS, x, w)
    with pytest.raises(UnsupportedError, match="K of 64 has no 2 parts"):
        hopper(HopperTile(64, 128, 2, split=2), *[device.array(normal((64, 64), F16))] * 2)
    with pytest.raises(UnsupportedError, match="(?s)x is f32.*w's rows do not begin"):
        hopper(TURNS, device.array(normal((4, 8), F32)), device.array(normal((8, 9), F32)))
