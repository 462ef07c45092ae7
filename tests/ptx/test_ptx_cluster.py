"""Clusters: ranks, distributed shared memory, remote arrivals, multicast copies."""

from __future__ import annotations

import numpy as np
import pytest

from cki.loader import TensorMap
from tests.ptx.operands import load


@pytest.mark.parametrize(
    ("blocks", "dimensions", "hint"),
    [(2, 2, 0), (2, 2, 1), (2, 3, 0), (2, 3, 1), (2, 4, 0), (2, 5, 0), (4, 4, 1), (4, 5, 1)],
)
def test_cluster(device, blocks: int, dimensions: int, hint: int) -> None:
    clusters = 2
    source = np.random.default_rng(9).integers(0, 1 << 32, (32 * blocks, 4), np.uint32)
    ranks = device.array(np.zeros((clusters * blocks, 4), np.uint32))
    gathered = [device.empty((clusters * blocks, 32 * blocks, 4), np.uint32) for _ in range(2)]
    on_device = device.array(source)
    ones = (1,) * (dimensions - 2)
    source_map = TensorMap(on_device.reshape(*ones, 32 * blocks, 4), (*ones, 32, 4), 0)
    load("cluster.cu", "clusters", kBlocks=blocks)(
        clusters * blocks, 64, source_map, on_device, ranks, *gathered, dimensions, hint, cluster=blocks
    )
    device.synchronize()
    for array in gathered:
        np.testing.assert_array_equal(
            device.numpy(array), np.broadcast_to(source, (clusters * blocks, *source.shape))
        )
    ranks = device.numpy(ranks)
    for block in range(clusters * blocks):
        rank = block % blocks
        following = (rank + 1) % blocks
        assert ranks[block, 0] == rank
        assert ranks[block, 1] == blocks
        assert (
            ranks[block, 2]
            == int(following * 1000 + (following + 0.125) * 8) + int((following + 0.5) * 2) + 1
        )
        assert ranks[block, 3] == sum(10 + peer for peer in range(blocks)) + 18 * 10000 + blocks * 1000000
