"""Bad arguments of the pointwise operations: the class and the text of each error."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError


@pytest.fixture(autouse=True)
def _simulated():
    with cki.device("sim"):
        yield


X = np.ones((4, 8), np.float32)
ONE = np.ones(1, np.float32)
COUNTER = np.zeros(1, np.int64)
TOO_WIDE = np.broadcast_to(np.float32(1), (1, (1 << 29) + 2))


def dropout(x=X, residual=None, p=0.5, seed=COUNTER, offset=COUNTER, **options):
    return cki.dropout_add(x, residual, p, seed, offset, **options)


@pytest.mark.parametrize(
    ("operation", "arguments", "options", "violation", "hint"),
    [
        (cki.gated_activation, (X[:, :7],), {}, "a last axis of 7 holds no gate and up", "an even last axis"),
        (cki.gated_activation, (X[:, :0],), {}, "x has shape (4, 0): its last axis is 0", "a last axis of 1 to"),
        (cki.gated_activation, (X[0, 0:1].reshape(()),), {}, "x has no last axis", "x of shape [..., width]"),
        (cki.gated_activation, (X, X[0, :4]), {}, "bias has shape (4,), x has shape (4, 8)", "bias of shape (8,)"),
        (cki.gated_activation, (X,), {"activation": "swish"}, "activation is 'swish'", "'silu'"),
        (cki.gated_activation, (X,), {"layout": "up"}, "layout is 'up'", "layout of 'gate_first', 'up_first'"),
        (cki.gated_activation, (X,), {"out": X.copy()}, "out has shape (4, 8)", "out of shape (4, 4)"),
        (cki.bias_activation, (X, X), {}, "bias has shape (4, 8), x has shape (4, 8)", "bias of shape (8,)"),
        (cki.bias_activation, (X,), {"multiplier": X[:3]}, "multiplier has shape (3, 8)", "of shape (4, 8)"),
        (cki.bias_activation, (X,), {"activation": "gelu_new"}, "activation is 'gelu_new'", "'gelu_tanh'"),
        (cki.bias_activation, (TOO_WIDE,), {}, "its last axis is 536870914", "a last axis of 1 to 536870912"),
        (cki.softmax, (X, X[:3] > 0), {}, "mask has shape (3, 8), which does not broadcast", "of shape (4, 8)"),
        (cki.softmax, (X, X[None] > 0), {}, "mask has shape (1, 4, 8), which does not", "of shape (4, 8)"),
        (cki.softmax, (X,), {"scale": 0.0}, "scale is 0.0", "scale above 0"),
        (cki.softmax, (X,), {"scale": 2e38}, "scale is 2e+38", "at most 1e+38"),
        (cki.softmax, (X,), {"scale": np.nan}, "scale is nan, not a finite number", ""),
        (cki.quantize_fp8, (X,), {"granularity": "block"}, "granularity is 'block'", "'row', 'block128'"),
        (cki.quantize_fp8, (X,), {"granularity": "tensor"}, "no scale is given", "a scale, from calibration"),
        (cki.quantize_fp8, (X,), {"scale": ONE}, 'a scale is given, and granularity is "row"', '"tensor"'),
        (
            cki.quantize_fp8, (X,), {"scale": X[0], "granularity": "tensor"}, "scale has shape (8,)",
            "scale of one element",
        ),
        (cki.quantize_fp8, (X,), {"out_dtype": "e5m2"}, "out_dtype is 'e5m2'", 'out_dtype "e4m3" or "uint8"'),
        (cki.quantize_fp8, (X,), {"scale_out": X[0].copy()}, "scale_out has shape (8,)", "of shape (4, 1)"),
        (dropout, (), {"p": 1.0}, "p is 1.0", "p from 0 to below 1"),
        (dropout, (), {"p": -0.1}, "p is -0.1", "p from 0 to below 1"),
        (dropout, (), {"residual": X[:3]}, "residual has shape (3, 8)", "residual of shape (4, 8)"),
        (dropout, (), {"seed": np.zeros(2, np.int64)}, "seed has shape (2,)", "seed of one element"),
    ],
)  # fmt: skip
def test_values_that_are_refused(operation, arguments, options, violation, hint):
    with pytest.raises(InvalidArgumentError) as caught:
        operation(*arguments, **options)
    assert isinstance(caught.value, ValueError)
    assert any(violation in problem for problem in caught.value.problems), str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "arguments", "options", "violation", "hint"),
    [
        (cki.gated_activation, (X.astype(np.int32),), {}, "x is i32", "x of f32, f16 or bf16"),
        (cki.gated_activation, (X, X[0].astype(np.int64)), {}, "bias is i64", "bias of f32, f16 or bf16"),
        (cki.bias_activation, (X,), {"multiplier": X.astype(np.float16)}, "multiplier is f16, x is f32", "of f32"),
        (cki.softmax, (X.astype(ml_dtypes.float8_e4m3fn),), {}, "x is e4m3", "x of f32, f16 or bf16"),
        (cki.softmax, (X, X), {}, "mask is f32", "mask of bool"),
        (cki.softmax, (X,), {"scale": "1"}, "scale is '1' of type str", ""),
        (cki.quantize_fp8, (X.astype(np.float64),), {}, "x is f64", "x of f32, f16 or bf16"),
        (
            cki.quantize_fp8, (X,), {"scale": ONE.astype(np.float16), "granularity": "tensor"}, "scale is f16",
            "scale of f32",
        ),
        (dropout, (), {"offset": np.zeros(1, np.int32)}, "offset is i32", "offset of int64 or uint64"),
        (dropout, (), {"seed": None}, "seed is None", ""),
        (dropout, (), {"residual": X.astype(np.float16)}, "residual is f16, x is f32", "residual of f32"),
    ],
)  # fmt: skip
def test_types_that_are_refused(operation, arguments, options, violation, hint):
    with pytest.raises(InvalidTypeError) as caught:
        operation(*arguments, **options)
    assert isinstance(caught.value, TypeError)
    assert any(violation in problem for problem in caught.value.problems), str(caught.value)
    assert hint in str(caught.value)


def test_every_violation_is_listed():
    with pytest.raises(InvalidTypeError) as caught:
        cki.gated_activation(X[:, :7].astype(np.int32), X[0], activation="x", layout="y")
    text = str(caught.value)
    for words in (
        "x is i32",
        "a last axis of 7",
        "bias has shape (8,)",
        "activation is 'x'",
        "layout is 'y'",
    ):
        assert words in text


def test_overlapping_out_is_refused():
    memory = np.zeros((5, 8), np.float32)
    for run in (cki.bias_activation, cki.softmax, lambda x, out: dropout(x, out=out)):
        with pytest.raises(InvalidArgumentError, match="out shares memory with x"):
            run(memory[:4], out=memory[1:])
    with pytest.raises(InvalidArgumentError, match="out shares memory with x"):
        cki.gated_activation(memory, out=memory[:, :4])
