"""Packed sequences as the attention kernels take them: constants and arguments besides those of dense tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cki import dtypes
from cki.operand import Operand
from cki.plan import ArgumentValue, NullPointer


@dataclass(frozen=True)
class PackedSequences:
    """What makes one packed row of tokens a batch of sequences; all lengths stay on the device.

    cu_seqlens_q: [sequences + 1].  key_offsets: cu_seqlens_k [sequences + 1], or beside a block_table [sequences,
    columns] the number of keys of each sequence.  i32 or i64, any strides.
    typical_queries: of one sequence; decides how tiles are cut, never a result.
    """

    cu_seqlens_q: Operand
    key_offsets: Operand
    block_table: Operand | None
    typical_queries: int

    @property
    def has_unit_columns(self) -> bool:
        """Whether a sequence's entries in the block table lie side by side."""
        table = self.block_table
        return table is not None and (table.strides[1] == 1 or table.shape[1] == 1)

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    def key_length(self, k: Operand) -> int:
        """Keys that a sequence can have at most."""
        return (
            k.shape[1] if self.block_table is None else min(k.shape[1] * self.block_table.shape[1], 2**30 - 1)
        )

    def mean_keys(self, k: Operand) -> int:
        """Keys of one sequence, if all are alike and fill the tensor or cache."""
        return min(self.key_length(k), k.shape[0] * k.shape[1] // max(self.sequences, 1))

    def slots(self, rows: int, block_rows: int) -> int:
        """Of one head: how many row blocks there are at most (cuda_src/attention/packed_sequences.cuh)."""
        return rows // block_rows + self.sequences + 2

    @staticmethod
    def limits(causal: bool, window: tuple[int, int]) -> tuple[int | None, int | None]:
        """(left, right) of `common/key_band.cuh`: with unknown lengths any limit may hide a key, short of 2**30."""
        left, right = window[0], 0 if causal else window[1]
        return (left if 0 <= left < 2**30 else None), (right if 0 <= right < 2**30 else None)

    def constants(self, causal_alignment: str) -> dict[str, Any]:
        table = self.block_table
        return {
            "kVarlen": True, "kPaged": table is not None, "kBottomRight": causal_alignment == "bottom_right",
            "QueryOffset": self.cu_seqlens_q.dtype, "KeyOffset": self.key_offsets.dtype,
            "TableIndex": dtypes.i32 if table is None else table.dtype,
        }  # fmt: skip

    def arguments(self, k: Operand) -> tuple[ArgumentValue, ...]:
        """The kernel's last parameters."""
        table = self.block_table
        return (
            self.cu_seqlens_q, self.key_offsets, NullPointer() if table is None else table,
            self.cu_seqlens_q.strides[0], self.key_offsets.strides[0], *((0, 0) if table is None else table.strides),
            self.sequences, k.shape[0], k.shape[1],
        )  # fmt: skip


#: The same for dense tensors, where nothing of it is compiled.
DENSE_CONSTANTS: dict[str, Any] = {
    "kVarlen": False, "kPaged": False, "kBottomRight": False,
    "QueryOffset": dtypes.i32, "KeyOffset": dtypes.i32, "TableIndex": dtypes.i32,
}  # fmt: skip
DENSE_ARGUMENTS: tuple[ArgumentValue, ...] = (*(NullPointer(),) * 3, *(0,) * 7)
