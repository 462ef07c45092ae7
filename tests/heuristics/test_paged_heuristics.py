"""Launch shapes of the decoding kernels: they fit every device, and the flagship shape gets what was measured best."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cki.device import sim_device
from cki.heuristics.paged import DecodeShape, append_blocks_per_token, choose_decode, choose_groups
from cki.kernel import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_shape_fits_in_shared_memory(arch):
    device = sim_device(arch)
    for itemsize, dim, rows, batch in itertools.product(
        (1, 2, 4), (8, 64, 128, 256), (1, 4, 16, 256), (1, 64, 5000)
    ):
        shape = DecodeShape(batch, rows, 8, dim, dim, itemsize, itemsize == 1, positions=10**6)
        chosen = choose_decode(shape, device)
        assert chosen.shared_memory(shape) <= device.shared_memory_per_block
        assert (
            chosen.min_blocks * (chosen.shared_memory(shape) + 1024) <= device.shared_memory_per_block + 1024
        )
        assert chosen.rows <= 8 * chosen.row_tiles
        assert chosen.split == (batch <= 1024)


def test_one_block_an_sm_with_three_stages_for_the_usual_decoder():
    for batch in (1, 128):
        chosen = choose_decode(DecodeShape(batch, 4, 8, 128, 128, 2, False, 10**6), sim_device("sm_90a"))
        assert (chosen.warps, chosen.stages, chosen.min_blocks) == (8, 3, 1)
        assert (chosen.groups, chosen.together, chosen.dealt, chosen.cluster) == (16, 8, batch == 1, False)


def test_clusters_merge_where_there_are_any():
    shape = DecodeShape(1, 4, 8, 128, 128, 2, False, positions=256)
    for arch in ARCHITECTURES:
        chosen = choose_decode(shape, sim_device(arch))
        assert chosen.dealt and chosen.cluster == (arch not in ("sm_80", "sm_89"))
        assert not chosen.cluster or chosen.groups == 8
    hopper = sim_device("sm_90a")
    for other in (
        {"positions": 10**5},
        {"kv_heads": 1},
        {"kv_heads": 64},
        {"batch": 64},
        {"batch": 6},
        {"window": True},
    ):
        assert not choose_decode(dataclasses.replace(shape, **other), hopper).cluster
    assert choose_decode(dataclasses.replace(shape, batch=4, positions=4096), hopper).cluster
    for slow in (
        {"itemsize": 1},
        {"itemsize": 4},
        {"rows": 7},
        {"rows": 16},
        {"scattered": True},
    ):  # products take longer
        assert not choose_decode(dataclasses.replace(shape, **slow), hopper).cluster
        assert choose_decode(dataclasses.replace(shape, positions=64, **slow), hopper).cluster


@pytest.mark.parametrize(("kv_heads", "groups"), [(8, 8), (14, 8), (16, 4), (32, 2)])
def test_all_clusters_are_resident_at_once(kv_heads, groups):
    chosen = choose_decode(DecodeShape(1, 1, kv_heads, 128, 128, 2, False, 256), sim_device("sm_90a"))
    assert (chosen.cluster, chosen.groups, chosen.together) == (True, groups, kv_heads)
    assert chosen.blocks <= 120


def test_few_keys_are_read_by_four_warps_a_block():
    def chosen(batch: int, kv_heads: int, positions: int) -> tuple[int, bool]:
        shape = DecodeShape(batch, 4, kv_heads, 128, 128, 2, False, positions)
        found = choose_decode(shape, sim_device("sm_90a"))
        return found.warps, found.cluster

    assert [chosen(4, 4, positions) for positions in (512, 1024)] == [(4, False), (8, False)]
    assert [chosen(1, 8, positions) for positions in (64, 256)] == [(4, True), (8, True)]
    assert chosen(4, 8, 128) == (8, True)


@pytest.mark.parametrize(
    ("batch", "dealt", "groups"),
    [
        (1, True, 16), (4, True, 16), (5, True, 15), (6, False, 16), (8, True, 16), (9, False, 16), (16, True, 16),
        (17, False, 16), (64, False, 16),
    ],
)  # fmt: skip
def test_sequences_are_dealt_where_their_groups_use_the_device(batch, dealt, groups):
    shape = DecodeShape(batch, 4, 8, 128, 128, 2, False, 10**5)
    chosen = choose_decode(shape, sim_device("sm_90a"))
    assert (chosen.dealt, chosen.by_lengths, chosen.groups) == (dealt, dealt and batch > 1, groups)
    assert not choose_decode(dataclasses.replace(shape, window=True), sim_device("sm_90a")).dealt


def test_no_more_blocks_than_there_can_be_work():
    chosen = choose_decode(DecodeShape(1, 4, 8, 128, 128, 2, False, positions=20), sim_device("sm_80"))
    assert (chosen.groups, chosen.together) == (-(-20 // chosen.warps), 8)


@pytest.mark.parametrize(
    ("units", "expected"),
    [(8, (33, 8)), (1, (264, 1)), (7, (37, 7)), (32, (8, 32)), (400, (3, 80)), (499, (264, 1))],
)
def test_groups_use_the_device(units, expected):
    groups, together = choose_groups(units, 4, 10**6, 264)
    assert units % together == 0 and 0.75 * 264 <= groups * together <= 264
    assert (groups, together) == expected


def test_a_unit_alone_does_not_depend_on_the_batch():
    device = sim_device("sm_90a")
    found = {
        choose_decode(DecodeShape(batch, 4, 8, 128, 128, 2, False, 512 * batch, alone=True), device)
        for batch in (1, 7, 1000, 5000)
    }
    assert len(found) == 1 and not found.pop().split


def test_blocks_that_share_a_token():
    device = sim_device("sm_90a")
    assert append_blocks_per_token(64, 48, 8, device) == 6
    assert append_blocks_per_token(100_000, 48, 8, device) == 1
    assert append_blocks_per_token(1, 3, 8, device) == 1
