"""Clusters, distributed shared memory, cooperative grids, and polling between blocks."""

from __future__ import annotations

import numpy as np
import pytest

from cki.errors import InvalidArgumentError
from cki.sim import Checks
from tests.sim.harness import kernel, line_of, report, run, sound_checks

FILE = "clusters.cu"
ORDERS = [Checks(), *(Checks(adversarial=True, hazards=True, seed=s) for s in range(6)), Checks.all(7)]


def sums(fault: int, size: int, checks: Checks | None = None) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(2 * size * 32, dtype=np.float32)
    y = np.zeros_like(x)
    run(kernel(FILE, "cluster_sum"), 2 * size, 32, x, y, fault, cluster=size, checks=checks)
    expected = np.broadcast_to(x.reshape(2, size, 32).sum(1, keepdims=True), (2, size, 32)).ravel()
    return y, expected


def fault_report(fault: int, checks: Checks) -> str:
    x = np.zeros(4 * 32, np.float32)
    return report(kernel(FILE, "cluster_sum"), 4, 32, x, np.zeros_like(x), fault, cluster=4, checks=checks)


@pytest.mark.parametrize("size", [1, 2, 16])
def test_sums_over_distributed_shared_memory(size):
    for checks in ORDERS:
        y, expected = sums(0, size, checks)
        assert np.array_equal(y, expected)


def test_sound_cluster_passes_every_check():
    for checks in sound_checks():
        y, expected = sums(0, 4, checks)
        assert np.array_equal(y, expected), checks


def test_two_dimensional_cluster_and_remote_stores():
    # Clusters of 2 x 2 in a grid of 4 x 2: the rank in the cluster is x + 2 y.
    for checks in ORDERS:
        y = np.zeros((2, 4, 32), np.int32)
        run(kernel(FILE, "cluster_ring"), (4, 2), 32, y, cluster=(2, 2), checks=checks)
        for by in range(2):
            for bx in range(4):
                rank = bx % 2 + 2 * by
                counter = 128 if rank == 0 else 0
                assert np.array_equal(y[by, bx], (rank - 1) % 4 * 100 + np.arange(32) + 10000 * counter)


def test_missing_cluster_barrier_before_a_remote_read():
    text = fault_report(1, Checks(races=True))
    assert "RACE" in text
    assert "of block rank" in text
    assert line_of(FILE, "write own part") in text
    assert line_of(FILE, "read the peer's part") in text


def test_peer_that_leaves_while_its_memory_is_read():
    found = [fault_report_or_none(2, Checks(adversarial=True, seed=seed)) for seed in range(20)]
    texts = [text for text in found if text]
    assert texts
    assert all("whose threads have all exited" in text for text in texts)
    assert all(line_of(FILE, "read the peer's part") in text for text in texts)


def fault_report_or_none(fault: int, checks: Checks) -> str:
    try:
        return fault_report(fault, checks)
    except pytest.fail.Exception:
        return ""


def test_peer_that_exits_early():
    text = fault_report(3, Checks())
    assert "whose threads have all exited" in text
    assert line_of(FILE, "read the peer's part") in text


def test_thread_that_skips_a_cluster_barrier_but_exits_is_not_waited_for():
    y, expected = sums(4, 4)
    assert np.array_equal(y, expected)


@pytest.mark.parametrize("checks", ORDERS)
def test_grid_barrier_of_a_cooperative_launch(checks):
    y = np.zeros(6 * 64, np.int32)
    arrived = np.zeros(1, np.uint32)
    run(kernel(FILE, "grid_barrier"), 6, 64, arrived, y, 4, cooperative=True, checks=checks)
    assert np.array_equal(y, np.full(6 * 64, 4))
    assert arrived[0] == 24


@pytest.mark.parametrize("threads", ["1", "2", "3"])
def test_blocks_may_wait_for_earlier_blocks(threads, monkeypatch):
    monkeypatch.setenv("CKI_SIM_THREADS", threads)
    for checks in ORDERS:
        y = np.zeros(20, np.int32)
        run(kernel(FILE, "chain"), 20, 32, np.zeros(20, np.uint32), y, 0, checks=checks)
        assert np.array_equal(y, np.arange(1, 21))


@pytest.mark.parametrize("threads", ["1", "2", "3"])
def test_blocks_that_wait_for_later_ones_are_reported(threads, monkeypatch):
    monkeypatch.setenv("CKI_SIM_THREADS", threads)
    y = np.zeros(20, np.int32)
    text = report(kernel(FILE, "chain"), 20, 32, np.zeros(20, np.uint32), y, 1, checks=Checks())
    assert "DEADLOCK" in text
    assert "cooperative launch" in text
    assert line_of(FILE, "poll chain") in text


def test_polling_with_votes_for_a_flag_that_nobody_sets():
    text = report(
        kernel(FILE, "poll_forever"), 1, 32, np.zeros(1, np.uint32), np.zeros(32, np.int32), checks=Checks()
    )
    assert "DEADLOCK" in text


@pytest.mark.parametrize("checks", ORDERS)
def test_last_block_sums(checks):
    x = np.arange(30, dtype=np.float32)
    y = np.zeros(1, np.float32)
    run(
        kernel(FILE, "last_block"),
        30,
        64,
        x,
        np.zeros(30, np.float32),
        np.zeros(1, np.uint32),
        y,
        checks=checks,
    )
    assert y[0] == x.sum()


def test_impossible_clusters_are_refused():
    y = np.zeros(32, np.int32)
    with pytest.raises(InvalidArgumentError, match="at most 16") as error:
        run(kernel(FILE, "cluster_ring"), 50, 32, y, cluster=(32, 1, 1))
    assert "not a multiple" in str(error.value)
