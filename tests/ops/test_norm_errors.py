"""Bad arguments of layer_norm and rms_norm: the class and the text of each error."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from tests.refusals import error_of


@pytest.fixture(autouse=True)
def _simulated():
    with cki.device("sim"):
        yield


X = np.ones((4, 8), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "violation", "hint"),
    [
        ((X, X[0, :7]), {}, "weight has shape (7,), x has shape (4, 8)", "weight of shape (8,)"),
        ((X, X), {}, "weight has shape (4, 8), x has shape (4, 8)", "weight of shape (8,)"),
        ((X, None, X[0, :1]), {}, "bias has shape (1,), x has shape (4, 8)", "bias of shape (8,)"),
        ((X.astype(np.int32),), {}, "x is i32", "x of f32, f16 or bf16"),
        ((X.astype(np.float64),), {}, "x is f64", "x of f32, f16 or bf16"),
        ((X, X[0].astype(np.int64)), {}, "weight is i64", "weight of f32, f16 or bf16"),
        ((X[:, :0],), {}, "x has shape (4, 0): its last axis is 0", "a last axis of 1 to"),
        ((X[0, 0:1].reshape(()),), {}, "x has no axis to normalise", "x of shape [..., width]"),
        (
            (X,),
            {"residual": X[:3]},
            "residual has shape (3, 8), x has shape (4, 8)",
            "residual of shape (4, 8)",
        ),
        ((X,), {"residual": X.astype(np.float16)}, "residual is f16, x is f32", "residual of f32"),
        ((X,), {"eps": -1e-5}, "eps is -1e-05", "eps of 0 or more"),
        ((X,), {"eps": float("nan")}, "eps is nan, not a finite number", ""),
        ((X,), {"normalize": "both"}, "normalize is 'both'", 'normalize "rounded" or "unrounded"'),
        ((X,), {"out": np.empty((4, 7), np.float32)}, "out has shape (4, 7)", "out of shape (4, 8)"),
        ((X,), {"out": np.empty((4, 8), np.float16)}, "out is f16", "out of dtype f32"),
        ((X,), {"residual_out": np.empty((4, 8), np.float32)}, "residual_out is given", "no residual_out"),
    ],
)
def test_layer_norm_refuses(arguments, options, violation, hint):
    with pytest.raises(error_of(violation)) as caught:
        cki.layer_norm(*arguments, **options)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert str(caught.value).startswith("layer_norm: ")
    assert any(violation in problem for problem in caught.value.problems), str(caught.value)
    assert hint in str(caught.value)


def test_every_violation_is_listed():
    with pytest.raises(InvalidTypeError) as caught:
        cki.layer_norm(X.astype(np.int32), X[0, :7], X[0, :6], residual=X, eps=-1.0, normalize="x")
    text = str(caught.value)
    for words in ("x is i32", "weight has shape (7,)", "bias has shape (6,)", "residual is f32", "eps is -1.0",
                  "normalize is 'x'"):  # fmt: skip
        assert words in text


def test_weight_offset_needs_a_weight():
    with pytest.raises(InvalidArgumentError, match=r"weight_offset is 1\.0, but there is no weight"):
        cki.rms_norm(X, weight_offset=1.0)


def test_overlapping_out_is_refused():
    memory = np.zeros((5, 8), np.float32)
    with pytest.raises(InvalidArgumentError, match="out shares memory with x"):
        cki.rms_norm(memory[:4], out=memory[1:])
    with pytest.raises(InvalidArgumentError, match="out shares memory with weight"):
        cki.rms_norm(X.copy(), memory[0], out=memory[:4])


def test_outputs_in_one_memory_are_refused():
    memory = np.zeros((4, 8), np.float32)
    with pytest.raises(InvalidArgumentError, match="shares memory"):
        cki.rms_norm(X.copy(), residual=X.copy(), out=memory, residual_out=memory)
