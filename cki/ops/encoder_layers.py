"""Encoder layers in a row as launches over one workspace: pure functions of operands.

Between blocks, norms go into products: the product that ends a block stores statistics of the rows that it writes,
where the next block can normalise by them (`fuses_attention`, `fuses_feed_forward`).  Then the norm is no launch: a
layer is 5, but for the first norm of a pre-LN stack, whose input has no statistics, and the last of a post-LN stack,
whose result has no reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cki import dtypes
from cki.device import DeviceInfo
from cki.operand import Operand, dense
from cki.ops.attention_hopper import workspace_of
from cki.ops.encoder_blocks import (
    AttentionBlock,
    FeedForward,
    attention_scratch,
    feed_forward_scratch,
    fuses_attention,
    fuses_feed_forward,
    plan_attention_block,
    plan_feed_forward,
)
from cki.ops.linear_hopper import statistics_operand
from cki.plan import Plan, Step

Layer = tuple[AttentionBlock, FeedForward]


class Statistics(NamedTuple):
    """Of the rows of a layer's input and output, and of those between its blocks: a product may read and store some."""

    outside: Operand
    inside: Operand


def plan_layers(
    x: Operand, layers: Sequence[Layer], y: Operand, attended: Operand, scratch: Operand, statistics: Statistics,
    device: DeviceInfo,
) -> tuple[Step, ...]:  # fmt: skip
    """x through all layers; every one writes y, which may be x.

    attended: as x, for what is between a layer's blocks.  scratch: for the inside of a block, `layer_scratch` bytes.
    statistics: room for them, see `layer_statistics`.
    """
    steps: tuple[Step, ...] = ()
    outside = None  # the statistics of the layer's input, where they have been stored
    for number, (attention, feed_forward) in enumerate(layers):
        source = y if number else x
        wanted = fuses_feed_forward(attended, feed_forward, y, device)
        first = plan_attention_block(
            source, attention, attended, scratch, device, statistics=outside,
            y_statistics=statistics.inside if wanted else None,
        )  # fmt: skip
        wanted = any(
            fuses_attention(y, following, attended, device)
            for following, _ in layers[number + 1 : number + 2]
        )
        second = plan_feed_forward(
            attended, feed_forward, y, scratch, device, statistics=statistics.inside if first.stored else None,
            y_statistics=statistics.outside if wanted else None,
        )  # fmt: skip
        outside = statistics.outside if second.stored else None
        steps += first.steps + second.steps
    return steps


def plan_stack(x: Operand, layers: Sequence[Layer], y: Operand, device: DeviceInfo) -> Plan:
    """`plan_layers` over a workspace of its own.  The layers are of the same sizes."""
    nbytes = layer_scratch(x, *layers[0])
    scratch, attended = dense("scratch", (nbytes,), dtypes.u8), dense("attended", x.shape, x.dtype)
    room = layer_statistics(x, dense("statistics", (statistics_nbytes(x),), dtypes.u8))
    steps = plan_layers(x, layers, y, attended, scratch, room, device)
    slots = [("scratch", nbytes), ("attended", attended.nbytes)]
    if any(block.front for layer in layers for block in layer):
        slots.append(("statistics", statistics_nbytes(x)))
    return Plan(steps, (*slots, *workspace_of(steps)))


def layer_scratch(x: Operand, attention: AttentionBlock, feed_forward: FeedForward) -> int:
    """Bytes: the feed-forward block's inner activations take the place of Q, K, V and the heads' outputs."""
    return max(attention_scratch(x, attention), feed_forward_scratch(x, feed_forward))


def statistics_nbytes(x: Operand) -> int:
    """Bytes of `layer_statistics`."""
    return 2 * statistics_operand("", x.shape[0] * x.shape[1], x.shape[-1]).nbytes


def layer_statistics(x: Operand, room: Operand) -> Statistics:
    """Two statistics of x's rows in the room, which has `statistics_nbytes`."""
    rows, columns = x.shape[0] * x.shape[1], x.shape[-1]
    first = statistics_operand(room.slot, rows, columns, room.offset, room.alignment)
    alignment = min(room.alignment, 8)  # pairs of f32, one behind the other
    return Statistics(
        first, statistics_operand(room.slot, rows, columns, room.offset + first.nbytes, alignment)
    )
