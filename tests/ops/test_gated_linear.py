"""Gated linear layers against the float64 reference: the fused kernel for sm_90a, and the two launches elsewhere."""

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
from cki.errors import InvalidArgumentError, UnsupportedError
from cki.heuristics.linear_hopper import HopperTile
from cki.operand import dense
from cki.ops.call import call
from cki.ops.gated_linear import GATED_LINEAR, plan_gated_linear
from tests.compare import assert_close
from tests.ops.inputs import BF16, F16, F32, normal
from tests.ops.linear_cases import plain

H200 = sim_device("sm_90a")
#: In turn, shared by rows, and blocks that bring gates and ups for each other.
TILES = [HopperTile(64, 128, 2, True), HopperTile(128, 128, 2), HopperTile(64, 128, 2, True, sharers=2)]
LAYOUTS = ("in_out", "out_in")
_specs: dict[HopperTile, Any] = {}


def fused(tile: HopperTile, x: Any, w: Any, bias: Any = None, **options: Any) -> Any:
    """cki.gated_linear by this tile, on a device that counts as one of two SMs, so that a block has many tiles."""

    def plan(problem: Any, outputs: Any, device: Any) -> Any:
        return plan_gated_linear(
            problem["x"], problem["w"], problem.get("bias"), outputs["out"], dataclasses.replace(device, sm_count=2),
            activation=problem.attribute("activation"), layout=problem.attribute("layout"),
            weight_layout=problem.attribute("weight_layout"), tile=tile,
        )  # fmt: skip

    spec = _specs.setdefault(tile, dataclasses.replace(GATED_LINEAR, plan=plan))
    values = (
        options.get("activation", "silu"), options.get("layout", "gate_first"), options.get("weight_layout", "in_out")
    )  # fmt: skip
    return call(spec, (x, w, bias), values, (options.get("out"),))


def plain_gated(x: Any, w: Any, bias: Any = None, **options: Any) -> np.ndarray:
    """The same in two steps in x's type, as one does it plainly."""
    weight_layout = options.pop("weight_layout", "in_out")
    projected = plain(x, w, bias, weight_layout=weight_layout)
    return reference.gated_activation(projected, **options).astype(x.dtype)


def weight(depth: int, columns: int, dtype: Any, layout: str) -> np.ndarray:
    return normal((depth, columns) if layout == "in_out" else (columns, depth), dtype, 2, scale=depth**-0.5)


@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_fused(device, tile, weight_layout):
    """Widths that end inside a box, where gates run into ups; rows of y that TMA cannot store; all activations."""
    cases = (
        (F16, 65, 64, 72, "silu"),
        (BF16, 150, 200, 136, "gelu"),
        (F16, 129, 36, 64, "relu"),
        (F16, 1, 8, 8, None),
    )
    for dtype, rows, width, depth, activation in cases:
        if weight_layout == "in_out" and width % 8:  # refused: test_tiles_that_cannot_be_gated
            continue
        for layout in ("gate_first", "up_first"):
            x, w = normal((rows, depth), dtype, 1), weight(depth, 2 * width, dtype, weight_layout)
            bias = normal((2 * width,), F32 if width == 200 else dtype, 3)
            options = {"activation": activation, "layout": layout, "weight_layout": weight_layout}
            got = device.numpy(fused(tile, device.array(x), device.array(w), device.array(bias), **options))
            truth, same = reference.gated_linear(x, w, bias, **options), plain_gated(x, w, bias, **options)
            assert_close(got, truth, same, f"{tile}, {rows} x {depth} by {width}, {options}")


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_fused_under_every_check(device, tile):
    x, w, bias = normal((130, 264), F16, 1), weight(264, 400, F16, "out_in"), normal((400,), F16, 3)
    tensors = [device.array(t) for t in (x, w, bias)]
    results = []
    for seed in range(4 if device.kind == "sim" else 2):
        checks = cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed)
        with checks if device.kind == "sim" else contextlib.nullcontext():
            results.append(device.numpy(fused(tile, *tensors, weight_layout="out_in")))
    assert all(np.array_equal(result, results[0]) for result in results)
    options = {"weight_layout": "out_in"}
    assert_close(
        results[0], reference.gated_linear(x, w, bias, **options), plain_gated(x, w, bias, **options)
    )


@pytest.mark.parametrize("layout", ["gate_first", "up_first", "interleaved"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=["f32", "f16"])
def test_public(device, dtype, layout):
    """Small and large enough for the fused kernel; odd widths and leading axes; a view of a wider weight."""
    for rows, width, depth, activation in ((5, 33, 40, "sigmoid"), (256, 128, 640, "silu")):
        x, wide = normal((2, rows, depth), dtype, 1), weight(depth, 2 * width + 8, dtype, "in_out")
        w, options = wide[:, : 2 * width], {"activation": activation, "layout": layout}
        got = device.numpy(cki.gated_linear(device.array(x), device.array(wide)[:, : 2 * width], **options))
        assert_close(got, reference.gated_linear(x, w, **options), plain_gated(x, w, **options))


def plan(rows: int, layout: str = "gate_first", dtype: Any = dtypes.bf16, activation: str = "silu") -> Any:
    x, w, y = (
        dense("x", (rows, 4096), dtype),
        dense("w", (4096, 28672), dtype),
        dense("y", (rows, 14336), dtype),
    )
    return plan_gated_linear(x, w, None, y, H200, layout=layout, activation=activation)


def test_which_launches():
    """One for many rows; two, and the projection between them, for few rows, f32, interleaved columns, other gates."""
    (step,) = plan(2048).steps
    assert step.kernel.entry == "linear_hopper"
    assert step.kernel.constant("kGated") is True
    for two in (
        plan(1),
        plan(2048, "interleaved"),
        plan(2048, dtype=dtypes.f32),
        plan(2048, activation="tanh"),
    ):
        assert len(two.steps) == 2
        assert two.steps[1].kernel.entry == "gated_activation"
        assert [slot for slot, _ in two.workspace] == ["projected"]
    assert plan(0).steps == ()


def test_tiles_that_cannot_be_gated():
    x, w, y = (
        dense("x", (64, 64), dtypes.f16),
        dense("w", (64, 256), dtypes.f16),
        dense("y", (64, 128), dtypes.f16),
    )
    for tile in (
        HopperTile(64, 64, 2, True),
        HopperTile(64, 128, 2),
    ):
        with pytest.raises(UnsupportedError, match="whole 64 columns"):
            plan_gated_linear(x, w, None, y, H200, tile=tile)
    y, w = dense("y", (64, 36), dtypes.f16), dense("w", (64, 72), dtypes.f16)
    with pytest.raises(UnsupportedError, match="second half of 36 columns"):
        plan_gated_linear(x, w, None, y, H200, tile=TILES[0])


def test_bad_arguments(device):
    x, w = device.array(normal((4, 8), F16)), device.array(normal((8, 6), F16))
    with pytest.raises(InvalidArgumentError, match="(?s)activation is 'swish'.*layout is 'both'"):
        cki.gated_linear(x, w, activation="swish", layout="both")
    with pytest.raises(InvalidArgumentError, match="7 columns hold no gates and ups"):
        cki.gated_linear(x, device.array(normal((8, 7), F16)))
    with pytest.raises(InvalidArgumentError, match="w has shape"):
        cki.gated_linear(x, device.array(normal((9, 6), F16)))
    with pytest.raises(InvalidArgumentError, match="bias has shape"):
        cki.gated_linear(x, w, device.array(normal((3,), F16)))
