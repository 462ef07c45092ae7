"""Which products of few rows get the kernel for them, by which tile, and how it is launched: pure functions."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cki import dtypes
from cki.device import sim_device
from cki.errors import UnsupportedError
from cki.heuristics.linear_skinny import (
    CANDIDATES,
    DEFAULT_ROWS,
    FULL_TILE,
    MAX_ROWS,
    NARROW_TILES,
    PAIR_TILE,
    ROUNDS_TILE,
    SkinnyTile,
    blocks_together,
    choose_skinny_tile,
    fits,
    predicted_time,
    preferred_tile,
    skinny_blocks,
)
from cki.kernel import ARCHITECTURES
from cki.operand import Operand, dense
from cki.ops.linear import plan_linear
from cki.plan import Step

H200 = sim_device("sm_90a")
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "gemm_skinny.csv"
LATER = RESULTS.with_name("gemm_llama.csv")
#: Of which the first file has nothing.
SHARED_RINGS = [tile for tile in CANDIDATES if not tile.own_rings]
TILE = SkinnyTile(16, 64, 1, 4, 8, 4)
#: N, K of Llama-8B's products.
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def plan(
    rows: int = 1, depth: int = 4096, columns: int = 4096, dtype: Any = dtypes.bf16, layout: str = "in_out",
    arch: str = "sm_90a", tile: SkinnyTile | None = None, **operands: Operand | None,
) -> tuple[Step, ...]:  # fmt: skip
    shape = (depth, columns) if layout == "in_out" else (columns, depth)
    return plan_linear(
        operands.get("x") or dense("x", (rows, depth), dtype), operands.get("w") or dense("w", shape, dtype),
        operands.get("bias"), operands.get("residual"), operands.get("y") or dense("y", (rows, columns), dtype),
        sim_device(arch), weight_layout=layout, tile=tile,
    )  # fmt: skip


def measured() -> dict[str, dict[str, float]]:
    """Microseconds by shape ("MxKxN", bf16, [K, N]) and tile, on an H200."""
    cells: dict[str, dict[str, float]] = {}
    with RESULTS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            kind, _, tile = row["implementation"].partition(" ")
            if kind == "skinny" and int(row["problem"].split("x")[0]) <= DEFAULT_ROWS:
                assert (row["dtype"], row["layout"]) == ("bf16", "in_out")
                cells.setdefault(row["problem"], {})[tile] = float(row["median_us"])
    return cells


@pytest.mark.parametrize("problem", measured())
def test_the_choice_is_the_fastest_tile_measured(problem):
    """Within 2 %, of tiles whose warps share a ring; and the model's time within 10 %."""
    rows, depth, columns = map(int, problem.split("x"))
    times = measured()[problem]
    tile = choose_skinny_tile(rows, columns, depth, 2, H200, along_n=True, among=SHARED_RINGS)
    assert tile.programmatic == (tile.left >= 0)
    tile = dataclasses.replace(tile, ahead=0, left=-1)  # as in that file
    assert times[str(tile)] <= 1.02 * min(times.values())
    predicted = predicted_time(tile, rows, columns, depth, 2, H200)
    assert 0.9 < predicted / times[str(tile)] < 1.1


