"""bench/pointwise.py as far as it goes without a GPU: bytes, overrides, and its variants on the simulated device."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cki
from cki.device import sim_device

DEVICE = sim_device("sm_90a")


@pytest.fixture
def pointwise(script):
    return script("pointwise")


@pytest.mark.parametrize(
    ("op", "a_row"),
    [
        ("swiglu", 3 * 2048), ("bias_gelu", 2 * 2048), ("silu_multiply", 3 * 2048), ("softmax", 2 * 2048),
        ("quantize_row", 3 * 1024 + 4), ("quantize_block128", 3 * 1024 + 32), ("quantize_tensor", 3 * 1024),
        ("dropout_add", 3 * 2048), ("add_rms_norm_quantize", 7 * 1024 + 4), ("rope", 2 * 2048 + 8),
        ("add_rms_norm_quantize_block128", 7 * 1024 + 32), ("add_layer_norm_quantize", 7 * 1024 + 4),
    ],
)  # fmt: skip
def test_bytes(pointwise, op, a_row):
    assert pointwise.Problem(op, 7, 1024, "bf16").nbytes == 7 * a_row


def test_overrides(pointwise):
    chosen = pointwise.configurations(pointwise.Problem("swiglu", 16384, 4096, "bf16"), DEVICE)[0]
    config = pointwise.overridden(chosen, 4096, "vectors_per_thread=4,min_blocks=6")
    assert (config.vectors_per_thread, config.min_blocks, config.full_tiles) == (4, 6, False)
    with pytest.raises(SystemExit, match="no field 'warps'; there are: min_blocks"):
        pointwise.overridden(chosen, 4096, "warps=3")
    rows = pointwise.configurations(pointwise.Problem("softmax", 16384, 4096, "bf16"), DEVICE)[0]
    with pytest.raises(SystemExit, match="covers 1024 of 4096"):
        pointwise.overridden(rows, 4096, "vectors_per_thread=1")


def tensors_of(pointwise, problem):
    """NumPy arrays of the kinds that `make_inputs` makes on a GPU."""
    op, generator = pointwise.OPS[problem.op], np.random.default_rng(0)
    shape = (problem.rows, problem.width)
    makers = {
        None: lambda: None,
        "x": lambda: generator.standard_normal(shape).astype(np.float32),
        "wide": lambda: generator.standard_normal((shape[0], 2 * shape[1])).astype(np.float32),
        "vector": lambda: generator.standard_normal(shape[1:]).astype(np.float32),
        "wide_vector": lambda: generator.standard_normal(2 * shape[1]).astype(np.float32),
        "heads": lambda: generator.standard_normal((shape[0], shape[1] // 128, 128)).astype(np.float32),
        "heads_out": lambda: np.full((shape[0], shape[1] // 128, 128), np.nan, np.float32),
        "positions": lambda: np.arange(shape[0]),
        "bits": lambda: np.array([5]),
        "one": lambda: np.array([0.25], np.float32),
        "y": lambda: np.full(shape, np.nan, np.float32),
        "codes": lambda: np.full(shape, np.nan, ml_dtypes.float8_e4m3fn),
        "rows": lambda: np.full((shape[0], 1), np.nan, np.float32),
        "blocks": lambda: np.full((shape[0], -(-shape[1] // 128)), np.nan, np.float32),
    }
    return [makers[kind]() for kind in (*op.inputs, *op.outputs)]


@pytest.mark.parametrize(
    "op",
    ["swiglu", "swiglu_up_first", "swiglu_interleaved", "geglu", "reglu", "bias_geglu_interleaved", "bias_gelu",
     "silu_multiply", "softmax",
     "quantize_row", "quantize_block128", "quantize_tensor", "add_rms_norm_quantize", "add_rms_norm_quantize_block128",
     "add_layer_norm_quantize_block128", "rope", "dropout_add"],
)  # fmt: skip
def test_variants_compute_the_operation(pointwise, op):
    problem = pointwise.Problem(op, 3, 256, "f32")
    known = pointwise.configurations(problem, DEVICE)
    inputs = len(pointwise.OPS[op].inputs)
    for config in (None, *known[-1:]):
        tensors = tensors_of(pointwise, problem)
        with cki.device("sim"):
            pointwise.cki_call(problem, config)(*tensors)
        expected = pointwise.OPS[op].expected(*tensors[:inputs])
        assert len(expected) == len(tensors) - inputs
        for output, truth in zip(tensors[inputs:], expected):
            limit = 0.08 if output.dtype.itemsize == 1 else 1e-5  # a code may be the neighbour of 448
            assert np.abs(output.astype(np.float64) - truth).max() <= limit * np.abs(truth).max()
