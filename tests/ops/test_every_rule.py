"""A wrong shape hides no wrong type: each pair of a misshapen tensor and one of a wrong dtype is named in one error."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cki
from cki.errors import CkiError
from tests.adapters.examples import E4M3, EXAMPLES, HEADS, INDEX, KV, X, normal

F32 = np.float32
_COUNT = np.ones(1, np.int64)
_CODES = {"q": HEADS[:, :1].astype(ml_dtypes.bfloat16), "k": KV.astype(E4M3), "v": KV.astype(E4M3)}
_PER_HEAD = {"sinks": np.ones(4, F32), "alibi_slopes": np.ones(4, F32)}
_PER_TOKEN = {"k_scale": np.ones((2, 11, 2), F32), "v_scale": np.ones((2, 11, 2), F32)}
_BLOCK = {**EXAMPLES["encoder_layer"][0], "bq": normal(32), "bo": normal(32), "mask": np.ones((2, 7), bool)}

#: Calls with nearly all tensors that their operation takes.
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, *example) for name, example in EXAMPLES.items()},
    "linear, residual": ("linear", {**EXAMPLES["linear"][0], "residual": normal(5, 40)}, {}),
    "gated_linear, bias": ("gated_linear", {**EXAMPLES["gated_linear"][0], "bias": normal(40)}, {}),
    "linear_fp8, bias": ("linear_fp8", {**EXAMPLES["linear_fp8"][0], "bias": normal(16)}, {}),
    "rms_norm, all": ("rms_norm", {"x": X, "weight": X[0], "residual": X}, {}),
    "softmax, mask": ("softmax", {"x": X, "mask": X > 0}, {}),
    "attention, all": (
        "attention",
        {"q": HEADS, "k": KV, "v": KV, "bias": normal(9, 11), "mask": np.ones((9, 11), bool), **_PER_HEAD,
         "dropout_seed": _COUNT, "dropout_offset": _COUNT}, {"dropout_p": 0.5},
    ),
    "varlen_attention, paged": (
        "varlen_attention",
        {"q": HEADS[0], "k": normal(6, 8, 2, 16), "v": normal(6, 8, 2, 16), "cu_seqlens_q": np.array([0, 4, 9], INDEX),
         "block_table": np.zeros((2, 2), INDEX), "seq_lens": np.array([9, 12], INDEX), **_PER_HEAD}, {},
    ),
    "decode_attention, all": (
        "decode_attention",
        {**_CODES, "seq_lens": np.array([7, 11], INDEX), **_PER_TOKEN, **_PER_HEAD, "counters": np.zeros(8, np.uint32)},
        {},
    ),
    "apply_rope, table": (
        "apply_rope", {"x": HEADS[0], "positions": np.arange(9, dtype=INDEX), "cos_sin": normal(9, 16)}, {},
    ),
    "encoder_layer, all": (
        "encoder_layer", {**_BLOCK, "attention_gamma": normal(32), "output_beta": normal(32), "b1": normal(64)},
        EXAMPLES["encoder_layer"][1],
    ),
    "embed_tokens, all": (
        "embed_tokens",
        {"token_ids": np.array([[3, 1, 4]], INDEX), "word_table": normal(6, 24), "position_table": normal(9, 24),
         "positions": np.array([2, 1, 0], INDEX), "type_table": normal(2, 24),
         "token_type_ids": np.array([[0, 1, 1]], INDEX)}, {},
    ),
}  # fmt: skip


def problems(name: str, arrays: dict[str, Any], attributes: dict[str, Any]) -> list[str]:
    try:
        getattr(cki, name)(**arrays, **attributes)
    except CkiError as error:
        return list(error.problems)
    return []


def _names_type(problem: str, name: str, dtype: str) -> bool:
    return problem.startswith(name) and dtype in problem


@pytest.mark.parametrize("case", CALLS)
def test_types_are_named_beside_wrong_shapes(case):
    name, given, attributes = CALLS[case]
    arrays = {key: value for key, value in given.items() if isinstance(value, np.ndarray)}
    missed, found = [], 0
    with cki.device("sim"):
        for wrong in arrays:
            dtype = np.dtype(np.uint16)
            retyped = {wrong: np.zeros(arrays[wrong].shape, dtype)}
            alone = problems(name, {**given, **retyped}, attributes)
            assert any("u16" in problem for problem in alone), f"{wrong} of u16 is taken"
            if not any(_names_type(problem, wrong, "u16") for problem in alone):
                continue  # named with another one, as x of which weights have another type
            for misshapen in arrays.keys() - {wrong}:
                broken = {**given, misshapen: arrays[misshapen][None, None], **retyped}
                found += 1
                if not any(_names_type(p, wrong, "u16") for p in problems(name, broken, attributes)):
                    missed.append(f"{wrong} beside {misshapen}")
    assert not missed
    assert found or len(arrays) == 1


def endless(*shape: int, dtype: Any = F32) -> np.ndarray:
    """Of one element."""
    return np.broadcast_to(np.zeros(1, dtype), shape)


@pytest.mark.parametrize(
    ("name", "arrays", "words"),
    [
        ("attention", dict.fromkeys("qkv", endless(1, 1, 2**31, 16)), "q has 2147483648 heads"),
        ("embed_tokens", {"token_ids": endless(1, 2**40, dtype=INDEX), "word_table": normal(4, 16)}, "token_ids has"),
        ("merge_states", {"outs": endless(2**33, 1, 16), "lses": endless(2**33, 1)}, "8589934592 states"),
    ],
)  # fmt: skip
def test_sizes_that_no_int_of_a_kernel_holds(name, arrays, words):
    with cki.device("sim"):
        (problem,) = problems(name, arrays, {})
    assert words in problem
