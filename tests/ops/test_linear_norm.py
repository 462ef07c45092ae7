"""Norms of rows inside the Hopper GEMM: statistics that it stores, products and residuals normalised by them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

import cki
import cki.sim
from cki import dtypes, reference
from cki.device import sim_device
from cki.encoder.prepare import fold_layer_norm
from cki.errors import UnsupportedError
from cki.heuristics.linear_hopper import CANDIDATES, STATISTICS_COLUMNS, WIDE_TILES, HopperTile, norm_fits
from cki.operand import dense
from cki.ops.call import call
from cki.ops.linear import plan_linear
from cki.ops.linear_hopper import RowNorm
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec
from cki.plan import Plan
from tests.compare import assert_close
from tests.ops.inputs import BF16, F16, normal
from tests.ops.linear_cases import plain

TURNS, SHARED, TALL = HopperTile(64, 64, 2, True), HopperTile(128, 64, 2), HopperTile(128, 128, 2, True)
SPARE_TURNS, SPARE_TALL = (dataclasses.replace(tile, spare_warps=True) for tile in (TURNS, TALL))
#: What an encoder of a few thousand rows takes for its feed-forward block, small.
CHOSEN = dataclasses.replace(SPARE_TURNS, sharers=2, pairs=True)
#: Whose sums leave no registers: norms wait in shared memory, and rows that have cancelled are stored again.
PARKING = HopperTile(128, 192, 2, True)
PARKING_PAIRS = dataclasses.replace(PARKING, pairs=True, narrow=128)
EPSILON = 1e-5


def slots(columns: int) -> int:
    return -(-columns // STATISTICS_COLUMNS)


def spec_of(tile: HopperTile, kind: str | None, stores: bool, sm_count: int = 2) -> OpSpec:
    """A linear layer that normalises rows by given statistics, and returns those of its own."""

    def columns_of(problem: Any) -> int:
        return problem["w"].shape[1 if problem.attribute("weight_layout") == "in_out" else 0]

    def infer(problem: Any) -> Any:
        rows, columns = problem["x"].shape[0], columns_of(problem)
        found = {"out": OutputSpec((rows, columns), problem["x"].dtype)}
        if stores:
            found["statistics_out"] = OutputSpec((rows, slots(columns), 2), dtypes.f32)
        return found

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        norm = None
        if kind is not None:
            norm = RowNorm(kind, problem["statistics"], EPSILON, problem.get("gamma"))
        return Plan(plan_linear(
            problem["x"], problem["w"], problem.get("bias"), problem.get("residual"), outputs["out"],
            dataclasses.replace(device, sm_count=sm_count), activation=problem.attribute("activation"),
            weight_layout=problem.attribute("weight_layout"), tile=tile, norm=norm,
            statistics=outputs.get("statistics_out"),
        ))  # fmt: skip

    names = ("bias", "residual", "statistics", "gamma")
    return OpSpec(
        "normalising_linear", (Input("x"), Input("w"), *(Input(name, True) for name in names)),
        (Attribute("activation", str), Attribute("weight_layout", str, "in_out")), ("out", "statistics_out"),
        lambda problem: None, infer, plan,
    )  # fmt: skip


def run(
    device: Any, tile: HopperTile, kind: str | None, x: Any, w: Any, bias: Any = None, *, residual: Any = None,
    statistics: Any = None, gamma: Any = None, activation: Any = None, layout: str = "in_out", stores: bool = False,
) -> Any:  # fmt: skip
    """The layer's result, and with `stores` its statistics, as NumPy arrays."""
    given = [None if t is None else device.array(t) for t in (x, w, bias, residual, statistics, gamma)]
    found = call(spec_of(tile, kind, stores), tuple(given), (activation, layout), (None, None))
    return tuple(device.numpy(t) for t in found) if stores else device.numpy(found)


def statistics_of(x: np.ndarray) -> np.ndarray:
    """As the kernel stores them."""
    wide = x.astype(np.float64)
    parts = [wide[:, i : i + STATISTICS_COLUMNS] for i in range(0, x.shape[1], STATISTICS_COLUMNS)]
    found = [np.stack([p.sum(1), (p**2).sum(1)], -1) for p in parts]
    return np.stack(found, 1).astype(np.float32)


def weight(depth: int, columns: int, dtype: Any, layout: str) -> np.ndarray:
    return normal((depth, columns) if layout == "in_out" else (columns, depth), dtype, 2, scale=depth**-0.5)


@pytest.mark.parametrize(("tile", "columns"), [(TURNS, 136), (SHARED, 64), (TALL, 200)], ids=str)
def test_statistics_are_those_of_what_is_stored(device, tile, columns):
    x, w = normal((150, 72), F16, 1), weight(72, columns, F16, "in_out")
    residual = normal((150, columns), F16, 3) + np.linspace(-20, 20, 150).astype(F16)[:, None]
    y, found = run(device, tile, None, x, w, residual=residual, stores=True)
    assert_close(y, reference.linear(x, w, residual=residual), plain(x, w, residual=residual))
    expected = statistics_of(y)
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_statistics_with_k_split(device):
    x, w = normal((70, 200), F16, 1), weight(200, 136, F16, "in_out")
    y, found = run(device, HopperTile(64, 128, 2, split=2), None, x, w, stores=True)
    assert np.allclose(found, statistics_of(y), rtol=1e-5, atol=1e-4)


