"""bench/varlen.py as far as it goes without a GPU: cells, what they count, a variant's result."""

from __future__ import annotations

import numpy as np
import pytest

import cki
import cki.reference
from tests.ops.varlen_cases import chunked, offsets


@pytest.fixture
def varlen(script):
    return script("varlen")


def test_cells_cover_both_sets(varlen):
    ragged, paged = varlen.cells("ragged"), varlen.cells("paged")
    assert len(ragged) == 4 and len(paged) == 12 and varlen.cells("all") != []
    assert all(len(cell.queries) == 32 and min(cell.queries) >= 16 for cell in ragged)
    assert {cell.block for cell in paged} == {16, 64, 128}
    assert all(length % cell.block == 0 for cell in paged for length in cell.keys)
    assert len({str(cell) for cell in ragged + paged}) == 16


def test_flops_count_visible_pairs(varlen):
    assert varlen.Cell("", (3, 1), (5, 2), 2, 8, False).flops == 4 * 2 * 8 * (15 + 2)
    assert varlen.Cell("", (3, 1), (5, 2), 2, 8, True).flops == 4 * 2 * 8 * (3 + 4 + 5 + 2)


@pytest.mark.parametrize("name", [None, "hopper 128 rows x 128 keys, 2 stages, fixed, ping-pong"])
def test_a_variant_computes_attention(varlen, name):
    tensors = chunked(np.dtype(np.float16), [70, 20], [128, 64], 16, dim=64, heads=1)
    cell = varlen.Cell("", (70, 20), (128, 64), 1, 64, True, 16)
    out = np.full_like(tensors["q"], np.nan)
    at = varlen.Inputs(
        tensors["q"], None, None, out, tensors["cu_seqlens_q"], offsets([128, 64]), tensors["seq_lens"],
        (tensors["k"], tensors["v"]), tensors["block_table"], (None,) * 4,
    )  # fmt: skip
    with cki.device("sim"):
        result = varlen.cki_call(cell, varlen.candidates(64)[name] if name else None)(at)
    truth = cki.reference.varlen_attention(**tensors, causal=True)
    assert result is out and np.abs(out - truth).max() < 4e-3


def test_variants_are_the_choice_with_fields_changed_where_they_fit(varlen):
    cell = varlen.cells("paged")[0]
    found = varlen.chosen_with(cell, ["stages=3", "ping_pong=False,stages=3", "stages=9"])
    assert [(t.stages, t.ping_pong) for t in found.values()] == [(3, True), (3, False)]
    assert str(cell) not in {str(c) for c in varlen.cells("paged", shuffled=False)}
