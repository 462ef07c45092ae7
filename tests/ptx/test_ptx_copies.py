"""cp.async, mbarriers and bulk copies: bytes in place, phases in order."""

from __future__ import annotations

import numpy as np

from tests.ptx.operands import load


def test_cp_async(device) -> None:
    rng = np.random.default_rng(6)
    source = rng.integers(0, 255, 2048, np.uint8)
    counts = rng.integers(0, 17, 32).astype(np.int32)
    out = device.empty((2048,), np.uint8)
    load("cp_async.cu", "copies")(1, 32, device.array(source), device.array(counts), out)
    device.synchronize()
    out = device.numpy(out).reshape(4, 32, 16)
    source = source.reshape(4, 32, 16)
    for thread, count in enumerate(counts):
        expected = np.where(np.arange(16) < count, source[0, thread], 0)
        np.testing.assert_array_equal(out[0, thread], expected, err_msg=f"16 bytes, {count} from the source")
        expected = np.full(16, 0xEE, np.uint8)
        expected[:8] = np.where(np.arange(8) < min(count, 8), source[1, thread, :8], 0)
        expected[8:12] = np.where(np.arange(4) < min(count, 4), source[1, thread, 8:12], 0)
        np.testing.assert_array_equal(
            out[1, thread], expected, err_msg=f"8 and 4 bytes, {count} from the source"
        )
    np.testing.assert_array_equal(out[2:], source[2:])


def test_mbarrier(device) -> None:
    rounds = 9
    out = device.array(np.zeros(8 + rounds, np.uint32))
    load("mbarrier.cu", "phases")(1, 64, out, rounds)
    device.synchronize()
    out = device.numpy(out)
    assert list(out[:8]) == [1, 0, 0, 1, 0, 1, 1, 1]
    assert list(out[8:]) == [32 * 100 * i + 31 * 16 for i in range(rounds)]


def test_bulk(device) -> None:
    blocks = 5
    source = np.random.default_rng(7).integers(-100, 100, (blocks, 64)).astype(np.float32)
    out, total = device.empty((blocks, 64), np.float32), device.array(np.full(64, 0.5, np.float32))
    load("bulk.cu", "bulk_copies")(blocks, 64, device.array(source), out, total)
    device.synchronize()
    np.testing.assert_array_equal(device.numpy(out), source + 1)
    np.testing.assert_array_equal(device.numpy(total), (source + 1).sum(0) + 0.5)
