"""ptx/memory.cuh: each width moves its bytes, and flags pass data between two blocks that run together."""

from __future__ import annotations

import numpy as np

from tests.ptx.operands import load


def test_accesses(device) -> None:
    words = np.random.default_rng(5).integers(0, 1 << 32, 352, np.uint32)
    out, flags = device.empty((352,), np.uint32), device.array(np.zeros(40, np.uint32))
    payload = device.array(np.zeros(2, np.uint32))
    load("memory.cu", "accesses")(2, 16, device.array(words), out, flags, payload, cooperative=True)
    device.synchronize()
    np.testing.assert_array_equal(device.numpy(out), words)
    seen = device.numpy(flags)
    assert seen[0] == 2
    assert seen[1] == 32 * 3
    assert seen[2] == 0x5678
    assert seen[3] == 0x1234
    assert sorted(seen[4:36]) == list(range(32))  # each atomic saw another old value
    assert seen[36] == 32
