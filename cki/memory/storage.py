"""The memory of a paged cache: its layout in an arena of the device, and the tensors over it."""

from __future__ import annotations

import numpy as np

from cki.memory.arena import Arena, CudaArena, HostArena, VirtualArena, allocation_granularity
from cki.memory.layout import CacheLayout, CacheShape
from cki.memory.views import CacheLayer, CacheTensor


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
