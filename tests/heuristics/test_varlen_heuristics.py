"""How attention over packed sequences is planned: a grid that covers all lengths, tiles that hints decide and results
do not show."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cki import dtypes, tensor_map
from cki.device import sim_device
from cki.errors import UnsupportedError
from cki.heuristics.attention import choose_tiles
from cki.heuristics.attention_hopper import HopperTiles, choose_packed_tiles
from cki.kernel import ARCHITECTURES
from cki.operand import Operand, dense
from cki.ops.attention import PackedSequences, plan_attention
from cki.plan import NullPointer, Step, TensorMapArg

DEVICE = sim_device("sm_90a")


def plan(
    tokens: int = 4096, keys: int = 4096, heads: int = 8, kv_heads: int = 2, dim: int = 64, batch: int = 8,
    typical: int = 512, block_size: int = 0, blocks: int = 500, columns: int = 64, arch: str = "sm_100a",
    **options: Any,
) -> Step:  # fmt: skip
    """The attention kernel's step; sm_100a has the generic one alone."""
    q = dense("q", (1, tokens, heads, dim), dtypes.bf16)
    k = dense(
        "k", (blocks, block_size, kv_heads, dim) if block_size else (1, keys, kv_heads, dim), dtypes.bf16
    )
    table = dense("block_table", (batch, columns), dtypes.i64) if block_size else None
    lengths = dense("lengths", (batch if block_size else batch + 1,), dtypes.i32)
    packed = PackedSequences(dense("cu_seqlens_q", (batch + 1,), dtypes.i32), lengths, table, typical)
    return plan_attention(q, k, k, q, device=sim_device(arch), packed=packed, **options)[-1]


