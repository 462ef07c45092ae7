"""`torch.nn.functional.scaled_dot_product_attention`, its signature and its rules, by CKI's kernels; with
`recompute_gradient=True` also its gradient, as the functions of `cki.adapters.torch` have it.

torch's layout [batch, heads, length, dim] is CKI's with two axes exchanged, which strides express, as they do an axis
that is broadcast: nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    """Attention as torch defines it; under torch.compile too.

    query: [..., queries, head_dim].  key: [..., keys, head_dim].  value: [..., keys, value_dim].  f32, f16 or bf16, all
        alike; any strides; two or more axes, of which those in front (batch axes, then heads) broadcast.  Under
        torch.autocast they are cast to its type, as by torch's own.
    attn_mask: broadcastable to [..., queries, keys].  bool: True takes part; float: added to the scaled logits.
    is_causal: query i sees the keys up to i (top left, as torch), of those that attn_mask leaves it.
    scale: None is 1/sqrt(head_dim).
    enable_gqa: heads of key and value may divide those of query, in three or more axes.  They are not repeated in
        memory, unless key and value have different numbers of them.
    dropout_p: 0.0 alone; this is a library for inference.
    recompute_gradient: autograd records the call and differentiates the plain expression.

    Returns [..., queries, value_dim], with heads laid out as [..., queries, heads, value_dim] in memory.  A query that
    sees no key gets 0.
    Raises InvalidArgumentError, InvalidTypeError or UnsupportedError before any launch.
    """
    if recompute_gradient is not False:
        require_bool(_OPERATION, recompute_gradient)
    _check(query, key, value, attn_mask, dropout_p, enable_gqa)
    query, key, value = as_autocast(query, key, value)
    has_heads = max(query.ndim, key.ndim, value.ndim) > 2
    query, key, value = (tensor if tensor.ndim > 2 else tensor.unsqueeze(0) for tensor in (query, key, value))
    query, key, value = _with_heads(query, key, value, enable_gqa)
    batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in (query, key, value)))
    bias = mask = None
    if attn_mask is not None:
        if len(batch) > 1 and attn_mask.ndim > 3:  # one batch axis, as q, k and v get
            attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, len(batch) - 1)
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    q, k, v = (_one_batch_axis(tensor, batch).transpose(1, 2) for tensor in (query, key, value))
    operation = _attention_with_gradient() if recompute_gradient else attention
    try:
        out = operation(
            q, k, v, causal=is_causal, causal_alignment="top_left", scale=scale, bias=bias, mask=mask
        ).transpose(1, 2)
    except CkiError as error:
        raise renamed(error, _OPERATION, _NAMES) from None
    if not has_heads:
        return out[0, 0]
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


def _with_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three with as many heads as `cki.attention` wants: of key and value alike, and of query a multiple."""
    heads, of_key, of_value = (tensor.shape[-3] for tensor in (query, key, value))
    if of_key == of_value and (enable_gqa or of_key in (1, heads)):
        return query, key, value
    if enable_gqa:
        key, value = (t.repeat_interleave(heads // max(1, t.shape[-3]), -3) for t in (key, value))
        return query, key, value
    wanted = max(heads, of_key, of_value) if 0 not in (heads, of_key, of_value) else 0
    query, key, value = (t.expand(*t.shape[:-3], wanted, *t.shape[-2:]) for t in (query, key, value))
    return query, key, value


def _one_batch_axis(tensor: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """[..., heads, length, dim] with its batch axes broadcast to these, and as one: copied if they do not merge."""
    tensor = tensor.expand(*batch, *tensor.shape[-3:])
    return tensor.flatten(0, len(batch) - 1) if batch else tensor.unsqueeze(0)


def _common(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """What the shapes broadcast to, if they do."""
    found: tuple[int, ...] = ()
    for shape in shapes:
        longer, shorter = (shape, found) if len(shape) > len(found) else (found, shape)
        shorter = (1,) * (len(longer) - len(shorter)) + shorter
        if any(a != b and 1 not in (a, b) for a, b in zip(longer, shorter)):
            return None
        found = tuple(b if a == 1 else a for a, b in zip(longer, shorter))
    return found


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
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    least = 3 if enable_gqa else 2
    if min(len(shape) for shape in shapes) < least:
        axes = "{}, {} and {}".format(*map(len, shapes))
        problems.append(f"query, key and value have {axes} axes, not {least} or more")
        hints.append("[..., heads, length, dim] for each" if enable_gqa else "[..., length, dim] for each")
    else:
        heads = _common([shape[-3:-2] for shape in shapes])
        if enable_gqa:
            heads = shapes[0][-3:-2]
            for name, shape in zip(("key", "value"), shapes[1:]):
                if heads[0] % shape[-3] if shape[-3] else heads[0]:
                    problems.append(
                        f"query has {heads[0]} heads, which is no multiple of {name}'s {shape[-3]}"
                    )
                    hints.append("query heads a multiple of key's and of value's")
        elif heads is None:
            counts = "{}, {} and {}".format(*(shape[-3] if len(shape) > 2 else 1 for shape in shapes))
            problems.append(f"query, key and value have {counts} heads, but enable_gqa is False")
            hints.append(
                "the same heads, one, or with enable_gqa=True query heads a multiple of key's and of value's"
            )
        batch = _common([shape[:-3] for shape in shapes])
        if batch is None:
            batches = "{}, {} and {}".format(*(shape[:-3] for shape in shapes))
            problems.append(f"query, key and value have batch axes {batches}, which do not broadcast")
            hints.append("batch axes of the same extents, or of 1")
        if attn_mask is not None and heads is not None and batch is not None:
            full = (*batch, *heads, shapes[0][-2], shapes[1][-2])
            if _common([full, tuple(attn_mask.shape)]) != full:
                problems.append(
                    f"attn_mask has shape {tuple(attn_mask.shape)}, which does not broadcast to {full}"
                )
                hints.append("attn_mask that broadcasts to [..., heads, queries, keys]")
    if problems:
        raise InvalidArgumentError(
            f"{_OPERATION}: invalid arguments", problems, "; ".join(dict.fromkeys(hints))
        )
