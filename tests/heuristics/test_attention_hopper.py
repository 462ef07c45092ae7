"""How the Hopper kernel is planned: tiles that fit, registers that add up, maps as TMA takes them, refusals."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from cki import dtypes, tensor_map
from cki.device import sim_device
from cki.errors import UnsupportedError
from cki.heuristics.attention_hopper import (
    HopperTiles,
    choose_few_rows,
    choose_hopper_tiles,
    key_span,
    sections_of,
    value_span,
)
from cki.operand import Operand, dense
from cki.ops.attention import plan_attention
from cki.ops.attention_dropout import AttentionDropout
from cki.ops.attention_hopper import COUNTER, PART_LSES, PARTS, workspace_of
from cki.plan import NullPointer, Step, TensorMapArg

DEVICE = sim_device("sm_90a")
DIMS = range(16, 257, 16)
TILES = HopperTiles(2, 128)


def plan(
    queries: int = 1000, keys: int = 3000, heads: int = 4, kv_heads: int = 2, dim: int = 64, batch: int = 2,
    dtype: Any = dtypes.bf16, arch: str = "sm_90a", tiles: HopperTiles | None = TILES, **options: Any,
) -> tuple[Step, ...]:  # fmt: skip
    q = options.pop("q", dense("q", (batch, queries, heads, dim), dtype))
    k, v = (options.pop(n, dense(n, (batch, keys, kv_heads, dim), dtype)) for n in ("k", "v"))
    out = dense("out", (batch, queries, heads, dim), dtype)
    return plan_attention(q, k, v, out, device=sim_device(arch), tiles=tiles, **options)


def all_choices() -> list[tuple[int, int, HopperTiles]]:
    found = []
    for dim, value_dim, limits in itertools.product(DIMS, DIMS, (False, True)):
        for rows, plain in itertools.product((1, 64, 65, 128, 129, 100000), (False, True)):
            tiles = choose_hopper_tiles(rows, 16, dim, value_dim, limits, plain, DEVICE)
            found.append((dim, value_dim, tiles))
    return found


def test_tiles_fit_shared_memory_and_registers():
    for dim, value_dim, tiles in all_choices():
        per_sm = tiles.blocks_per_sm
        assert tiles.shared_memory(dim, value_dim) <= DEVICE.shared_memory_per_block
        assert per_sm * (tiles.shared_memory(dim, value_dim) + 1024) <= 228 * 1024
        assert tiles.block_keys % 16 == 0 and tiles.block_keys <= 256 and tiles.block_rows <= 256
        assert tiles.stages >= 2
        for packed in (False, True):
            producer, consumer = tiles.register_shares(packed)
            assert per_sm * tiles.threads * tiles.registers <= 65536
            # More than the block was launched with, and the last consumer waits for ever.
            assert producer + tiles.consumers * consumer <= (1 + tiles.consumers) * tiles.registers
            # Accumulators, weights and about 30 more: what spills is found by compiling, what cannot fit here.
            needed = tiles.block_keys // 2 + tiles.block_keys // 4 + value_dim // 2 + 24
            assert needed <= (consumer or tiles.registers), (dim, value_dim, str(tiles))


def test_two_warps_copy_for_three_consumers_of_a_cache():
    assert [HopperTiles(3, 128).copying_warps(copies) for copies in (0, 1, 8)] == [1, 2, 2]
    assert HopperTiles(2, 128).copying_warps(8) == 1
    assert HopperTiles(2, 128, copy_warps=2).copying_warps(1) == 2


def test_keys_a_tile_do_not_depend_on_queries_and_batch():
    for dim, limits, plain in itertools.product(DIMS, (False, True), (False, True)):
        chosen = {
            choose_hopper_tiles(r, n, dim, dim, limits, plain, DEVICE).block_keys
            for r in (1, 65, 129, 9999)
            for n in (1, 64, 1000)
        }
        assert len(chosen) == 1


def test_few_tiles_are_made_smaller_until_they_fill_the_sms():
    """BERT-large's 64 heads of a batch of 4 at 128, 512 and 4096 tokens."""
    chosen = [choose_hopper_tiles(n, 64, 64, 64, False, True, DEVICE) for n in (128, 512, 4096)]
    assert [tiles.consumers for tiles in chosen] == [1, 2, 3]
    assert [tiles.schedule for tiles in chosen] == ["single", "fixed", "dynamic"]


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True), ({"queries": 64}, True), ({"queries": 63, "keys": 255}, False), ({"dtype": dtypes.f32}, False),
        ({"queries": 1, "keys": 256}, True),
        ({"arch": "sm_100a"}, False), ({"mask": dense("mask", (1, 1, 1000, 1), dtypes.bool_)}, True),
        ({"mask": Operand("mask", (1, 1, 1000, 3000), (0, 0, 6000, 2), dtypes.bool_)}, False),
        ({"dim": 20}, False), ({"dim": 24}, True),
    ],
)  # fmt: skip
def test_taken_unasked_where_it_can_be(change, taken):
    entries = [step.kernel.entry for step in plan(tiles=None, **change)]
    assert ("attention_hopper" in entries) is taken


