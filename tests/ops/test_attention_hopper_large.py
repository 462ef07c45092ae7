"""The Hopper attention kernel where elements lie beyond 2^31, and over a million tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from tests.ops.attention_cases import qkv
from tests.ops.inputs import F16
from tests.ops.test_attention_hopper import check

#: More than 2^31 elements from the first of three to the last.
FAR = 2**30 + 64


def strided(memory: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A view of `memory`, strides in elements."""
    part = memory[offset:]
    nbytes = tuple(stride * 2 for stride in strides)
    if isinstance(memory, np.ndarray):
        return np.lib.stride_tricks.as_strided(part, shape, nbytes)
    import cupy

    return cupy.lib.stride_tricks.as_strided(part, shape, nbytes)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batches", "tokens", "heads"])
def test_elements_beyond_2_31(device, axis):
    """Three batches, tokens or heads 2^30 elements apart; on the simulated device untouched memory is never there."""
    sizes = [(3, 5, 1), (1, 3, 1), (1, 5, 3)][axis]
    q, k, v = qkv(F16, sizes[1], sizes[1], heads=sizes[2], kv_heads=sizes[2], dim=16, batch=sizes[0])
    strides = [80, 16, 16, 1]
    strides[axis] = FAR
    if device.kind == "cuda":
        import cupy as framework
    else:
        framework = np
    memory = framework.empty(2 * FAR + 4096, F16)
    given = [strided(memory, 1024 * i, (*sizes, 16), tuple(strides)) for i in range(3)]
    for view, values in zip(given, (q, k, v)):
        view[:] = device.array(values)
    out = strided(framework.empty(2 * FAR + 4096, F16), 0, (*sizes, 16), tuple(strides))
    check(device, q, k, v, given=tuple(given), out=out, causal=True)


def attend_row(q: Any, k: Any, v: Any, begin: int, end: int) -> Any:
    """One query of one head over keys [begin, end), in float64 on the GPU."""
    import cupy

    logits = k[begin:end].astype(cupy.float64) @ q.astype(cupy.float64) / q.shape[0] ** 0.5
    weights = cupy.exp(logits - logits.max())
    return weights @ v[begin:end].astype(cupy.float64) / weights.sum()


@pytest.mark.gpu
def test_a_million_tokens():
    """Causal; some rows against float64."""
    cupy = pytest.importorskip("cupy")
    rng = cupy.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2**20, 1, 64), dtype=np.float32).astype(F16) for _ in range(3))
    out = cki.attention(q, k, v, causal=True)
    for row in (0, 1, 12345, 2**19 + 77, 2**20 - 1):
        truth = attend_row(q[0, row, 0], k[0, :, 0], v[0, :, 0], 0, row + 1)
        assert float(abs(out[0, row, 0] - truth).max()) <= 2e-3 * float(abs(truth).max()) + 1e-5


@pytest.mark.gpu
def test_tensors_of_more_than_2_31_elements():
    """17 heads of 2^20 tokens, a window, one KV head."""
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.memGetInfo()[0] < 24 << 30:
        pytest.skip("needs 14 GB of device memory, and leaves some to others")
    rng = cupy.random.default_rng(2)
    tokens, heads, dim = 2**20, 17, 128
    base, k, v = (rng.standard_normal((1, tokens, 1, dim), dtype=np.float32).astype(F16) for _ in range(3))
    q = cupy.empty((1, tokens, heads, dim), F16)
    for head in range(heads):
        q[:, :, head] = base[:, :, 0] * F16.type(1 + head / heads)
    assert q.size > 2**31
    out = cki.attention(q, k, v, causal=True, window=(500, 0))
    for row, head in ((0, 0), (400, 16), (tokens // 2, 3), (tokens - 1, 0), (tokens - 1, 16)):
        truth = attend_row(q[0, row, head], k[0, :, 0], v[0, :, 0], max(0, row - 500), row + 1)
        assert float(abs(out[0, row, head] - truth).max()) <= 2e-3 * float(abs(truth).max()) + 1e-5
