"""ptx/half2.cuh: arithmetic of pairs to the bit, the exponential within the PTX manual's error."""

from __future__ import annotations

import numpy as np

from tests.ptx.operands import load

NAMES = ("fma", "fnma", "saturate", "max", "ex2")
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 6e-8, -6e-8, 65504.0], np.float16)


def test_pairs(device) -> None:
    rng = np.random.default_rng(4)
    count = 1 << 12
    a, b, c = (np.concatenate([rng.uniform(-14, 14, count), rng.permutation(SPECIAL)]) for _ in range(3))
    a, b, c = (values.astype(np.float16) for values in (a, b, c))
    out = [device.empty((a.size // 2,), np.uint32) for _ in NAMES]
    words = [device.array(values.view(np.uint32)) for values in (a, b, c)]
    load("half2.cu", "pairs")((a.size // 2 + 255) // 256, 256, *words, a.size // 2, *out)
    device.synchronize()
    got = {name: device.numpy(array).view(np.float16) for name, array in zip(NAMES, out)}
    wide_a, wide_b, wide_c = (values.astype(np.float64) for values in (a, b, c))
    with np.errstate(all="ignore"):
        expected = {
            "fma": wide_a * wide_b + wide_c, "fnma": wide_c - wide_a * wide_b,
            "saturate": np.clip(np.nan_to_num(np.abs(wide_a) * wide_b, nan=0.0), 0, 1),
            "max": np.maximum(wide_a, wide_b),
        }  # fmt: skip
        for name, values in expected.items():
            np.testing.assert_array_equal(got[name], values.astype(np.float16), err_msg=name)
        exact = np.exp2(wide_a)
    ordinary = np.abs(wide_a) < 14
    error = np.abs(got["ex2"][ordinary] - exact[ordinary]) / exact[ordinary]
    assert error.max() <= 2.0**-9.9
    assert np.isnan(got["ex2"][np.isnan(a)]).all() and (got["ex2"][np.isneginf(a)] == 0).all()
