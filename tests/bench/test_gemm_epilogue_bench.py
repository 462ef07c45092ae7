"""bench/gemm_epilogue.py as far as it goes without a GPU: what it takes as right."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def epilogue(script):
    pytest.importorskip("torch")
    return script("gemm_epilogue")


def test_what_is_right(epilogue):
    import torch

    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator).bfloat16()

    i = epilogue.Inputs(normal(20, 32), normal(32, 64), normal(64), normal(20, 64), None, None, None)
    rows = [0, 7, 19]
    found = {name: epilogue.expected(name, i, rows) for name in epilogue.implementations()}
    product = i.x[rows].double() @ i.w.double()
    biased = product + i.bias.double()
    truths = {
        "torch": product, "plain": product, "bias": biased, "bias, relu": biased.relu(),
        "bias, gelu": torch.nn.functional.gelu(biased), "bias, residual": biased + i.residual[rows].double(),
        "bias, silu": torch.nn.functional.silu(biased),
        "bias, gelu_tanh": torch.nn.functional.gelu(biased, approximate="tanh"),
        "bias, residual, statistics": biased + i.residual[rows].double(),
        "swiglu": torch.nn.functional.silu(product[:, :32]) * product[:, 32:],
    }  # fmt: skip
    assert found.keys() == truths.keys()
    for name, truth in truths.items():
        assert np.allclose(found[name], truth.numpy(), atol=1e-9), name
