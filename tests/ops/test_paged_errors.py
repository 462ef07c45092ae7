"""What `cki.paged_attention` and `cki.decode_attention` refuse, and graphs whose lengths change."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki import reference
from cki.errors import InvalidArgumentError
from tests.compare import assert_close
from tests.ops.inputs import BF16, E4M3, F16, F32, normal
from tests.ops.paged_cases import paged_cache, plain_paged
from tests.refusals import error_of


@pytest.fixture(autouse=True)
def _simulated():
    with cki.device("sim"):
        yield


def zeros(*shape, dtype=F16):
    return np.zeros(shape, dtype)


def test_every_broken_rule_is_named():
    cache = (zeros(4, 2, 3, 16), zeros(4, 3, 3, 8, dtype=BF16))
    with pytest.raises(cki.errors.InvalidTypeError) as caught:
        cki.paged_attention(
            zeros(2, 17, 4, 24), cache, zeros(3, 5, dtype=np.float32), zeros(2, dtype=np.int16), window=(-2, 0),
            softcap=-1.0, sinks=zeros(5), counters=zeros(3, dtype=np.uint32),
        )  # fmt: skip
    for words in (
        "17 queries", "4 heads, which is no multiple of k_cache's 3", "k_cache has head_dim 16, not 24",
        "v_cache is bf16", "k_cache holds (4, 2)", "block_table is f32", "block_table has shape (3, 5)",
        "seq_lens is i16", "window is (-2, 0)", "softcap is -1.0", "sinks has shape (5,)", "sinks is f16",
        "counters has 3 elements",
    ):  # fmt: skip
        assert words in str(caught.value), words


def refused(match, q, cache, table=None, lengths=None, error=None, **options):
    table = zeros(len(q), 2, dtype=np.int32) if table is None else table
    lengths = zeros(len(q), dtype=np.int32) if lengths is None else lengths
    with pytest.raises(error or error_of(match), match=match):
        cki.paged_attention(q, cache, table, lengths, **options)


def test_rows_that_cannot_be_copied():
    refused("multiples of 4 bytes", zeros(1, 1, 1, 7), (zeros(2, 16, 1, 7), zeros(2, 16, 1, 7)))
    odd = zeros(2, 16, 1, 17)[..., 1:]
    refused("multiples of 4 bytes", zeros(1, 1, 1, 16), (odd, odd.copy()))
    stepped = zeros(2, 16, 1, 32)[..., ::2]
    refused("stride 2 along its last axis", zeros(1, 1, 1, 16), (stepped, stepped))


def test_types_that_do_not_go_together():
    pages, codes, scales = zeros(2, 16, 1, 16, dtype=BF16), zeros(2, 16, 1, 16, dtype=E4M3), np.ones(1, F32)
    refused("q has dtype f16, k_cache has dtype bf16", zeros(1, 1, 1, 16), (pages, pages))
    refused("q is f32 beside e4m3", zeros(1, 1, 1, 16, dtype=F32), (codes, codes, scales, scales))
    refused("without its scales", zeros(1, 1, 1, 16), (codes, codes))
    refused("scales are given", zeros(1, 1, 1, 16, dtype=BF16), (pages, pages, scales, scales))
    refused(
        "one of k_scale and v_scale", zeros(1, 1, 1, 16), (codes, codes, scales, np.ones((2, 16, 1), F32))
    )
    refused("the cache is a ndarray", zeros(1, 1, 1, 16), codes, error=cki.errors.InvalidTypeError)
    with cki.device("sim", arch="sm_80"):
        refused(
            "sm_89", zeros(1, 1, 1, 16), (codes, codes, scales, scales), error=cki.errors.UnsupportedError
        )


def test_decode_attention_needs_one_kind_of_lengths():
    q, k, lengths = zeros(2, 1, 2, 16), zeros(2, 8, 2, 16), zeros(2, dtype=np.int32)
    with pytest.raises(cki.errors.InvalidArgumentError, match="exactly one of seq_lens and cu_seqlens_k"):
        cki.decode_attention(q, k, k)
    with pytest.raises(cki.errors.InvalidArgumentError, match=r"k of shape \[tokens, kv_heads, head_dim\]"):
        cki.decode_attention(q, k, k, cu_seqlens_k=zeros(3, dtype=np.int32))
    with pytest.raises(cki.errors.InvalidArgumentError, match="k has a batch of 2, q of 3"):
        cki.decode_attention(zeros(3, 1, 2, 16), k, k, zeros(3, dtype=np.int32))
    with pytest.raises(cki.errors.InvalidArgumentError, match=r"k has shape .* v has shape"):
        cki.decode_attention(q, k, zeros(2, 9, 2, 16), lengths)


@pytest.mark.parametrize(
    ("lengths", "entry", "message"),
    [
        ([33, 5], 0, r"seq_lens\[0\] is 33, block_table has 2 columns of blocks of 16"),
        ([-1, 5], 0, r"seq_lens\[0\] is -1"),
        ([32, 5], 9, r"block_table\[0\] holds 9 within its length, the cache has 4 blocks"),
    ],
)
def test_validated_lengths_and_tables(monkeypatch, lengths, entry, message):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    table = np.array([[1, entry], [2, 77]], np.int32)
    refused(message, zeros(2, 1, 1, 16), (zeros(4, 16, 1, 16),) * 2, table, np.array(lengths, np.int32))


@pytest.mark.parametrize(
    ("k_shape", "lengths", "message"),
    [
        ((2, 8, 1, 16), {"seq_lens": [8, 9]}, r"seq_lens\[1\] is 9, k has room for 8 tokens"),
        ((2, 8, 1, 16), {"seq_lens": [-1, 8]}, r"seq_lens\[0\] is -1"),
        ((8, 1, 16), {"cu_seqlens_k": [5, 4, 8]}, "cu_seqlens_k falls from 5 to 4"),
        ((8, 1, 16), {"cu_seqlens_k": [0, 4, 9]}, "cu_seqlens_k holds 0 to 9, k has 8 tokens"),
    ],
)
def test_validated_lengths_without_blocks(monkeypatch, k_shape, lengths, message):
    k, q = zeros(*k_shape), zeros(2, 1, 1, 16)
    arrays = {name: np.array(values, np.int32) for name, values in lengths.items()}
    assert np.isfinite(cki.decode_attention(q, k, k, **arrays)).all()  # inert when nothing looks
    monkeypatch.setenv("CKI_VALIDATE", "1")
    with pytest.raises(InvalidArgumentError, match=message):
        cki.decode_attention(q, k, k, **arrays)
    within = {name: np.sort(np.clip(values, 0, 8)) for name, values in arrays.items()}
    cki.decode_attention(q, k, k, **within)


def test_entries_before_the_window_are_not_validated(monkeypatch):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    cache, table = (zeros(4, 16, 1, 16),) * 2, np.array([[-1, 2]], np.int32)
    cki.paged_attention(zeros(1, 1, 1, 16), cache, table, np.array([32], np.int32), window=(10, 0))


def test_empty_batch():
    q = zeros(0, 1, 2, 16)
    cache, table = (zeros(4, 16, 1, 16),) * 2, zeros(0, 2, dtype=np.int32)
    out, lse = cki.paged_attention(q, cache, table, zeros(0, dtype=np.int32), return_lse=True)
    assert out.shape == (0, 1, 2, 16) and lse.shape == (0, 2, 1)


@pytest.mark.parametrize("count", [False, True])
def test_a_captured_graph_serves_other_lengths_and_tables(count):
    """What a replay gives equals an eager call on the same lengths, bit for bit."""
    q = normal((3, 1, 4, 16), BF16, 1)
    cache, _ = paged_cache([96] * 3, 4, 2, 16, BF16, spare=0)
    table, lengths = zeros(3, 24, dtype=np.int32), np.array([3, 6, 1], np.int32)
    out = zeros(3, 1, 4, 16, dtype=BF16)
    counters = zeros(12, dtype=np.uint32) if count else None
    generator = np.random.default_rng(0)
    graph = cki.capture(cki.paged_attention, q, cache, table, lengths, out=out, counters=counters)
    for wanted in ([96, 2, 17], [1, 1, 1], [0, 95, 0]):
        lengths[:] = wanted
        table[:] = np.stack([generator.permutation(72)[:24] for _ in range(3)])
        graph.replay()
        assert np.array_equal(out, cki.paged_attention(q, cache, table, lengths, counters=counters))
        truth = reference.paged_attention(q, cache, table, lengths)
        assert_close(out, truth, plain_paged(q, cache, table, lengths)[0])
