"""Plan of the Hopper attention kernel (`cuda_src/attention/hopper/attention.cu`): tensor maps, constants, launches.

`cki.ops.attention.plan_attention` comes here when its `tiles` are `HopperTiles`, and by itself where `preferred` says
so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cki import dtypes
from cki.device import DeviceInfo
from cki.errors import UnsupportedError
from cki.heuristics.attention import padded
from cki.heuristics.attention_fp32 import Fp32Tiles
from cki.heuristics.attention_hopper import (
    FEW_QUERIES,
    FEW_ROWS_KEYS,
    GROUP_ROWS,
    MIN_QUERIES,
    SCHEDULES,
    HopperTiles,
    choose_few_rows,
    choose_hopper_tiles,
    choose_packed_tiles,
    key_span,
    packable_heads,
    sections_of,
    value_span,
)
from cki.kernel import kernel_spec
from cki.operand import Operand, dense
from cki.ops.attention_fp32 import PIECES_OF, fp32_obstacles, plan_split, preferred_fp32
from cki.ops.merge import plan_merge_states
from cki.ops.packed_sequences import PackedSequences
from cki.plan import ArgumentValue, NullPointer, Step, TensorMapArg

#: Parameters before and after those that the generic kernel has too.
_PARAMS = "TTTP" + "P" * 9 + "q" * 26 + "i" * 9 + "ffffPPPqqqqiiiPPIf" + "i" * 9 + "PPP" + "q" * 6
_ARCH = "sm_90a"
#: Keys that one TMA copy brings at least: whole patterns of every swizzle.
_BOX_KEYS = 16
#: The workspace slot of the dynamic schedule's counter, and its bytes.
COUNTER = ("attention_work_counter", 4)
#: Those of results and their LSE of parts of the keys.
PARTS, PART_LSES = "attention_parts", "attention_part_lses"
_WORKSPACE = (COUNTER[0], PARTS, PART_LSES, *PIECES_OF)


def hopper_obstacles(
    q: Operand, k: Operand, v: Operand, device: DeviceInfo, packed: PackedSequences | None = None
) -> list[str]:
    """Every reason why the Hopper kernel cannot compute attention over these operands; empty when it can."""
    found = layout_obstacles(q, k, v, device, may_share=(k, v))
    if q.dtype not in (dtypes.f16, dtypes.bf16):
        found.append(f"q has dtype {q.dtype}: it takes f16 and bf16")
    if packed is not None and packed.block_table is not None and k.shape[1] % _BOX_KEYS:
        found.append(f"the cache has blocks of {k.shape[1]} keys, not a multiple of {_BOX_KEYS}")
    return found


def layout_obstacles(
    q: Operand, k: Operand, v: Operand, device: DeviceInfo, may_share: tuple[Operand, ...] = ()
) -> list[str]:
    """The reasons that lie in the device and in strides and addresses.

    may_share: tensors of which all batches may be one in memory (stride 0).
    """
    found = []
    if device.arch != _ARCH:
        found.append(f"it needs {_ARCH}, the device is {device.arch}")
    if not k.shape[0] * k.shape[1]:
        found.append("there is no key")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.strides[3] != 1 and tensor.shape[3] != 1:
            found.append(f"{name} has stride {tensor.strides[3]} along head_dim, not 1")
        if not tensor.is_aligned(16):
            found.append(f"{name}'s rows do not begin at multiples of 16 bytes")
        first = 1 if tensor in may_share and tensor.strides[0] == 0 else 0
        axes = zip(tensor.shape[first:3], tensor.strides[first:3])
        if any(extent > 1 and stride <= 0 for extent, stride in axes):
            found.append(f"{name} has strides {tensor.strides}, which repeat or reverse an axis")
        if any(stride * tensor.dtype.itemsize >= 1 << 40 for stride in tensor.strides):
            found.append(f"{name} has strides {tensor.strides}, beyond 2**40 bytes")
    return found


def preferred(
    q: Operand, k: Operand, v: Operand, bias: Operand | None, mask: Operand | None, *, has_limits: bool,
    is_plain: bool, any_length: bool, may_split: bool, device: DeviceInfo,
) -> HopperTiles | None:  # fmt: skip
    """The tiles with which the Hopper kernel is faster than the generic one; None where it is not or cannot be used.

    any_length: whatever the number of queries and keys, so that they decide no result.  may_split: they may decide how
    keys are cut.
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    if any(tensor is not None and _key_stride(tensor) not in (0, 1) for tensor in (bias, mask)):
        return None
    if q.dtype == dtypes.f32:
        return None if any_length else preferred_fp32(q, k, v, (queries, keys), is_plain, device)
    is_few = queries <= FEW_QUERIES and keys >= FEW_ROWS_KEYS
    if (
        device.arch != _ARCH
        or hopper_obstacles(q, k, v, device)
        or (queries < MIN_QUERIES and not (is_few or any_length))
    ):
        return None
    dims = padded(head_dim), padded(value_dim)
    if is_few:
        return choose_few_rows(
            queries,
            keys,
            batch,
            kv_heads,
            heads // kv_heads,
            *dims,
            is_plain,
            may_split and not any_length,
            device,
        )
    return choose_hopper_tiles(queries, batch * heads, *dims, has_limits, is_plain, device)


