"""CKI_VALIDATE=1 looks at values; what is no tensor, or has no such axis, is still refused by the operation's rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki

_IDS, _OFFSETS, _TABLE = np.zeros(2, np.int32), np.array([0, 2], np.int32), np.zeros((1, 2), np.int32)
_Q, _CACHE, _ROWS = (
    np.zeros((2, 2, 8), np.float16),
    np.zeros((3, 4, 2, 8), np.float16),
    np.zeros((8, 8), np.float16),
)


def _append_kv(k_cache: Any, v_cache: Any, **arguments: Any) -> Any:
    return cki.append_kv(cache=(k_cache, v_cache), **arguments)


def _paged_attention(k_cache: Any, v_cache: Any, **arguments: Any) -> Any:
    return cki.paged_attention(cache=(k_cache, v_cache), **arguments)


def _fused_attention(**arguments: Any) -> Any:
    return cki.fused_attention(num_heads=2, head_dim=4, **arguments)


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "packed": (cki.varlen_attention, {"q": _Q, "k": _Q, "v": _Q, "cu_seqlens_q": _OFFSETS, "cu_seqlens_k": _OFFSETS}),
    "chunked": (
        cki.varlen_attention,
        {"q": _Q, "k": _CACHE, "v": _CACHE, "cu_seqlens_q": _OFFSETS, "seq_lens": _IDS[:1], "block_table": _TABLE},
    ),
    "append_kv": (
        _append_kv,
        {
            "k": _Q, "v": _Q, "k_cache": _CACHE, "v_cache": _CACHE, "slot_mapping": _OFFSETS, "positions": _IDS,
            "cos_sin": np.zeros((3, 8), np.float32),
        },
    ),
    "apply_rope": (cki.apply_rope, {"x": _Q, "positions": _IDS, "cos_sin": np.zeros((3, 8), np.float32)}),
    "paged_attention": (
        _paged_attention,
        {"q": _Q[:1, None], "k_cache": _CACHE, "v_cache": _CACHE, "block_table": _TABLE, "seq_lens": _IDS[:1]},
    ),
    "embed_tokens": (
        cki.embed_tokens,
        {"token_ids": _IDS, "word_table": _ROWS, "position_table": _ROWS, "token_type_ids": _IDS, "type_table": _ROWS},
    ),
    "fused_attention": (
        _fused_attention,
        {"x": _ROWS[:2], "wq": _ROWS, "wk": _ROWS, "wv": _ROWS, "wo": _ROWS, "cu_seqlens": _OFFSETS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", ["text", np.float32(1), [0, 1], np.zeros((), np.int32)], ids=type)
@pytest.mark.parametrize(
    ("operation", "name"),
    [(operation, name) for operation, (_, tensors) in CALLS.items() for name in tensors],
)
def test_what_is_no_tensor_is_left_to_the_rules(monkeypatch, operation, name, bad):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    call, tensors = CALLS[operation]
    with cki.device("sim"), pytest.raises(cki.CkiError, match=rf"\b{name}\b"):
        call(**{**tensors, name: bad})


@pytest.mark.parametrize("window", [None, 3, {}, (), np.array(1)], ids=repr)
def test_a_window_that_is_no_pair(monkeypatch, window):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    call, tensors = CALLS["paged_attention"]
    with cki.device("sim"), pytest.raises(cki.CkiError, match="window is "):
        call(**tensors, window=window)


def test_an_alignment_that_is_no_text(monkeypatch):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    call, tensors = CALLS["chunked"]
    with (
        cki.device("sim"),
        pytest.raises(cki.errors.InvalidTypeError, match=r"causal_alignment is array\(\[1, 2"),
    ):
        call(**tensors, causal_alignment=np.array([1, 2]))
