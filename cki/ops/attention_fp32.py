"""What the plan of the Hopper attention kernel needs for fp32 tensors: when it is taken, and their bf16 pieces."""

from __future__ import annotations

from cki import dtypes
from cki.device import DeviceInfo
from cki.heuristics.attention import padded
from cki.heuristics.attention_fp32 import LARGEST_DIM, MIN_QUERIES, PIECES, Fp32Tiles, choose_fp32_tiles
from cki.heuristics.attention_hopper import GROUP_ROWS, key_span, value_span
from cki.kernel import kernel_spec
from cki.operand import Operand, dense
from cki.ops.packed_sequences import PackedSequences
from cki.plan import ArgumentValue, Step, TensorMapArg

_ARCH = "sm_90a"
_SPLIT_PARAMS = "P" * 7 + "q" * 9 + "i" * 7
_SPLIT_THREADS, _SPLIT_GROUP = 256, 8
#: The workspace slots of the pieces of queries, keys and values.
PIECES_OF = ("attention_q_pieces", "attention_k_pieces", "attention_v_pieces")


def fp32_obstacles(
    q: Operand, k: Operand, v: Operand, device: DeviceInfo, packed: PackedSequences | None = None
) -> list[str]:
    """Every reason why the Hopper kernel cannot compute attention over these fp32 operands; empty when it can."""
    found = []
    if device.arch != _ARCH:
        found.append(f"it needs {_ARCH}, the device is {device.arch}")
    if not k.shape[0] * k.shape[1]:
        found.append("there is no key")
    if packed is not None and packed.block_table is not None:
        found.append("keys of fp32 lie in a cache, which would be split whole")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != dtypes.f32:
            found.append(f"{name} has dtype {tensor.dtype}, not f32")
        if tensor.strides[3] != 1 and tensor.shape[3] != 1:
            found.append(f"{name} has stride {tensor.strides[3]} along head_dim, not 1")
        if tensor.shape[3] > LARGEST_DIM:
            found.append(f"{name} has head_dim {tensor.shape[3]}, beyond {LARGEST_DIM}")
    return found


def preferred_fp32(
    q: Operand, k: Operand, v: Operand, lengths: tuple[int, int], is_plain: bool, device: DeviceInfo,
    packed: PackedSequences | None = None,
) -> Fp32Tiles | None:  # fmt: skip
    """The tiles with which the Hopper kernel is taken, None where it is not.  lengths: queries and keys a sequence."""
    if min(lengths) < MIN_QUERIES or fp32_obstacles(q, k, v, device, packed):
        return None
    batch, rows, heads, _ = q.shape
    return choose_fp32_tiles(rows, batch * heads, max(q.shape[3], v.shape[3]), is_plain, device)


def plan_split(
    q: Operand, k: Operand, v: Operand, tiles: Fp32Tiles, counter: ArgumentValue
) -> tuple[Step, tuple[TensorMapArg, TensorMapArg, TensorMapArg]]:
    """The launch that writes the pieces to the workspace, and the kernel's tensor maps of them.

    counter: of the dynamic schedule, which it zeroes, or a null pointer.
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    pieces = [
        dense(name, (*t.shape[:2], t.shape[2] * PIECES, -(-t.shape[3] // _SPLIT_GROUP) * _SPLIT_GROUP), dtypes.bf16)
        for name, t in zip(PIECES_OF, (q, k, v))
    ]  # fmt: skip
    kernel = kernel_spec(
        "attention/hopper/split_fp32.cu", "split_fp32", _SPLIT_PARAMS, archs=(_ARCH,), max_registers=64,
        kWide=all(t.shape[3] % _SPLIT_GROUP == 0 and t.is_aligned(16) for t in (q, k, v)),
    )  # fmt: skip
    blocks = -(-max(p.size for p in pieces) // (PIECES * _SPLIT_GROUP * _SPLIT_THREADS))
    sizes = (batch, queries, keys, heads, kv_heads, head_dim, value_dim)
    strides = (*q.strides[:3], *k.strides[:3], *v.strides[:3])
    step = Step(
        kernel, (blocks, 3, 1), (_SPLIT_THREADS, 1, 1), (q, k, v, *pieces, counter, *strides, *sizes),
        reason="fp32 as three pieces of bf16",
    )  # fmt: skip
    spans = (key_span(padded(head_dim)),) * 2 + (value_span(padded(value_dim)),)
    rows = (GROUP_ROWS, tiles.block_keys, tiles.block_keys)
    q_map, k_map, v_map = (_map(*each) for each in zip(pieces, rows, spans))
    return step, (q_map, k_map, v_map)


def _map(pieces: Operand, rows: int, span: int) -> TensorMapArg:
    """Boxes of the three pieces of `rows` tokens x `span` bytes of one head."""
    batch, tokens, heads, dim = pieces.shape
    strides = tuple(pieces.strides[axis] * 2 for axis in (1, 2, 0))
    return TensorMapArg(pieces, (dim, tokens, heads, batch), strides, (span // 2, rows, PIECES, 1), span)
