"""fp32's GEMM of Hopper, asked for by its tile, against the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cki import reference
from cki.device import sim_device
from cki.dtypes import f32
from cki.errors import UnsupportedError
from cki.operand import dense
from cki.ops.call import call
from cki.ops.linear import LINEAR, plan_linear
from cki.ops.linear_fp32 import Fp32Tile
from cki.plan import Plan
from tests.compare import assert_close
from tests.ops.inputs import F16, F32, normal
from tests.ops.linear_cases import plain
from tests.orders import every_check, orders

#: A ring that wraps soon, and the usual one.
SHORT, USUAL = Fp32Tile(2), Fp32Tile(3)
LAYOUTS = ("in_out", "out_in")
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
_specs: dict[Fp32Tile, Any] = {}


def by_tile(
    tile: Fp32Tile, x: Any, w: Any, bias: Any = None, *, residual: Any = None, activation: Any = None,
    weight_layout: str = "in_out", out: Any = None,
) -> Any:  # fmt: skip
    """cki.linear on a device that counts as one of two SMs, so that a block has several tiles."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        return Plan(plan_linear(
            problem["x"], problem["w"], problem.get("bias"), problem.get("residual"), outputs["out"],
            dataclasses.replace(device, sm_count=2), activation=problem.attribute("activation"),
            weight_layout=problem.attribute("weight_layout"), tile=tile,
        ))  # fmt: skip

    spec = _specs.setdefault(tile, dataclasses.replace(LINEAR, plan=plan))
    return call(spec, (x, w, bias, residual), (activation, weight_layout), (out,))


def weight(depth: int, columns: int, layout: str) -> np.ndarray:
    """Normal numbers of variance 1 / depth."""
    return normal((depth, columns) if layout == "in_out" else (columns, depth), F32, 2, scale=depth**-0.5)


