"""The decoding kernels under every check of the simulated device.

Each warp's ring of two or three tiles is filled at least three times and runs on across units; blocks share units, and
one has six of them, so that every warp combines in turn.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.inputs import BF16, E4M3, F16, F32, normal
from tests.ops.paged_cases import check_paged, configured, paged_cache
from tests.orders import every_check, orders


@pytest.mark.parametrize(
    ("case", "name", "dtype", "cache_dtype", "block_size", "scales", "merge_here"),
    [
        (0, "whole tiles", BF16, BF16, 16, 0, True),
        (1, "tokens apart", F16, F16, 3, 0, False),
        (2, "fp32", F32, F32, 16, 0, True),
        (3, "e4m3, scales of tokens", BF16, E4M3, 5, 3, True),
        (4, "e4m3, scales of heads", F16, E4M3, 32, 1, False),
    ],
)
def test_small_shapes_under_every_check(
    device, case, name, dtype, cache_dtype, block_size, scales, merge_here
):
    device = device.holding(cache_dtype)
    lengths = [250, 0, 30, 20, 1, 40]
    cache, table = paged_cache(lengths, block_size, 1, 16, cache_dtype, scales=scales)
    q = normal((6, 2, 4, 16), dtype, 3)
    for seed in orders(device, case):
        counters = device.array(np.zeros(48, np.uint32)) if merge_here else None
        run = configured(counters, groups=2 if seed % 2 else 3, warps=2, stages=2 if seed % 2 else 3)
        with every_check(device, seed):
            check_paged(
                device, q, cache, table, lengths, run=run, window=(200, 0), sinks=np.ones(4, np.float32)
            )


@pytest.mark.parametrize("merge", ["here", "launch", "cluster"])
def test_one_sequence_under_every_check(device, merge):
    """Dealt tiles: four rounds of them and a rest, which leaves one group less to do than the others."""
    lengths = [420]
    cache, table = paged_cache(lengths, 16, 1, 16, BF16)
    q = normal((1, 2, 4, 16), BF16, 3)
    for seed in orders(device, ("here", "launch", "cluster").index(merge)):
        counters = device.array(np.zeros(8, np.uint32)) if merge == "here" else None
        groups = 2 + seed % 3
        run = configured(
            counters, groups=groups, together=1, warps=2, stages=2, dealt=True, cluster=merge == "cluster"
        )
        with every_check(device, seed):
            check_paged(device, q, cache, table, lengths, run=run)


def test_clusters_under_every_check(device):
    """The line is cut: blocks with parts of two units, of one in the middle, without any; items of two sizes."""
    for case, (dim, lengths) in enumerate(((16, [250, 0, 30, 20, 1, 40]), (32, [3, 300, 9]))):
        cache, table = paged_cache(lengths, 16, 1, dim, BF16)
        q = normal((len(lengths), 2, 4, dim), BF16, 3)
        for seed in orders(device, case):
            run = configured(groups=9 if seed % 2 else 5, warps=2, stages=2, cluster=True)
            with every_check(device, seed):
                check_paged(device, q, cache, table, lengths, run=run)
