"""The blocks of an encoder layer as launches over one piece of scratch memory: pure functions of operands.

An attention block is 4 launches and a feed-forward block 3, in both norm orders: Q, K and V come from one launch and
lie side by side, attention reads them as slices, and biases, activation and residual additions happen in the products'
epilogues.  The result's own memory holds what the norm writes (pre-LN) or reads (post-LN, in place).

A pre-LN norm whose weights are folded into the product behind it (`cki.prepare`) is no launch where Hopper's kernel
computes that product and the one before: the latter stores statistics of the rows that it writes.  `plan_layers` hands
them on, so that a layer is 5 launches, the first of a stack 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cki import dtypes
from cki.device import DeviceInfo
from cki.heuristics.linear_hopper import HopperTile
from cki.operand import Operand, dense
from cki.ops.attention import PackedSequences, plan_attention
from cki.ops.attention_hopper import workspace_of
from cki.ops.linear import Part, fused_norm_tile, plan_linear, plan_linear_parts
from cki.ops.linear_hopper import RowNorm, also_zeroing, statistics_operand
from cki.ops.norm import plan_layer_norm
from cki.plan import Plan, Step


@dataclass(frozen=True)
class AttentionBlock:
    """Weights and options of an attention block, named as in `fused_attention`.

    wk, wv: None where wq holds all three, side by side.  packed: the sequences that x, a batch of one, consists of.
    folded: the weights of the norm in front are in wq and bq, and wq's columns sum to zero.
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
    folded: bool = False


@dataclass(frozen=True)
class FeedForward:
    """Weights and options of a feed-forward block and its norm.  folded: that one's are in w1 and b1, as in wq."""

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
    folded: bool = False

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

    statistics: of x's rows, where they are known.  y_statistics: where those of y's rows should go.
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
    tile = None if statistics is None else _qkv_tile(x, block, device)
    if tile is not None and statistics is not None:
        fused = RowNorm("layer", statistics, block.epsilon)
        steps = plan_linear(
            x, block.wq, block.bq, None, qkv, device, weight_layout=layout, tile=tile, norm=fused
        )
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
    residual = x if block.residual else None
    last = _last_product(context, block.wo, block.bo, residual, y, device, layout, y_statistics)
    return Planned(steps + last.steps + (() if block.pre_ln else norm(y)), last.stored)


def _followed_by(steps: tuple[Step, ...], attention: tuple[Step, ...]) -> tuple[Step, ...]:
    """Attention behind Q, K and V.  Hopper's kernels overlap, and the counter of attention's dynamic order, which a
    launch of its own resets elsewhere, is reset by the product."""
    first = attention[0].kernel.entry
    if (
        not steps
        or steps[-1].kernel.entry != "linear_hopper"
        or first not in ("reset_counter", "attention_hopper")
    ):
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


def _qkv_tile(x: Operand, block: AttentionBlock, device: DeviceInfo) -> HopperTile | None:
    """With which Q, K and V come from x and its rows' statistics, without a norm in between."""
    if not (block.folded and block.pre_ln and block.wk is None):
        return None
    columns = (block.num_heads + 2 * block.num_kv_heads) * block.head_dim
    qkv = dense("qkv", (*x.shape[:-1], columns), x.dtype)
    return fused_norm_tile(x, block.wq, None, qkv, device, weight_layout=block.weight_layout, norm="layer")


