"""Which tile a product gets, and how operands are read: pure functions, no device."""

from __future__ import annotations

import random

import pytest

from cki import dtypes
from cki.device import sim_device
from cki.heuristics.linear import (
    TILES_16BIT,
    TILES_FP32,
    WeightAccess,
    block_count,
    choose_tile,
    copy_bytes,
    pair_access,
    weight_access,
)
from cki.kernel import ARCHITECTURES
from cki.operand import Operand, dense
from cki.ops.linear import Part, plan_linear, plan_linear_parts

H200 = sim_device("sm_90a")


def test_a_small_batch_gets_a_small_tile():
    """16 tokens of all-MiniLM-L6-v2: a tile of 64 rows would do four times the work."""
    for itemsize in (2, 4):
        for depth, columns in ((384, [384] * 3), (384, [1536]), (1536, [384])):
            assert choose_tile(16, columns, depth, itemsize, H200).block_m == 16


def test_a_large_product_gets_a_large_tile():
    assert choose_tile(8192, [8192], 8192, 2, H200) in TILES_16BIT[-2:]
    assert choose_tile(8192, [8192], 8192, 4, H200) is TILES_FP32[-1]


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "fastest"),
    [
        (8192, 1024, 3072, (128, 128)), (8192, 1024, 1024, (128, 128)), (8192, 1024, 4096, (128, 128)),
        (8192, 4096, 1024, (128, 128)), (512, 1024, 3072, (64, 64)), (512, 1024, 4096, (64, 128)),
        (512, 4096, 1024, (32, 64)), (16, 384, 1152, (16, 64)), (16, 384, 1536, (16, 64)), (96, 384, 1536, (16, 64)),
        (96, 1536, 384, (16, 64)), (4096, 4096, 4096, (128, 128)),
    ],
)  # fmt: skip
def test_the_choice_is_what_was_fastest_on_an_h200(rows, depth, columns, fastest):
    """bench/results/gemm.csv: within half a percent of the fastest of all tiles."""
    tile = choose_tile(rows, [columns], depth, 2, H200)
    assert (tile.block_m, tile.block_n) == fastest


def test_a_product_of_few_tiles_is_spread_over_the_device():
    """512 x 1024: 32 tiles of 128 x 128 would leave 100 of 132 SMs idle."""
    tile = choose_tile(512, [1024], 1024, 2, H200)
    assert block_count(tile, 512, [1024]) >= 64


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_choices_fit_the_device(arch):
    device, draw = sim_device(arch), random.Random(1)
    for _ in range(300):
        rows, columns, depth = (draw.choice((1, 2, 15, 17, 100, 1000, 5000, 50000)) for _ in range(3))
        for itemsize in (2, 4):
            for gathered in (False, True):
                tile = choose_tile(rows, [columns], depth, itemsize, device, gathered=gathered)
                assert tile.shared_memory <= device.shared_memory_per_block
                assert not gathered or tile.block_m * tile.block_n <= 64 * 64
                assert block_count(tile, rows, [columns]) * tile.block_m * tile.block_n >= rows * columns


def test_registers_of_all_tiles_fit_an_sm():
    for tile in TILES_16BIT + TILES_FP32:
        assert tile.max_registers <= 255
        assert tile.min_blocks * tile.threads * tile.max_registers <= 65536


def test_parts_do_not_share_tiles():
    assert block_count(TILES_16BIT[0], 17, [65, 64, 1]) == 2 * (2 + 1 + 1)


@pytest.mark.parametrize(
    ("arguments", "access"),
    [
        ((8, 6, 6, 1), WeightAccess(True, 6, 1)),
        ((8, 6, 1, 8), WeightAccess(False, 8, 1)),
        ((8, 6, 12, 2), WeightAccess(False, 2, 12)),
        ((1, 6, 99, 1), WeightAccess(True, 0, 1)),
        ((8, 1, 1, 99), WeightAccess(False, 0, 1)),
        ((8, 1, 5, 99), WeightAccess(True, 5, 1)),
        ((1, 1, 7, 9), WeightAccess(True, 0, 1)),
        ((0, 6, 6, 1), WeightAccess(True, 6, 1)),
    ],
)
def test_weight_access(arguments, access):
    assert weight_access(*arguments) == access


