"""The blocks of an encoder layer as launches over one piece of scratch memory: pure functions of operands.

An attention block is 4 launches and a feed-forward block 3, in both norm orders: Q, K and V come from one launch and
lie side by side, attention reads them as slices, and biases, activation and residual additions happen in the products'
epilogues.  The result's own memory holds what the norm writes (pre-LN) or reads (post-LN, in place).

A norm in front of a block is no launch where the block has weights with that norm in them (`FusedNorm`), the statistics
of x's rows are known, because the product before has stored them, and Hopper's kernel computes the products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cki.device import DeviceInfo
from cki.operand import Operand, dense
from cki.ops.attention import PackedSequences, plan_attention
from cki.ops.linear import Part, plan_linear, plan_linear_parts
from cki.ops.linear_hopper import RowNorm, also_zeroing, normalises_residual_by
from cki.ops.linear_norm import fused_norm_tile
from cki.ops.norm import plan_layer_norm
from cki.plan import Step


class FusedNorm(NamedTuple):
    """The norm in front of a block, in the block's products (`cki.encoder.prepare`).

    w, bias: of the first product, with the norm's weights in them; w's columns sum to zero.
    gamma, last_bias: of a post-LN block, whose residual is normalised too: the norm's weight, and the last product's
    bias with the norm's in it.
    """

    w: Operand
    bias: Operand | None
    gamma: Operand | None = None
    last_bias: Operand | None = None


@dataclass(frozen=True)
class AttentionBlock:
    """Weights and options of an attention block, named as in `fused_attention`.

    wk, wv: None where wq holds all three, side by side.  packed: the sequences that x, a batch of one, consists of.
    front: the norm before wq, inside the products.  Of pre-LN that is gamma's, of post-LN the layer before's.
    """

    wq: Operand
    wk: Operand | None
    wv: Operand | None
    wo: Operand
    gamma: Operand | None
    beta: Operand | None
    bq: Operand | None
    bk: Operand | None
    bv: Operand | None
    bo: Operand | None
    mask: Operand | None
    num_heads: int
    head_dim: int
    num_kv_heads: int
    causal: bool
    pre_ln: bool
    residual: bool
    epsilon: float
    scale: float | None
    weight_layout: str = "in_out"
    packed: PackedSequences | None = None
    front: FusedNorm | None = None


@dataclass(frozen=True)
class FeedForward:
    """Weights and options of a feed-forward block and its norm.  front: the norm before w1, inside the products."""

    w1: Operand
    w2: Operand
    b1: Operand | None
    b2: Operand | None
    gamma: Operand | None
    beta: Operand | None
    activation: str | None
    pre_ln: bool
    epsilon: float
    weight_layout: str = "in_out"
    front: FusedNorm | None = None

    @property
    def inner(self) -> int:
        """Columns of u w1."""
        return self.w1.shape[1 if self.weight_layout == "in_out" else 0]


class Planned(NamedTuple):
    """Steps of a block.  stored: whether they store the statistics of the result's rows."""

    steps: tuple[Step, ...]
    stored: bool


def plan_attention_block(
    x: Operand, block: AttentionBlock, y: Operand, scratch: Operand, device: DeviceInfo, *,
    statistics: Operand | None = None, y_statistics: Operand | None = None,
) -> Planned:  # fmt: skip
    """Steps of `fused_attention`.  scratch: `attention_scratch` bytes.

    statistics: of x's rows, to use `block.front`: where `fuses_attention`.  x is then what that norm is applied to.
    y_statistics: where those of y's rows should go; if they do, a post-LN block's norm is left to its reader.
    """
    batch, seq, _ = x.shape
    q_columns, kv_columns = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    columns = q_columns + 2 * kv_columns
    qkv = _within(scratch, (batch, seq, columns), x)
    context = _within(scratch, (batch, seq, q_columns), x, aligned(qkv.nbytes))

    def heads(of: Operand, count: int, width: int, first: int) -> Operand:
        shape = (batch, seq, count, block.head_dim)
        return of.view(shape, (seq * width, width, block.head_dim, 1), first)

    def norm(source: Operand) -> tuple[Step, ...]:
        return plan_layer_norm(source, block.gamma, block.beta, y, device, eps=block.epsilon)

    layout = block.weight_layout
    fused = None if statistics is None else block.front
    if fused is not None and statistics is not None:
        steps = plan_linear(
            x, fused.w, fused.bias, None, qkv, device, weight_layout=layout,
            norm=RowNorm("layer", statistics, block.epsilon),
        )  # fmt: skip
    else:
        steps = norm(x) if block.pre_ln else ()
        steps += _projections(y if block.pre_ln else x, block, qkv, device)
    attention = plan_attention(
        heads(qkv, block.num_heads, columns, 0), heads(qkv, block.num_kv_heads, columns, q_columns),
        heads(qkv, block.num_kv_heads, columns, q_columns + kv_columns), heads(context, block.num_heads, q_columns, 0),
        device=device, causal=block.causal, scale=block.scale, mask=_attention_mask(block.mask),
        packed=block.packed,
    )  # fmt: skip
    steps = _followed_by(steps, attention)
    last = _Last(block.wo, block.bo, layout, block.epsilon, fused, statistics)
    planned = _plan_last(context, last, x if block.residual else None, y, y_statistics, device)
    is_done = block.pre_ln or planned.stored
    return Planned(steps + planned.steps + (() if is_done else norm(y)), planned.stored)


