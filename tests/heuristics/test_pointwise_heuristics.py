"""How element-wise kernels are cut: every element covered, within the device's limits, for any shape."""

from __future__ import annotations

import itertools
import random

import pytest

from cki import dtypes
from cki.device import sim_device
from cki.heuristics.pointwise import MAX_WIDTH, tile_config
from cki.operand import Operand, dense
from cki.ops.pointwise import plan_bias_activation, plan_gated_activation
from cki.ops.pointwise_dropout import plan_dropout_add
from cki.ops.pointwise_quantize import plan_quantize_fp8
from cki.ops.pointwise_rules import broadcast_to

DEVICE = sim_device("sm_90a")


def test_every_configuration_covers_its_rows_within_limits():
    random.seed(1)
    widths = [*range(1, 70), *(random.randrange(70, 100000) for _ in range(200)), 4096, MAX_WIDTH]
    for width, size, inputs, rows, lanes in itertools.product(
        widths, (1, 2, 4, 8), (1, 2), (1, 300, 1 << 30), (1, 16)
    ):
        config = tile_config(rows, width, size, inputs, DEVICE, min_blocks=4, min_lanes=lanes)
        assert config.threads == 256
        assert config.threads_per_row >= lanes
        assert config.threads * config.min_blocks * config.max_registers <= 65536
        tile = config.threads_per_row * config.vectors_per_thread * size
        groups, tiles, one = config.grid(rows, width)
        assert (groups - 1) * config.rows_per_block < rows <= groups * config.rows_per_block
        assert one == 1 and tiles <= 65535 and groups < 2**31
        assert tiles * tile >= width or tiles == 65535
        assert width + tiles * tile < 2**31  # the kernel's column and a step of the grid
        assert config.full_tiles == (width % tile == 0)


@pytest.mark.parametrize(
    ("width", "size"), [(4096, 8), (1024, 8), (14336, 8), (5120, 8), (4096, 4), (384, 8)]
)
def test_usual_rows_keep_bytes_in_flight_and_idle_little(width, size):
    for inputs in (1, 2):
        config = tile_config(16384, width, size, inputs, DEVICE, min_blocks=4)
        assert config.vectors_per_thread * inputs >= (3 if width == 384 else 4)
        tile = config.threads_per_row * config.vectors_per_thread * size
        assert -(-width // tile) * tile <= width * 8 / 7


def test_few_rows_are_spread_over_more_blocks():
    few, many = (tile_config(rows, 4096, 8, 1, DEVICE, min_blocks=4) for rows in (64, 16384))
    assert few.vectors_per_thread == 1
    blocks = few.grid(64, 4096)
    assert blocks[0] * blocks[1] == 128
    assert many.vectors_per_thread == 4


@pytest.mark.parametrize("layout", ["gate_first", "up_first", "interleaved"])
def test_widths_decide_the_access(layout):
    for width, size in ((4096, 8), (4100, 4), (4098, 2), (4097, 1)):
        x, y = dense("x", (9, 2 * width), dtypes.bf16), dense("y", (9, width), dtypes.bf16)
        (step,) = plan_gated_activation(x, None, y, DEVICE, layout=layout)
        assert step.kernel.constant("kVectorSize") == size


def test_one_launch_for_dense_tensors_and_no_launch_without_rows():
    x = dense("x", (2, 3, 4, 64), dtypes.bf16)
    counter, scale = dense("seed", (1,), dtypes.i64), dense("scale", (2, 3, 4, 1), dtypes.f32)
    codes = dense("codes", x.shape, dtypes.e4m3)
    assert len(plan_bias_activation(x, None, x, DEVICE)) == 1
    assert len(plan_dropout_add(x, x, counter, counter, x, DEVICE, p=0.5)) == 1
    assert len(plan_quantize_fp8(x, codes, scale, DEVICE)) == 1
    empty = dense("x", (0, 64), dtypes.bf16)
    assert plan_bias_activation(empty, None, empty, DEVICE) == ()


def test_indices_of_dropout_are_those_of_the_shape():
    """Peeled axes and merged ones: first_index and the index strides count elements of x's shape, not of its memory."""
    x = dense("x", (2, 3, 4, 5, 6), dtypes.f32)
    permuted = Operand("x", (5, 2, 4, 3, 6), (6, 360, 30, 120, 1), dtypes.f32)
    counter = dense("seed", (1,), dtypes.i64)
    (step,) = plan_dropout_add(x, None, counter, counter, x, DEVICE, p=0.5)
    assert step.args[-6:-2] == (0, 0, 6, 0)
    steps = plan_dropout_add(
        permuted, None, counter, counter, dense("y", permuted.shape, dtypes.f32), DEVICE, p=0.5
    )
    assert [step.args[-3] for step in steps] == [0, 72]
    assert {step.args[-6:-3] for step in steps} == {(144, 18, 6)}


@pytest.mark.parametrize(
    ("shape", "strides", "into", "expected"),
    [
        ((4, 8), (8, 1), (4, 8), (8, 1)),
        ((8,), (1,), (3, 4, 8), (0, 0, 1)),
        ((4, 1), (1, 1), (3, 4, 8), (0, 1, 0)),
        ((), (), (2, 2), (0, 0)),
        ((3, 8), (8, 1), (4, 8), None),
        ((1, 4, 8), (32, 8, 1), (4, 8), None),
    ],
)
def test_broadcasting(shape, strides, into, expected):
    found = broadcast_to(Operand("mask", shape, strides, dtypes.bool_), into)
    assert (None if found is None else found.strides) == expected
    assert found is None or found.shape == into
