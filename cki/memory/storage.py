"""The memory of a paged KV cache: where everything lies in an arena of the device, the tensors over it, and the
tables of a step: filled in page-locked memory, and of them what the device lacks is uploaded.

    | slot_mapping | positions | seq_lens | cu_seqlens_q | block_table | static scales |   tables of the step
    | layer 0: K | V | K scales | V scales | layer 1: K | ...                          |   regions of all blocks

K and V of a layer are each one dense `[blocks, block_size, kv_heads, head_dim]`: every framework can import that, and
the blocks that a layer's kernel reads lie close together.  Each has room for `max_num_blocks`, so none ever moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cki import dtypes
from cki.dtypes import DType
from cki.memory.arena import Arena, CudaArena, HostArena, Range, VirtualArena, allocation_granularity
from cki.memory.views import CacheLayer, CacheTensor, Place

if TYPE_CHECKING:  # which takes the sizes' rules from here
    from cki.memory.blocks import BlockAllocator

#: The longest row that attention kernels read (`cki.ops.paged_rules`).
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class CacheShape:
    """What the sizes of a cache follow from.

    token_scales: one fp32 scale a token and head, of K and of V.  static_scales: one a head.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: DType
    token_scales: bool
    static_scales: bool
    max_sequences: int
    max_blocks_per_sequence: int
    max_step_tokens: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers: K, V and scales."""
        scales = 2 * 4 if self.token_scales else 0
        of_head = (self.head_dim + self.value_head_dim) * self.dtype.itemsize + scales
        return self.num_layers * self.block_size * self.num_kv_heads * of_head


class CacheLayout:
    """Places of all tensors of a cache with room for `max_num_blocks` blocks.

    tables: by name.  upload_nbytes: what one step writes, from offset 0.  nbytes: of the arena.
    """

    def __init__(self, shape: CacheShape, max_num_blocks: int, granularity: int) -> None:
        self.shape = shape
        self._granularity = granularity
        sequences, tokens = shape.max_sequences, shape.max_step_tokens
        tensors: list[tuple[str, tuple[int, ...], DType]] = [
            ("slot_mapping", (tokens,), dtypes.i64),
            ("positions", (tokens,), dtypes.i32),
            ("seq_lens", (sequences,), dtypes.i32),
            ("cu_seqlens_q", (sequences + 1,), dtypes.i32),
            ("block_table", (sequences, shape.max_blocks_per_sequence), dtypes.i32),
        ]
        if shape.static_scales:
            of_heads = (shape.num_layers, shape.num_kv_heads)
            tensors += [("k_scale", of_heads, dtypes.f32), ("v_scale", of_heads, dtypes.f32)]
        self.tables: dict[str, Place] = {}
        end = 0
        for name, extents, dtype in tensors:
            self.tables[name] = Place(end, extents, dtype)
            end = _rounded(end + self.tables[name].nbytes, 256)
        self.tables_nbytes = end
        self.upload_nbytes = self.tables["block_table"].offset
        self._regions = _rounded(end, granularity)
        self._room = {name: place.nbytes for name, place in self._of_layer(max_num_blocks, {}).items()}
        self._layer_nbytes = sum(_rounded(size, granularity) for size in self._room.values())
        self.nbytes = self._regions + shape.num_layers * self._layer_nbytes

    def _of_layer(self, num_blocks: int, offsets: dict[str, int]) -> dict[str, Place]:
        shape = self.shape
        tokens = (num_blocks, shape.block_size, shape.num_kv_heads)
        places = {
            "k": Place(offsets.get("k", 0), (*tokens, shape.head_dim), shape.dtype),
            "v": Place(offsets.get("v", 0), (*tokens, shape.value_head_dim), shape.dtype),
        }
        if shape.token_scales:
            for name in ("k_scale", "v_scale"):
                places[name] = Place(offsets.get(name, 0), tokens, dtypes.f32)
        return places

    def layer(self, index: int, num_blocks: int) -> dict[str, Place]:
        """Places of a layer's "k", "v" and, for scales of tokens, "k_scale", "v_scale"."""
        offsets, end = {}, self._regions + index * self._layer_nbytes
        for name, room in self._room.items():
            offsets[name] = end
            end += _rounded(room, self._granularity)
        return self._of_layer(num_blocks, offsets)

    def block_parts(self) -> list[Range]:
        """All parts of one block, of K, V and scales of every layer: (offset in block 0, bytes)."""
        places = [place for i in range(self.shape.num_layers) for place in self.layer(i, 1).values()]
        return [(place.offset, place.nbytes) for place in places]

    def ranges(self, num_blocks: int) -> list[Range]:
        """All that must be usable memory for so many blocks."""
        places = [p for i in range(self.shape.num_layers) for p in self.layer(i, num_blocks).values()]
        return [(0, self.tables_nbytes), *((place.offset, place.nbytes) for place in places)]


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class CacheStorage:
    """Tables of a step, static scales, and `num_blocks` blocks in each layer.

    max_num_blocks: addresses are reserved for so many; None when it never grows.  gpu: its index, None is the host.
    layers: keys, values and scales; `grow` makes them anew, at the same addresses.

    Raises OutOfBlocksError when the device has too little memory.
    """

    def __init__(
        self, shape: CacheShape, num_blocks: int, max_num_blocks: int | None, gpu: int | None
    ) -> None:
        granularity = HostArena.granularity
        if gpu is not None and max_num_blocks is not None:
            granularity = allocation_granularity(gpu)
        self.layout = CacheLayout(
            shape, num_blocks if max_num_blocks is None else max_num_blocks, granularity
        )
        self.arena: Arena
        if gpu is None:
            self.arena = HostArena(self.layout.nbytes)
        else:
            self.arena = (CudaArena if max_num_blocks is None else VirtualArena)(self.layout.nbytes, gpu)
        self._block_parts = self.layout.block_parts()
        self.grow(num_blocks)

    def grow(self, num_blocks: int) -> None:
        """Memory for so many blocks in all; when it fails nothing has changed."""
        self.arena.commit(self.layout.ranges(num_blocks))
        self.layers = [self._layer(index, num_blocks) for index in range(self.layout.shape.num_layers)]

    def copy_block(self, source: int, target: int, stream: int) -> None:
        """A block's keys, values and scales of all layers, in stream order."""
        for offset, nbytes in self._block_parts:
            self.arena.copy(offset + target * nbytes, offset + source * nbytes, nbytes, stream)

    def upload_static_scales(self, scales: tuple[np.ndarray, np.ndarray], stream: int) -> None:
        """Scales of keys and of values, f32 [layers, kv_heads]; waits until the device has read them."""
        staging = self.arena.staging(scales[0].nbytes)
        for name, values in zip(("k_scale", "v_scale"), scales):
            index = staging.next()
            buffer = staging.buffers[index].view(np.float32)
            buffer[:] = values.reshape(-1)
            self.arena.upload(self.layout.tables[name].offset, buffer, stream)
            staging.sent(index, stream)
        for _ in staging.buffers:
            staging.next()  # until all was read

    def _layer(self, index: int, num_blocks: int) -> CacheLayer:
        places = list(self.layout.layer(index, num_blocks).values())
        if self.layout.shape.static_scales:
            heads = self.layout.shape.num_kv_heads
            whole = [self.layout.tables[name] for name in ("k_scale", "v_scale")]
            places += [p._replace(offset=p.offset + 4 * heads * index, shape=(heads,)) for p in whole]
        return CacheLayer(*(CacheTensor(self.arena, place) for place in places))


