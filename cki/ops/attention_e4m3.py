"""Attention of e4m3 queries, keys and values: its rules, and the plan of its Hopper kernel.

`cki.attention` comes here for e4m3 (or uint8 with its bits).  On sm_90a the kernel is
`cuda_src/attention/hopper/attention_e4m3.cu`; elsewhere, and for what it does not take, the generic kernel converts to
f16 as it reads, which is exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.attention import padded
from cki.heuristics.attention_e4m3 import (
    MIN_CONVERTED,
    MIN_QUERIES,
    PROMOTED_DIM,
    SLAB_KEYS,
    E4m3Tiles,
    choose_e4m3_tiles,
)
from cki.heuristics.attention_hopper import GROUP_ROWS, SCHEDULES, key_span, sections_of
from cki.kernel import kernel_spec
from cki.operand import Operand, dense
from cki.ops.attention_hopper import COUNTER, layout_obstacles
from cki.ops.packed_sequences import PackedSequences
from cki.ops.spec import Input, Problem
from cki.plan import ArgumentValue, NullPointer, Step, TensorMapArg

CODES = (dtypes.e4m3, dtypes.u8)
OUT_DTYPES = {"bf16": dtypes.bf16, "f16": dtypes.f16}
DESCALE_INPUTS = tuple(Input(f"{name}_descale", optional=True) for name in "qkv")
#: The workspace slot of the turned values.
VALUES = "attention_turned_values"
#: Those of q, k and v as f16.
CONVERTED = tuple(f"attention_{name}_of_codes" for name in "qkv")
_PARAMS = "TTTP" + "P" * 10 + "q" * 21 + "i" * 9 + "fff" + "i" * 5
_TURN_PARAMS = "PPPqqqiiiii"
_CONVERT_PARAMS = "P" * 6 + "q" * 12 + "i" * 7
_TURN_THREADS, _TURN_COLUMNS = 256, 128
_ARCH = "sm_90a"
#: The generic kernel's arguments where nothing is descaled.
NO_DESCALES: tuple[ArgumentValue, ...] = (*(NullPointer(),) * 3, *(0,) * 6)


class Descales(NamedTuple):
    """What a code of 1 stands for: f32, [batch, kv_heads] or [kv_heads]."""

    q: Operand
    k: Operand
    v: Operand

    def arguments(self) -> tuple[ArgumentValue, ...]:
        """Pointers, then strides along batch and KV heads of each."""
        return (*self, *(stride for tensor in self for stride in _descale_strides(tensor)))


def _descale_strides(tensor: Operand) -> tuple[int, int]:
    return (0 if tensor.ndim == 1 else tensor.strides[0], tensor.strides[-1])


def descales_of(problem: Problem) -> Descales | None:
    """What a checked problem gives; None for other types."""
    if problem.get("q_descale") is None:
        return None
    return Descales(problem["q_descale"], problem["k_descale"], problem["v_descale"])


def as_e4m3(tensor: Operand) -> Operand:
    """uint8 stands for e4m3."""
    return dataclasses.replace(tensor, dtype=dtypes.e4m3) if tensor.dtype == dtypes.u8 else tensor


def is_e4m3_call(problem: Problem) -> bool:
    """Whether a call means e4m3: codes, or bytes with a descale."""
    given = any(problem.get(item.name) is not None for item in DESCALE_INPUTS)
    types = {problem[name].dtype for name in "qkv"}
    return dtypes.e4m3 in types or (given and dtypes.u8 in types)


def result_dtype(problem: Problem) -> DType:
    """Of the output: q's, of codes what out_dtype says."""
    if descales_of(problem) is None:
        return problem["q"].dtype
    return OUT_DTYPES[problem.attribute("out_dtype") or "bf16"]


