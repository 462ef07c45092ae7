"""Codes of e4m3 as f16 (common/convert_element.cuh)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import cki
from tests.ops.inputs import E4M3


def test_codes_become_f16_by_bits_where_there_is_no_instruction(device):
    """Every pair of codes."""
    results = [device.empty((1 << 16,), np.uint32) for _ in range(2)]
    kernel = cki.load(Path(__file__).parents[1] / "kernels" / "e4m3_codes.cu", entry="e4m3_codes")
    kernel(256, 256, *results)
    device.synchronize()
    expected = np.arange(1 << 16, dtype=np.uint16).view(E4M3).astype(np.float16)
    for result in results:
        np.testing.assert_array_equal(device.numpy(result).view(np.float16), expected)