def check(device: Any, tile: Fp32Tile, x: Any, w: Any, bias: Any = None, **options: Any) -> np.ndarray:
    """Runs the kernel on row-major copies and compares; returns the result."""
    on_device = {k: device.array(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    vector = None if bias is None else device.array(bias)
    got = device.numpy(by_tile(tile, device.array(x), device.array(w), vector, **on_device))
    with np.errstate(invalid="ignore"):
        truth, same = reference.linear(x, w, bias, **options), plain(x, w, bias, **options)
    assert_close(got, truth, same, f"{tile}, {x.shape} by {w.shape}")
    return got


# Extents around the tile's; K of less than a stage, of whole ones, and of a part more.
@LAYOUT
def test_extents(device, layout):
    for rows, columns, depth in ((1, 4, 4), (127, 36, 32), (129, 132, 72), (70, 260, 160)):
        x, w = normal((rows, depth), F32, 1), weight(depth, columns, layout)
        check(device, USUAL, x, w, weight_layout=layout)


def test_long_sums(device):
    """Where tensor cores alone would cut off: the error is that of fp32 sums."""
    x, w = np.abs(normal((40, 2048), F32, 1)), np.abs(weight(2048, 40, "out_in"))
    got = check(device, USUAL, x, w, weight_layout="out_in")
    truth = reference.linear(x, w, weight_layout="out_in")
    assert np.abs(got - truth).max() <= 2e-6 * truth.max()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_epilogues(device, activation):
    x, w, residual = normal((70, 72), F32, 1, scale=2.0), weight(72, 70, "out_in"), normal((70, 70), F32, 4)
    options = {"activation": activation, "residual": residual, "weight_layout": "out_in"}
    check(device, USUAL, x, w, normal((70,), F32, 3), **options)


@LAYOUT
def test_orders_of_every_check(device, layout):
    """Rings walked through more than twice, several tiles a block; the residual is the result; always the same bits."""
    rows, columns, depth = 270, 136, 32 * 5 + 8
    x, w = normal((rows, depth), F32, 1), weight(depth, columns, layout)
    bias, residual = normal((columns,), F32, 3), normal((rows, columns), F32, 4)
    tensors = [device.array(t) for t in (x, w, bias)]
    results = []
    for seed in list(orders(device, 1 + LAYOUTS.index(layout), on_gpu=2))[:2]:
        y = device.array(residual)
        with every_check(device, seed):
            by_tile(SHORT, *tensors, residual=y, weight_layout=layout, out=y)
        results.append(device.numpy(y))
    assert all(np.array_equal(result, results[0]) for result in results)
    options: dict[str, Any] = {"weight_layout": layout, "residual": residual}
    assert_close(results[0], reference.linear(x, w, bias, **options), plain(x, w, bias, **options))


def test_infinities_and_nan(device):
    """They stay in their rows; tf32 rounds the largest fp32 numbers to infinity."""
    x, w = normal((10, 72), F32, 1), np.abs(weight(72, 72, "in_out"))
    x[3, 5], x[4, 71], x[7, 2], x[8, 1], x[8, 40] = np.inf, -np.inf, np.nan, np.inf, -np.inf
    got = check(device, USUAL, x, w)
    assert np.all(got[3] == np.inf)
    assert np.all(got[4] == -np.inf)
    assert np.all(np.isnan(got[7:9]))
    x[7, 2] = np.uint32(0x7FFFFFFF).view(F32)  # rounded to tf32 as an integer it would be zero
    assert np.all(np.isnan(check(device, USUAL, x, w)[7]))
    largest = np.float32(np.finfo(np.float32).max)
    x, w = np.zeros((1, 4), F32), np.zeros((4, 4), F32)
    x[0, 0], w[0] = largest, (1.0, 0.5, -1.0, 0.0)
    got = device.numpy(by_tile(USUAL, device.array(x), device.array(w)))
    assert np.array_equal(got, [[largest, largest / 2, -largest, 0]])


def test_views(device):
    """Slices of wider tensors; what lies beside the result stays as it was."""
    wide_x, wide_w, wide_y = (
        normal((3, 40, 96), F32, 1),
        normal((96, 160), F32, 2),
        normal((3, 40, 121), F32, 4),
    )
    for transposed in (False, True):
        options = {"weight_layout": "out_in" if transposed else "in_out"}
        x, w, y = wide_x[..., 8:80], wide_w[:72, 16:88], device.array(wide_y)
        given_w = device.array(wide_w)[:72, 16:88]
        if transposed:
            w, given_w = w.T, given_w.T
        by_tile(USUAL, device.array(wide_x)[..., 8:80], given_w, out=y[..., 25:97], **options)
        got = device.numpy(y)
        assert_close(got[..., 25:97], reference.linear(x, w, **options), plain(x, w, **options))
        assert np.array_equal(got[..., :25], wide_y[..., :25])
        assert np.array_equal(got[..., 97:], wide_y[..., 97:])


@LAYOUT
def test_linear_takes_it_unasked(layout):
    """The public function, from where it is the faster kernel; fewer rows keep the generic one."""
    info = sim_device("sm_90a")
    for rows, entry in ((8192, "linear_fp32"), (64, "linear")):
        shape = (1024, 512) if layout == "in_out" else (512, 1024)
        x, w, y = dense("x", (rows, 1024), f32), dense("w", shape, f32), dense("y", (rows, 512), f32)
        (step,) = plan_linear(x, w, None, None, y, info, weight_layout=layout)
        assert step.kernel.entry == entry
    for arch in ("sm_80", "sm_100a"):
        x, w, y = dense("x", (8192, 1024), f32), dense("w", (1024, 512), f32), dense("y", (8192, 512), f32)
        assert plan_linear(x, w, None, None, y, sim_device(arch))[0].kernel.entry == "linear"


def test_refusals_name_every_obstacle(device):
    x, w = device.array(normal((4, 9), F32)), device.array(normal((9, 7), F32))
    with pytest.raises(UnsupportedError, match="(?s)x's rows do not begin.*w's rows do not begin"):
        by_tile(USUAL, x, w)
    with pytest.raises(UnsupportedError, match="x is f16: it takes f32"):
        by_tile(USUAL, *[device.array(normal((8, 8), F16))] * 2)
    assert by_tile(USUAL, device.array(normal((0, 8), F32)), device.array(normal((8, 8), F32))).shape == (
        0,
        8,
    )