def check_descales(problem: Problem, batch: int) -> None:
    """e4m3 goes with all three descales and an out_dtype of 16 bits; other types with none of them.

    batch: batches or sequences.
    """
    e4m3 = is_e4m3_call(problem)
    given = [item.name for item in DESCALE_INPUTS if problem.get(item.name) is not None]
    name = problem.attribute("out_dtype")
    if not e4m3:
        if given:
            problem.reject(
                f"{', '.join(given)} beside q of dtype {problem['q'].dtype}",
                "descales with e4m3 (or uint8 with its bits) only",
            )
        if name is not None:
            problem.reject(
                f"out_dtype is {name!r} beside q of dtype {problem['q'].dtype}", "out_dtype with e4m3 only"
            )
        return
    if name not in (None, *OUT_DTYPES):
        problem.reject(f"out_dtype is {name!r}", 'out_dtype "bf16" or "f16"')
    missing = [item.name for item in DESCALE_INPUTS if item.name not in given]
    if missing:
        problem.reject(
            f"e4m3 without {', '.join(missing)}",
            "q_descale, k_descale and v_descale, f32 [batch, kv_heads] or [kv_heads]",
        )
    k = problem["k"]
    wanted = ((batch, k.shape[-2]), k.shape[-2:-1]) if k.ndim > 2 else ()
    for item in given:
        tensor = problem[item]
        if tensor.dtype != dtypes.f32:
            problem.reject_type(f"{item} is {tensor.dtype}", f"{item} of f32")
        if wanted and tensor.shape not in wanted:
            problem.reject(
                f"{item} has shape {tensor.shape}, k has shape {k.shape}",
                f"{item} of shape {wanted[0]} or {wanted[1]}: [batch, kv_heads] or [kv_heads]",
            )


def hopper_e4m3_obstacles(q: Operand, k: Operand, v: Operand, device: DeviceInfo) -> list[str]:
    """Every reason why the Hopper kernel cannot compute attention over these codes; empty when it can."""
    found = layout_obstacles(q, k, v, device)
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[3] % 16:
            found.append(f"{name} has head_dim {tensor.shape[3]}, not a multiple of 16")
    return found


def preferred_e4m3(
    q: Operand, k: Operand, v: Operand, device: DeviceInfo, *, has_limits: bool, any_length: bool
) -> E4m3Tiles | None:
    """The tiles with which the Hopper kernel is taken; None where it cannot be used."""
    batch, queries, heads, head_dim = q.shape
    if hopper_e4m3_obstacles(q, k, v, device) or (queries < MIN_QUERIES and not any_length):
        return None
    return choose_e4m3_tiles(
        queries, batch * heads, _padded_depth(head_dim), padded(v.shape[3]), has_limits, device
    )


