"""Planted faults are found, with file and line; the sound versions pass 100 seeds of every check."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cki.sim import Checks
from tests.sim.harness import kernel, line_of, report, run, sound_checks

FILE = "faults.cu"
X = np.linspace(0.5, 1.5, 256, dtype=np.float32)


def all_kernels(fault: int):
    """(kernel, block, arguments, smem, outputs) of each kernel with a fault planted."""
    y = np.zeros(256, np.float32)
    x64 = X[:64].copy()
    return {
        "block_sums": (256, (X, y), 0),
        "warp_exchange": (32, (y,), 0),
        "warp_masks": (32, (y,), 0),
        "named_barrier": (128, (y,), 0),
        "bounds": (64, (x64, np.zeros(64, np.float32), 64), 64 * 4),
    }


@pytest.mark.parametrize("name", sorted(all_kernels(0)))
def test_sound_kernels_pass_every_check(name):
    block, values, smem = all_kernels(0)[name]
    built = kernel(FILE, name)
    run(built, 1, block, *values, 0, smem=smem)
    expected = [v.copy() for v in values if isinstance(v, np.ndarray)]
    for checks in sound_checks():
        run(built, 1, block, *values, 0, smem=smem, checks=checks)
        got = [v for v in values if isinstance(v, np.ndarray)]
        assert all(np.array_equal(a, b) for a, b in zip(expected, got)), checks


def test_block_sum_is_right():
    y = np.zeros(256, np.float32)
    run(kernel(FILE, "block_sums"), 1, 256, X, y, 0)
    total = X.astype(np.float64).sum()
    assert np.allclose(y, total * total, rtol=1e-6)


@pytest.mark.parametrize("fault", [1, 2])
def test_missing_syncthreads_is_a_race_on_the_plain_order(fault):
    text = report(
        kernel(FILE, "block_sums"), 1, 256, X, np.zeros(256, np.float32), fault, checks=Checks(races=True)
    )
    assert "RACE" in text
    assert line_of(FILE, "write part") in text
    assert line_of(FILE, "read part") in text


@pytest.mark.parametrize("fault", [1, 2])
def test_missing_syncthreads_changes_the_numbers_of_adversarial_runs(fault):
    expected = np.zeros(256, np.float32)
    built = kernel(FILE, "block_sums")
    run(built, 1, 256, X, expected, 0)
    wrong = 0
    for seed in range(20):
        y = np.zeros(256, np.float32)
        run(built, 1, 256, X, y, fault, checks=Checks(adversarial=True, seed=seed))
        wrong += not np.array_equal(y, expected)
    assert wrong >= 5


@pytest.mark.parametrize("fault", [1, 2], ids=["no __syncwarp", "shuffle instead of __syncwarp"])
def test_missing_syncwarp(fault):
    text = report(
        kernel(FILE, "warp_exchange"), 1, 32, np.zeros(32, np.float32), fault, checks=Checks(races=True)
    )
    assert line_of(FILE, "write values") in text
    assert line_of(FILE, "read values") in text


@pytest.mark.parametrize(
    ("fault", "words", "markers"),
    [
        (1, "are in a __|names lanes that wait", ["narrow mask", "wide mask", "all lanes again"]),
        (2, "are in a __(shfl_xor|any)_sync", ["shuffle meets vote", "vote meets shuffle"]),
        (3, "not in its mask 0x0000ffff", ["caller outside mask"]),
    ],
)
def test_wrong_warp_masks(fault, words, markers):
    for checks in [Checks()] + [Checks(adversarial=True, seed=s) for s in range(10)]:
        text = report(kernel(FILE, "warp_masks"), 1, 32, np.zeros(32, np.float32), fault, checks=checks)
        assert re.search(words, text)
        assert any(line_of(FILE, marker) in text for marker in markers)


def test_deadlock_at_a_named_barrier_names_every_wait():
    text = report(kernel(FILE, "named_barrier"), 1, 128, np.zeros(128, np.float32), 1, checks=Checks())
    assert "DEADLOCK" in text
    assert (
        f"threads 0-76: wait at barrier 1 (127 of 128 threads arrived) at {line_of(FILE, 'named barrier')}"
        in text
    )
    assert "thread 77: exited" in text
    assert "threads 78-127" in text


def test_mismatched_barrier_counts():
    text = report(kernel(FILE, "named_barrier"), 1, 128, np.zeros(128, np.float32), 2, checks=Checks())
    assert "thread count 96 differs from the 128" in text
    assert line_of(FILE, "named barrier") in text


@pytest.mark.parametrize(
    ("fault", "marker", "words"),
    [
        (1, "dynamic shared", "of the 256 bytes of dynamic shared memory"),
        (2, "static shared", "index 33 of an array of type 'float[32]'"),
        (3, "local array", "index 5 of an array of type 'float[4]'"),
        (4, "read global", "read of 4 bytes at offset 256 of a tensor of 256 bytes"),
        (5, "write global", "write of 4 bytes, 4 bytes before a tensor of 256 bytes"),
        (6, "through a pointer", "read of 4 bytes at offset 128 of a static shared array of 128 bytes"),
        (7, "through a pointer", "read of 4 bytes at offset 16 of a static shared array of 16 bytes"),
        (8, "through a pointer", "read of 4 bytes at offset 20 of a static shared array of 20 bytes"),
        (9, "stored through a pointer", "write of 4 bytes at offset 16 of a static shared array of 16 bytes"),
    ],
)
def test_out_of_bounds(fault, marker, words):
    # Far from each other, so that one array's neighbour is not the other.
    memory = np.zeros(4096, np.float32)
    x, y = memory[256:320], memory[2048:2112]
    text = report(kernel(FILE, "bounds"), 1, 64, x, y, 64, fault, smem=256, checks=Checks(bounds=True))
    assert "OUT OF BOUNDS" in text
    assert "thread 63" in text
    assert words in text.replace("float [", "float[")  # GCC and Clang write types differently
    assert line_of(FILE, marker) in text
