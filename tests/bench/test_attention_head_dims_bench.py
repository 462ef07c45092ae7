"""bench/attention_head_dims.py as far as it goes without a GPU: its cells, what a peer takes, the summary."""

from __future__ import annotations

import pytest


@pytest.fixture
def head_dims(script):
    return script("attention_head_dims")


def test_cells_are_16384_tokens_of_about_one_width(head_dims):
    cells = head_dims.cells(head_dims.DIMS, head_dims.TOKENS)
    assert len(set(cells)) == 60
    assert all(cell.batch * cell.tokens == 16384 for cell in cells)
    assert all(abs(cell.heads * cell.dim - 2048) <= cell.dim / 2 for cell in cells)


def test_a_peer_is_timed_at_the_least_head_dimension_that_it_takes(head_dims, monkeypatch):
    monkeypatch.setattr(head_dims.attention, "make_inputs", lambda shape, seed: (shape.dim,))

    def takes_multiples_of_64(dim):
        if dim % 64:
            raise RuntimeError("head_dim")

    def takes_none(dim):
        raise RuntimeError("no")

    at = {
        d: head_dims.supported(takes_multiples_of_64, head_dims.cells([d], [512])[0]) for d in head_dims.DIMS
    }
    assert at == {32: 64, 80: 128, 96: 128, 160: 192, 192: 192}
    assert head_dims.supported(takes_none, head_dims.cells([80], [512])[0]) is None


def test_summary_takes_the_best_peer_of_each_shape(head_dims):
    rows = [
        {"problem": problem, "implementation": name, "over_cki": ratio}
        for problem, name, ratio in (("p", "cki", 1.0), ("p", "cudnn at 80", 0.9), ("p", "fa3 at 96", 0.8))
    ]
    rows += [{"problem": "q", "implementation": "fa3 at 64", "over_cki": 1.25}]
    assert head_dims.summary(rows) == [
        "0.800  p", "1.250  q", "1.000  geometric mean of 2 shapes, least 0.800"
    ]  # fmt: skip