def test_few_rows_pack_heads_and_cut_keys_where_tiles_are_few():
    def chosen(queries: int, batch: int, may_split: bool = True, keys: int = 4096) -> HopperTiles:
        return choose_few_rows(queries, keys, batch, 8, 4, 128, 128, True, may_split, DEVICE)

    assert (chosen(1, 1).heads, chosen(1, 1).splits, chosen(1, 1).consumers) == (4, 16, 1)
    assert chosen(1, 1, may_split=False).splits == 1
    assert chosen(16, 16) == HopperTiles(1, 128, 2, False, heads=4)
    assert chosen(32, 16).block_queries == 32  # 128 rows
    assert chosen(64, 16) == HopperTiles(2, 128, schedule="dynamic", heads=4)
    assert chosen(1, 1, keys=128).splits == 1
    long = choose_hopper_tiles(4096, 32, 128, 128, True, True, DEVICE)
    assert {chosen(n, b, keys=k).block_keys for n in (1, 99) for b in (1, 50) for k in (1, 9999)} == {
        long.block_keys
    }


def test_few_rows_fit_shared_memory():
    for dim, value_dim, plain, group in itertools.product(DIMS, DIMS, (False, True), (1, 3, 64, 96)):
        tiles = choose_few_rows(5, 3000, 2, 2, group, dim, value_dim, plain, True, DEVICE)
        assert tiles.blocks_per_sm * tiles.shared_memory(dim, value_dim) <= DEVICE.shared_memory_per_block
        assert group % tiles.heads == 0 and tiles.heads <= 32


def test_parts_of_keys_are_merged_by_a_second_launch():
    out, lse = dense("out", (1, 4, 8, 64), dtypes.bf16), dense("lse", (1, 8, 4), dtypes.f32)
    q, k = dense("q", (1, 4, 8, 64), dtypes.bf16), dense("k", (1, 1000, 2, 64), dtypes.bf16)
    steps = plan_attention(q, k, k, out, device=DEVICE, lse=lse, tiles=HopperTiles(1, 128, heads=4, splits=3))
    assert [step.kernel.entry for step in steps] == ["attention_hopper", "merge_states"]
    assert steps[0].grid == (2 * 3, 1, 1)  # parts of 3, 3 and 2 tiles of keys
    assert dict(workspace_of(steps)) == {PARTS: 3 * 4 * 8 * 64 * 4, PART_LSES: 3 * 8 * 4 * 4}
    packed = {"dropout": AttentionDropout(0.1, dense("s", (1,), dtypes.i64), dense("o", (1,), dtypes.i64))}
    with pytest.raises(UnsupportedError, match="keys in parts"):
        plan_attention(q, k, k, out, device=DEVICE, tiles=HopperTiles(1, 128, splits=3), **packed)


def test_swizzles_divide_rows():
    assert [key_span(d) for d in (16, 32, 48, 64, 256)] == [32, 64, 128, 128, 128]
    assert [value_span(d) for d in (16, 32, 48, 64, 80, 96, 192)] == [32, 64, 32, 128, 32, 64, 128]


