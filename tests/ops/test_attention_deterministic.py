"""`deterministic=True`: a query's bits do not depend on how many other queries, or hidden keys, are in the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from tests.ops.attention_cases import check, qkv
from tests.ops.inputs import DTYPES


def run(device: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    tensors = (device.array(np.ascontiguousarray(t)) for t in (q, k, v))
    out, lse = cki.attention(*tensors, deterministic=True, return_lse=True, **options)
    return device.numpy(out), device.numpy(lse)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_chunks_of_a_prompt_and_single_tokens(device, dtype):
    """A causal prompt at once, in two chunks, and its last token alone, over the keys that each sees."""
    q, k, v = qkv(DTYPES[dtype], 150, 150, heads=4, kv_heads=2, dim=64)
    check(device, q, k, v, causal=True, deterministic=True)
    out, lse = run(device, q, k, v, causal=True)
    for begin, end in ((0, 70), (70, 150), (149, 150)):
        part, part_lse = run(device, q[:, begin:end], k[:, :end], v[:, :end], causal=True)
        np.testing.assert_array_equal(part, out[:, begin:end])
        np.testing.assert_array_equal(part_lse, lse[:, :, begin:end])


def test_packed_sequences_have_the_bits_of_dense_ones(device):
    q, k, v = qkv(DTYPES["bf16"], 100, 100, heads=2, dim=64)
    out, _ = run(device, q, k, v, causal=True)
    offsets = device.array(np.array([0, 100, 103], np.int32))
    q2, k2, v2 = (device.array(np.concatenate([t[0], t[0, :3]])) for t in (q, k, v))
    packed = device.numpy(cki.varlen_attention(q2, k2, v2, offsets, causal=True, deterministic=True))
    np.testing.assert_array_equal(packed[:100], out[0])
    np.testing.assert_array_equal(packed[100:], out[0, :3])


def test_few_queries_over_many_keys(device):
    """Their heads share a tile, and without `deterministic` keys are cut into parts."""
    q, k, v = qkv(DTYPES["bf16"], 600, 600, heads=4, kv_heads=2, dim=64)
    out, lse = run(device, q, k, v, causal=True)
    for begin in (597, 520):
        part, part_lse = run(device, q[:, begin:], k, v, causal=True)
        np.testing.assert_array_equal(part, out[:, begin:])
        np.testing.assert_array_equal(part_lse, lse[:, :, begin:])
        check(device, q[:, begin:], k, v, causal=True)


def test_many_keys_without_limits(device):
    """Long calls without limits have wider tiles of keys when nothing is asked."""
    q, k, v = qkv(DTYPES["bf16"], 64, 700, dim=128)
    mask = np.arange(700) < 300
    few, _ = run(device, q, k[:, :300], v[:, :300], mask=device.array(np.ones(300, bool)))
    many, _ = run(device, q, k, v, mask=device.array(mask))
    np.testing.assert_array_equal(few, many)