_STEP_TENSORS = ("slot_mapping", "positions", "seq_lens", "cu_seqlens_q")


class StepTables:
    """The tables at the beginning of a cache's arena.  One upload brings all but the block table, a second one its part
    that has changed: of the same batch as before the columns that were added, else the batch's rows.
    """

    def __init__(self, arena: Arena, layout: CacheLayout, allocator: BlockAllocator) -> None:
        self._arena, self._layout, self._allocator = arena, layout, allocator
        end, table = layout.upload_nbytes, layout.tables["block_table"]
        self._staging = arena.staging(end + table.nbytes)
        self._staged = []
        for buffer in self._staging.buffers:
            arrays = {}
            for name in _STEP_TENSORS:
                offset, _, dtype = place = layout.tables[name]
                arrays[name] = buffer[offset : offset + place.nbytes].view(dtype.numpy)
            arrays["slot_mapping"].fill(-1)
            arrays["block_table"] = buffer[end : end + table.nbytes].view(np.int32)
            self._staged.append(arrays)
        # Tokens of the step that last used a buffer: what lies behind is inert.
        self._staged_tokens = [0] * len(self._staged)
        # The batch whose block table the device holds: (version of the allocator's table, rows).
        self._batch = (-1, b"")
        # How many entries of each row of the allocator's table are right there.
        self._sent = np.zeros(len(allocator.lengths), np.int64)
        # Tensors of the last step's (sequences, tokens), for the next one of the same extents.
        self._viewed = (-1, -1)
        self._views: dict[str, CacheTensor] = {}

    def tensor(self, name: str, extent: int | None = None) -> CacheTensor:
        """A table, or its first `extent` entries."""
        place = self._layout.tables[name]
        if extent is not None:
            place = place._replace(shape=(extent, *place.shape[1:]))
        return CacheTensor(self._arena, place)

    def of_step(self, sequences: int, tokens: int) -> dict[str, CacheTensor]:
        """The tables of so many sequences and tokens, by their names in `Step`."""
        if self._viewed != (sequences, tokens):
            self._viewed = sequences, tokens
            self._views = {
                "slot_mapping": self.tensor("slot_mapping", tokens), "positions": self.tensor("positions", tokens),
                "cu_seqlens_q": self.tensor("cu_seqlens_q", sequences + 1),
                "seq_lens": self.tensor("seq_lens", sequences), "block_table": self.tensor("block_table", sequences),
            }  # fmt: skip
        return self._views

    def cut(self, rows: np.ndarray) -> None:
        """These rows of the allocator have lost entries at their ends: others will take their places."""
        self._sent[rows] = np.minimum(self._sent[rows], self._allocator.held[rows])

    def forget(self) -> None:
        """What the device holds is not known: the next step uploads its block table whole."""
        self._batch = (-1, b"")

    def upload(self, rows: np.ndarray, counts: np.ndarray, lengths: np.ndarray, stream: int) -> None:
        """Fill and upload the tables of a step that gives rows of the allocator's table `counts` tokens each.

        lengths: of the rows, the new tokens included.
        """
        index, block_size, total = self._staging.next(), self._allocator.block_size, int(counts.sum())
        staged, buffer, batch = self._staged[index], self._staging.buffers[index], len(rows)
        starts = np.cumsum(counts) - counts
        owner = np.repeat(rows, counts)
        positions = np.arange(total) + np.repeat(lengths - counts - starts, counts)
        place, offset = np.divmod(positions, block_size)
        staged["slot_mapping"][:total] = self._allocator.table[owner, place] * np.int64(block_size) + offset
        staged["positions"][:total] = positions
        before = self._staged_tokens[index]
        if before > total:
            staged["slot_mapping"][total:before] = -1
            staged["positions"][total:before] = 0
        self._staged_tokens[index] = total
        staged["seq_lens"][:batch], staged["seq_lens"][batch:] = lengths, 0
        staged["cu_seqlens_q"][:batch], staged["cu_seqlens_q"][batch:] = starts, total
        self._arena.upload(0, buffer[: self._layout.upload_nbytes], stream)
        part = self._new_blocks(rows)
        if part is not None:
            self._upload_block_table(rows, part, staged["block_table"], stream)
        self._staging.sent(index, stream)

    def upload_blocks(self, rows: np.ndarray, stream: int) -> None:
        """Upload what the device lacks of these rows' block table, and nothing else."""
        part = self._new_blocks(rows)
        if part is not None:
            index = self._staging.next()
            self._upload_block_table(rows, part, self._staged[index]["block_table"], stream)
            self._staging.sent(index, stream)

    def _new_blocks(self, rows: np.ndarray) -> tuple[int, int, int, int] | None:
        """Top, bottom, left and right of the part that the device lacks of these rows' table; from now on it has it."""
        held = self._allocator.held[rows]
        batch = self._allocator.version, rows.tobytes()
        if batch == self._batch:
            sent = self._sent[rows]
            changed = np.flatnonzero(held != sent)
            if not len(changed):
                return None
            top, bottom = int(changed[0]), int(changed[-1]) + 1
            left, right = int(sent[changed].min()), int(held[changed].max())
        else:
            top, bottom, left, right = 0, len(rows), 0, int(held.max(initial=0))
        self._batch, self._sent[rows] = batch, held
        return (top, bottom, left, right) if right else None

    def _upload_block_table(
        self, rows: np.ndarray, corners: tuple[int, int, int, int], staged: np.ndarray, stream: int
    ) -> None:
        top, bottom, left, right = corners
        part = staged[: (bottom - top) * (right - left)].reshape(bottom - top, right - left)
        part[:] = self._allocator.table[rows[top:bottom], left:right]
        place = self._layout.tables["block_table"]
        pitch = 4 * place.shape[1]
        self._arena.upload_rows(place.offset + top * pitch + 4 * left, pitch, part, stream)
