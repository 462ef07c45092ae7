"""`torch.nn.functional.scaled_dot_product_attention`, its signature and its rules, by CKI's kernels; with
`recompute_gradient=True` also its gradient, as the functions of `cki.adapters.torch` have it.

torch's layout [batch, heads, length, dim] is CKI's with two axes exchanged, which strides express: nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cki.adapters.gradient import require_bool
from cki.adapters.renamed import renamed
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.ops.attention import attention

_OPERATION = "scaled_dot_product_attention"
_NAMES = {
    "q": "query", "k": "key", "v": "value", "bias": "attn_mask", "mask": "attn_mask", "causal": "is_causal",
}  # fmt: skip
_MASK_TYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recompute_gradient: bool = False,
) -> torch.Tensor:
    """Attention as torch defines it, without its broadcasting of batch axes; under torch.compile too.

    query: [..., heads, queries, head_dim].  key: [..., kv_heads, keys, head_dim].
    value: [..., kv_heads, keys, value_dim].  f32, f16 or bf16, all alike; any strides; no or several batch axes, the
        same for all three.  Under torch.autocast they are cast to its type, as by torch's own.
    attn_mask: broadcastable to [..., heads, queries, keys].  bool: True takes part; float: added to the scaled logits.
    is_causal: query i sees the keys up to i (top left, as torch), of those that attn_mask leaves it.
    scale: None is 1/sqrt(head_dim).
    enable_gqa: kv_heads may divide heads; keys and values are not repeated in memory.
    dropout_p: 0.0 alone; this is a library for inference.
    recompute_gradient: autograd records the call and differentiates the plain expression.

    Returns [..., heads, queries, value_dim], laid out as [..., queries, heads, value_dim] in memory.  A query that sees
    no key gets 0.
    Raises InvalidArgumentError, InvalidTypeError or UnsupportedError before any launch.
    """
    if recompute_gradient is not False:
        require_bool(_OPERATION, recompute_gradient)
    _check(query, key, value, attn_mask, dropout_p, enable_gqa)
    query, key, value = as_autocast(query, key, value)
    batch = query.shape[:-3]
    bias = mask = None
    if attn_mask is not None:
        if len(batch) > 1 and attn_mask.ndim > 3:  # one batch axis, as q, k and v get
            attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, len(batch) - 1)
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    q, k, v = (_one_batch_axis(tensor).transpose(1, 2) for tensor in (query, key, value))
    operation = _attention_with_gradient() if recompute_gradient else attention
    try:
        out = operation(
            q, k, v, causal=is_causal, causal_alignment="top_left", scale=scale, bias=bias, mask=mask
        ).transpose(1, 2)
    except CkiError as error:
        raise renamed(error, _OPERATION, _NAMES) from None
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Floating-point tensors in autocast's type, where it is enabled on their device, as torch's own attention takes
    them; f64 stays, as there.  Others and all tensors outside autocast are returned as they are."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def _attention_with_gradient() -> Callable[..., torch.Tensor]:
    from cki.adapters import torch as operations  # which offers this module's function

    return functools.partial(operations.attention, recompute_gradient=True)


def _one_batch_axis(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 4:
        return tensor
    return tensor.unsqueeze(0) if tensor.ndim == 3 else tensor.flatten(0, tensor.ndim - 4)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape broadcasts to `full`."""
    return len(shape) <= len(full) and all(
        extent == 1 or extent == wanted for extent, wanted in zip(shape[::-1], full[::-1])
    )


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
    dropout_p: float, enable_gqa: bool,
) -> None:  # fmt: skip
    """The rules that `cki.attention` does not know."""
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        tensors["attn_mask"] = attn_mask
    wrong = [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]
    if wrong:
        raise InvalidTypeError(f"{_OPERATION}: {', '.join(wrong)} must be of torch", hint="tensors of torch")
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0.0:
        raise UnsupportedError(f"{_OPERATION}: dropout_p is {dropout_p}", hint="dropout_p=0.0 (inference)")
    if not isinstance(enable_gqa, bool):
        raise InvalidTypeError(
            f"{_OPERATION}: enable_gqa is {enable_gqa!r}", hint="enable_gqa of True or False"
        )
    if attn_mask is not None and attn_mask.dtype not in _MASK_TYPES:
        raise InvalidTypeError(
            f"{_OPERATION}: attn_mask is {attn_mask.dtype}", hint="attn_mask of bool, f32, f16 or bf16"
        )
    problems, hints = [], []
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        problems.append(
            f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} axes, not three or more alike"
        )
        hints.append("[batch, heads, length, dim] for each")
    else:
        if not enable_gqa and query.shape[-3] != key.shape[-3]:
            problems.append(
                f"query has {query.shape[-3]} heads and key {key.shape[-3]}, but enable_gqa is False"
            )
            hints.append("enable_gqa=True, for keys and values that several query heads share")
        batches = [tuple(tensor.shape[:-3]) for tensor in (query, key, value)]
        if not batches[0] == batches[1] == batches[2]:
            problems.append("query, key and value have batch axes {}, {} and {}, not alike".format(*batches))
            hints.append("the same batch axes; tensor.expand(...) repeats one without a copy")
        full = (*query.shape[:-1], key.shape[-2])
        if attn_mask is not None and not _broadcasts(tuple(attn_mask.shape), full):
            problems.append(
                f"attn_mask has shape {tuple(attn_mask.shape)}, which does not broadcast to {full}"
            )
            hints.append("attn_mask that broadcasts to [..., heads, queries, keys]")
    if problems:
        raise InvalidArgumentError(f"{_OPERATION}: invalid arguments", problems, "; ".join(hints))
