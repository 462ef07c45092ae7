"""Bad arguments of `cki.varlen_attention`: the class and the text of each error, and what CKI_VALIDATE=1 looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from tests.ops.inputs import F16
from tests.ops.varlen_cases import chunked, offsets, packed
from tests.refusals import error_of


@pytest.fixture(autouse=True)
def _simulated():
    with cki.device("sim"):
        yield


def tensor(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


Q, K = tensor(9, 4, 16), tensor(12, 2, 16)
CU, CU_K = offsets([5, 0, 4]), offsets([5, 3, 4])
PACKED: dict[str, Any] = {"q": Q, "k": K, "v": K.copy(), "cu_seqlens_q": CU, "cu_seqlens_k": CU_K}
PAGES = tensor(6, 4, 2, 16)
PAGED: dict[str, Any] = {
    "q": Q, "k": PAGES, "v": PAGES.copy(), "cu_seqlens_q": CU, "block_table": tensor(3, 2, dtype=np.int32),
    "seq_lens": tensor(3, dtype=np.int32),
}  # fmt: skip

CASES = [
    (PACKED, {"q": Q[None]}, "q has shape (1, 9, 4, 16), which has 4 axes, not 3", "q [tokens, heads, head_dim]"),
    (PACKED, {"k": PAGES}, "k has shape (6, 4, 2, 16), which has 4 axes, not 3", "k and v [tokens, kv_heads"),
    (PAGED, {"k": K}, "k has shape (12, 2, 16), which has 3 axes, not 4", "k and v [blocks, block_size, kv_heads"),
    (PACKED, {"v": K.astype(np.float32)}, "v has dtype f32", "of one dtype"),
    (PACKED, {"q": Q.astype(np.int32)}, "q has dtype i32", "of dtype f32, f16 or bf16"),
    (PACKED, {"v": K[:5]}, "k has 12 tokens, v has 5", "of one length"),
    (PACKED, {"v": K[:, :1]}, "k has 2 heads, v has 1", "the same heads (axis 1)"),
    (PAGED, {"v": PAGES[:, :, :1]}, "k has 2 heads, v has 1", "the same heads (axis 2)"),
    (PACKED, {"q": Q[:, :3]}, "q has 3 heads, which is no multiple of k's 2", "a multiple of KV heads"),
    (PACKED, {"q": Q[..., :8]}, "q has head_dim 8, k has head_dim 16", "of one head_dim"),
    (PACKED, {"v": tensor(12, 2, 257)}, "v has head_dim 257", "a head_dim of 1 to 256"),
    (PACKED, {"cu_seqlens_q": CU[None]}, "cu_seqlens_q has shape (1, 4)", "of shape (batch + 1,)"),
    (PACKED, {"cu_seqlens_q": CU[:0]}, "cu_seqlens_q has shape (0,)", "of shape (batch + 1,)"),
    (PACKED, {"cu_seqlens_q": CU.astype(np.float32)}, "cu_seqlens_q is f32", "int32 or int64"),
    (PACKED, {"cu_seqlens_k": CU_K.astype(np.int16)}, "cu_seqlens_k is i16", "int32 or int64"),
    (PACKED, {"cu_seqlens_k": CU_K[:3]}, "cu_seqlens_k has shape (3,)", "cu_seqlens_k of shape (4,)"),
    (PACKED, {"cu_seqlens_k": None}, "q has 9 tokens, k has 12, and there is no cu_seqlens_k", "as many keys"),
    (PACKED, {"seq_lens": tensor(3, dtype=np.int32)}, "seq_lens is given without block_table", "cu_seqlens_k alone"),
    (PAGED, {"seq_lens": None}, "block_table is given without seq_lens", "seq_lens of shape (3,)"),
    (PAGED, {"cu_seqlens_k": CU_K}, "cu_seqlens_k is given beside block_table", "seq_lens with a block_table"),
    (PAGED, {"seq_lens": tensor(4, dtype=np.int32)}, "seq_lens has shape (4,)", "seq_lens of shape (3,)"),
    (PAGED, {"seq_lens": tensor(3)}, "seq_lens is f16", "int32 or int64"),
    (PAGED, {"block_table": tensor(2, 5, dtype=np.int32)}, "block_table has shape (2, 5)", "of shape (3, 5)"),
    (PAGED, {"block_table": tensor(3, dtype=np.int32)}, "block_table has shape (3,)", "of shape (3,"),
    (PAGED, {"block_table": tensor(3, 2)}, "block_table is f16", "int32 or int64"),
    (PAGED, {"v": PAGES[:5]}, "k holds (6, 4) blocks and places, v (5, 4)", "the same blocks"),
    (PAGED, {"k": PAGES[:, :0], "v": PAGES[:, :0]}, "k has blocks of 0 places", "a block_size of at least 1"),
    (PACKED, {"sinks": tensor(2, dtype=np.float32)}, "sinks has shape (2,), q has 4 heads", "of shape (4,)"),
    (PACKED, {"alibi_slopes": tensor(4)}, "alibi_slopes is f16", "of f32"),
    (PACKED, {"causal_alignment": "left"}, "causal_alignment is 'left'", '"top_left"'),
    (PACKED, {"window": (-2, 1)}, "window is (-2, 1)", "at least -1"),
    (PACKED, {"softcap": -1.0}, "softcap is -1.0", "of 0 (off), or from 1e-38 to 1e+38"),
    (PACKED, {"scale": float("inf")}, "scale is inf, not a finite number", ""),
    (PACKED, {"max_seqlen_q": -1}, "max_seqlen_q is -1", "at least 0"),
    (PACKED, {"max_seqlen_k": 3.5}, "max_seqlen_k is 3.5 of type float, not int", ""),
    (PACKED, {"causal": 1}, "causal is 1 of type int, not bool", ""),
    (PACKED, {"out": tensor(9, 4, 8)}, "out", "(9, 4, 16)"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "changes", "violation", "hint"), CASES)
def test_error_names_the_rule_and_what_would_pass(arguments, changes, violation, hint):
    with pytest.raises(error_of(violation)) as caught:
        cki.varlen_attention(**{**arguments, **changes})
    assert violation in str(caught.value)
    assert hint in str(caught.value)


def test_every_violated_rule_is_named():
    with pytest.raises(ValueError, match="invalid arguments") as caught:
        cki.varlen_attention(
            Q[:, :3], K, K[:5], CU, CU_K[:3], softcap=-2.0, window=(0, -5), sinks=tensor(4, dtype=np.float32),
            seq_lens=tensor(3, dtype=np.int32), max_seqlen_q=-4,
        )  # fmt: skip
    for part in (
        "softcap is", "window is", "max_seqlen_q is", "without block_table", "cu_seqlens_k has shape", "v has 5",
        "no multiple", "sinks has shape (4,)",
    ):  # fmt: skip
        assert sum(part in problem for problem in caught.value.problems) == 1, part


def test_a_missing_tensor_is_named():
    with pytest.raises(InvalidTypeError, match="cu_seqlens_q is None"):
        cki.varlen_attention(Q, K, K, None)


def test_an_output_that_overlaps_an_input_is_refused():
    memory = tensor(20, 2, 16)
    with pytest.raises(InvalidArgumentError, match="overlap"):
        cki.varlen_attention(memory[:9], K, K, CU, CU_K, out=memory[5:14])


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (PACKED, {"cu_seqlens_q": [0, 6, 5, 9]}, r"cu_seqlens_q goes down: \[1\] is 6, \[2\] is 5"),
        (PACKED, {"cu_seqlens_k": [0, 6, 5, 9]}, "cu_seqlens_k goes down"),
        (PACKED, {"cu_seqlens_q": [0, 1, 5, 10]}, "cu_seqlens_q holds 10, there are 9 tokens"),
        (PACKED, {"cu_seqlens_k": [-1, 1, 5, 10]}, "cu_seqlens_k holds -1"),
        (
            PACKED,
            {"max_seqlen_q": 4},
            "cu_seqlens_q holds a sequence of 5 tokens, the maximum is said to be 4",
        ),
        (PACKED, {"max_seqlen_k": 4}, "cu_seqlens_k holds a sequence of 5 tokens"),
        (PAGED, {"seq_lens": [9, 0, 0]}, r"seq_lens\[0\] is 9, block_table has 2 columns of blocks of 4"),
        (PAGED, {"seq_lens": [0, -1, 0]}, r"seq_lens\[1\] is -1"),
        (PAGED, {"seq_lens": [0, 0, 7], "max_seqlen_k": 6}, "seq_lens holds 7, the maximum is said to be 6"),
        (
            PAGED,
            {"block_table": [[9, 9], [9, 9], [0, 6]], "seq_lens": [0, 0, 5]},
            r"block_table\[2\] holds 6 within",
        ),
    ],
)
def test_validated_lengths_and_tables(monkeypatch, arguments, changes, message):
    changed = {n: np.array(c, np.int32) if isinstance(c, list) else c for n, c in changes.items()}
    monkeypatch.setenv("CKI_VALIDATE", "1")
    with pytest.raises(InvalidArgumentError, match=message):
        cki.varlen_attention(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (PAGED, {"window": ("a", 3)}), (PAGED, {"window": ()}), (PACKED, {"max_seqlen_q": "many"}),
        (PACKED, {"q": tensor()}), (PACKED, {"cu_seqlens_q": CU.astype(np.float32)}), (PAGED, {"seq_lens": None}),
        (PAGED, {"block_table": tensor(2, 2, dtype=np.int32)}), (PAGED, {"k": K}),
    ],
)  # fmt: skip
def test_validation_leaves_wrong_shapes_and_types_to_the_rules(monkeypatch, arguments, changes):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    with pytest.raises(cki.CkiError, match="varlen_attention: invalid arguments"):
        cki.varlen_attention(**{**arguments, **changes})


def test_what_is_right_passes_validation(monkeypatch):
    """Also entries before the window and past the length, which are not read."""
    monkeypatch.setenv("CKI_VALIDATE", "1")
    cki.varlen_attention(**packed(F16, [5, 0, 70], [9, 3, 70]), max_seqlen_q=70, max_seqlen_k=70)
    tensors = chunked(F16, [10, 0], [100, 3], 16)
    cki.varlen_attention(**tensors, causal=True, max_seqlen_k=100)
    tensors["block_table"][0, :4] = -1
    cki.varlen_attention(**tensors, causal=True, window=(20, 0))
    with pytest.raises(InvalidArgumentError, match="holds -1 within its length"):
        cki.varlen_attention(**tensors, causal=True, window=(80, 0))
