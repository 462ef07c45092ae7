"""The linear kernel for few rows whose weights come by TMA: what is its own (test_linear_few_rows.py has the rest)."""

from __future__ import annotations

from typing import Any

import pytest

import cki
import cki.reference
from cki.errors import UnsupportedError
from cki.heuristics.linear_skinny import TMA_CANDIDATES, SkinnyTile, fits, persistent_blocks
from tests.compare import assert_close
from tests.ops.few_rows_cases import LAYOUTS, TMA_PAIR, TMA_WHOLE, check, weight
from tests.ops.linear_cases import BF16, F16, F32, linear_with_tile, normal, plain
from tests.orders import every_check, orders


@pytest.fixture(autouse=True)
def _only_where_it_runs(device: Any) -> None:
    if not fits(TMA_WHOLE, 2, device.info, along_n=True):
        pytest.skip("needs sm_90a")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", TMA_CANDIDATES, ids=str)
def test_every_candidate(device, tile, layout):
    dtype, columns, depth = (
        (F16, BF16)[tile.split - 1],
        tile.block_n + 8,
        (tile.stages + 3) * tile.split * 64 + 8,
    )
    bias, residual = normal((columns,), dtype, 3), normal((13, columns), dtype, 4)
    x, w = normal((13, depth), dtype, 1), weight(depth, columns, dtype, layout)
    check(device, tile, x, w, bias, residual=residual, activation="gelu_tanh", weight_layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_computes_several_tiles(device, layout):
    """Stages of the next tile follow in the ring, from any place of it; the last round is not full."""
    tile = SkinnyTile(16, 64, 1, 4, 20, tma=True)
    columns, depth = 64 * (2 * device.info.sm_count + 3) - 8, 64 * 7 - 16
    assert persistent_blocks(tile, 3, columns, device.info) == (device.info.sm_count, 1, 1)
    x, w = normal((3, depth), F16, 1), weight(depth, columns, F16, layout)
    bias, residual = normal((columns,), F16, 3), normal((3, columns), F16, 4)
    check(device, tile, x, w, bias, residual=residual, activation="relu", weight_layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orders_of_several_tiles_a_block(device, layout, monkeypatch):
    """Seven tiles of five stages by two blocks: the copies of the next tile run beside the finish of one."""
    monkeypatch.setattr("cki.ops.linear_streamed.persistent_blocks", lambda *_: (2, 1, 1))
    x, w = normal((5, 64 * 5), BF16, 1), weight(64 * 5, 64 * 7, BF16, layout)
    truth, same = cki.reference.linear(x, w, weight_layout=layout), plain(x, w, weight_layout=layout)
    for seed in orders(device, LAYOUTS.index(layout)):
        with every_check(device, seed):
            got = linear_with_tile(TMA_WHOLE, device.array(x), device.array(w), weight_layout=layout)
        assert_close(device.numpy(got), truth, same)


def test_what_tma_cannot_describe_is_refused(device):
    with pytest.raises(UnsupportedError, match=r"(?s)x's rows do not begin.*w's rows do not begin"):
        linear_with_tile(TMA_PAIR, device.array(normal((3, 63), F16)), device.array(normal((63, 9), F16)))
    with pytest.raises(UnsupportedError, match="f16 and bf16"):
        linear_with_tile(TMA_PAIR, device.array(normal((3, 64), F32)), device.array(normal((64, 8), F32)))
    large = SkinnyTile(16, 64, 1, 4, 24, tma=True)
    with pytest.raises(UnsupportedError, match="cannot hold tile 16x64w1x4s24k1tma"):
        linear_with_tile(large, device.array(normal((3, 64), F16)), device.array(normal((64, 8), F16)))
    if device.kind == "sim":
        with cki.device("sim", arch="sm_80"), pytest.raises(UnsupportedError, match="needs sm_90a"):
            linear_with_tile(TMA_PAIR, normal((3, 64), F16), normal((64, 8), F16))
