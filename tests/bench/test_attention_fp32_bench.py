"""bench/attention_fp32.py as far as it goes without a GPU: its cells, and what is said of an error."""

from __future__ import annotations

import pytest


@pytest.fixture
def fp32(script):
    return script("attention_fp32")


def test_cells_are_16384_tokens_of_one_width(fp32):
    cells = fp32.cells(fp32.DIMS, fp32.TOKENS)
    assert len(set(cells)) == 20
    assert all(cell.batch * cell.tokens == 16384 and cell.heads * cell.dim == 2048 for cell in cells)


def test_an_error_is_told_relative_to_the_largest_value(fp32):
    torch = pytest.importorskip("torch")
    shape = fp32.Shape(1, 512, 1, 8, True, "f32")
    q, k, v = (torch.randn(1, 512, 1, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    rows = fp32.attention.attend_rows(q, k, v, list(range(512)), True, torch.float64)
    assert fp32.error_of(shape, lambda *_: rows, (q, k, v, None)) == 0.0
    off = rows.clone()
    off[0, 100] += 0.01 * rows.abs().max()
    assert 0.005 < fp32.error_of(shape, lambda *_: off, (q, k, v, None)) < 0.02