def _padded_depth(head_dim: int) -> int:
    """A head dimension rounded up to whole steps of the first product."""
    return -(-head_dim // 32) * 32


def _pair_map(tensor: Operand, rows: int, columns: int) -> TensorMapArg:
    """Boxes of `rows` tokens x `columns` pairs of elements of one head: two codes are 16 bits."""
    batch, tokens, heads, dim = tensor.shape
    # An axis of extent 1 may have any stride, also one that a tensor map does not take.
    strides = tuple(tensor.strides[axis] if tensor.shape[axis] > 1 else 16 for axis in (1, 2, 0))
    pairs = dataclasses.replace(tensor, dtype=dtypes.u16)
    return TensorMapArg(pairs, (dim // 2, tokens, heads, batch), strides, (columns, rows, 1, 1), columns * 2)


def plan_hopper_e4m3(
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    tiles: E4m3Tiles,
    descales: Descales,
    optional: dict[str, Operand | None],
    features: dict[str, Any],
    numbers: tuple[int | float, ...],
    device: DeviceInfo,
) -> tuple[Step, ...]:
    """The launches: one that turns the values (and zeroes the counter of the dynamic schedule), and the kernel.

    optional: lse, sinks, alibi_slopes.  features: constants that the generic kernel has too.  numbers: its shift,
    left, right, scale, softcap and softcap_rate.  UnsupportedError names every obstacle.
    """
    obstacles = hopper_e4m3_obstacles(q, k, v, device)
    if obstacles:
        raise UnsupportedError("attention: the Hopper kernel of e4m3", obstacles, "the generic kernel")
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    if value_dim > PROMOTED_DIM:
        # Wide values in parts, each with scores of its own: sums that leave no registers for promotion are wrong by a
        # multiple of what rounding explains.
        parts = [
            plan_hopper_e4m3(q, k, v_part, out_part, tiles, descales, optional, features, numbers, device)
            for v_part, out_part in zip(column_parts(v), column_parts(out))
        ]
        return tuple(step for steps in parts for step in steps)
    group = heads // kv_heads
    depth, value_columns = _padded_depth(head_dim), padded(value_dim)
    row_blocks = -(-queries // tiles.block_rows)
    work = row_blocks * heads * batch
    if work >= 2**31 - 2**20:  # numbers drawn past the last one must fit too
        raise UnsupportedError(
            f"attention: {work} tiles of queries", ["2**31 - 2**20 at most"], "a smaller batch"
        )
    blocks = work if tiles.schedule == "single" else min(work, device.sm_count)
    section = sections_of(
        keys * (head_dim + value_dim), group, batch * heads, row_blocks, device.sm_count, device,
        is_alike=not (features["kLimitLeft"] or features["kLimitRight"]), wanted=tiles.section,
    )  # fmt: skip
    producer_registers, consumer_registers = tiles.register_shares()
    kernel = kernel_spec(
        "attention/hopper/attention_e4m3.cu", "attention_e4m3", _PARAMS, archs=(_ARCH,),
        max_registers=tiles.registers, **features, Result=out.dtype, kHeadDim=depth, kValueDim=value_columns,
        kKeySpan=key_span(depth // 2), kConsumers=tiles.consumers, kBlockKeys=tiles.block_keys, kStages=tiles.stages,
        kPingPong=tiles.ping_pong, kSchedule=SCHEDULES.index(tiles.schedule),
        kLazy=tiles.lazy, kLse=optional["lse"] is not None,
        kProducerRegisters=producer_registers, kConsumerRegisters=consumer_registers,
        kWideStore=out.strides[3] == 1 and value_dim % 8 == 0 and out.is_aligned(16),
    )  # fmt: skip
    counter: ArgumentValue = NullPointer()
    if tiles.schedule == "dynamic":
        counter = dense(COUNTER[0], (1,), dtypes.u32)
    key_tiles = -(-keys // SLAB_KEYS)
    turned = dense(VALUES, (batch, value_dim, kv_heads, key_tiles * SLAB_KEYS), dtypes.e4m3)
    row = key_tiles * SLAB_KEYS
    # [batch, columns, kv_heads, keys] as a view of [batch, kv_heads, columns, keys].
    turned = turned.view(turned.shape, (kv_heads * value_dim * row, row, value_dim * row, 1))
    key_box = key_span(depth // 2) // 2
    maps = (
        _pair_map(q, GROUP_ROWS, key_box),
        _pair_map(k, tiles.block_keys, key_box),
        _pair_map(turned, value_columns, SLAB_KEYS // 2),
    )
    pointers: tuple[ArgumentValue, ...] = tuple(
        NullPointer() if tensor is None else tensor for tensor in optional.values()
    )
    vectors = (optional["sinks"], optional["alibi_slopes"])
    arguments: tuple[ArgumentValue, ...] = (
        *maps, counter, q, k, v, out, *pointers, *descales, *q.strides[:3], *k.strides[:3], *v.strides[:3],
        *out.strides, *(tensor.strides[0] if tensor else 0 for tensor in vectors), *descales.arguments()[3:],
        queries, keys, heads, group, head_dim, value_dim, *numbers,
        row_blocks, batch * heads, *section, work,
    )  # fmt: skip
    turn = kernel_spec(
        "attention/hopper/transpose_e4m3_values.cu", "transpose_e4m3_values", _TURN_PARAMS, archs=(_ARCH,),
        max_registers=64,
    )  # fmt: skip
    column_tiles = -(-value_dim // _TURN_COLUMNS)
    turn_blocks = column_tiles * key_tiles * kv_heads * batch
    if turn_blocks >= 2**31:
        raise UnsupportedError(
            f"attention: {turn_blocks} tiles of values", ["2**31 - 1 at most"], "a smaller batch"
        )
    return (
        Step(
            turn, (turn_blocks, 1, 1), (_TURN_THREADS, 1, 1),
            (v, turned, counter, *v.strides[:3], keys, kv_heads, value_dim, column_tiles, key_tiles),
            reason="values with their keys side by side",
        ),
        Step(
            kernel, (blocks, 1, 1), (tiles.threads, 1, 1), arguments, tiles.shared_memory(depth, value_columns),
            programmatic=True, reason=f"e4m3 wgmma and TMA, {tiles}",
        ),
    )  # fmt: skip


def converts(queries: int, packed: PackedSequences | None, any_length: bool) -> bool:
    """Whether what the e4m3 kernel does not serve goes to the 16-bit Hopper kernel, converted: not the keys of a cache,
    of which a call may read few, and not for few queries, which do not pay for the conversion of all keys."""
    if packed is not None:
        if packed.block_table is not None:
            return False
        queries = packed.typical_queries
    return any_length or queries >= MIN_CONVERTED


def plan_codes_to_f16(
    q: Operand, k: Operand, v: Operand
) -> tuple[tuple[Step, ...], tuple[Operand, Operand, Operand]]:
    """The launch that writes the codes as f16 to the workspace, and the tensors there: for the 16-bit Hopper kernel."""
    tensors, slots = (q, k, v), [dense(n, _whole_pieces(t), dtypes.f16) for n, t in zip(CONVERTED, (q, k, v))]
    is_wide = all(t.strides[3] == 1 and t.shape[3] % 8 == 0 and t.is_aligned(8) for t in tensors)
    kernel = kernel_spec(
        "attention/hopper/codes_to_f16.cu", "codes_to_f16", _CONVERT_PARAMS, archs=(_ARCH,), max_registers=64,
        kWide=is_wide,
    )  # fmt: skip
    blocks = -(-max(slot.size for slot in slots) // (8 * _TURN_THREADS))
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    sizes = (batch, queries, keys, heads, kv_heads, head_dim, value_dim)
    step = Step(
        kernel, (blocks, 3, 1), (_TURN_THREADS, 1, 1), (*tensors, *slots, *q.strides, *k.strides, *v.strides, *sizes),
        reason="e4m3 as f16",
    )  # fmt: skip
    q, k, v = (slot.view(tensor.shape, slot.strides) for tensor, slot in zip(tensors, slots))
    return (step,), (q, k, v)


def _whole_pieces(tensor: Operand) -> tuple[int, ...]:
    """Its shape with rows of whole pieces of 8 elements."""
    return (*tensor.shape[:3], -(-tensor.shape[3] // 8) * 8)


def column_parts(tensor: Operand) -> list[Operand]:
    """The last axis in as few parts as are promoted, multiples of 16 wide and as even as that allows."""
    count = -(-tensor.shape[3] // PROMOTED_DIM)
    width = padded(-(-tensor.shape[3] // count))
    begins = range(0, tensor.shape[3], width)
    return [
        tensor.view(
            (*tensor.shape[:3], min(width, tensor.shape[3] - begin)),
            tensor.strides,
            begin * tensor.strides[3],
        )
        for begin in begins
    ]


def values_workspace(steps: tuple[Step, ...]) -> tuple[tuple[str, int], ...]:
    """The workspace of turned values and of codes as f16, where these steps make some."""
    needed: dict[str, int] = {}
    for step in steps:
        for argument in step.args:
            if isinstance(argument, Operand) and argument.slot in (VALUES, *CONVERTED):
                needed[argument.slot] = max(needed.get(argument.slot, 0), argument.nbytes)
    return tuple(needed.items())