def normalised(x: np.ndarray, gamma: Any, beta: Any, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The norm in float64, and rounded to x's type."""
    if kind == "rms":
        truth = reference.rms_norm(x, gamma, eps=EPSILON)
    else:
        truth = reference.layer_norm(x, gamma, beta, eps=EPSILON)
    return truth, truth.astype(x.dtype)


@pytest.mark.parametrize(
    ("tile", "dtype", "layout", "depth"),
    [
        (TURNS, F16, "in_out", 264),
        (TURNS, F16, "out_in", 1152),  # a whole round of 16 slots, and two more
        (SHARED, BF16, "out_in", 72),
        (TALL, F16, "out_in", 200),
        (SPARE_TURNS, F16, "in_out", 2056),
        (SPARE_TALL, F16, "out_in", 200),
        (CHOSEN, F16, "out_in", 200),
        (PARKING, BF16, "in_out", 200),
        (PARKING_PAIRS, F16, "out_in", 264),
    ],
    ids=str,
)
def test_layer_norm_in_the_weight(device, tile, dtype, layout, depth):
    rows, columns = (150, 136) if tile.block_n < 192 else (330, 520)
    x = normal((rows, depth), dtype, 1) + np.linspace(-9, 9, rows).astype(dtype)[:, None]
    w, bias = weight(depth, columns, dtype, layout), normal((columns,), dtype, 3)
    gamma, beta = 1 + normal((depth,), dtype, 4, scale=0.2), normal((depth,), dtype, 5, scale=0.2)
    folded, shift = fold_layer_norm("numpy", w, gamma, beta, bias, weight_layout=layout)
    got = run(
        device, tile, "layer", x, folded, shift, statistics=statistics_of(x), activation="gelu", layout=layout,
    )  # fmt: skip
    truth, rounded = normalised(x, gamma, beta, "layer")
    options: dict[str, Any] = {"activation": "gelu", "weight_layout": layout}
    assert_close(got, reference.linear(truth, w, bias, **options), plain(rounded, w, bias, **options))


@pytest.mark.parametrize("tile", [TURNS, SPARE_TURNS, CHOSEN, PARKING, PARKING_PAIRS], ids=str)
def test_rows_whose_mean_hides_them(device, tile):
    """Means of 50 to 4000 standard deviations, and a row without any: such sums are computed again, beside others."""
    columns = 136 if tile.block_n < 192 else 328
    x = normal((140, 264), F16, 1)
    x[3], x[66], x[139] = x[3] / 64 + 1, x[66] / 2048 + 8, 3
    w = weight(264, columns, F16, "in_out")
    folded, shift = fold_layer_norm("numpy", w)
    for layout in ("in_out", "out_in"):
        given = folded if layout == "in_out" else np.ascontiguousarray(folded.T)
        got = run(device, tile, "layer", x, given, shift, statistics=statistics_of(x), layout=layout)
        truth, rounded = normalised(x, None, None, "layer")
        assert_close(got, reference.linear(truth, w), plain(rounded, w))
        assert np.abs(got[139]).max() < 1e-3  # a row of equal elements


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("tile", [TURNS, PARKING, PARKING_PAIRS], ids=str)
def test_rows_that_are_computed_again_are_finished_like_others(device, tile, activation):
    x = normal((70, 136), F16, 1)
    x[5], x[68] = x[5] / 128 + 2, x[68] / 128 - 2
    w, bias = weight(136, 328, F16, "in_out"), normal((328,), F16, 3)
    folded, shift = fold_layer_norm("numpy", w, None, None, bias)
    got = run(device, tile, "layer", x, folded, shift, statistics=statistics_of(x), activation=activation)
    truth, rounded = normalised(x, None, None, "layer")
    options: dict[str, Any] = {"activation": activation}
    assert_close(got, reference.linear(truth, w, bias, **options), plain(rounded, w, bias, **options))


@pytest.mark.parametrize("tile", [TURNS, PARKING], ids=str)
def test_rows_of_equal_elements_whose_mean_is_rounded(device, tile):
    """1 / 1000 times itself a thousand times is not 1; what is left, times 1 / sqrt(epsilon), would be large."""
    x = normal((70, 1000), BF16, 1)
    x[:64] = (10.0 ** np.linspace(3, 18, 64)).astype(BF16)[:, None]
    folded, shift = fold_layer_norm("numpy", weight(1000, 136, BF16, "in_out"))
    got = run(device, tile, "layer", x, folded, shift, statistics=statistics_of(x))
    truth, rounded = normalised(x, None, None, "layer")
    assert not got[:64].astype(np.float32).any()
    assert_close(got, reference.linear(truth, folded), plain(rounded, folded))


@pytest.mark.parametrize("tile", [TURNS, PARKING], ids=str)
def test_rms_norm_in_the_weight(device, tile):
    x, w = normal((150, 264), BF16, 1, scale=3.0), weight(264, 136, BF16, "in_out")
    got = run(device, tile, "rms", x, w, statistics=statistics_of(x), activation="silu")
    truth, rounded = normalised(x, None, None, "rms")
    options: dict[str, Any] = {"activation": "silu"}
    assert_close(got, reference.linear(truth, w, **options), plain(rounded, w, **options))


@pytest.mark.parametrize("tile", [TURNS, SHARED], ids=str)
def test_a_residual_that_is_normalised(device, tile):
    """And the statistics of the sum, in the same launch."""
    rows, columns = 150, 136
    x, w, bias = normal((rows, 72), F16, 1), weight(72, columns, F16, "in_out"), normal((columns,), F16, 3)
    residual, gamma = (
        normal((rows, columns), F16, 4, scale=4.0) + 2,
        1 + normal((columns,), F16, 5, scale=0.2),
    )
    residual[5], residual[77] = residual[5] / 1024 + 8, 7  # what the sums of squares cannot tell
    got, found = run(
        device, tile, "residual", x, w, bias, residual=residual, statistics=statistics_of(residual), gamma=gamma,
        stores=True,
    )  # fmt: skip
    truth, rounded = normalised(residual, gamma, None, "layer")
    assert_close(got, reference.linear(x, w, bias, residual=truth), plain(x, w, bias, residual=rounded))
    assert np.allclose(found, statistics_of(got), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("reader", [TURNS, SPARE_TURNS, CHOSEN, PARKING, PARKING_PAIRS], ids=str)
def test_under_every_check(device, reader):
    """A layer that stores statistics and one that reads them, several tiles a block: the same bits in every order."""
    x, w = normal((150, 72), F16, 1), weight(72, 136, F16, "in_out")
    residual = normal((150, 136), F16, 3)
    residual[70] += 60  # too much of it cancels
    results = []
    for seed in range(3):
        checks = cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed)
        with checks if device.kind == "sim" else contextlib.nullcontext():
            y, found = run(device, TURNS, None, x, w, residual=residual, stores=True)
            v = weight(136, 72 if reader.block_n < 192 else 584, F16, "in_out")
            results.append((y, found, run(device, reader, "layer", y, v, statistics=found)))
    for result in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(result, results[0]))


