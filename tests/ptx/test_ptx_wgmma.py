"""wgmma: every element type, operand arrangement and swizzle; every N on the GPU, a few in simulation.

Bounds as in test_ptx_mma.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from cki import dtypes
from tests.ptx.operands import load, product_error, random_elements, widen

BOUND = {"f16": 2.0**-21, "bf16": 2.0**-21, "e4m3": 2.0**-11, "f32": 2.0**-21}
SHARED, REGISTERS, A_MN_MAJOR, B_MN_MAJOR = 0, 1, 2, 4


def multiply(device, element: str, n: int, form: int, span: int, accumulate: bool = True) -> float:
    """The error of one product D = A B^T (+ C)."""
    rng = np.random.default_rng(10)
    k = {"e4m3": 32, "f32": 8}.get(element, 16)
    a, b = random_elements(rng, (64, k), element), random_elements(rng, (n, k), element)
    if element == "f32":  # tf32
        a, b = (x & np.uint32(0xFFFFE000) for x in (a, b))
    c = rng.standard_normal((64, n), np.float32)
    d = device.empty((64, n), np.float32)
    operands = [device.array(np.ascontiguousarray(x).view(np.uint8)) for x in (a, a.T, b, b.T)]
    load("wgmma.cu", "products", kN=n, Element=dtypes.from_name(element))(
        1, 128, *operands, device.array(c), d, form, int(accumulate), span, smem=8192 + max(n, 64) * 128
    )
    device.synchronize()
    return product_error(device.numpy(d), widen(a, element), widen(b, element), c if accumulate else 0.0)


def mn_spans(n: int) -> list[int]:
    """The swizzles whose slabs of Span/2 columns divide n."""
    return [span for span in (0, 32, 64, 128) if n % max(span // 2, 8) == 0]


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("n", [8, 64, 192])
def test_sixteen_bit_arrangements(device, element: str, n: int) -> None:
    for form in (SHARED, REGISTERS, A_MN_MAJOR, B_MN_MAJOR, B_MN_MAJOR + REGISTERS, B_MN_MAJOR + A_MN_MAJOR):
        for span in mn_spans(n) if form & B_MN_MAJOR else (0, 32, 64, 128):
            error = multiply(device, element, n, form, span)
            assert error <= BOUND[element], f"form {form}, swizzle {span}: {error}"
    assert multiply(device, element, n, SHARED, 128, accumulate=False) <= BOUND[element]


@pytest.mark.parametrize("element", ["e4m3", "f32"])
@pytest.mark.parametrize("n", [16, 128])
def test_arrangements_along_k(device, element: str, n: int) -> None:
    for form in (SHARED, REGISTERS):
        for span in (0, 32, 64, 128):
            error = multiply(device, element, n, form, span)
            assert error <= BOUND[element], f"form {form}, swizzle {span}: {error}"


@pytest.mark.parametrize("element", list(BOUND))
@pytest.mark.parametrize("n", [24, 256])
def test_odd_and_largest_n(device, element: str, n: int) -> None:
    for form in (SHARED, REGISTERS):
        assert multiply(device, element, n, form, 128) <= BOUND[element]


# Each N has asm of its own, but the simulated wgmma treats all N alike.
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("element", list(BOUND))
@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_n(device, element: str, n: int) -> None:
    for form in (SHARED, REGISTERS):
        assert multiply(device, element, n, form, 128) <= BOUND[element]
