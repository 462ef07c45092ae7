"""Bad arguments of linear, fused_attention and encoder_layer: the class and the text of each error."""

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


X, W = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)
B, R = np.ones(6, np.float32), np.ones((4, 6), np.float32)


def half(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float16)


LINEAR_CASES = [
    ((X.astype(np.int32), W), {}, "x is i32", "x of f32, f16 or bf16"),
    ((X.astype(np.float64), W.astype(np.float64)), {}, "x is f64", "x of f32, f16 or bf16"),
    ((X, half(W)), {}, "w is f16, x is f32", "w of f32"),
    ((X, W.T), {}, "w has shape (6, 8), x has shape (4, 8)", "w of shape (8, N)"),
    ((X, W), {"weight_layout": "out_in"}, "w has shape (8, 6), x has shape (4, 8)", "w of shape (N, 8)"),
    ((X, B), {}, "w has shape (6,), x has shape (4, 8)", "w of shape (8, N)"),
    ((X[0, 0:1].reshape(()), W), {}, "x has no axis to multiply (shape ())", "x of shape [..., K]"),
    ((X, W, B[:5]), {}, "bias has shape (5,)", "bias of shape (6,)"),
    ((X, W, R), {}, "bias has shape (4, 6)", "bias of shape (6,)"),
    ((X, W, half(B)), {}, "bias is f16", "bias of f32"),
    ((half(X), half(W), B.astype(np.int32)), {}, "bias is i32", "bias of f32 or f16"),
    (
        (X, W),
        {"residual": R[:3]},
        "residual has shape (3, 6), the result has shape (4, 6)",
        "residual of shape (4, 6)",
    ),
    ((X, W), {"residual": half(R)}, "residual is f16, x is f32", "residual of f32"),
    ((X, W), {"activation": "tanh"}, "activation is 'tanh'", "'gelu', 'gelu_tanh', 'silu', 'relu' or None"),
    ((X, W), {"activation": 3}, "activation is 3 of type int, not str", ""),
    ((X, W), {"weight_layout": "NK"}, "weight_layout is 'NK'", 'weight_layout "in_out" or "out_in"'),
    ((X, W), {"out": np.empty((4, 5), np.float32)}, "out has shape (4, 5)", "out of shape (4, 6)"),
    ((X, W), {"out": np.empty((4, 6), np.float16)}, "out is f16", "out of dtype f32"),
]


@pytest.mark.parametrize(("arguments", "options", "violation", "hint"), LINEAR_CASES)
def test_linear_refuses(arguments, options, violation, hint):
    with pytest.raises(error_of(violation)) as caught:
        cki.linear(*arguments, **options)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert str(caught.value).startswith("linear: ")
    assert any(violation in problem for problem in caught.value.problems), str(caught.value)
    assert hint in str(caught.value)


def test_every_violation_is_listed():
    with pytest.raises(InvalidTypeError) as caught:
        cki.linear(X.astype(np.int32), W, B[:5], residual=R[:3], activation="x", weight_layout="y")
    text = str(caught.value)
    for words in ("x is i32", "w is f32, x is i32", "bias has shape (5,)", "residual has shape (3, 6)",
                  "residual is f32", "activation is 'x'", "weight_layout is 'y'"):  # fmt: skip
        assert words in text
    assert text.endswith("w of x's type; bias of shape (6,); residual of x's type; residual of shape (4, 6)")


def test_missing_and_foreign_tensors():
    with pytest.raises(InvalidTypeError, match="w is None"):
        cki.linear(X, None)
    with pytest.raises(InvalidTypeError, match="w"):
        cki.linear(X, "weights")
    with pytest.raises(InvalidTypeError, match="complex"):
        cki.linear(X.astype(np.complex64), W)


@pytest.mark.parametrize("name", ["x", "w", "bias", "residual"])
def test_out_that_overlaps(name):
    """Only the very same view as the residual is allowed."""
    memory = np.zeros(400, np.float32)
    tensors = {"x": X, "w": W, "bias": B, "residual": R}
    shape = tensors[name].shape
    tensors[name] = memory[2 : 2 + tensors[name].size].reshape(shape)
    out = memory[:24].reshape(4, 6)
    with pytest.raises(InvalidArgumentError, match=f"out shares memory with {name}"):
        cki.linear(tensors["x"], tensors["w"], tensors["bias"], residual=tensors["residual"], out=out)


def test_read_only_and_self_overlapping_out():
    out = np.empty((4, 6), np.float32)
    out.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="read-only"):
        cki.linear(X, W, out=out)
    with pytest.raises(InvalidArgumentError, match="out overlaps itself"):
        cki.linear(X, W, out=np.lib.stride_tricks.as_strided(np.empty(40, np.float32), (4, 6), (8, 4)))


def test_elements_at_odd_addresses():
    raw = np.zeros(4 * 8 * 4 + 1, np.uint8)
    x = raw[1:].view(np.float32).reshape(4, 8)
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match="x"):
        cki.linear(x, W)


# --- the encoder ops --------------------------------------------------------------------------------------------------


def block(**changes):
    """Arguments of a valid fused_attention, with some replaced."""
    f32 = np.float32
    arguments = {"x": np.ones((2, 5, 12), f32), "num_heads": 4, "head_dim": 3}
    arguments |= {name: np.ones((12, 12), f32) for name in ("wq", "wk", "wv", "wo")}
    return arguments | changes