@pytest.mark.parametrize(("rows", "depth"), [(1, 4096), (16, 4096), (1, 14336), (16, 14336)])
def test_rings_of_warps(rows, depth):
    """Where two launches lie beside each other: within 2 % of the fastest tile, the model's time within 8 %."""
    times = {}
    with LATER.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            kind, _, name = row["implementation"].partition(" ")
            if kind == "skinny" and (row["problem"], row["layout"]) == (f"{rows}x{depth}x4096", "in_out"):
                times[name] = float(row["median_us"])
    tile = choose_skinny_tile(rows, 4096, depth, 2, H200, along_n=True)
    assert preferred_tile(rows, 4096, depth, 2, H200, along_n=True, copy_width=16) == tile
    assert tile.own_rings
    assert times[str(tile)] <= 1.02 * min(times.values())
    assert 0.92 < predicted_time(tile, rows, 4096, depth, 2, H200) / times[str(tile)] < 1.08


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_narrow_tiles_along_k(rows):
    """A block for nearly every SM, where that is so; the next launch's beside them, or as they end."""

    def chosen(columns: int, depth: int, along_n: bool = False) -> str:
        return str(preferred_tile(rows, columns, depth, 2, H200, along_n=along_n, copy_width=16))

    assert chosen(4096, 4096) == chosen(3072, 4096) == "16x32w1x4s4k1owna10l0r"
    assert chosen(4096, 14336) == chosen(4096, 8192) == "16x32w1x4s4k1owna8l4r"
    assert chosen(2048, 4096) == "16x32w1x8s3k1owna10l0r"
    assert chosen(5120, 5120) == "16x48w1x4s3k1owna4l2r"
    assert chosen(6144, 4096) == chosen(5760, 4096) == "16x48w1x6s3k1owna8l0r"
    assert "16x48" not in chosen(8192, 4096) + chosen(6144, 4096, along_n=True)
    for columns, depth in ((12288, 4096), (16384, 2048), (28672, 8192), (128256, 4096)):  # in rounds
        assert chosen(columns, depth) == "16x32w1x8s2k1owna4l0r"
        assert "16x32w1x8s2" not in chosen(10240, depth) + chosen(columns, depth, along_n=True)
    assert chosen(16384, 4096, along_n=True) == chosen(16384, 2048, along_n=True) == "16x64w1x4s2k1owna4l0r"
    assert "16x64w1x4s2" not in chosen(14336, 4096, along_n=True) + chosen(22016, 4096, along_n=True)
    assert chosen(4096, 4096, along_n=True) == "16x64w1x4s5k1owna12l0"
    for tile in (*NARROW_TILES, FULL_TILE, ROUNDS_TILE):
        assert not fits(tile, 2, H200, along_n=True)
        assert "own" not in str(
            choose_skinny_tile(rows, 4096, 4096, 4, H200, along_n=False)
        )  # fp32: more registers


def test_the_model_of_whole_k_and_pairs():
    """Times of all tiles that split K once at most, also bad ones: within 15 %."""
    for problem, times in measured().items():
        rows, depth, columns = map(int, problem.split("x"))
        known = {str(one): one for tile in CANDIDATES for one in both_launches(tile)}
        for name, microseconds in times.items():
            tile = known.get(name)
            if tile is not None and tile.split <= 2:
                ratio = predicted_time(tile, rows, columns, depth, 2, H200) / microseconds
                assert 0.85 < ratio < 1.15, (problem, name, ratio)


def both_launches(tile: SkinnyTile) -> tuple[SkinnyTile, SkinnyTile]:
    return tile, dataclasses.replace(tile, programmatic=False)


def test_launches_overlap_where_two_fit_side_by_side():
    """As measured: elsewhere the prefetch of blocks that come late costs more than the overlap saves."""
    for columns, depth, programmatic in (
        (4096, 4096, True),
        (4096, 14336, True),
        (6144, 4096, True),
        (28672, 4096, False),
    ):
        (step,) = plan(1, depth, columns)
        assert step.programmatic is programmatic


