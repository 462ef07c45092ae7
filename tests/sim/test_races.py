"""The race detector: what counts as order, byte by byte; and that a seed decides a schedule."""

from __future__ import annotations

import numpy as np
import pytest

from cki import sim
from cki.sim import Checks
from tests.sim.harness import kernel, line_of, report, run, sound_checks

FILE = "races.cu"


@pytest.mark.parametrize("name", ["counter", "message", "volatile_message", "broadcast"])
def test_sound_kernels_pass_every_check(name):
    expected = {"counter": 64, "message": 42, "volatile_message": 42, "broadcast": 6}[name]
    for checks in sound_checks():
        y = np.zeros(64, np.int32)
        run(kernel(FILE, name), 1, 64, y, 0, checks=checks)
        assert y[0] == expected


def test_neighbouring_bytes_do_not_race():
    t = np.arange(64)
    for checks in sound_checks():
        y = np.zeros(64, np.uint8)
        run(kernel(FILE, "neighbours"), 1, 64, y, checks=checks)
        assert np.array_equal(y, ((t + 2) * 2 + 2 * t) % 256)


@pytest.mark.parametrize(
    ("name", "fault", "markers"),
    [
        ("counter", 1, ["add", "read count"]),
        ("message", 1, ["write data", "read data"]),
        ("message", 2, ["write data", "read data"]),
        ("volatile_message", 1, []),
        ("broadcast", 1, ["broadcast", "use"]),
    ],
)
def test_missing_order_is_found_on_the_plain_schedule(name, fault, markers):
    text = report(kernel(FILE, name), 1, 64, np.zeros(64, np.int32), fault, checks=Checks(races=True))
    assert "RACE" in text
    assert all(line_of(FILE, marker) in text for marker in markers)


def orders(seed: int) -> np.ndarray:
    y = np.zeros(10 * 128, np.int32)
    run(kernel(FILE, "order"), 10, 128, y, checks=Checks(adversarial=True, seed=seed))
    return y


def test_a_seed_decides_the_schedule_whatever_the_threads(monkeypatch):
    results = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("CKI_SIM_THREADS", threads)
        results.append([orders(seed) for seed in range(8)])
    assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    assert len({result.tobytes() for result in results[0]}) == 8


def test_checks_of_a_with_block_apply_to_launches_inside():
    built = kernel(FILE, "counter")
    run(built, 1, 64, np.zeros(64, np.int32), 1)
    with sim.checks(races=True):
        with pytest.raises(sim.SimulationError, match="RACE"):
            run(built, 1, 64, np.zeros(64, np.int32), 1)
        with sim.checks(hazards=True):
            run(built, 1, 64, np.zeros(64, np.int32), 1)
    run(built, 1, 64, np.zeros(64, np.int32), 1)


def test_findings_are_written_once_a_place():
    text = report(kernel(FILE, "broadcast"), 1, 64, np.zeros(64, np.int32), 1, checks=Checks(races=True))
    lines = [line for line in text.splitlines() if line.startswith("RACE")]
    assert 1 <= len(lines) <= 8  # one a pair of instructions, not one a thread