F32_12 = np.ones((12, 12), np.float32)
BLOCK_CASES = [
    ({"x": np.ones((2, 12), np.float32)}, "x has shape (2, 12)", "x of shape [batch, seq, hidden]"),
    ({"x": np.ones((2, 5, 12), np.int64)}, "x is i64", "x of f32, f16 or bf16"),
    ({"wq": F32_12[:, :9]}, "wq has shape (12, 9), x has shape (2, 5, 12)", "wq of shape (12, 12)"),
    ({"wo": F32_12[:9]}, "wo has shape (9, 12)", "wo of shape (12, 12)"),
    ({"wk": half(F32_12)}, "wk is f16, x is f32", "wk of f32"),
    ({"num_kv_heads": 2}, "wk has shape (12, 12)", "wk of shape (12, 6)"),
    ({"num_kv_heads": 3}, "num_kv_heads is 3, num_heads is 4", "num_kv_heads that divides num_heads"),
    ({"num_kv_heads": 0}, "num_kv_heads is 0", "num_kv_heads that divides num_heads"),
    ({"num_heads": 0}, "num_heads is 0", "num_heads of 1 to 65536"),
    ({"num_heads": None}, "num_heads is None of type NoneType, not int", ""),
    ({"head_dim": 300}, "head_dim is 300", "a head_dim of 1 to 256"),
    ({"gamma": np.ones(11, np.float32)}, "gamma has shape (11,)", "gamma of shape (12,)"),
    ({"beta": np.ones(12, np.int32)}, "beta is i32", "beta of f32"),
    ({"bq": np.ones(11, np.float32)}, "bq has shape (11,)", "bq of shape (12,)"),
    ({"epsilon": -1.0}, "epsilon is -1.0", "epsilon of 0 or more"),
    ({"scale": float("nan")}, "scale is nan, not a finite number", ""),
    (
        {"mask": np.ones((2, 6), bool)},
        "mask has shape (2, 6), x has shape (2, 5, 12)",
        "mask of shape (2, 5)",
    ),
    ({"mask": np.ones(5, bool)}, "mask has shape (5,)", "(2, 4, 5, 5)"),
    ({"mask": np.ones((2, 5), np.float32)}, "mask is f32", "mask of bool or u8"),
    ({"out": np.empty((2, 5, 11), np.float32)}, "out has shape (2, 5, 11)", "out of shape (2, 5, 12)"),
]


@pytest.mark.parametrize(("changes", "violation", "hint"), BLOCK_CASES)
def test_fused_attention_refuses(changes, violation, hint):
    with pytest.raises(error_of(violation)) as caught:
        cki.fused_attention(**block(**changes))
    assert str(caught.value).startswith("fused_attention: ")
    assert any(violation in problem for problem in caught.value.problems), str(caught.value)
    assert hint in str(caught.value)


def layer(**changes):
    """Arguments of a valid encoder_layer, with some replaced."""
    return block(w1=np.ones((12, 7), np.float32), w2=np.ones((7, 12), np.float32)) | changes


LAYER_CASES = [
    ({"w1": F32_12[:11]}, "w1 has shape (11, 12), x has shape (2, 5, 12)", "w1 of shape (12, N)"),
    ({"w2": F32_12[:8]}, "w2 has shape (8, 12)", "w2 of shape (7, 12)"),
    ({"b1": np.ones(8, np.float32)}, "b1 has shape (8,)", "b1 of shape (7,)"),
    ({"b2": np.ones(8, np.float32)}, "b2 has shape (8,)", "b2 of shape (12,)"),
    ({"output_gamma": np.ones(7, np.float32)}, "output_gamma has shape (7,)", "output_gamma of shape (12,)"),
    (
        {"attention_beta": np.ones(7, np.float32)},
        "attention_beta has shape (7,)",
        "attention_beta of shape (12,)",
    ),
    ({"activation": "swish"}, "activation is 'swish'", "'gelu', 'gelu_tanh', 'silu', 'relu' or None"),
]


@pytest.mark.parametrize(("changes", "violation", "hint"), LAYER_CASES)
def test_encoder_layer_refuses(changes, violation, hint):
    with pytest.raises(error_of(violation)) as caught:
        cki.encoder_layer(**layer(**changes))
    assert str(caught.value).startswith("encoder_layer: ")
    assert any(violation in problem for problem in caught.value.problems), str(caught.value)
    assert hint in str(caught.value)


def test_every_violation_of_a_layer_is_listed():
    with pytest.raises(InvalidArgumentError) as caught:
        cki.encoder_layer(
            **layer(wq=F32_12[:, :9], wv=F32_12[:9], w2=F32_12[:8], b1=B, epsilon=-1.0, activation="x")
        )
    text = str(caught.value)
    for words in ("wq has shape (12, 9)", "wv has shape (9, 12)", "w2 has shape (8, 12)", "b1 has shape (6,)",
                  "epsilon is -1.0", "activation is 'x'"):  # fmt: skip
        assert words in text


def test_the_output_may_not_be_the_input():
    arguments = block()
    with pytest.raises(InvalidArgumentError, match="out shares memory with x"):
        cki.fused_attention(**arguments, out=arguments["x"])