def _last_product(
    x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand, device: DeviceInfo, layout: str,
    statistics: Operand | None,
) -> Planned:  # fmt: skip
    """The product that ends a block, with statistics of its rows where they are wanted and it can store them."""
    tile = None
    if statistics is not None:
        tile = fused_norm_tile(x, w, residual, y, device, weight_layout=layout, statistics=True)
    stored = tile is not None
    steps = plan_linear(
        x,
        w,
        bias,
        residual,
        y,
        device,
        weight_layout=layout,
        tile=tile,
        statistics=statistics if stored else None,
    )
    return Planned(steps, stored)


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

    tile = None if statistics is None else _inner_tile(x, block, device)
    fused = None if tile is None or statistics is None else RowNorm("layer", statistics, block.epsilon)
    normalises = block.pre_ln and fused is None
    steps = norm(x) if normalises else ()
    steps += plan_linear(
        y if normalises else x, block.w1, block.b1, None, inner, device, activation=block.activation,
        weight_layout=layout, tile=tile, norm=fused,
    )  # fmt: skip
    last = _last_product(inner, block.w2, block.b2, x, y, device, layout, y_statistics)
    return Planned(steps + last.steps + (() if block.pre_ln else norm(y)), last.stored)


def _inner_tile(x: Operand, block: FeedForward, device: DeviceInfo) -> HopperTile | None:
    """With which u w1 comes from x and its rows' statistics, without a norm in between."""
    if not (block.folded and block.pre_ln):
        return None
    inner = dense("inner", (*x.shape[:-1], block.inner), x.dtype)
    return fused_norm_tile(
        x,
        block.w1,
        None,
        inner,
        device,
        activation=block.activation,
        weight_layout=block.weight_layout,
        norm="layer",
    )


def plan_layers(
    x: Operand, layers: Sequence[tuple[AttentionBlock, FeedForward]], y: Operand, attended: Operand, scratch: Operand,
    statistics: Operand, device: DeviceInfo,
) -> tuple[Step, ...]:  # fmt: skip
    """x through all layers; every one writes y, which may be x.

    attended: as x, for what is between a layer's blocks.  scratch: for the inside of a block, `layer_scratch` bytes.
    statistics: `layer_statistics` of x's rows; those of y's and attended's take turns with it.
    """
    steps: tuple[Step, ...] = ()
    stored = False  # whether the statistics are those of the tensor that comes next
    for number, (attention, feed_forward) in enumerate(layers):
        source = y if number else x
        wanted = _inner_tile(attended, feed_forward, device) is not None
        first = plan_attention_block(
            source, attention, attended, scratch, device, statistics=statistics if stored else None,
            y_statistics=statistics if wanted else None,
        )  # fmt: skip
        following = [block for block, _ in layers[number + 1 : number + 2]]
        wanted = any(_qkv_tile(y, block, device) is not None for block in following)
        second = plan_feed_forward(
            attended, feed_forward, y, scratch, device, statistics=statistics if first.stored else None,
            y_statistics=statistics if wanted else None,
        )  # fmt: skip
        stored = second.stored
        steps += first.steps + second.steps
    return steps


def plan_stack(
    x: Operand, layers: Sequence[tuple[AttentionBlock, FeedForward]], y: Operand, device: DeviceInfo
) -> Plan:
    """`plan_layers` over a workspace of its own.  The layers are of the same sizes."""
    nbytes = layer_scratch(x, *layers[0])
    scratch, attended = dense("scratch", (nbytes,), dtypes.u8), dense("attended", x.shape, x.dtype)
    statistics = layer_statistics("statistics", x)
    steps = plan_layers(x, layers, y, attended, scratch, statistics, device)
    rooms = [("scratch", nbytes), ("attended", attended.nbytes)]
    if any(layer.folded for pair in layers for layer in pair):
        rooms.append(("statistics", statistics.nbytes))
    return Plan(steps, (*rooms, *workspace_of(steps)))


def layer_scratch(x: Operand, attention: AttentionBlock, feed_forward: FeedForward) -> int:
    """Bytes: the feed-forward block's inner activations take the place of Q, K, V and the heads' outputs."""
    return max(attention_scratch(x, attention), feed_forward_scratch(x, feed_forward))


def layer_statistics(slot: str, x: Operand, offset: int = 0, alignment: int = 256) -> Operand:
    """Room for the statistics of x's rows: an operand of `slot`."""
    rows = x.shape[0] * x.shape[1]
    return statistics_operand(slot, rows, x.shape[-1], offset=offset, alignment=alignment)


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
