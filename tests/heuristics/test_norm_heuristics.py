"""Which configuration a norm gets: every row covered, within the device's limits, for any shape."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from cki import dtypes
from cki.device import sim_device
from cki.heuristics.norm import RowShape, candidates, choose, vector_size
from cki.heuristics.rows import MAX_ROWS, row_batches
from cki.operand import Operand, dense

DEVICE = sim_device("sm_90a")


def test_every_candidate_covers_its_row_within_limits():
    random.seed(1)
    widths = [
        *range(1, 130),
        *(random.randrange(130, 50000) for _ in range(200)),
        4096,
        16384,
        32768,
        1 << 20,
    ]
    for width, itemsize, inputs, rows in itertools.product(widths, (2, 4), (1, 2), (1, 300, 1 << 20)):
        size = 16 // itemsize
        while width % size:
            size //= 2
        shape = RowShape(rows, width, size, itemsize, itemsize, inputs, 2, True)
        for config in candidates(shape, DEVICE):
            assert config.threads <= 1024
            assert config.threads_per_row in (1, 2, 4, 8, 16, 32) or config.threads_per_row % 32 == 0
            assert config.threads_per_row <= 32 or config.rows_per_block == 1
            assert config.threads % 32 == 0
            assert config.threads * config.min_blocks * config.max_registers <= 65536
            assert config.grid(rows, DEVICE) * config.rows_per_block >= min(rows, DEVICE.sm_count)
            if config.vectors_per_thread:
                reach = config.threads_per_row * config.vectors_per_thread * size
                assert reach >= width
                assert config.full_row == (reach == width)
                assert config.vectors_per_thread * size <= 32
            else:
                assert width > 12288


def test_wide_rows_are_in_registers_up_to_the_stated_limits():
    for itemsize, inputs, limit in ((2, 1, 32768), (2, 2, 24576), (4, 1, 16384), (4, 2, 12288)):
        fits, too_wide = (
            choose(RowShape(4096, width, 16 // itemsize, itemsize, inputs=inputs), DEVICE)
            for width in (limit, limit + 16)
        )
        assert fits.name == "block"
        assert too_wide.name == "long"


def test_few_rows_get_more_threads_each():
    many, few = (choose(RowShape(rows, 4096, 8, 2), DEVICE) for rows in (16384, 64))
    assert few.threads_per_row > many.threads_per_row


@pytest.mark.parametrize(
    ("width", "x", "weight", "size"),
    [
        (1024, (16, 0, 1), (16, 0, 1), 8),
        (1024, (16, 0, 1), (4, 0, 1), 2),  # weight aligned to 4 bytes: fp32 pairs need 8, 16-bit ones 4
        (1000, (16, 0, 1), (16, 0, 1), 8),
        (1004, (16, 0, 1), (16, 0, 1), 4),
        (1001, (16, 0, 1), (16, 0, 1), 1),
        (1024, (16, 2, 1), (16, 0, 1), 1),  # starts at an odd element
        (1024, (16, 8, 1), (16, 0, 1), 4),
        (1024, (16, 0, 2), (16, 0, 1), 1),  # stepped
        (1, (16, 0, 7), (16, 0, 1), 1),
    ],
)
def test_vector_size(width, x, weight, size):
    alignment, offset, step = x
    rows = Operand("x", (4, width), (4096, step), dtypes.bf16, offset, alignment)
    weights = Operand("w", (width,), (weight[2],), dtypes.bf16, weight[1], weight[0])
    assert vector_size([rows, weights], width) == size


def _addresses(operand: Operand) -> set[int]:
    grids = np.meshgrid(*(np.arange(extent) for extent in operand.shape[:-1]), indexing="ij")
    total = sum((grid * stride for grid, stride in zip(grids, operand.strides)), start=np.zeros((), int))
    return {int(value) for value in np.ravel(total)}


def test_batches_visit_every_row_once():
    generator = random.Random(2)
    for _ in range(200):
        shape = tuple(generator.choice((1, 1, 2, 3, 4)) for _ in range(generator.randrange(0, 7)))
        order = generator.sample(range(len(shape)), len(shape))
        base = dense("x", tuple(shape[axis] for axis in order), dtypes.f32)
        strides = [0] * len(shape)
        for place, axis in enumerate(order):
            strides[axis] = base.strides[place] * 8
        x, y = Operand("x", (*shape, 8), (*strides, 1), dtypes.f32), dense("y", (*shape, 8), dtypes.f32)
        pairs = []
        for batch in row_batches([x, y]):
            assert batch.axes == 3 or batch.extents[:2] == (1, 1)
            for index in itertools.product(*map(range, batch.extents)):
                pairs.append(tuple(
                    offset + sum(i * stride for i, stride in zip(index, strides))
                    for offset, strides in zip(batch.offsets, batch.strides)
                ))  # fmt: skip
        assert len(pairs) == len(set(pairs)) == int(np.prod(shape))
        assert {p[0] for p in pairs} == _addresses(x)
        expected = {int(a): int(b) for a, b in zip(_in_order(x), _in_order(y))}
        assert all(expected[a] == b for a, b in pairs)


def _in_order(operand: Operand) -> np.ndarray:
    grids = np.meshgrid(*(np.arange(extent) for extent in operand.shape[:-1]), indexing="ij")
    return np.ravel(sum((g * s for g, s in zip(grids, operand.strides)), start=np.zeros((), int)))


def test_dense_rows_are_one_launch():
    (batch,) = row_batches([dense("x", (2, 3, 4, 8), dtypes.f32)])
    assert batch.rows == 24
    assert batch.axes == 1


def test_rows_beyond_32_bits_are_cut():
    batches = row_batches([dense("x", (3 * MAX_ROWS, 1), dtypes.f32)])
    assert [batch.rows for batch in batches] == [MAX_ROWS] * 3
    assert [batch.offsets[0] for batch in batches] == [0, MAX_ROWS, 2 * MAX_ROWS]


def test_no_rows():
    assert row_batches([dense("x", (4, 0, 8), dtypes.f32)]) == []
