"""What a paged KV cache hands out: tensors in its memory, the tensors of a layer, the inputs of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cki.dlpack import DLPackExport
from cki.dtypes import DType
from cki.memory.arena import Arena
from cki.tensor import TensorView, contiguous_strides


class Place(NamedTuple):
    """A dense tensor in the arena."""

    offset: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        total = self.dtype.itemsize
        for extent in self.shape:
            total *= extent
        return total


class CacheTensor(DLPackExport):
    """A dense tensor in a cache's memory, for any framework: `torch.from_dlpack(t)`, the same for JAX, CuPy, NumPy.

    Nothing is copied; the memory lives as long as the tensor or an import of it.  `view` is what kernels take.
    """

    def __init__(self, arena: Arena, place: Place) -> None:
        offset, shape, dtype = place
        super().__init__(
            TensorView(
                arena.base + offset, shape, contiguous_strides(shape), dtype, arena.device, False, arena
            )
        )

    @property
    def view(self) -> TensorView:
        """Address, shape, strides, dtype, device; its owner keeps the memory."""
        return self._view

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def dtype(self) -> DType:
        return self._view.dtype

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        return self._view.ptr

    def numpy(self) -> np.ndarray:
        """The values in host memory: the memory itself on the simulated device, else a copy after all work is done."""
        arena = self._view.owner
        assert isinstance(arena, Arena)
        nbytes = self._view.size * self.dtype.itemsize
        return arena.read(self.ptr - arena.base, nbytes).view(self.dtype.numpy).reshape(self.shape)

    def __repr__(self) -> str:
        return f"CacheTensor({self.dtype}{list(self.shape)} on {self._view.device})"


class CacheLayer(NamedTuple):
    """Tensors of one layer.

    k: [blocks, block_size, kv_heads, head_dim].  v: the same with value_head_dim.
    k_scale, v_scale: for e4m3, fp32 by which a stored value is multiplied: [blocks, block_size, kv_heads], or
    [kv_heads] when they are static; else None.
    """

    k: CacheTensor
    v: CacheTensor
    k_scale: CacheTensor | None = None
    v_scale: CacheTensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of the kernels of one step, in device memory; the next `prepare_step` writes over them, in stream order.

    num_sequences B, num_tokens T (new ones, sequence after sequence), max_seq_len: as Python numbers.
    slot_mapping: i64 [T], block * block_size + offset of each new token.
    positions: i32 [T], place of each new token in its sequence.
    cu_seqlens_q: i32 [B + 1], where each sequence's new tokens start.
    seq_lens: i32 [B], tokens of each sequence, the new ones included.
    block_table: i32 [B, max_blocks_per_sequence], in the order of the step's sequences; stale past a sequence's length.
    copies: i32 [copies, 2] on the host, (source, target) of the blocks that were copied before they are written.
    """

    num_sequences: int
    num_tokens: int
    max_seq_len: int
    slot_mapping: CacheTensor
    positions: CacheTensor
    cu_seqlens_q: CacheTensor
    seq_lens: CacheTensor
    block_table: CacheTensor
    copies: np.ndarray
