"""The blocks of an encoder layer as launches over one piece of scratch memory: pure functions of operands.

An attention block is 4 launches and a feed-forward block 3, in both norm orders: Q, K and V come from one launch and
lie side by side, attention reads them as slices, and biases, activation and residual additions happen in the products'
epilogues.  The result's own memory holds what the norm writes (pre-LN) or reads (post-LN, in place).
"""

from __future__ import annotations

from dataclasses import dataclass

from cki.device import DeviceInfo
from cki.operand import Operand, dense
from cki.ops.attention import PackedSequences, plan_attention
from cki.ops.linear import Part, plan_linear, plan_linear_parts
from cki.ops.norm import plan_layer_norm
from cki.plan import Step


@dataclass(frozen=True)
class AttentionBlock:
    """Weights and options of an attention block, named as in `fused_attention`.

    wk, wv: None where wq holds all three, side by side.  packed: the sequences that x, a batch of one, consists of.
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


@dataclass(frozen=True)
class FeedForward:
    """Weights and options of a feed-forward block and its norm."""

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

    @property
    def inner(self) -> int:
        """Columns of u w1."""
        return self.w1.shape[1 if self.weight_layout == "in_out" else 0]


def plan_attention_block(
    x: Operand, block: AttentionBlock, y: Operand, scratch: Operand, device: DeviceInfo
) -> tuple[Step, ...]:
    """Steps of `fused_attention`.  scratch: `attention_scratch` bytes."""
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

    steps = norm(x) if block.pre_ln else ()
    u, layout = y if block.pre_ln else x, block.weight_layout
    if block.wk is None or block.wv is None:
        steps += plan_linear(u, block.wq, block.bq, None, qkv, device, weight_layout=layout)
    else:
        parts = [Part(block.wq, block.bq), Part(block.wk, block.bk), Part(block.wv, block.bv)]
        steps += plan_linear_parts(u, parts, qkv, device, weight_layout=layout)
    steps += plan_attention(
        heads(qkv, block.num_heads, columns, 0), heads(qkv, block.num_kv_heads, columns, q_columns),
        heads(qkv, block.num_kv_heads, columns, q_columns + kv_columns), heads(context, block.num_heads, q_columns, 0),
        device=device, causal=block.causal, scale=block.scale, mask=_attention_mask(block.mask),
        packed=block.packed,
    )  # fmt: skip
    residual = x if block.residual else None
    steps += plan_linear(context, block.wo, block.bo, residual, y, device, weight_layout=layout)
    return steps if block.pre_ln else steps + norm(y)


def attention_scratch(x: Operand, block: AttentionBlock) -> int:
    """Bytes of scratch memory: Q, K and V side by side, and the heads' outputs."""
    tokens = x.shape[0] * x.shape[1] * x.dtype.itemsize
    q_columns, kv_columns = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    return aligned(tokens * (q_columns + 2 * kv_columns)) + tokens * q_columns


def plan_feed_forward(
    x: Operand, block: FeedForward, y: Operand, scratch: Operand, device: DeviceInfo
) -> tuple[Step, ...]:
    """Steps of y = F(LN(x)) + x (pre_ln) or LN(F(x) + x).  scratch: room for u w1."""
    inner = _within(scratch, (*x.shape[:-1], block.inner), x)
    layout = block.weight_layout

    def norm(source: Operand) -> tuple[Step, ...]:
        return plan_layer_norm(source, block.gamma, block.beta, y, device, eps=block.epsilon)

    steps = norm(x) if block.pre_ln else ()
    steps += plan_linear(
        y if block.pre_ln else x, block.w1, block.b1, None, inner, device, activation=block.activation,
        weight_layout=layout,
    )  # fmt: skip
    steps += plan_linear(inner, block.w2, block.b2, x, y, device, weight_layout=layout)
    return steps if block.pre_ln else steps + norm(y)


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