@pytest.mark.parametrize("tile", [*CANDIDATES, ROUNDS_TILE, PAIR_TILE], ids=str)
def test_candidates_fit_an_h200(tile):
    assert any(fits(tile, itemsize, H200, along_n=False) for itemsize in (2, 4))
    registers = 65536 // (blocks_together(tile, H200) * tile.threads)
    # Sums, a step's fragments and addresses.
    assert tile.block_m * tile.block_n // tile.warps_n // 32 + 64 <= registers
    rings = blocks_together(tile, H200) * (tile.warps_k if tile.own_rings else 1)
    in_flight = rings * (tile.stages - 1) * tile.block_n * 128
    assert in_flight >= 40_000, "bytes of the weight under way on an SM"


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(("columns", "depth"), LLAMA)
def test_a_large_weight_and_few_rows(rows, columns, depth, layout):
    """Taken unasked, spread over the whole GPU, or two launches beside each other; x read by few blocks."""
    (step,) = plan(rows, depth, columns, layout=layout)
    assert step.kernel.entry == "linear_skinny"
    split, block_n = step.kernel.constant("kSplit"), step.kernel.constant("kBlockN")
    assert step.cluster == (split, 1, 1)
    assert step.grid == (-(-columns // block_n) * split, 1, 1)
    launches = 2 if step.kernel.constant("kOwnRings") else 1
    assert launches * step.grid[0] >= 0.9 * H200.sm_count
    assert rows <= block_n / 2


def test_what_it_does_not_take_unasked():
    for different in (
        {"rows": DEFAULT_ROWS + 1}, {"depth": 256, "columns": 512}, {"columns": 4097},
        {"depth": 4092, "layout": "out_in"},
        {"x": Operand("x", (1, 4096), (4096, 1), dtypes.bf16, offset=2)},
        {"w": Operand("w", (4096, 4096), (8192, 2), dtypes.bf16)},
        {"rows": 6, "x": dense("x", (2, 1, 3, 4096), dtypes.bf16).view((2, 1, 3, 4096), (2**20, 1, 2**14, 1)),
         "y": dense("y", (2, 1, 3, 4096), dtypes.bf16), "columns": 4100},
    ):  # fmt: skip
        (step,) = plan(**different)
        assert step.kernel.entry != "linear_skinny", different


def test_nothing_to_compute():
    assert plan(0) == ()
    assert plan(0, tile=TILE) == ()
    assert plan(3, columns=0, tile=TILE) == ()


def test_rows_over_three_axes():
    x = dense("x", (2, 4, 4096), dtypes.bf16).view((2, 3, 4096), (4 * 4096, 4096, 1))
    (step,) = plan(x=x, y=dense("y", (2, 3, 4096), dtypes.bf16))
    assert (step.kernel.entry, step.kernel.constant("kRowAxes")) == ("linear_skinny", 3)
    assert step.args[5:8] == (6, 2, 3)


def test_any_number_of_rows_when_asked():
    (step,) = plan(70, 264, 72, tile=TILE)
    assert step.grid == (2 * 4, 5, 1)
    assert step.smem == TILE.shared_memory == 8 * 80 * 128


def test_parts_of_sums_may_outgrow_the_ring():
    assert SkinnyTile(64, 64, 1, 4, 2).shared_memory == 4 * 64 * 72 * 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_choices_fit_the_device(arch, itemsize):
    device = sim_device(arch)
    for rows in (1, 5, 16, 17, 33, 64, 100):
        for columns, depth in (*LLAMA, (8, 8), (100000, 64), (64, 100000)):
            for along_n in (False, True):
                tile = choose_skinny_tile(rows, columns, depth, itemsize, device, along_n=along_n)
                assert tile is not None
                assert fits(tile, itemsize, device, along_n=along_n)
                assert tile.block_m >= min(rows, 32)
                assert tile.split == 1 or arch in ("sm_90a", "sm_100a", "sm_120a")


def test_a_split_where_columns_are_few():
    tiles = {n: choose_skinny_tile(1, n, 8192, 2, H200, along_n=True) for n in (512, 65536)}
    assert tiles[512].split == 8
    assert tiles[65536].split == 1


def test_more_rows_get_higher_tiles():
    heights = [
        choose_skinny_tile(rows, 4096, 4096, 2, H200, along_n=True).block_m for rows in (1, 16, 17, 64)
    ]
    assert heights == [16, 16, 32, 64]
    assert max(tile.block_m for tile in CANDIDATES) == MAX_ROWS


def test_serial_launches_and_old_architectures():
    serial = dataclasses.replace(TILE, programmatic=False)
    (step,) = plan(tile=serial)
    assert not step.programmatic
    assert step.kernel.constant("kProgrammatic") is False
    (step,) = plan(arch="sm_80")
    assert step.kernel.entry == "linear_skinny"
    assert (step.programmatic, step.cluster) == (False, (1, 1, 1))
    assert step.kernel.archs == ARCHITECTURES


def test_narrow_copies_are_not_taken_unasked():
    assert preferred_tile(1, 4096, 4096, 2, H200, along_n=True, copy_width=16) is not None
    assert preferred_tile(1, 4096, 4096, 2, H200, along_n=True, copy_width=8) is None


def test_widths_follow_the_places():
    odd = Operand("y", (1, 4096), (4097, 1), dtypes.bf16, offset=2)
    (step,) = plan(y=odd, residual=dense("r", (1, 4096), dtypes.bf16))
    assert (step.kernel.constant("kVectorY"), step.kernel.constant("kVectorResidual")) == (1, 2)


def test_reasons_name_the_prediction():
    (step,) = plan(8, tile=TILE)
    assert step.reason == (
        "8 x 4096 by 4096: few rows, tiles of 16 x 64, K in 4 parts, 256 blocks, 16 and 16 bytes a copy, "
        "20.3 us predicted"
    )
    assert skinny_blocks(TILE, 8, 4096) == (256, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"arch": "sm_80"}, "sm_80 with 166912 bytes"),
        ({"tile": SkinnyTile(16, 32, 1, 4, 8)}, "tile 16x32w1x4s8k1 for bf16"),
        ({"tile": SkinnyTile(64, 256, 4, 2, 5), "dtype": dtypes.f32}, "for f32"),
        ({"tile": SkinnyTile(64, 256, 4, 2, 8)}, "another tile, or the generic kernel"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(UnsupportedError, match=words):
        plan(**{"tile": TILE, **arguments})
