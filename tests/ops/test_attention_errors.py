"""Bad arguments of attention: the class and the text of each error, and that all violated rules are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from tests.refusals import error_of


@pytest.fixture(autouse=True)
def _simulated():
    with cki.device("sim"):
        yield


def tensor(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


Q, K, V = tensor(2, 3, 4, 16), tensor(2, 5, 2, 16), tensor(2, 5, 2, 16)

CASES = [
    ((Q[0], K, V), {}, "q has shape (3, 4, 16), which has 3 axes, not 4", "q [batch, queries, heads, head_dim]"),
    ((Q, K, V.astype(np.float32)), {}, "v has dtype f32", "of one dtype"),
    ((*(t.astype(np.float64) for t in (Q, K, V)),), {}, "q has dtype f64", "of dtype f32, f16 or bf16"),
    ((Q, K[:1], V), {}, "batch sizes differ: q has 2, k has 1, v has 2", "one batch size"),
    ((Q, K, V[:, :4]), {}, "k has 5 keys, v has 4", "of one length"),
    ((Q, K, V[:, :, :1]), {}, "k has 2 heads, v has 1", "the same heads"),
    ((Q[:, :, :3], K, V), {}, "q has 3 heads, which is no multiple of k's 2", "a multiple of KV heads"),
    ((Q, K[..., :8], V), {}, "q has head_dim 16, k has head_dim 8", "of one head_dim"),
    ((Q, K, tensor(2, 5, 2, 257)), {}, "v has head_dim 257", "a head_dim of 1 to 256"),
    ((Q, K, V), {"bias": tensor(4, 5)}, "bias has shape (4, 5), which does not broadcast to (2, 4, 3, 5)", "able"),
    ((Q, K, V), {"bias": tensor(3, 5, dtype=bool)}, "bias is bool", "bias of f32, f16 or bf16"),
    ((Q, K, V), {"mask": tensor(3, 5, dtype=np.int32)}, "mask is i32", "mask of bool or u8"),
    ((Q, K, V), {"mask": tensor(1, 1, 1, 3, 5, dtype=bool)}, "mask has shape (1, 1, 1, 3, 5)", "broadcastable"),
    ((Q, K, V), {"sinks": tensor(2, dtype=np.float32)}, "sinks has shape (2,), q has 4 heads", "of shape (4,)"),
    ((Q, K, V), {"alibi_slopes": tensor(4)}, "alibi_slopes is f16", "of f32"),
    ((Q, K, V), {"causal_alignment": "left"}, "causal_alignment is 'left'", '"top_left"'),
    ((Q, K, V), {"window": (3,)}, "window is (3,)", "a pair (left, right)"),
    ((Q, K, V), {"window": (-2, 1)}, "window is (-2, 1)", "at least -1"),
    ((Q, K, V), {"softcap": -1.0}, "softcap is -1.0", "of 0 (off), or from 1e-38 to 1e+38"),
    ((Q, K, V), {"softcap": 1e-30, "scale": 1e10}, "softcap is 1e-30", "of 0 (off), or from 1e-28 to 1e+38"),
    ((Q, K, V), {"softcap": 3e38}, "softcap is 3e+38", "of 0 (off), or from 1e-38 to 1e+38"),
    ((Q, K, V), {"scale": -2e30}, "scale is -2e+30", "scale of 0, or of a magnitude from 1e-30 to 1e+30"),
    ((Q, K, V), {"scale": 1e-31}, "scale is 1e-31", "scale of 0, or of a magnitude from 1e-30 to 1e+30"),
    ((Q, K, V), {"scale": 1e-50}, "scale is 1e-50, which fp32 does not hold", ""),
    ((Q, K, V), {"scale": float("nan")}, "scale is nan, not a finite number", ""),
    ((Q, K, V), {"causal": 3}, "causal is 3 of type int, not bool", ""),
    ((Q, K, V), {"out": tensor(2, 3, 4, 8)}, "out", "(2, 3, 4, 16)"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "violation", "hint"), CASES)
def test_error_names_the_rule_and_what_would_pass(tensors, options, violation, hint):
    with pytest.raises(error_of(violation)) as caught:
        cki.attention(*tensors, **options)
    assert violation in str(caught.value)
    assert hint in str(caught.value)


def test_every_violated_rule_is_named():
    with pytest.raises(ValueError, match="invalid arguments") as caught:
        cki.attention(Q[:, :, :3], K, V[:1], softcap=-2.0, window=(0, -5), sinks=tensor(4, dtype=np.float32))
    error = caught.value
    assert isinstance(error, InvalidArgumentError)
    for part in ("softcap is", "window is", "batch sizes differ", "no multiple", "sinks has shape (4,)"):
        assert sum(part in problem for problem in error.problems) == 1


def test_an_output_that_overlaps_an_input_is_refused():
    memory = tensor(2, 6, 2, 16)
    with pytest.raises(InvalidArgumentError, match="overlap"):
        cki.attention(memory[:, :4], K, V, out=memory[:, 2:])


def test_a_missing_tensor_is_named():
    with pytest.raises(InvalidTypeError, match="v is None"):
        cki.attention(Q, K, None)
