"""ptx/math.cuh: approximate functions within the PTX manual's error, and their special values to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.operands import load

NAMES = ("ex2", "lg2", "rcp", "rsqrt", "tanh")
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.0, -1.0], np.float32)


def evaluate(device, x: np.ndarray) -> dict[str, np.ndarray]:
    out = [device.empty(x.shape, np.float32) for _ in NAMES]
    load("math.cu", "approximate")((x.size + 255) // 256, 256, device.array(x), x.size, *out)
    device.synchronize()
    return {name: device.numpy(array) for name, array in zip(NAMES, out)}


@pytest.fixture
def samples(device) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    wide = np.exp2(rng.uniform(-120, 120, 1 << 14)).astype(np.float32)
    near_one = rng.uniform(0.5, 2.0, 1 << 14).astype(np.float32)
    small = rng.uniform(-20, 20, 1 << 14).astype(np.float32)
    x = np.concatenate([wide, -wide, near_one, small])
    return x, evaluate(device, x)


def relative_error(actual: np.ndarray, exact: np.ndarray) -> float:
    return float(np.max(np.abs(actual.astype(np.float64) - exact) / np.abs(exact)))


def test_ex2(samples) -> None:
    x, out = samples
    inside = np.abs(x) < 125
    assert relative_error(out["ex2"][inside], np.exp2(x[inside].astype(np.float64))) <= 2.0**-22
    assert np.all(out["ex2"][x > 129] == np.inf)
    assert np.all(out["ex2"][x < -127] == 0)  # below the normal range: flushed


def test_lg2(samples) -> None:
    x, out = samples
    positive = x > 0
    near = positive & (x > 0.5) & (x < 2)
    far = positive & ~((x >= 0.5) & (x <= 2))
    exact = np.log2(np.where(positive, x, 1).astype(np.float64))
    assert np.max(np.abs(out["lg2"][near] - exact[near])) <= 2.0**-22
    assert relative_error(out["lg2"][far], exact[far]) <= 2.0**-22
    assert np.all(np.isnan(out["lg2"][x < 0]))


def test_rcp(samples) -> None:
    x, out = samples
    exact = 1 / x.astype(np.float64)
    assert np.max(np.abs(out["rcp"] - exact) / np.spacing(np.abs(exact.astype(np.float32)))) <= 1.5


def test_rsqrt(samples) -> None:
    x, out = samples
    positive = x > 0
    assert relative_error(out["rsqrt"][positive], 1 / np.sqrt(x[positive].astype(np.float64))) <= 2.0**-22.4
    assert np.all(np.isnan(out["rsqrt"][x < 0]))


def test_tanh(samples) -> None:
    x, out = samples
    assert relative_error(out["tanh"], np.tanh(x.astype(np.float64))) <= 2.0**-10.9


def test_special_values(device) -> None:
    # 0, -0, inf, -inf, NaN, two subnormals (flushed by the .ftz forms), 1, -1
    out = evaluate(device, SPECIAL)
    inf, nan = np.inf, np.nan
    expected = {
        "ex2": [1, 1, inf, 0, nan, 1, 1, 2, 0.5],
        "lg2": [-inf, -inf, inf, nan, nan, -inf, -inf, 0, nan],
        "rcp": [inf, -inf, 0.0, -0.0, nan, inf, -inf, 1, -1],
        "rsqrt": [inf, -inf, 0.0, nan, nan, inf, -inf, 1, nan],
    }
    for name, values in expected.items():
        wanted = np.array(values, np.float32)
        equal = (out[name] == wanted) & (np.signbit(out[name]) == np.signbit(wanted))
        same = equal | (np.isnan(out[name]) & np.isnan(wanted))
        assert same.all(), f"{name}{SPECIAL[~same]} = {out[name][~same]}, expected {wanted[~same]}"
    tanh = out["tanh"]
    assert tanh[0] == 0 and tanh[2] == 1 and tanh[3] == -1 and np.isnan(tanh[4])


def test_max_nan(device) -> None:
    a, b = (grid.ravel() for grid in np.meshgrid(SPECIAL, SPECIAL))
    y = device.empty(a.shape, np.float32)
    load("math.cu", "larger")(1, 256, device.array(a), device.array(b), a.size, y)
    device.synchronize()
    assert np.array_equal(device.numpy(y), np.maximum(a, b), equal_nan=True)  # NumPy's keeps a NaN too
