"""The memory of a paged KV cache: where everything lies in an arena of the device, and the tensors over it.

    | slot_mapping | positions | seq_lens | cu_seqlens_q | block_table | static scales |   tables of the step
    | layer 0: K | V | K scales | V scales | layer 1: K | ...                          |   regions of all blocks

K and V of a layer are each one dense `[blocks, block_size, kv_heads, head_dim]`: every framework can import that, and
the blocks that a layer's kernel reads lie close together.  Each has room for `max_num_blocks`, so none ever moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cki import dtypes
from cki.dtypes import DType
from cki.memory.arena import Arena, CudaArena, HostArena, Range, VirtualArena, allocation_granularity
from cki.memory.views import CacheLayer, CacheTensor, Place

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
