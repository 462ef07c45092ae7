"""bench/attention.py's Hopper part as far as it goes without a GPU: candidates, summary, a variant's result."""

from __future__ import annotations

import numpy as np
import pytest

import cki
import cki.reference
from cki.heuristics.attention_hopper import HopperTiles


@pytest.fixture
def hopper(script):
    return script("attention_hopper")


def test_candidates_begin_with_the_heuristics_choice(hopper):
    shape = hopper.attention.parse("4x4096x16x128:causal", "bf16")
    names = list(hopper.candidates(shape))
    assert names[0] == "hopper 128 rows x 128 keys, 2 stages, dynamic, ping-pong"
    assert {"single", "fixed", "dynamic"} <= {word for name in names for word in name.split(", ")}
    assert len(hopper.cells()) == len(set(hopper.cells())) == 41


def test_every_cell_has_candidates_and_few_kernels(hopper):
    kernels = set()
    for text, dtype in hopper.cells():
        shape = hopper.attention.parse(text, dtype)
        found = hopper.candidates(shape)
        assert 4 <= len(found) <= 12
        kernels |= {(shape.dim, shape.causal, dtype, name) for name in found}
    assert len(kernels) <= 90  # to be compiled and checked within one call


def test_summary_compares_the_best_candidate_with_the_best_peer(hopper):
    times = {"generic": 30.0, "hopper a": 12.0, "hopper b": 10.0, "cudnn": 13.0, "fa3": 11.0}
    rows = [{"problem": "p", "dtype": "bf16", "implementation": n, "median_us": t} for n, t in times.items()]
    rows += [{"problem": "q", "dtype": "bf16", "implementation": "hopper a", "median_us": 5.0}]
    lines = hopper.summary(rows)
    assert lines == ["1.100  p bf16: hopper b, 10.0 us", "1.100  geometric mean of 1 shapes"]


@pytest.mark.parametrize(
    "tiles", [HopperTiles(2, 64, schedule="dynamic"), HopperTiles(1, 64, 2, False, "single", 2)]
)
def test_a_variant_computes_attention(hopper, tiles):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 150, 2, 64)).astype(np.float16)
    out = np.full_like(q, np.nan)
    shape = hopper.attention.parse("2x150x2x64:causal", "f16")
    with cki.device("sim"):
        hopper.attention.cki_call(shape, tiles)(q, k, v, out)
    assert np.abs(out - cki.reference.attention(q, k, v, causal=True)).max() < 2e-3
