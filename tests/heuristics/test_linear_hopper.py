"""How the Hopper GEMM is planned: tiles that fit, registers that add up, maps as TMA takes them, refusals."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cki import dtypes, tensor_map
from cki.device import sim_device
from cki.errors import UnsupportedError
from cki.heuristics.linear_hopper import (
    CANDIDATES,
    LAUNCH_REGISTERS,
    REGISTER_SHARES,
    TILES,
    WIDE_TILES,
    HopperTile,
    choose_hopper_tile,
    narrow_from,
    predicted_time,
    preferred_hopper_tile,
    wide_rounds,
)
from cki.operand import Operand, dense
from cki.ops.linear import Part, plan_linear, plan_linear_parts
from cki.plan import Step, TensorMapArg

H200 = sim_device("sm_90a")
TILE = HopperTile(128, 128, ping_pong=True)
#: Time of the model's choice over that of the best measured tile: the worst cell, and the mean.
WORST_CHOICE, MEAN_CHOICE = 1.02, 1.005


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
    extra = tile.fetched_bytes if tile.fetches else 0
    assert tile.shared_memory + extra <= H200.shared_memory_per_block
    assert tile.blocks_together == (2 if tile.consumers == 1 else 1)
    assert tile.accumulators <= 128
    assert tile.stages >= 3
    producer, consumer = REGISTER_SHARES
    assert 128 * producer + 256 * consumer <= 65536
    assert tile.threads * LAUNCH_REGISTERS <= 65536


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("tile", CANDIDATES, ids=str)
def test_maps_keep_tma_s_rules(tile, layout):
    (step,) = plan(layout=layout, tile=tile)
    x, w, y, residual = maps_of(step)
    assert residual == x  # none: any map will do
    assert not [problem for given in (x, w, y) for problem in tensor_map.problems(0, given)]
    assert (x.dims, x.box) == ((264, 1000), (64, tile.block_m))
    if layout == "in_out":  # blocks that share too few columns share K
        expected = ((520, 264), (64, 64 if tile.block_n >= 64 * tile.sharers else 64 // tile.sharers))
    else:
        expected = ((264, 520), (64, tile.block_n // tile.sharers))
    assert (w.dims, w.box) == expected
    assert (y.dims, y.box, y.operand.slot) == ((520, 1000), (64, 16), "y")


def test_a_block_an_sm_at_most():
    (step,) = plan(rows=8192, columns=8192)
    assert step.grid == (H200.sm_count, 1, 1)
    (step,) = plan(rows=130, columns=130 + 6)
    assert step.grid == (4, 1, 1)
    assert step.smem == TILE.shared_memory


def test_clusters():
    """Blocks that split K: one tile a cluster.  Blocks that share a weight: whole clusters, an SM a block."""
    (step,) = plan(rows=2048, columns=2048, tile=HopperTile(128, 64, 8, split=2))
    assert (step.grid, step.cluster) == ((1024, 1, 1), (2, 1, 1))
    (step,) = plan(rows=8192, columns=8192, tile=HopperTile(128, 128, 6, True, sharers=2))
    assert (step.grid, step.cluster) == ((132, 1, 1), (2, 1, 1))
    (step,) = plan(rows=300, columns=136, tile=HopperTile(128, 128, 6, True, sharers=2))
    assert step.grid == (8, 1, 1)  # three rows of tiles are two clusters


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
        ({"tile": HopperTile(128, 128, 4, split=8)}, "has no 8 parts"),
        ({"tile": HopperTile(128, 128, 4, True, split=2)}, "share one tile"),
        ({"tile": HopperTile(128, 128, 2, split=2)}, "at most 32 sums a thread"),
        ({"tile": HopperTile(64, 64, 4, True, consumers=1)}, "small blocks have 64 rows"),
        ({"tile": HopperTile(128, 192, 3, sharers=16)}, "multiples of eight rows"),
        ({"tile": HopperTile(128, 128, 4, split=2, sharers=2)}, "a cluster splits K, or"),
        ({"tile": HopperTile(128, 192, 4, True), "residual": dense("r", (1000, 520), dtypes.f16)}, "no registers for"),
        ({"tile": HopperTile(128, 256, 3, True)}, "at most 192 sums a thread"),
        ({"tile": HopperTile(192, 128, 3)}, "rows in multiples of 64"),
        ({"tile": HopperTile(128, 192, 3, True, sharers=2, narrow=128)}, "without clusters"),
        ({"tile": HopperTile(128, 192, 3, True, narrow=96)}, "in multiples of 64"),
        ({"tile": HopperTile(128, 192, 3, True, narrow=192)}, "have fewer columns"),
        ({"tile": HopperTile(128, 64, 4, split=2, fetches=True), "residual": dense("r", (1000, 520), dtypes.f16)},
         "where no cluster splits K"),
    ],
)  # fmt: skip
def test_obstacles(operands, words):
    with pytest.raises(UnsupportedError, match=words):
        plan(**operands)


def test_wide_tiles_where_a_finish_costs():
    """Short products, where wide tiles and narrower ones behind them take hardly more rounds, and not few of them."""

    def choice(rows: int, columns: int, depth: int, activation: str | None = None) -> str:
        residual = activation is None
        found = preferred_hopper_tile(
            rows, columns, depth, H200, activation=activation is not None, residual=residual,
            wide_from=wide_rounds(activation, residual=residual),
        )  # fmt: skip
        return str(found)

    for activation in ("gelu", "gelu_tanh", "silu"):
        assert choice(8192, 4096, 1024, activation) == "128x192s4ppn128"
    assert choice(8192, 4096, 1024) == "128x192s4ppfetchn128"
    assert choice(8192, 4096, 1024, "relu") == "128x128s6pp"
    assert choice(8192, 3072, 1024, "gelu") == "128x192s4pp"  # its rounds come out
    assert choice(8192, 3072, 1024, "silu") == choice(4096, 4096, 1024, "gelu_tanh") == "128x128s6pp"
    assert choice(8192, 4096, 4096, "gelu") == "128x128s6pp"  # a long K hides it
    assert choice(8192, 1024, 1024) == "128x128s5ppfetch"
    for tile in WIDE_TILES:
        extra = max(tile.fetched_bytes, tile.parked_bytes)
        assert tile.shared_memory + extra <= H200.shared_memory_per_block


def test_wide_tiles_behind_a_norm():
    """Where GELU is behind it, in 12 rounds and more; never with spare warps."""

    def choice(rows: int, columns: int, activation: str | None, norm: str) -> str:
        return str(preferred_hopper_tile(
            rows, columns, 1024, H200, activation=activation is not None, norm=norm,
            wide_from=wide_rounds(activation, residual=False, norm=norm),
        ))  # fmt: skip

    assert (
        choice(8192, 4096, "gelu", "layer") == choice(16384, 4096, "gelu", "layer") == "128x192s4pppairsn128"
    )
    assert choice(8192, 4096, "gelu_tanh", "rms") == "128x192s4ppn128"
    assert choice(4096, 4096, "gelu", "layer") == "128x128s6pppairs"
    assert choice(8192, 3072, None, "layer") == choice(8192, 3072, None, "rms") == "128x128s6pp"
    assert choice(2048, 4096, "gelu", "layer") == "128x128s6ppm2pairsspare"


@pytest.mark.parametrize("rows", [128, 1000, 2048, 8192, 16384])
def test_narrower_tiles_even_out_what_blocks_have(rows):
    """The busiest block has what the tiles of the launch, dealt out in turn, give it."""
    tile = replace(WIDE_TILES[1], narrow=128)
    for columns in (192, 200, 1024, 3072, 4096, 5000, 14336):
        column, busiest = narrow_from(tile, rows, columns, H200)
        assert (
            column % tile.block_n == 0
            and tile.block_n <= column <= -(-columns // tile.block_n) * tile.block_n
        )
        down = -(-rows // 128)
        work = [1.5] * (down * (column // 192)) + [1.0] * (down * -(-(columns - column) // 128))
        dealt = [sum(work[block :: H200.sm_count]) for block in range(min(len(work), H200.sm_count))]
        assert max(dealt) == busiest
        (step,) = plan(rows, 64, columns, dtypes.bf16, tile=tile)
        assert (step.grid[0], step.args[11]) == (len(dealt), column)
    assert narrow_from(tile, 8192, 4096, H200) == (3840, 16.0)  # 16.5 by wide ones alone


def test_narrower_tiles_know_their_place():
    with pytest.raises(UnsupportedError, match="narrower ones of consumers in turn"):
        plan(tile=HopperTile(128, 256, 4, narrow=128))
    with pytest.raises(UnsupportedError, match="128 columns have no wide tile"):
        plan(tile=replace(WIDE_TILES[1], narrow=128), columns=128)


def test_empty_results_need_no_launch():
    assert plan(rows=0) == ()
    assert plan(columns=0) == ()


def test_a_transposed_weight_is_the_other_layout():
    given = Operand("w", (264, 520), (1, 264), dtypes.f16)
    (step,) = plan(w=given)
    assert step.kernel.constant("kWeightAlongN") is False
    assert maps_of(step)[1].dims == (264, 520)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "entry"),
    [
        (4096, 4096, 4096, "linear_hopper"), (512, 1024, 1024, "linear_hopper"), (2048, 1024, 3072, "linear_hopper"),
        (96, 384, 1536, "linear"), (512, 64, 64, "linear"), (1, 4096, 4096, "linear_skinny"),
    ],
)  # fmt: skip
def test_products_that_ask_for_no_tile(rows, depth, columns, entry):
    """Large ones are the Hopper kernel's; small ones, and those it cannot read, are not."""
    x, w, y = (
        dense(n, e, dtypes.f16) for n, e in zip("xwy", ((rows, depth), (depth, columns), (rows, columns)))
    )
    (step,) = plan_linear(x, w, None, None, y, H200)
    assert step.kernel.entry == entry
    (step,) = plan_linear(x.view((rows, depth), (depth, 1), 1), w, None, None, y, H200)
    assert step.kernel.entry == "linear"


