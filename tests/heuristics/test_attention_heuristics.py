"""How the generic attention kernel is planned: tiles that fit every device, copies that addresses allow, no limits that
hide nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cki import dtypes
from cki.device import sim_device
from cki.heuristics.attention import choose_tiles, heads_per_block, padded
from cki.kernel import ARCHITECTURES
from cki.operand import Operand, dense
from cki.ops.attention import plan_attention
from cki.plan import NullPointer, Step

DEVICE = sim_device("sm_90a")


def plan(
    queries: int = 128, keys: int = 300, heads: int = 4, kv_heads: int = 2, dim: int = 64, batch: int = 2,
    dtype: Any = dtypes.bf16, arch: str = "sm_80", **options: Any,
) -> Step:  # fmt: skip
    q = options.pop("q", dense("q", (batch, queries, heads, dim), dtype))
    k, v = (options.pop(n, dense(n, (batch, keys, kv_heads, dim), dtype)) for n in ("k", "v"))
    out = dense("out", (batch, queries, heads, dim), dtype)
    (step,) = plan_attention(q, k, v, out, device=sim_device(arch), **options)
    return step


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiles_fit_every_device(arch):
    device = sim_device(arch)
    dims = range(16, 257, 16)
    for dim, value_dim, itemsize, plain in itertools.product(dims, dims, (2, 4), (False, True)):
        keys = set()
        for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 100000):
            tiles = choose_tiles(rows, dim, value_dim, itemsize, plain, device)
            assert tiles.shared_memory(dim, value_dim, itemsize) <= device.shared_memory_per_block
            assert tiles.block_keys % 16 == 0
            assert rows > 64 or tiles.block_rows < 2 * max(rows, 16)  # no more than half of a tile is padding
            keys.add(tiles.block_keys)
        assert len(keys) == 1, "results would depend on the number of queries"


def test_a_step_is_complete():
    step = plan(causal=True)
    assert len(step.args) == len(step.kernel.params)
    for letter, value in zip(step.kernel.params, step.args):
        kinds = {"P": (Operand, NullPointer), "q": int, "i": int, "I": int, "f": float}[letter]
        assert isinstance(value, kinds), (letter, value)
    assert step.grid == (1 * 4 * 2, 1, 1)
    assert step.smem == 128 * 144 + 2 * 2 * 64 * 144 + 16


def test_the_tile_does_not_depend_on_batch_heads_or_lengths():
    chosen = {
        plan(batch=b, heads=h, queries=n, keys=m).kernel.constant("kBlockKeys")
        for b, h, n, m in itertools.product((1, 65537), (2, 64), (1, 7, 4096), (1, 100000))
    }
    assert len(chosen) == 1


def test_groups_share_a_block_while_there_are_few_queries():
    assert heads_per_block(1, 8) == 8
    assert heads_per_block(512, 8) == 1
    step = plan(queries=1, heads=32, kv_heads=4, batch=3)
    assert step.grid[0] == 3 * 4
    assert step.kernel.constant("kPackHeads") is True
    assert step.kernel.constant("kWarps") == 1


def test_more_than_65535_batches_fit_the_grid():
    step = plan(queries=1, keys=1, heads=1, kv_heads=1, batch=65537)
    assert step.grid == (65537, 1, 1)


def test_an_empty_output_needs_no_launch():
    q, k = dense("q", (0, 3, 4, 64), dtypes.f16), dense("k", (0, 5, 4, 64), dtypes.f16)
    assert plan_attention(q, k, k, dense("out", q.shape, dtypes.f16), device=DEVICE) == ()


@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({}, False, False),
        ({"causal": True}, False, True),
        ({"causal": True, "queries": 1}, False, False),  # the last query sees every key
        ({"causal": True, "causal_alignment": "top_left", "queries": 1}, False, True),
        ({"window": (427, 300)}, False, False),
        ({"window": (298, 127)}, True, False),
        ({"window": (299, 126)}, False, True),
        ({"window": (5, 5), "causal": True}, True, True),
    ],
)
def test_limits_that_hide_no_key_cost_nothing(options, left, right):
    kernel = plan(**options).kernel
    assert (kernel.constant("kLimitLeft"), kernel.constant("kLimitRight")) == (left, right)


@pytest.mark.parametrize(
    ("dtype", "dim", "offset", "stride", "expected"),
    [
        (dtypes.f16, 64, 0, 1, 16), (dtypes.f16, 20, 0, 1, 8), (dtypes.f16, 18, 0, 1, 4), (dtypes.f16, 5, 0, 1, 2),
        (dtypes.f16, 64, 2, 1, 2), (dtypes.f16, 64, 4, 1, 4), (dtypes.f16, 64, 0, 2, 2), (dtypes.f32, 64, 0, 1, 16),
        (dtypes.f32, 6, 0, 1, 8), (dtypes.f32, 5, 0, 1, 4), (dtypes.f32, 64, 0, 3, 4),
    ],
)  # fmt: skip
def test_copies_are_as_wide_as_addresses_allow(dtype, dim, offset, stride, expected):
    row = 4 * dim * stride
    q = Operand("q", (2, 128, 4, dim), (128 * row, row, dim * stride, stride), dtype, offset)
    assert plan(dtype=dtype, dim=dim, q=q).kernel.constant("kCopyBytes") == expected


def test_broadcast_axes_have_stride_zero():
    bias = dense("bias", (4, 1, 300), dtypes.f32)
    step = plan(bias=bias)
    first = 9 + 16
    assert step.args[first : first + 4] == (0, 300, 0, 1)
    assert padded(40) == 48
