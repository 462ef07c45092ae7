"""mma.sync: products of random operands within the bound of fp32 accumulation.

The operands' products are exact in fp32; what rounds is their sum, in an order and at a width that are the hardware's
own. Tensor cores align the terms of one instruction to the largest and truncate, so that each of K terms may lose up to
2^-22 of the largest partial sum (Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021). FP8 products
are summed at 14 bits on sm_90 (DeepSeek-V3 report, section 3.3.2).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.operands import load, product_error, random_elements, widen

BLOCKS = 24
BOUND = {"f16": 2.0**-21, "bf16": 2.0**-21, "tf32": 2.0**-21, "e4m3": 2.0**-11}


@pytest.fixture
def problem(device):
    rng = np.random.default_rng(4)
    operands: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for element, k in (("f16", 16), ("bf16", 16), ("e4m3", 32)):
        a, b = (random_elements(rng, (BLOCKS, rows, k), element) for rows in (16, 8))
        operands[element] = (a, b)
    # fp32 patterns with low bits set: the instruction ignores the lower 13
    operands["tf32"] = tuple(
        rng.standard_normal((BLOCKS, rows, 8), np.float32).view(np.uint32) for rows in (16, 8)
    )
    c = rng.standard_normal((BLOCKS, 16, 8), np.float32)
    outputs = {element: device.empty((BLOCKS, 16, 8), np.float32) for element in BOUND}
    words = [
        device.array(np.ascontiguousarray(operands[element][side]).reshape(BLOCKS, -1).view(np.uint32))
        for element in ("f16", "bf16", "tf32", "e4m3")
        for side in (0, 1)
    ]
    in_order = [outputs[element] for element in ("f16", "bf16", "tf32", "e4m3")]
    load("mma.cu", "products")(BLOCKS, 32, *words, device.array(c), *in_order)
    device.synchronize()
    return operands, c, {element: device.numpy(array) for element, array in outputs.items()}


@pytest.mark.parametrize("element", list(BOUND))
def test_product(problem, element: str) -> None:
    operands, c, outputs = problem
    a, b = operands[element]
    if element == "tf32":
        a, b = ((x & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64) for x in (a, b))
    else:
        a, b = widen(a, element), widen(b, element)
    assert product_error(outputs[element], a, b, c) <= BOUND[element]