def fuses_attention(x: Operand, block: AttentionBlock, y: Operand, device: DeviceInfo) -> bool:
    """Whether the norm before the block can be inside its products."""
    if block.front is None or not block.residual:
        return False
    columns = (block.num_heads + 2 * block.num_kv_heads) * block.head_dim
    qkv = dense("qkv", (*x.shape[:-1], columns), x.dtype)
    context = dense("context", (*x.shape[:-1], block.num_heads * block.head_dim), x.dtype)
    return _fuses(x, block.front, qkv, None, context, block.wo, y, block.weight_layout, device)


def _followed_by(steps: tuple[Step, ...], attention: tuple[Step, ...]) -> tuple[Step, ...]:
    """Attention behind Q, K and V.  Hopper's kernels overlap, and the counter of attention's dynamic order, which a
    launch of its own resets elsewhere, is reset by the product."""
    first = attention[0].kernel.entry if attention else ""
    after_hopper = bool(steps) and steps[-1].kernel.entry == "linear_hopper"
    if not after_hopper or first not in ("reset_counter", "attention_hopper"):
        return steps + attention
    if first == "reset_counter":
        steps, attention = (*steps[:-1], also_zeroing(steps[-1], attention[0].args[0])), attention[1:]
    return (*steps, replace(attention[0], programmatic=True), *attention[1:])


def _projections(u: Operand, block: AttentionBlock, qkv: Operand, device: DeviceInfo) -> tuple[Step, ...]:
    """Q, K and V of u."""
    if block.wk is None or block.wv is None:
        return plan_linear(u, block.wq, block.bq, None, qkv, device, weight_layout=block.weight_layout)
    parts = [Part(block.wq, block.bq), Part(block.wk, block.bk), Part(block.wv, block.bv)]
    return plan_linear_parts(u, parts, qkv, device, weight_layout=block.weight_layout)


class _Last(NamedTuple):
    """The product that ends a block.  fused, statistics: of the norm before the block, where it is in the products."""

    w: Operand
    bias: Operand | None
    layout: str
    epsilon: float
    fused: FusedNorm | None
    statistics: Operand | None


def _plan_last(
    x: Operand,
    last: _Last,
    residual: Operand | None,
    y: Operand,
    y_statistics: Operand | None,
    device: DeviceInfo,
) -> Planned:
    """It normalises the residual where that is left to it, and stores statistics where they are wanted and it can."""
    norm, bias = None, last.bias
    if last.fused is not None and last.fused.gamma is not None and last.statistics is not None:
        norm = RowNorm("residual", last.statistics, last.epsilon, last.fused.gamma)
        bias = last.fused.last_bias
    stored = y_statistics is not None and None is not fused_norm_tile(
        x, last.w, residual, y, device, weight_layout=last.layout, statistics=True,
        norm=None if norm is None else norm.kind,
    )  # fmt: skip
    steps = plan_linear(
        x, last.w, bias, residual, y, device, weight_layout=last.layout, norm=norm,
        statistics=y_statistics if stored else None,
    )  # fmt: skip
    return Planned(steps, stored)


def _fuses(
    x: Operand, front: FusedNorm, inner: Operand, activation: str | None, last_x: Operand, last_w: Operand, y: Operand,
    layout: str, device: DeviceInfo,
) -> bool:  # fmt: skip
    """Whether a block's first product, of x to `inner`, and its last, of last_x to y, can have the norm inside."""
    first = fused_norm_tile(
        x, front.w, None, inner, device, activation=activation, weight_layout=layout, norm="layer"
    )
    if first is None or front.gamma is None:
        return first is not None
    return normalises_residual_by(front.gamma, front.last_bias, y) and None is not fused_norm_tile(
        last_x, last_w, x, y, device, weight_layout=layout, norm="residual"
    )