def test_the_grid_follows_from_tokens_and_batch_alone():
    assert plan(tokens=1000, batch=7, typical=500).grid == ((1000 // 128 + 9) * 8, 1, 1)
    # The four heads of a group share a block, so a query is four rows.
    assert plan(tokens=1000, batch=7, typical=9).grid == ((4000 // 64 + 9) * 2, 1, 1)
    assert plan(block_size=16).grid == plan(block_size=16, blocks=9, columns=3).grid == plan(keys=17).grid


@pytest.mark.parametrize("rows", [16, 128])
def test_slots_cover_every_row_block_of_any_lengths_once(rows):
    """The arithmetic of cuda_src/attention/packed_sequences.cuh."""
    generator = np.random.default_rng(rows)
    for _ in range(200):
        total, batch = int(generator.integers(0, 2000)), int(generator.integers(0, 9))
        inner = np.sort(generator.integers(0, total + 1, batch + 1)).tolist()
        begins = [0, *inner, total]
        first_slots = [begin // rows + segment for segment, begin in enumerate(begins)]
        needed = [-(-(end - begin) // rows) for begin, end in itertools.pairwise(begins)]
        for first, following, blocks in zip(first_slots, first_slots[1:], needed):
            assert blocks <= following - first <= blocks + 1
        assert first_slots[-1] == total // rows + batch + 2


@pytest.mark.parametrize("block_size", [0, 16])
def test_a_step_is_complete(block_size):
    step = plan(causal=True, block_size=block_size)
    assert len(step.args) == len(step.kernel.params)
    for letter, value in zip(step.kernel.params, step.args):
        kinds = {"P": (Operand, NullPointer), "q": int, "i": int, "I": int, "f": float}[letter]
        assert isinstance(value, kinds), (letter, value)
    places = 2 * 64 * 8 if block_size else 0
    assert step.smem == 128 * 144 + 2 * 2 * 64 * 144 + places + 16
    assert step.kernel.constant("kPaged") is bool(block_size)


def test_the_longest_sequence_decides_rows_but_never_keys_a_tile():
    steps = [plan(typical=n, block_size=b) for n in (0, 1, 5, 40, 64, 10**6) for b in (0, 1, 16)]
    assert {step.kernel.constant("kBlockKeys") for step in steps} == {64}
    assert plan(typical=1).kernel.constant("kWarps") == 1
    assert plan(typical=1).kernel.constant("kPackHeads") is True
    assert plan(typical=64).kernel.constant("kPackHeads") is False


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiles_with_places_fit_every_device(arch):
    device = sim_device(arch)
    for dim, value_dim, itemsize, plain in itertools.product(
        range(16, 257, 16), range(16, 257, 16), (2, 4), (False, True)
    ):
        tiles = choose_tiles(128, dim, value_dim, itemsize, plain, device, True)
        assert tiles.shared_memory(dim, value_dim, itemsize, True) <= device.shared_memory_per_block


@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({}, False, False),
        ({"causal": True}, False, True),
        ({"causal": True, "window": (-1, 5)}, False, True),
        ({"window": (10**6, -1)}, True, False),
        ({"window": (2**30, 2**40)}, False, False),
    ],
)
def test_a_limit_stands_while_some_length_may_reach_it(options, left, right):
    kernel = plan(keys=17, **options).kernel
    assert (kernel.constant("kLimitLeft"), kernel.constant("kLimitRight")) == (left, right)


def test_rows_of_shared_blocks_stay_within_32_bits():
    step = plan(tokens=2**28, heads=8, kv_heads=1, typical=1, batch=2)
    assert step.kernel.constant("kPackHeads") is False


def test_more_blocks_than_a_grid_holds_are_refused():
    with pytest.raises(UnsupportedError, match="a grid holds"):
        plan(tokens=2**29, heads=128, kv_heads=128, typical=1, batch=2)


# The Hopper kernel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True), ({"typical": 64}, True), ({"typical": 63, "keys": 2047}, False), ({"typical": 1}, True),
        ({"arch": "sm_80"}, False), ({"dim": 20}, False),
        ({"block_size": 16}, True), ({"block_size": 48}, True), ({"block_size": 256}, True), ({"block_size": 8}, False),
        ({"block_size": 24}, False), ({"keys": 0}, False), ({"block_size": 16, "blocks": 0}, False),
    ],
)  # fmt: skip
def test_the_hopper_kernel_is_taken_unasked_where_it_can_be(change, taken):
    step = plan(**{"arch": "sm_90a"} | change)
    assert (step.kernel.entry == "attention_hopper") is taken


@pytest.mark.parametrize(
    ("block_size", "box"), [(0, 128), (16, 16), (48, 16), (64, 64), (128, 128), (256, 128)]
)
def test_a_step_of_the_hopper_kernel_is_complete(block_size, box):
    step = plan(arch="sm_90a", causal=True, block_size=block_size, dim=128)
    assert len(step.args) == len(step.kernel.params)
    for letter, value in zip(step.kernel.params, step.args):
        kinds = {"T": TensorMapArg, "P": (Operand, NullPointer), "q": int, "i": int, "I": int, "f": float}[
            letter
        ]
        assert isinstance(value, kinds), (letter, value)
    maps = [a for a in step.args if isinstance(a, TensorMapArg)]
    assert [m.box for m in maps] == [(64, 64, 1, 1), (64, box, 1, 1), (64, box, 1, 1)]
    assert all(tensor_map.problems(1 << 20, m) == [] for m in maps)
    assert step.kernel.constant("kBoxKeys") == box
    assert step.grid == (132, 1, 1) and step.programmatic
    assert step.smem == HopperTiles(2, 128).shared_memory(128, 128) + 2 * 16  # a tile of 28 bytes, not 12


def test_keys_a_hopper_tile_do_not_depend_on_lengths_and_caches():
    steps = [
        plan(tokens=n, batch=b, keys=n, block_size=s, dim=128, arch="sm_90a")
        for n, b, s in itertools.product((64, 1000, 10**6), (1, 9, 500), (0, 16, 64))
    ]
    assert {step.kernel.constant("kBlockKeys") for step in steps} == {128}


def test_short_sequences_get_small_hopper_tiles():
    rows = {
        n: choose_packed_tiles(16384, 16384 // n, 32, 64, 64, False, True, DEVICE).block_rows
        for n in (64, 2048)
    }
    assert rows == {64: 64, 2048: 192}


def test_few_queries_over_many_keys_pack_heads():
    def heads(**change: Any) -> int:
        return plan(arch="sm_90a", heads=12, **change).kernel.constant("kPackedHeads")

    assert heads(typical=1, tokens=8) == heads(typical=127) == heads(typical=16, block_size=16) == 6
    assert heads(typical=128) == heads(typical=127, keys=2047) == 1


def test_what_the_hopper_kernel_does_not_take_is_named():
    with pytest.raises(UnsupportedError, match="blocks of 8 keys, not a multiple of 16"):
        plan(arch="sm_90a", block_size=8, tiles=HopperTiles(2, 128))


def test_no_tokens_need_no_launch():
    q = dense("q", (1, 0, 4, 64), dtypes.f16)
    offsets = dense("cu_seqlens_q", (3,), dtypes.i32)
    packed = PackedSequences(offsets, offsets, None, 1)
    assert plan_attention(q, q, q, q, device=DEVICE, packed=packed) == ()