@pytest.mark.parametrize(("rows", "entries"), [(8192, ["linear_hopper"] * 3), (96, ["linear"])])
def test_parts_of_a_weight(rows, entries):
    """Q, K and V: a launch each where that is faster than one of the generic kernel."""
    x, y = dense("x", (rows, 1024), dtypes.f16), dense("y", (rows, 3072), dtypes.f16)
    parts = [
        Part(dense(f"w{i}", (1024, 1024), dtypes.f16), dense(f"b{i}", (1024,), dtypes.f16)) for i in range(3)
    ]
    steps = plan_linear_parts(x, parts, y, H200)
    assert [step.kernel.entry for step in steps] == entries
    if len(steps) == 3:
        assert [maps_of(step)[2].operand.offset for step in steps] == [0, 1024 * 2, 2048 * 2]
        assert [maps_of(step)[2].strides for step in steps] == [(3072 * 2,)] * 3


# --- the choice against what was measured (bench/results/gemm_hopper.csv) -------------------------------------------

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "gemm_hopper.csv"


#: Measured with a producer of a whole warp: ping-pong tiles were 5 to 10 % slower than now (docs/linear_hopper.md).
OLD_COMMITS = ("f286a8d",)


def measured() -> dict[tuple[str, str], dict[str, float]]:
    """(shape, layout) -> implementation -> microseconds."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with RESULTS.open() as file:
        for row in csv.DictReader(file):
            if row["commit"] not in OLD_COMMITS:
                cell = found.setdefault((row["problem"], row["layout"]), {})
                cell[row["implementation"]] = float(row["median_us"])
    return found


def shape_of(problem: str) -> tuple[int, int, int, str]:
    """Rows, depth, columns, epilogue."""
    extents, _, epilogue = problem.partition(":")
    rows, depth, columns = (int(extent) for extent in extents.split("x"))
    return rows, depth, columns, epilogue


def test_the_choice_is_near_the_best_that_was_measured():
    ratios = []
    for (problem, _), times in measured().items():
        rows, depth, columns, epilogue = shape_of(problem)
        known = {f"hopper {tile}": tile for tile in TILES}
        tile = choose_hopper_tile(
            rows, columns, depth, H200, activation=epilogue == "gelu", residual=epilogue == "residual",
        )  # fmt: skip
        ratios.append(times[f"hopper {tile}"] / min(times[name] for name in known if name in times))
    assert max(ratios) <= WORST_CHOICE
    assert sum(ratios) / len(ratios) <= MEAN_CHOICE


def test_predictions_are_near_what_was_measured():
    """Of the chosen tile: a device under load runs at less than its full clock, in one shape more than in another."""
    for (problem, _), times in measured().items():
        rows, depth, columns, epilogue = shape_of(problem)
        if rows < 512:  # bound by the weight's bytes, which the model does not know
            continue
        options = {"activation": epilogue == "gelu", "residual": epilogue == "residual"}
        tile = choose_hopper_tile(rows, columns, depth, H200, **options)
        predicted = predicted_time(tile, rows, columns, depth, H200, **options)
        assert 0.85 < predicted / times[f"hopper {tile}"] < 1.15, problem


def measured_as(tile: HopperTile) -> HopperTile:
    """Without a residual by TMA, and with as many stages as in that file."""
    shape = (tile.block_m, tile.block_n, tile.ping_pong, tile.split)
    return next(t for t in TILES if shape == (t.block_m, t.block_n, t.ping_pong, t.split))


def test_the_better_kernel_is_taken_unasked():
    """Wherever both were measured, but for a product of few rows that the generic kernel multiplies as fast."""
    for (problem, _), times in measured().items():
        rows, depth, columns, epilogue = shape_of(problem)
        tile = preferred_hopper_tile(
            rows, columns, depth, H200, activation=epilogue == "gelu", residual=epilogue == "residual"
        )
        taken = "generic" if tile is None else f"hopper {tile}"
        if tile is not None and taken not in times:
            taken = f"hopper {measured_as(tile)}"
        assert times[taken] <= 1.1 * times["generic"], problem
        assert rows < 512 or tile is not None, problem


def test_spare_warps_read_statistics_where_rounds_are_few():
    def tile(rows: int, norm: str | None) -> HopperTile:
        found = preferred_hopper_tile(rows, 3072, 1024, H200, norm=norm)
        assert found is not None
        return found

    assert tile(2048, "layer").spare_warps
    assert not any(tile(rows, norm).spare_warps for rows, norm in ((8192, "layer"), (2048, None)))


def test_a_residual_comes_by_tma_where_that_was_measured():
    """Not into tiles whose K is split."""
    for (problem, _), times in measured().items():
        rows, depth, columns, epilogue = shape_of(problem)
        tile = preferred_hopper_tile(rows, columns, depth, H200, residual=epilogue == "residual")
        if epilogue != "residual" or tile is None or tile.split > 1:
            assert tile is None or not tile.fetches
        elif f"hopper {tile}" in times:
            assert tile.fetches and times[f"hopper {tile}"] < times[f"hopper {measured_as(tile)}"]
    found = preferred_hopper_tile(8192, 1024, 1024, H200, residual=True, norm="residual")
    assert found is not None and found.fetches  # measured in whole encoders (docs/encoder.md)


@pytest.mark.parametrize(
    ("rows", "copied"), [(17, "x32"), (32, "x32"), (33, "x48"), (48, "x48"), (49, ""), (64, "")]
)
def test_few_rows_by_heavy_weights(rows, copied):
    """Two launches fit the GPU side by side, where they can; long ones begin at once."""
    for depth, columns, expected in (
        (4096, 4096, "64x64s12smalll8"), (14336, 4096, "64x64s12small"), (4096, 6144, "64x128s8smalla4l8"),
        (8192, 8192, "64x128s8small"), (4096, 28672, "64x64s6smalla2l0"), (8192, 2048, "64x64s12k2smalla4l4"),
        (14336, 2048, "64x64s12k2small"),
    ):  # fmt: skip
        tile = preferred_hopper_tile(rows, columns, depth, H200)
        assert str(tile) == expected + copied
        assert tile.shared_memory <= H200.shared_memory_per_block
        (step,) = plan(rows, depth, columns, tile=tile)
        assert maps_of(step)[0].box == (64, tile.rows_x or 64)


def test_rows_that_are_not_there_are_not_copied():
    """Beyond 64 of them where one tile has all; of light weights nothing was measured."""
    for columns, tile in ((4096, "128x64s7k2"), (6144, "128x64s8pp"), (28672, "128x256s4")):
        found = [str(preferred_hopper_tile(rows, columns, 4096, H200)) for rows in (65, 96, 112, 113, 128)]
        assert found == [tile + copied for copied in ("x80", "x96", "x112", "", "")]
    light = preferred_hopper_tile(500, 1024, 1024, H200)
    assert light is not None and light.rows_x == 0


def test_gelu_of_pairs_is_for_products_that_normalise_their_rows():
    """Which an encoder's are; a linear layer's GELU keeps its tail."""
    for rows in (2048, 8192):
        alone = preferred_hopper_tile(rows, 4096, 1024, H200, activation=True)
        folded = preferred_hopper_tile(rows, 4096, 1024, H200, activation=True, norm="layer")
        assert alone is not None and not alone.pairs
        assert folded is not None and folded.pairs
    plain = preferred_hopper_tile(8192, 3072, 1024, H200, norm="layer")
    assert plain is not None and not plain.pairs


def test_weights_are_shared_where_that_was_measured():
    """By products behind norms of about 2048 rows; not of 8192, nor where a cluster would be half empty."""

    def sharers(rows: int, columns: int, norm: str | None = "layer") -> int:
        tile = preferred_hopper_tile(rows, columns, 1024, H200, norm=norm)
        assert tile is not None
        return tile.sharers

    assert sharers(2048, 3072) == sharers(2048, 4096) == 2
    assert sharers(8192, 3072) == sharers(512, 3072) == sharers(1920, 4096) == sharers(2048, 4096, None) == 1
