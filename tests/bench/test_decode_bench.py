"""bench/decode.py and bench/gemm_decode.py without a GPU: cells, configurations, the calls themselves."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import cki
import cki.reference
from cki.device import sim_device
from cki.heuristics.paged import DecodeShape, choose_decode
from cki.ops.call import call
from tests.ops.paged_cases import paged_cache

H200 = dataclasses.replace(sim_device("sm_90a"), sm_count=132)


@pytest.fixture
def scripts(script):
    return script("decode"), script("gemm_decode")


def test_cells_are_those_of_the_issue_and_of_equal_bytes(scripts):
    decode, _ = scripts
    assert len(decode.SETS["grid"]) == 14
    for name in ("blocks", "groups", "dims"):
        sizes = [cell.nbytes for cell in decode.SETS[name]]
        assert max(sizes) / min(sizes) < 1.001
    assert decode.parse("8x32768:kv=e4m3,block=64") == decode.Cell(8, 32768, kv="e4m3", block=64)


def test_configurations_have_names(scripts):
    decode, _ = scripts
    for variant in (*decode.CANDIDATES, decode.Variant(4, 3, 2, counted=True)):
        assert decode.parse_variant(str(variant)) == variant
    with pytest.raises(ValueError, match="8 warps"):
        decode.parse_variant("8 warps")
    shape = DecodeShape(8, 16, 8, 128, 128, 2, False, 8 * 512)
    chosen, other = choose_decode(shape, H200), decode.parse_variant("6w3s@1").choose(shape, H200)
    assert (other.warps, other.stages, other.groups) == (6, 3, 16)
    assert dataclasses.replace(
        other, warps=chosen.warps, stages=chosen.stages, groups=chosen.groups, min_blocks=chosen.min_blocks
    ) == dataclasses.replace(chosen, cluster=False)


def test_a_configuration_computes_attention(scripts):
    decode, _ = scripts
    cache, table = paged_cache([150, 33], 16, 2, 64, np.float16)
    q = np.random.default_rng(1).normal(size=(2, 1, 4, 64)).astype(np.float16)
    at = decode.Inputs(q, cache, table, np.array([150, 33], np.int32), np.full_like(q, np.nan), None, None)
    with cki.device("sim"):
        decode.variant_call(decode.Variant(2, 3, 1))(at)
    truth = cki.reference.paged_attention(q, at.cache, at.table, at.lengths)
    assert np.abs(at.out - truth).max() < 4e-3


@pytest.mark.parametrize("codes", [False, True])
def test_a_product_of_few_tokens(scripts, codes):
    _, bench = scripts
    rng = np.random.default_rng(5)
    product = bench.Product(256, 24, norm=True, gated=True)
    x, gamma = (rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((3, 256), (256,)))
    w = rng.normal(size=(48, 256)).astype(ml_dtypes.float8_e4m3fn if codes else ml_dtypes.bfloat16)
    scales = np.full((1, 2), 0.1, np.float32) if codes else None
    found = []
    with cki.device("sim"):
        for variant in (bench.Variant(), bench.Variant(serial=True), bench.Variant(stages=3)):
            y = np.full((3, 24), np.nan, ml_dtypes.bfloat16)
            call(variant.spec(product), (x, w, scales, None, gamma), (str(variant),), (y,))
            found.append(y.astype(np.float64))
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    n = cki.reference.rms_norm(x.astype(np.float64), gamma.astype(np.float64), eps=bench.EPSILON)
    gate, up = np.split(n @ w.astype(np.float64).T * (0.1 if codes else 1), 2, axis=1)
    truth = gate / (1 + np.exp(-gate)) * up
    assert np.abs(found[0] - truth).max() < 0.02 * np.abs(truth).max()
