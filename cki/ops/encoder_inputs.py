"""What an encoder makes of its inputs before the first layer: a dense padding mask, and positions.

Both are single small launches, planned into the whole model's plan (`cki.ops.encoder_model`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cki import dtypes
from cki.dtypes import DType
from cki.errors import InvalidArgumentError
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops.validate import host_values, reads_values
from cki.plan import ArgumentValue, NullPointer, Step

#: Element types of a mask [batch, seq] and of lengths [batch].
MASK_TYPES = (dtypes.bool_, dtypes.u8, dtypes.i8, dtypes.i32, dtypes.i64)
LENGTH_TYPES = (dtypes.i32, dtypes.i64)
_THREADS = 256
_MAX_BLOCKS = 1 << 16


def plan_padding_mask(source: Operand | None, out: Operand) -> tuple[Step, ...]:
    """out [batch, seq] of u8: 1 where a token is kept.

    source: a mask [batch, seq] of MASK_TYPES, lengths [batch] of LENGTH_TYPES, or None, which keeps all.
    """
    batch, length = out.shape
    is_lengths = source is not None and source.ndim == 1
    if source is None:
        strides = (0, 0)
    else:
        strides = (source.strides[0], 0) if is_lengths else (source.strides[0], source.strides[1])
    kernel = mask_kernel(None if source is None else source.dtype, lengths=is_lengths)
    blocks = min(_MAX_BLOCKS, -(-batch * length // _THREADS))
    arguments: tuple[ArgumentValue, ...] = (source or NullPointer(), out, batch * length, length, *strides)
    return (Step(kernel, (blocks, 1, 1), (_THREADS, 1, 1), arguments, reason=f"{batch} x {length} tokens"),)


def plan_token_positions(
    ids: Operand, out: Operand, padding_id: int | None, offsets: Operand | None = None
) -> tuple[Step, ...]:
    """out [batch, seq] of i32: the position of each token.  ids: [batch, seq] of i32 or i64.

    padding_id: counts by RoBERTa's rule; None counts from 0.  offsets: [sequences + 1], of the sequences that the one
    row of ids consists of.
    """
    rows, length = ids.shape
    sequences = rows if offsets is None else offsets.shape[0] - 1
    blocks = min(_MAX_BLOCKS, -(-sequences // (_THREADS // 32)))
    kernel = positions_kernel(
        ids.dtype, None if offsets is None else offsets.dtype, skips_padding=padding_id is not None
    )
    arguments: tuple[ArgumentValue, ...] = (
        ids, offsets or NullPointer(), out, sequences, length, padding_id or 0, *ids.strides,
        0 if offsets is None else offsets.strides[0],
    )  # fmt: skip
    reason = f"a warp for each of {sequences} sequences"
    return (Step(kernel, (blocks, 1, 1), (_THREADS, 1, 1), arguments, reason=reason),)


@reads_values
def validate_offsets(cu_seqlens: Any, tokens: int, longest: int | None = None) -> None:
    """Raise InvalidArgumentError for offsets of packed sequences that fall, lie outside 0..tokens, or leave a sequence
    of more than `longest` tokens, after waiting for the device."""
    found = host_values(cu_seqlens, "cu_seqlens")
    if found.ndim != 1 or not found.size or found.dtype.kind != "i":
        return  # the rules refuse it
    values = found.astype(np.int64)
    lengths, problems = np.diff(values), []
    if values[0] < 0 or values[-1] > tokens:
        problems.append(f"cu_seqlens goes from {values[0]} to {values[-1]}, there are {tokens} tokens")
    if (lengths < 0).any():
        first = int(np.argmax(lengths < 0))
        problems.append(f"cu_seqlens falls from {values[first]} to {values[first + 1]}")
    elif longest is not None and lengths.max(initial=0) > longest:
        problems.append(f"a sequence has {lengths.max()} tokens, the model has positions for {longest}")
    if problems:
        raise InvalidArgumentError(
            "offsets of packed sequences", problems, "0 <= cu_seqlens[b] <= cu_seqlens[b + 1]"
        )


def mask_kernel(source: DType | None, *, lengths: bool = False) -> KernelSpec:
    """The kernel for a source of that type, or for none."""
    return kernel_spec(
        "embedding/padding_mask.cu", "padding_mask", "PPqiqq", max_registers=32, Source=source or dtypes.u8,
        kHasSource=source is not None, kSourceIsLengths=lengths, kThreads=_THREADS, kMinBlocks=4,
    )  # fmt: skip


def positions_kernel(index: DType, offset: DType | None, *, skips_padding: bool) -> KernelSpec:
    """The kernel for ids of a type, and offsets of a type where sequences are packed."""
    return kernel_spec(
        "embedding/token_positions.cu", "token_positions", "PPPiiiqqq", max_registers=64, Index=index,
        Offset=offset or index, kPacked=offset is not None, kSkipsPadding=skips_padding, kThreads=_THREADS,
        kMinBlocks=4,
    )  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Every kernel of this file."""
    del arch  # the same for all
    masks = [mask_kernel(None), *(mask_kernel(dtype) for dtype in MASK_TYPES)]
    lengths = [mask_kernel(dtype, lengths=True) for dtype in LENGTH_TYPES]
    positions = [
        positions_kernel(dtype, offset, skips_padding=skips)
        for dtype in LENGTH_TYPES
        for offset, skips in ((None, True), (dtype, True), (dtypes.i32, False))
    ]
    return [*masks, *lengths, *positions]
