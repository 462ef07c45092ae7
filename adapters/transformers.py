"""Attention implementation "cki" of Hugging Face transformers (5.x): `register()`, then `attn_implementation="cki"`.

An implementation is two functions.  `attention_mask` is called once a forward pass and kind of layer, and says what is
hidden; `attention_forward` is called by each layer with what it said:

    None            all keys; with a causal layer, the keys up to the query, counted from the first (an empty cache)
    i32 [batch]     the cache is full up to these lengths, without padding, and the queries are its newest tokens
    bool, 4 axes    this mask and nothing else

The first two leave the pattern to the kernels, which then skip what is hidden: causal, and the layer's sliding window.
Keys and values are read where the cache keeps them, each once for all query heads that share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from cki.adapters.torch_attention import as_autocast
from cki.errors import UnsupportedError
from cki.ops.attention import attention
from cki.ops.paged import decode_attention

NAME = "cki"
#: New tokens that `decode_attention` takes.
_DECODE_QUERIES = 16


def register() -> None:
    """Make "cki" known to transformers: `model.set_attn_implementation("cki")`.  May be called again."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> torch.Tensor | None:
    """What a layer's queries may see; arguments are those of transformers' `sdpa_mask`.

    others: among them the queries' places, as q_length, q_offset and device, or (early 5.x) as cache_position.
    """
    # Layers are told of their window even where this returns None, so it may only where no window is in play.
    skips = allow_is_causal_skip and mask_function is causal_mask_function
    if allow_is_causal_skip and _is_left_to_kernels(mask_function, local_size):
        q_length, q_offset, device = _queries(**others)
        is_aligned = q_offset is not None and q_offset - kv_offset == kv_length - q_length
        if is_aligned and _is_without_padding(attention_mask, kv_length, kv_offset):
            if kv_length == q_length:
                return None
            return torch.full((batch_size,), kv_length, dtype=torch.int32, device=device)
    return sdpa_mask(
        batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=skips, **others,
    )  # fmt: skip


def _queries(
    q_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    device: torch.device | str = "cpu",
    cache_position: torch.Tensor | None = None,
    **others: Any,
) -> tuple[int, int | None, torch.device | str]:
    """(number of queries, position of the first or None where the host does not know it, device)."""
    if cache_position is not None:
        first = None if is_tracing(cache_position) else int(cache_position[0])
        return cache_position.shape[0], first, cache_position.device
    return q_length, q_offset if isinstance(q_offset, int) else None, device


def _is_left_to_kernels(mask_function: Callable[..., Any], local_size: int | None) -> bool:
    """Whether the pattern is causal, or causal in the window `local_size`, which layers know too."""
    if mask_function is causal_mask_function:
        return local_size is None
    if torch.compiler.is_dynamo_compiling():  # which has no closures to look into
        return False
    # `sliding_window_causal_mask_function(w)` is and_masks(sliding_window_overlay(w), causal_mask_function).
    parts = _closure(mask_function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return False
    is_window = getattr(parts[0], "__qualname__", "").startswith("sliding_window_overlay.")
    return is_window and _closure(parts[0]).get("sliding_window") == local_size


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return dict(zip(code.co_freevars, [cell.cell_contents for cell in cells])) if code and cells else {}


def _is_without_padding(padding: torch.Tensor | None, kv_length: int, kv_offset: int) -> bool:
    """Whether no key is padding; False too where that cannot be read, in a traced program."""
    if padding is None:
        return True
    if is_tracing(padding):
        return False
    part = padding[:, kv_offset : kv_offset + kv_length]
    return part.shape[1] == kv_length and bool(part.all())


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention.  query: [batch, heads, queries, head_dim].  key, value: [batch, kv_heads, keys, dim].

    s_aux: a logit a head without a value (attention sinks).  position_bias: added to the scaled logits.
    Returns ([batch, queries, heads, value_dim], None); weights are never made, so `output_attentions=True` is refused.
    """
    if dropout:
        raise UnsupportedError(f'attention "{NAME}": dropout is {dropout}', hint="model.eval()")
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            f'attention "{NAME}": output_attentions=True, but no weights are made', hint='"eager"'
        )
    query, key, value = as_autocast(query, key, value)
    queries, keys = query.shape[2], key.shape[2]
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0}
    if s_aux is not None:
        options["sinks"] = s_aux.float()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = -1 if sliding_window is None else sliding_window - 1
    if attention_mask is not None and attention_mask.ndim == 1:
        options["window"] = (left, -1)
        if queries <= _DECODE_QUERIES and position_bias is None and _rows_are_aligned(k, v):
            return decode_attention(q, k, v, attention_mask, **options), None
        return attention(q, k, v, causal=True, bias=position_bias, **options), None
    if attention_mask is not None:
        mask, bias = (attention_mask, None) if attention_mask.dtype == torch.bool else (None, attention_mask)
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        return attention(q, k, v, mask=mask, bias=bias, **options), None
    if causal:
        # One query of a cache that no mask was made for stands at its end; several stand at its beginning.
        options |= {"causal": True, "causal_alignment": "top_left" if queries > 1 else "bottom_right"}
        options["window"] = (left, -1)
    elif left >= 0 and keys > sliding_window:
        raise UnsupportedError(
            f'attention "{NAME}": a window of {sliding_window} without a mask in a layer that is not causal',
            hint="a 4-axis attention_mask",
        )
    return attention(q, k, v, bias=position_bias, **options), None


def _rows_are_aligned(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `decode_attention` can copy the rows of a cache in steps of 16 bytes."""
    return all(t.stride(-1) == 1 and t.shape[-1] * t.element_size() % 16 == 0 for t in (k, v))