def attention_scratch(x: Operand, block: AttentionBlock) -> int:
    """Bytes of scratch memory: Q, K and V side by side, and the heads' outputs."""
    tokens = x.shape[0] * x.shape[1] * x.dtype.itemsize
    q_columns, kv_columns = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    return aligned(tokens * (q_columns + 2 * kv_columns)) + tokens * q_columns


def plan_feed_forward(
    x: Operand, block: FeedForward, y: Operand, scratch: Operand, device: DeviceInfo, *,
    statistics: Operand | None = None, y_statistics: Operand | None = None,
) -> Planned:  # fmt: skip
    """Steps of y = F(LN(x)) + x (pre_ln) or LN(F(x) + x).  scratch: room for u w1.  Statistics: as above."""
    inner = _within(scratch, (*x.shape[:-1], block.inner), x)
    layout = block.weight_layout

    def norm(source: Operand) -> tuple[Step, ...]:
        return plan_layer_norm(source, block.gamma, block.beta, y, device, eps=block.epsilon)

    fused = None if statistics is None else block.front
    if fused is not None and statistics is not None:
        steps = plan_linear(
            x, fused.w, fused.bias, None, inner, device, activation=block.activation, weight_layout=layout,
            norm=RowNorm("layer", statistics, block.epsilon),
        )  # fmt: skip
    else:
        steps = norm(x) if block.pre_ln else ()
        steps += plan_linear(
            y if block.pre_ln else x, block.w1, block.b1, None, inner, device, activation=block.activation,
            weight_layout=layout,
        )  # fmt: skip
    last = _Last(block.w2, block.b2, layout, block.epsilon, fused, statistics)
    planned = _plan_last(inner, last, x, y, y_statistics, device)
    is_done = block.pre_ln or planned.stored
    return Planned(steps + planned.steps + (() if is_done else norm(y)), planned.stored)


def fuses_feed_forward(x: Operand, block: FeedForward, y: Operand, device: DeviceInfo) -> bool:
    """Whether the norm before the block can be inside its products."""
    if block.front is None:
        return False
    inner = dense("inner", (*x.shape[:-1], block.inner), x.dtype)
    return _fuses(x, block.front, inner, block.activation, inner, block.w2, y, block.weight_layout, device)


def feed_forward_scratch(x: Operand, block: FeedForward) -> int:
    """Bytes of scratch memory: u w1."""
    return x.shape[0] * x.shape[1] * block.inner * x.dtype.itemsize


def aligned(nbytes: int) -> int:
    """Room for another tensor behind: tensors of a workspace begin at multiples of 256 bytes."""
    return -(-nbytes // 256) * 256


#: Tiles of attention are the same for all longer sequences; a plan is kept for each value that reaches it.
_LONG = 128


def packed_sequences(offsets: Operand, tokens: int, longest: int | None) -> PackedSequences:
    """What attention needs to know of `tokens` tokens in sequences that begin at `offsets` [sequences + 1]."""
    mean = -(-tokens // max(offsets.shape[0] - 1, 1))
    return PackedSequences(offsets, offsets, None, mean if longest is None else longest)


def tile_length(max_seqlen: int | None) -> int | None:
    """max_seqlen as plans depend on it."""
    return min(max_seqlen, _LONG) if isinstance(max_seqlen, int) else max_seqlen


def _within(scratch: Operand, shape: tuple[int, ...], like: Operand, offset: int = 0) -> Operand:
    """A row-major tensor of like's type in the scratch memory, `offset` bytes from its start."""
    return dense(scratch.slot, shape, like.dtype, offset=scratch.offset + offset, alignment=scratch.alignment)


def _attention_mask(mask: Operand | None) -> Operand | None:
    """[batch, keys] or [batch, queries, keys] with axes for heads and queries, which `attention` wants."""
    if mask is None or mask.ndim == 4:
        return mask
    if mask.ndim == 2:
        return mask.view((mask.shape[0], 1, 1, mask.shape[1]), (mask.strides[0], 0, 0, mask.strides[1]))
    return mask.view((mask.shape[0], 1, *mask.shape[1:]), (mask.strides[0], 0, *mask.strides[1:]))