def test_sections_hold_whole_groups():
    """Of a device with 60 MiB of L2: 1.5 MiB of keys and values, 9.6 and 33 where tiles differ in length."""
    megabyte = 1 << 20

    def found(*sizes: int, **options: Any) -> tuple[int, int]:
        return sections_of(*sizes, 132, DEVICE, **{"is_alike": True, **options})

    assert found(megabyte // 4, 4, 1024, 64) == (6 * 4, 42)
    assert found(megabyte // 4, 1, 13, 128) == (6, 2)  # the last has one
    assert found(100 * megabyte, 4, 1000, 132) == (4, 249)
    assert found(1, 1, 7, 1) == (7, 0)
    assert found(megabyte, 4, 1024, 64, wanted=30) == (28, 36)
    limited = {"is_alike": False}
    assert found(megabyte, 1, 128, 8, **limited) == (9, 12)  # the last has 20: at least 16
    assert found(8 * megabyte, 1, 16, 128, **limited) == (4, 3)
    assert found(32 * megabyte, 1, 16, 128, **limited) == (
        1,
        14,
    )  # the last has tiles for one and a half rounds
    assert found(2 * megabyte, 1, 8, 4, **limited) == (4, 0)  # all in one
    assert found(2 * megabyte, 1, 32, 8, **limited, is_packed=True) == (16, 1)


@pytest.mark.parametrize("schedule", ["single", "fixed", "dynamic"])
def test_a_step_is_complete(schedule):
    steps = plan(tiles=HopperTiles(2, 128, schedule=schedule))
    step = steps[-1]
    assert len(step.args) == len(step.kernel.params)
    for letter, value in zip(step.kernel.params, step.args):
        kinds = {"T": TensorMapArg, "P": (Operand, NullPointer), "q": int, "i": int, "I": int, "f": float}[
            letter
        ]
        assert isinstance(value, kinds), (letter, value)
    assert step.grid == ((8 * 4 * 2 if schedule == "single" else min(64, 132)), 1, 1)
    assert step.block == (384, 1, 1)
    assert step.programmatic == (len(steps) == 2) == (schedule == "dynamic")
    assert workspace_of(steps) == ((COUNTER,) if schedule == "dynamic" else ())


def test_a_persistent_grid_is_no_larger_than_the_device():
    assert plan(batch=50, tiles=HopperTiles(2, 128, schedule="fixed"))[-1].grid == (132, 1, 1)
    assert plan(batch=50, tiles=HopperTiles(1, 128, 2, False, "fixed", 2))[-1].grid == (264, 1, 1)


def test_maps_are_what_tma_takes():
    qkv = Operand("qkv", (2, 1000, 4, 80), (1000 * 3 * 320, 3 * 320, 80, 1), dtypes.bf16, 640)
    single = Operand(
        "k", (2, 3000, 1, 80), (240000, 80, 7, 1), dtypes.bf16
    )  # any stride along an axis of extent 1
    step = plan(q=qkv, k=single, v=single, dim=80)[-1]
    maps = [a for a in step.args if isinstance(a, TensorMapArg)]
    assert [m.box for m in maps] == [(64, 64, 1, 1), (64, 128, 1, 1), (16, 128, 1, 1)]
    assert maps[0].dims == (80, 1000, 4, 2) and maps[0].strides == (1920, 160, 1920000)
    for m in maps:
        assert tensor_map.problems(1 << 20, m) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"arch": "sm_80"}, "the device is sm_80"),
        ({"dtype": dtypes.f32}, "takes f16 and bf16"),
        ({"keys": 0}, "there is no key"),
        ({"dim": 20}, "multiples of 16 bytes"),
        ({"k": Operand("k", (2, 3000, 2, 64), (128, 0, 64, 1), dtypes.bf16)}, "repeat or reverse an axis"),
        (
            {"q": Operand("q", (2, 1000, 4, 64), (512000, 512, 128, 2), dtypes.bf16)},
            "stride 2 along head_dim",
        ),
        ({"bias": Operand("bias", (1000, 3000), (1, 1000), dtypes.f32)}, "stride 1000 along the keys"),
    ],
)
def test_what_it_does_not_take_is_named(options, reason):
    with pytest.raises(UnsupportedError, match=reason):
        plan(**options)


def test_work_beyond_31_bits_is_refused():
    with pytest.raises(UnsupportedError, match="tiles of queries"):
        plan(queries=1, keys=1, heads=2**11, kv_heads=2**11, batch=2**20)


def test_tiles_are_named_for_logs():
    assert str(HopperTiles(3, 128)) == "192 rows x 128 keys, 2 stages, single, ping-pong"
    assert "2 blocks an SM" in str(dataclasses.replace(HopperTiles(1, 128), blocks_per_sm=2))
