"""ptx/convert.cuh: every result to the bit, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.operands import CANONICAL_NAN, load, narrow, widen


def inputs() -> np.ndarray:
    """Float32 values: every upper half of the bits with lower halves that tie or nearly do, subnormal results, ties."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    exact = (upper[:, None] | lower[None, :]).ravel()
    rng = np.random.default_rng(1)
    count = 1 << 15
    subnormal = rng.uniform(-(2.0**-6), 2.0**-6, count) * np.exp2(-rng.integers(0, 24, count))
    ties = (rng.integers(0, 1 << 11, count) * 2 + 1) * np.exp2(-rng.integers(-6, 26, count))
    return np.concatenate([exact.view(np.float32), *(x.astype(np.float32) for x in (subnormal, ties, -ties))])


@pytest.fixture
def results(device):
    """The kernel's outputs by parameter name, and its input."""
    x = inputs()
    n = x.size
    names = ["to_f16", "to_bf16", "to_f16x2", "to_bf16x2", "to_e4m3x2", "to_e5m2x2", "to_tf32",
             "from_f16", "from_bf16", "from_f16x2", "from_bf16x2", "from_e4m3x2", "from_e5m2x2"]  # fmt: skip
    narrow_names = ("to_f16", "to_bf16", "to_e4m3x2", "to_e5m2x2")
    pair_names = ("from_f16x2", "from_bf16x2")
    out = {
        name: device.empty(
            (2 * n if name in pair_names else n,), np.uint16 if name in narrow_names else np.uint32
        )
        for name in names
    }
    load("convert.cu", "convert")((n + 255) // 256, 256, device.array(x), n, *out.values())
    device.synchronize()
    return x, {name: device.numpy(array) for name, array in out.items()}


def assert_equal_bits(actual: np.ndarray, expected: np.ndarray, inputs_: np.ndarray) -> None:
    wrong = np.flatnonzero(actual != expected)
    for i in wrong[:1]:
        pytest.fail(
            f"{wrong.size} differ; input {inputs_[i]!r}: got {actual[i]:#x}, expected {expected[i]:#x}"
        )


def test_conversions_from_f32(results) -> None:
    x, out = results
    for element in ("f16", "bf16"):
        low = narrow(x, element)
        assert_equal_bits(out[f"to_{element}"], low, x)
        pair = low.astype(np.uint32) | narrow(x[::-1], element).astype(np.uint32) << 16
        assert_equal_bits(out[f"to_{element}x2"], pair, x)
    for element in ("e4m3", "e5m2"):
        pair = narrow(x, element).astype(np.uint16) | narrow(x[::-1], element).astype(np.uint16) << 8
        assert_equal_bits(out[f"to_{element}x2"], pair, x)


def test_conversion_to_tf32(results) -> None:
    x, out = results
    bits = x.view(np.uint32)
    # To nearest, ties away from zero. NaN and infinity are cut: a NaN whose payload is low becomes an infinity.
    expected = np.where(np.isfinite(x), bits + np.uint32(0x1000), bits) & np.uint32(0xFFFFE000)
    assert_equal_bits(out["to_tf32"], expected, x)


def widened(bits: np.ndarray, element: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        values = widen(bits, element).astype(np.float32)
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32))


def test_conversions_to_f32(results) -> None:
    x, out = results
    half = (np.arange(x.size) & 0xFFFF).astype(np.uint16)
    assert_equal_bits(out["from_f16"], widened(half, "f16"), half)
    assert_equal_bits(out["from_f16x2"][0::2], widened(half, "f16"), half)
    assert_equal_bits(out["from_f16x2"][1::2], widened(~half, "f16"), half)
    assert_equal_bits(out["from_bf16"], half.astype(np.uint32) << 16, half)
    assert_equal_bits(out["from_bf16x2"][0::2], half.astype(np.uint32) << 16, half)
    assert_equal_bits(out["from_bf16x2"][1::2], (~half).astype(np.uint32) << 16, half)


def test_conversions_of_eight_bit_floats(results) -> None:
    x, out = results
    half = (np.arange(x.size) & 0xFFFF).astype(np.uint16)
    for element in ("e4m3", "e5m2"):
        parts = []
        for byte in (half & 0xFF, half >> 8):
            values = widen(byte.astype(np.uint8), element).astype(np.float16)
            parts.append(np.where(np.isnan(values), np.uint16(CANONICAL_NAN["f16"]), values.view(np.uint16)))
        assert_equal_bits(
            out[f"from_{element}x2"], parts[0].astype(np.uint32) | parts[1].astype(np.uint32) << 16, half
        )