def test_a_weight_with_a_norm_in_it_sums_to_zero():
    for dtype in (F16, BF16):
        w = normal((200, 40), dtype, 1) + 1  # columns with a large sum
        folded, _ = fold_layer_norm("numpy", w, 1 + normal((200,), dtype, 2), normal((200,), dtype, 3))
        ulp = float(np.finfo(np.float32).eps) * 2.0 ** (13 if dtype == F16 else 16)
        assert folded.dtype == dtype
        assert np.abs(folded.astype(np.float64).sum(0)).max() <= ulp * np.abs(folded.astype(np.float64)).max()


def test_frameworks_fold_alike():
    torch = pytest.importorskip("torch")
    w, gamma, beta = normal((24, 100), F16, 1), 1 + normal((100,), F16, 2), normal((100,), F16, 3)
    expected = fold_layer_norm("numpy", w, gamma, beta, weight_layout="out_in")
    given = [torch.from_numpy(t) for t in (w, gamma, beta)]
    got = fold_layer_norm("torch", *given, weight_layout="out_in")
    for one, other in zip(got, expected):
        assert np.allclose(one.numpy().astype(np.float64), other.astype(np.float64), atol=2e-3)


@pytest.mark.parametrize("kind", ["layer", "rms", "residual"])
def test_tiles_that_normalise(kind):
    """Some do, for every kind; those that do not say why."""
    x, w, y = (
        dense("x", (512, 1024), dtypes.f16),
        dense("w", (1024, 1024), dtypes.f16),
        dense("y", (512, 1024), dtypes.f16),
    )
    statistics, gamma = dense("s", (512, 16, 2), dtypes.f32), dense("g", (1024,), dtypes.f16)
    norm = RowNorm(kind, statistics, EPSILON, gamma if kind == "residual" else None)
    assert any(norm_fits(tile, kind) for tile in CANDIDATES)
    for tile in (*CANDIDATES, *WIDE_TILES, HopperTile(192, 64, 2, True)):
        given = (x, w, None, x if kind == "residual" else None, y, sim_device("sm_90a"))
        if norm_fits(tile, kind):
            assert plan_linear(*given, tile=tile, norm=norm)
        else:
            with pytest.raises(UnsupportedError, match="rows are normalised by"):
                plan_linear(*given, tile=tile, norm=norm)
