"""bench/attention_rows.py as far as it goes without a GPU: what a cell counts, and that its variants agree."""

from __future__ import annotations

import numpy as np
import pytest

import cki
import cki.reference


@pytest.fixture
def attention_rows(script):
    return script("attention_rows")


def test_a_cell_counts_visible_pairs_and_shared_keys(attention_rows):
    cell = attention_rows.Cell(2, 3, 100)
    assert cell.flops == 4 * 2 * 32 * 128 * (98 + 99 + 100)
    assert cell.nbytes == 2 * 2 * 128 * 2 * (3 * 32 + 100 * 8)


def test_variants_compute_attention(attention_rows, monkeypatch):
    for name, value in {"HEADS": 4, "KV_HEADS": 1, "GROUP": 4, "DIM": 64}.items():
        monkeypatch.setattr(attention_rows, name, value)
    cell, rng = attention_rows.Cell(1, 3, 300), np.random.default_rng(0)
    q = rng.standard_normal((1, 3, 4, 64)).astype(np.float16)
    k, v = (rng.standard_normal((1, 300, 1, 64)).astype(np.float16) for _ in range(2))
    truth = cki.reference.attention(q, k, v, causal=True)
    found = attention_rows.variants(cell)
    assert list(found) == ["cki", "generic", "hopper", "few", "packed", "decode"]
    with cki.device("sim"):
        for run in found.values():
            out = np.full_like(q, np.nan)
            assert run(q, k, v, out, np.array([300], np.int32)) is out
            assert np.abs(out - truth).max() < 2e-3