def preferred_packed(
    q: Operand, k: Operand, v: Operand, packed: PackedSequences, *, has_limits: bool, is_plain: bool,
    any_length: bool, device: DeviceInfo,
) -> HopperTiles | None:  # fmt: skip
    """The same for packed sequences."""
    if q.dtype == dtypes.f32:
        lengths = packed.typical_queries, packed.mean_keys(k)
        return None if any_length else preferred_fp32(q, k, v, lengths, is_plain, device, packed)
    has_many_keys = packed.mean_keys(k) >= FEW_ROWS_KEYS
    if hopper_obstacles(q, k, v, device, packed) or (
        packed.typical_queries < MIN_QUERIES and not (any_length or has_many_keys)
    ):
        return None
    _, tokens, heads, head_dim = q.shape
    return choose_packed_tiles(
        tokens, packed.sequences, heads, padded(head_dim), padded(v.shape[3]), has_limits, is_plain, device,
        packable_heads(heads // k.shape[2]) if packed.typical_queries < FEW_QUERIES and has_many_keys else 1,
    )  # fmt: skip


def _tensor_map(tensor: Operand, tokens: int, columns: int, heads: int = 1) -> TensorMapArg:
    """Boxes of `tokens` x `columns` elements of one head, or of `heads`, a token's one after the other.

    [batch, tokens, heads, dim] innermost first; with several heads a box these come before the tokens.
    """
    extents = (_batches(tensor), *tensor.shape[1:])
    itemsize = tensor.dtype.itemsize
    axes = (1, 2, 0) if heads == 1 else (2, 1, 0)
    # An axis of extent 1 may have any stride, also one that a tensor map does not take.
    strides = tuple(tensor.strides[axis] * itemsize if extents[axis] > 1 else 16 for axis in axes)
    box = (columns, tokens, 1, 1) if heads == 1 else (columns, heads, tokens, 1)
    return TensorMapArg(
        tensor, (extents[3], *(extents[axis] for axis in axes)), strides, box, columns * itemsize
    )


def _batches(tensor: Operand) -> int:
    """How many batches lie in memory: one where all share it."""
    return tensor.shape[0] if tensor.strides[0] else 1


def _key_stride(tensor: Operand | None) -> int:
    """Of a bias or mask: 0 along a broadcast axis."""
    return tensor.strides[-1] if tensor is not None and tensor.ndim and tensor.shape[-1] > 1 else 0


def _has_pairs(tensor: Operand | None, keys: int) -> bool:
    """Whether keys 2i and 2i + 1 of every row can be loaded together."""
    return tensor is not None and keys % 2 == 0 and tensor.is_aligned(2 * tensor.dtype.itemsize)


def plan_hopper(
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    tiles: HopperTiles,
    bias: Operand | None,
    mask: Operand | None,
    packed: PackedSequences | None,
    features: Mapping[str, Any],
    arguments: tuple[ArgumentValue, ...],
    descales: tuple[ArgumentValue, ...],
    device: DeviceInfo,
) -> tuple[Step, ...]:
    """The launches: a reset of the work counter for the dynamic schedule, and the kernel.

    features, arguments, descales: the constants and arguments that the generic kernel has too.
    Of fp32, one that splits and resets, and the kernel.  The dynamic schedule needs the workspace COUNTER.
    UnsupportedError names every obstacle.
    """
    is_fp32 = isinstance(tiles, Fp32Tiles)
    obstacles = (fp32_obstacles if is_fp32 else hopper_obstacles)(q, k, v, device, packed)
    for name, tensor in (("bias", bias), ("mask", mask)):
        if tensor is not None and _key_stride(tensor) not in (0, 1):
            obstacles.append(f"{name} has stride {_key_stride(tensor)} along the keys, not 1 or 0")
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    group, itemsize = heads // kv_heads, q.dtype.itemsize
    if group % tiles.heads or not 1 <= tiles.heads <= GROUP_ROWS:
        obstacles.append(f"{tiles.heads} heads a tile do not divide the {group} query heads of a KV head")
    if tiles.splits > 1 and (packed is not None or features["kDropout"]):
        obstacles.append("keys in parts are those of dense tensors without dropout")
    if obstacles:
        raise UnsupportedError("attention: the Hopper kernel", obstacles, "the generic kernel")
    key_columns, value_columns = padded(head_dim), padded(value_dim)
    box_keys, is_paged = tiles.block_keys, packed is not None and packed.block_table is not None
    if packed is None:
        row_blocks = -(-queries // tiles.block_queries)
    else:
        row_blocks = packed.slots(queries, tiles.block_queries)
        keys = packed.mean_keys(k)
        if is_paged:  # a box lies within one block
            box_keys = math.gcd(k.shape[1], tiles.block_keys)
    parts, part_keys = key_parts(keys, tiles) if tiles.splits > 1 else (1, keys)
    head_tiles = heads // tiles.heads * batch * parts
    work = row_blocks * head_tiles
    if work >= 2**31 - 2**20:  # numbers drawn past the last one must fit too
        raise UnsupportedError(
            f"attention: {work} tiles of queries", ["2**31 - 2**20 at most"], "a smaller batch"
        )
    resident = device.sm_count * tiles.blocks_per_sm
    blocks = work if tiles.schedule == "single" else min(work, resident)
    kv_bytes = part_keys * (head_dim + value_dim) * itemsize
    # Packed sequences: tiles of all lengths.  Few queries over many keys see nearly all of them.
    is_alike = packed is None and not (features["kLimitLeft"] or features["kLimitRight"])
    is_alike |= packed is None and 8 * queries <= keys
    sections = sections_of(
        kv_bytes, group // tiles.heads, head_tiles, row_blocks, resident, device,
        is_alike=is_alike, is_packed=packed is not None, wanted=tiles.section,
    )  # fmt: skip
    order = row_blocks, head_tiles, *sections, work
    copies = tiles.block_keys // box_keys if is_paged else 0
    producer_registers, consumer_registers = tiles.register_shares(packed is not None)
    file, entry = ("attention_fp32",) * 2 if is_fp32 else ("attention", "attention_hopper")
    kernel = kernel_spec(
        f"attention/hopper/{file}.cu", entry, _PARAMS, archs=(_ARCH,), max_registers=tiles.registers,
        **features, kHeadDim=key_columns, kValueDim=value_columns, kKeySpan=key_span(key_columns),
        kValueSpan=value_span(value_columns), kConsumers=tiles.consumers, kPackedHeads=tiles.heads,
        kCopyWarps=tiles.copying_warps(copies),
        kSplitKeys=parts > 1, Result=out.dtype,
        kBlockKeys=tiles.block_keys, kStages=tiles.stages, kPingPong=tiles.ping_pong,
        kAhead=tiles.weights_ahead(value_columns, features["kDropout"]),
        kBeforeValues=tiles.weights_before_values,
        kWholeBlocks=is_paged and k.shape[1] == box_keys,
        kUnitColumns=packed is not None and packed.has_unit_columns,
        kSchedule=SCHEDULES.index(tiles.schedule), kBoxKeys=box_keys, kMinBlocks=tiles.blocks_per_sm,
        kProducerRegisters=producer_registers, kConsumerRegisters=consumer_registers,
        kBiasKeyStride=_key_stride(bias), kBiasPair=_has_pairs(bias, keys),
        kMaskKeyStride=_key_stride(mask), kMaskPair=_has_pairs(mask, keys),
        kWideStore=parts == 1 and out.strides[3] == 1 and value_dim % 8 == 0 and out.is_aligned(16),
    )  # fmt: skip
    is_dynamic = tiles.schedule == "dynamic"
    counter: ArgumentValue = dense(COUNTER[0], (1,), dtypes.u32) if is_dynamic else NullPointer()
    before: tuple[Step, ...] = ()
    if isinstance(tiles, Fp32Tiles):
        split, maps = plan_split(q, k, v, tiles, counter)
        before = (split,)
    else:
        key_box, value_box = key_span(key_columns) // itemsize, value_span(value_columns) // itemsize
        maps = (
            _tensor_map(q, GROUP_ROWS // tiles.heads, key_box, tiles.heads),
            _tensor_map(k, box_keys, key_box),
            _tensor_map(v, box_keys, value_box),
        )
    step = Step(
        kernel, (blocks, 1, 1), (tiles.threads, 1, 1),
        (*maps, counter, *arguments, *order, _batches(k) - 1, _batches(v) - 1, parts, part_keys, *descales),
        tiles.shared_memory(key_columns, value_columns, packed is not None), programmatic=is_dynamic or is_fp32,
        reason=f"wgmma and TMA, {tiles}",
    )  # fmt: skip
    if is_fp32 or not is_dynamic:
        return (*before, step)
    reset = kernel_spec(
        "attention/hopper/reset_counter.cu", "reset_counter", "P", archs=(_ARCH,), max_registers=32
    )
    return Step(reset, (1, 1, 1), (32, 1, 1), (counter,), reason="counter of the dynamic schedule"), step


def key_parts(keys: int, tiles: HopperTiles) -> tuple[int, int]:
    """(number of parts of the keys, keys of each but the last): whole tiles, `tiles.splits` parts at most."""
    key_tiles = -(-keys // tiles.block_keys)
    part_tiles = -(-key_tiles // tiles.splits)
    return -(-key_tiles // part_tiles), part_tiles * tiles.block_keys


def part_results(out: Operand, keys: int, tiles: HopperTiles) -> tuple[Operand, Operand]:
    """(outputs, their LSE) of all parts, fp32 in the workspace: [batch * parts, queries, heads, value_dim] and
    [batch * parts, heads, queries]."""
    batch, queries, heads, value_dim = out.shape
    count = batch * key_parts(keys, tiles)[0]
    return (
        dense(PARTS, (count, queries, heads, value_dim), dtypes.f32),
        dense(PART_LSES, (count, heads, queries), dtypes.f32),
    )


def plan_merge(results: tuple[Operand, Operand], out: Operand, lse: Operand | None) -> tuple[Step, ...]:
    """The launch that makes one result of `part_results`.  lse: row-major [batch, heads, queries], or None."""
    parts, part_lses = results
    batch, queries, heads, value_dim = out.shape
    count = parts.shape[0] // batch
    (step, *row), (lse_step, lse_head, _) = parts.strides, part_lses.strides
    return plan_merge_states(
        parts.view((count, batch, queries, heads, value_dim), (step, count * step, *row)),
        part_lses.view((count, batch, queries, heads), (lse_step, count * lse_step, 1, lse_head)),
        out,
        lse and lse.view((batch, queries, heads), (heads * queries, 1, queries)),
        programmatic=True,
    )


def workspace_of(steps: tuple[Step, ...]) -> tuple[tuple[str, int], ...]:
    """The workspace that these steps need besides their operands."""
    needed: dict[str, int] = {}
    for step in steps:
        for argument in step.args:
            if isinstance(argument, Operand) and argument.slot in _WORKSPACE:
                needed[argument.slot] = max(needed.get(argument.slot, 0), argument.nbytes)
    return tuple(needed.items())
