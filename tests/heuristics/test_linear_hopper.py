"""How the Hopper GEMM is planned: tiles that fit, registers that add up, maps as TMA takes them, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from cki import dtypes, tensor_map
from cki.device import sim_device
from cki.errors import UnsupportedError
from cki.heuristics.linear_hopper import (
    CANDIDATES,
    LAUNCH_REGISTERS,
    REGISTER_SHARES,
    HopperTile,
    choose_hopper_tile,
    tile_count,
)
from cki.operand import Operand, dense
from cki.ops.linear import plan_linear
from cki.plan import Step, TensorMapArg

H200 = sim_device("sm_90a")
TILE = HopperTile(128, 128, ping_pong=True)


def plan(
    rows: int = 1000, depth: int = 264, columns: int = 520, dtype: Any = dtypes.f16, layout: str = "in_out",
    arch: str = "sm_90a", tile: HopperTile = TILE, **operands: Operand | None,
) -> tuple[Step, ...]:  # fmt: skip
    shape = (depth, columns) if layout == "in_out" else (columns, depth)
    return plan_linear(
        operands.get("x") or dense("x", (rows, depth), dtype), operands.get("w") or dense("w", shape, dtype),
        operands.get("bias"), operands.get("residual"), operands.get("y") or dense("y", (rows, columns), dtype),
        sim_device(arch), weight_layout=layout, tile=tile,
    )  # fmt: skip


def maps_of(step: Step) -> list[TensorMapArg]:
    return [argument for argument in step.args if isinstance(argument, TensorMapArg)]


@pytest.mark.parametrize("tile", CANDIDATES, ids=str)
def test_candidates_fit(tile):
    assert tile.shared_memory <= H200.shared_memory_per_block
    assert tile.accumulators <= 128
    assert tile.stages >= 3
    producer, consumer = REGISTER_SHARES
    assert 128 * producer + 256 * consumer <= 65536
    assert tile.threads * LAUNCH_REGISTERS <= 65536


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("tile", CANDIDATES, ids=str)
def test_maps_keep_tma_s_rules(tile, layout):
    (step,) = plan(layout=layout, tile=tile)
    x, w, y = maps_of(step)
    assert not [problem for given in (x, w, y) for problem in tensor_map.problems(0, given)]
    assert (x.dims, x.box) == ((264, 1000), (64, tile.block_m))
    expected = ((520, 264), (64, 64)) if layout == "in_out" else ((264, 520), (64, tile.block_n))
    assert (w.dims, w.box) == expected
    assert (y.dims, y.box, y.operand.slot) == ((520, 1000), (64, 16), "y")


def test_a_block_an_sm_at_most():
    (step,) = plan(rows=8192, columns=8192)
    assert step.grid == (H200.sm_count, 1, 1)
    (step,) = plan(rows=130, columns=130 + 6)
    assert step.grid == (4, 1, 1)
    assert step.smem == TILE.shared_memory


def test_tma_stores_only_whole_units():
    """Rows of 9 columns, and rows at odd places, are stored by the lanes."""
    assert plan()[0].kernel.constant("kTmaStore") is True
    (step,) = plan(columns=9, layout="out_in")
    assert step.kernel.constant("kTmaStore") is False
    assert step.kernel.constant("kVectorY") == 1
    assert maps_of(step)[2].operand.slot == "x"  # any map: it is not used
    shifted = Operand("y", (1000, 520), (528, 1), dtypes.f16, offset=4, alignment=256)
    (step,) = plan(y=shifted)
    assert step.kernel.constant("kTmaStore") is False
    assert step.kernel.constant("kVectorY") == 2


def test_widths_of_bias_and_residual_follow_their_places():
    bias, residual = dense("b", (520,), dtypes.f32), dense("r", (1000, 520), dtypes.f16)
    (step,) = plan(bias=bias, residual=residual)
    assert (step.kernel.constant("kVectorBias"), step.kernel.constant("kVectorResidual")) == (2, 2)
    odd = Operand("r", (1000, 520), (521, 1), dtypes.f16, alignment=256)
    (step,) = plan(bias=Operand("b", (520,), (2,), dtypes.f32), residual=odd)
    assert (step.kernel.constant("kVectorBias"), step.kernel.constant("kVectorResidual")) == (1, 1)


def test_leading_axes_that_merge_are_rows():
    (step,) = plan(x=dense("x", (5, 200, 264), dtypes.f16), y=dense("y", (5, 200, 520), dtypes.f16))
    assert maps_of(step)[0].dims == (264, 1000)


@pytest.mark.parametrize(
    ("operands", "words"),
    [
        ({"arch": "sm_80"}, "needs sm_90a"),
        ({"dtype": dtypes.f32}, "takes f16 and bf16"),
        ({"depth": 0}, "K is 0"),
        ({"depth": 263}, "x's rows do not begin"),
        ({"columns": 519}, "w's rows do not begin"),
        ({"depth": 263, "layout": "out_in"}, "(?s)x's rows .*w's rows"),
        ({"x": Operand("x", (1000, 264), (528, 2), dtypes.f16)}, "x has elements 2 apart"),
        ({"x": Operand("x", (1000, 264), (0, 1), dtypes.f16)}, "overlap or reverse"),
        ({"x": Operand("x", (1000, 264), (264, 1), dtypes.f16, offset=8)}, "x's rows do not begin"),
        ({"w": Operand("w", (264, 520), (1040, 2), dtypes.f16)}, "w has elements 1040 apart"),
        ({"x": Operand("x", (5, 200, 264), (264 * 300, 264, 1), dtypes.f16),
          "y": dense("y", (5, 200, 520), dtypes.f16)}, "do not lie evenly"),
        ({"tile": HopperTile(256, 128, 6)}, "bytes of shared memory"),
    ],
)  # fmt: skip
def test_obstacles(operands, words):
    with pytest.raises(UnsupportedError, match=words):
        plan(**operands)


def test_empty_results_need_no_launch():
    assert plan(rows=0) == ()
    assert plan(columns=0) == ()


def test_a_transposed_weight_is_the_other_layout():
    given = Operand("w", (264, 520), (1, 264), dtypes.f16)
    (step,) = plan(w=given)
    assert step.kernel.constant("kWeightAlongN") is False
    assert maps_of(step)[1].dims == (264, 520)


def test_the_public_function_keeps_the_generic_kernel():
    x, w, y = (dense(n, (4096, 4096), dtypes.f16) for n in "xwy")
    (step,) = plan_linear(x, w, None, None, y, H200)
    assert step.kernel.entry == "linear"


@pytest.mark.parametrize("rows", [1, 64, 512, 8192])
@pytest.mark.parametrize("has_epilogue", [False, True])
def test_choice_fills_the_gpu_before_it_enlarges_tiles(rows, has_epilogue):
    tile = choose_hopper_tile(rows, 4096, H200, has_epilogue=has_epilogue)
    rounds = -(-tile_count(tile, rows, 4096) // H200.sm_count)
    wasted = rounds * H200.sm_count * tile.block_m * tile.block_n / (rows * 4096)
    assert rounds == 1 or wasted < 1.5
    if rows == 8192:
        assert tile.ping_pong is has_epilogue
