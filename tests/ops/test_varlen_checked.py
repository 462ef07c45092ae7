"""The attention kernel over packed sequences under every check of the simulated device.

The ring of two stages is filled at least five times, and with it the places of two tiles of a cache; seeds vary the
order of threads, the moment at which copies land and the poison they find.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.inputs import DTYPES
from tests.ops.varlen_cases import check, chunked, packed, run
from tests.orders import every_check, orders


@pytest.mark.parametrize(
    ("case", "dtype", "block_size", "dim", "query_lengths", "key_lengths"),
    [
        (0, "f16", 0, 16, [20, 0, 3], [330, 5, 0]),  # packed keys
        (1, "f16", 16, 16, [20, 0, 3], [330, 5, 9]),  # blocks smaller than a tile
        (2, "bf16", 3, 7, [3, 2], [330, 40]),  # loads and stores instead of cp.async, packed heads, one warp
        (3, "f32", 100, 16, [70, 1], [170, 60]),  # tf32, four warps, two row blocks
    ],
)
def test_small_shapes_under_every_check(device, case, dtype, block_size, dim, query_lengths, key_lengths):
    if block_size:
        tensors = chunked(DTYPES[dtype], query_lengths, key_lengths, block_size, dim=dim)
    else:
        tensors = packed(DTYPES[dtype], query_lengths, key_lengths, dim=dim, padding=5)
    for seed in orders(device, case):
        with every_check(device, seed):
            check(device, tensors, causal=True, sinks=np.ones(2, np.float32))


def test_dropping_and_repairing_values_of_a_cache_under_every_check(device):
    """NaN in a key that some queries see: its place is looked up again for the repair."""
    tensors = chunked(DTYPES["f16"], [40, 5], [330, 20], 16)
    tensors["v"][tensors["block_table"][0, 20], 0, 0, 3] = np.nan  # key 320
    for seed in range(5 if device.kind == "sim" else 1):
        with every_check(device, seed):
            out = run(device, tensors, causal=True)[0].astype(np.float32)
        seen = np.arange(45) + 330 - 40 >= 320
        seen[40:] = False
        assert np.isnan(out[seen][..., 3]).all()
        assert np.isfinite(out[~seen]).all() and np.isfinite(np.delete(out, 3, axis=2)).all()