def operand(alignment: int = 16, offset: int = 0, dtype=dtypes.f16) -> Operand:
    return Operand("t", (4, 64), (64, 1), dtype, offset, alignment)


@pytest.mark.parametrize(
    ("tensor", "row_stride", "nbytes"),
    [
        (operand(), 64, 16),
        (operand(), 68, 8),
        (operand(), 66, 4),
        (operand(), 65, 2),
        (operand(alignment=8), 64, 8),
        (operand(offset=4), 64, 4),
        (operand(alignment=2), 64, 2),
        (operand(dtype=dtypes.f32), 65, 4),
        (operand(dtype=dtypes.f32), 66, 8),
    ],
)
def test_copy_bytes(tensor, row_stride, nbytes):
    assert copy_bytes(tensor, 1, (row_stride,)) == nbytes
    assert copy_bytes(tensor, 2, (row_stride,)) == tensor.dtype.itemsize


def test_pair_access():
    assert pair_access(operand(), 1, (64,))
    assert not pair_access(operand(), 1, (65,))
    assert not pair_access(operand(), 2, (64,))
    assert not pair_access(operand(alignment=2), 1, (64,))


def weights(count: int, columns: int, dtype=dtypes.f16) -> list[Part]:
    return [
        Part(dense(f"w{i}", (32, columns), dtype), dense(f"b{i}", (columns,), dtype)) for i in range(count)
    ]


def test_parts_in_one_launch():
    x, y = dense("x", (5, 32), dtypes.f16), dense("y", (5, 120), dtypes.f16)
    steps = plan_linear_parts(x, weights(3, 40), y, H200)
    assert len(steps) == 1
    assert steps[0].kernel.constant("kSegments") == 3
    assert steps[0].kernel.constant("kVectorY") == 2


def test_parts_that_begin_at_odd_columns_are_written_one_by_one():
    x, y = dense("x", (5, 32), dtypes.f16), dense("y", (5, 124), dtypes.f16)
    parts = [*weights(1, 41), *weights(2, 41)]
    (step,) = plan_linear_parts(x, parts, y.view((5, 123), (124, 1)), H200)
    assert step.kernel.constant("kVectorY") == 1


@pytest.mark.parametrize("change", ["strides", "bias", "bias type", "number"])
def test_parts_in_launches_of_their_own(change):
    x, parts = dense("x", (5, 32), dtypes.f16), weights(3, 40)
    if change == "strides":
        parts[1] = parts[1]._replace(w=dense("w1", (40, 32), dtypes.f16).view((32, 40), (1, 32)))
    elif change == "bias":
        parts[2] = parts[2]._replace(bias=None)
    elif change == "bias type":
        parts[0] = parts[0]._replace(bias=dense("b0", (40,), dtypes.f32))
    else:
        parts = weights(4, 40)
    y = dense("y", (5, 40 * len(parts)), dtypes.f16)
    steps = plan_linear_parts(x, parts, y, H200)
    assert len(steps) == len(parts)
    assert [step.args[8].offset for step in steps] == [80 * index for index in range(len(parts))]


def test_reasons_name_the_tile_and_the_copies():
    x, w, y = (
        dense(n, s, dtypes.bf16) for n, s in (("x", (9000, 1024)), ("w", (1024, 4096)), ("y", (9000, 4096)))
    )
    (step,) = plan_linear(x, w, None, None, y, sim_device("sm_80"))
    assert step.reason == "9000 x 1024 by 4096: tiles of 128 x 256, 1136 blocks, 16 and 16 bytes a copy"
    assert step.grid == (1136, 1, 1)
