"""Shuffles, votes, matches, reductions; __syncthreads and its reductions; named barriers."""

from __future__ import annotations

import numpy as np
import pytest

from cki.sim import Checks
from tests.sim.harness import kernel, line_of, report, run, sound_checks

FILE = "warps.cu"
ORDERS = [Checks(), *(Checks(adversarial=True, hazards=True, seed=s) for s in range(6)), Checks.all(7)]


@pytest.mark.parametrize("width", [32, 16, 8, 2])
def test_shuffles(width):
    y = np.zeros((6, 32), np.int32)
    lanes = np.arange(32)
    segment = lanes // width * width
    sources = [
        segment + lanes * 5 % 32 % width,
        np.where(lanes - 3 < segment, lanes, lanes - 3),
        np.where(lanes + 3 >= segment + width, lanes, lanes + 3),
        np.where((lanes ^ 5) >= segment + width, lanes, lanes ^ 5),
        np.full(32, 7),
        lanes ^ 1,
    ]
    for checks in ORDERS:
        run(kernel(FILE, "shuffles"), 1, 32, y, width, checks=checks)
        assert np.array_equal(y, 100 + np.array(sources))


def test_votes_matches_and_reductions():
    y = np.zeros((12, 32), np.uint32)
    lanes = np.arange(32, dtype=np.int64)
    bits = lambda chosen: sum(1 << int(i) for i in lanes[chosen])  # noqa: E731
    full = 0xFFFFFFFF
    expected = [
        np.full(32, bits(lanes % 3 == 0)), np.full(32, 3), np.full(32, 0),
        [bits(lanes % 5 == i % 5) for i in range(32)],
        np.full(32, (full + 1) & full), np.full(32, 0), np.full(32, 496), np.full(32, -16 & full), np.full(32, 15),
        np.full(32, full), np.full(32, 4 + 31000 + 100000 * int(np.bitwise_xor.reduce(lanes + 1))), np.full(32, 1),
    ]  # fmt: skip
    for checks in ORDERS:
        run(kernel(FILE, "votes"), 1, 32, y, checks=checks)
        assert np.array_equal(y, np.array(expected, np.int64).astype(np.uint32))


def test_exited_and_missing_lanes_are_not_waited_for():
    y = np.zeros(72, np.int32)
    for checks in ORDERS:
        run(kernel(FILE, "partial"), 1, 72, y, checks=checks)
        assert np.array_equal(y[:16], np.full(16, 120))
        assert np.array_equal(y[16:32], np.full(16, -1))
        assert np.array_equal(y[64:], np.full(8, 28))


def test_value_of_a_lane_outside_the_mask_is_poison():
    y = np.zeros(4, np.uint32)
    run(kernel(FILE, "outside"), 1, 32, y, checks=Checks(adversarial=True))
    assert y.tolist() == [0xFFFFFFFF] * 4


def test_block_votes():
    y = np.zeros(96, np.int32)
    for checks in ORDERS:
        run(kernel(FILE, "block_votes"), 1, 96, y, checks=checks)
        assert np.array_equal(y, np.full(96, 1 + 4 + 16 * 32))


def test_producer_and_consumer_at_named_barriers():
    y = np.zeros(64, np.float32)
    expected = sum(np.arange(64)[::-1] + round * 64 for round in range(5))
    for checks in sound_checks():
        y[:] = 0
        run(kernel(FILE, "producer_consumer"), 1, 128, y, 5, 0, checks=checks)
        assert np.array_equal(y, expected), checks


def test_overwriting_a_buffer_that_is_still_read_is_a_race():
    text = report(
        kernel(FILE, "producer_consumer"), 1, 128, np.zeros(64, np.float32), 5, 1, checks=Checks(races=True)
    )
    assert line_of(FILE, "produce") in text
    assert line_of(FILE, "consume") in text


def test_syncthreads_counts_the_threads_that_are_left():
    y = np.zeros(256, np.int32)
    for checks in ORDERS:
        run(kernel(FILE, "early_exit"), 1, 256, y, checks=checks)
        assert np.array_equal(y, np.arange(256) // 32)
