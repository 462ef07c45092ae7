"""The tables of a step: filled in page-locked memory, and of them what the device lacks is uploaded."""

from __future__ import annotations

import numpy as np

from cki.memory.arena import Arena
from cki.memory.blocks import BlockAllocator
from cki.memory.storage import CacheLayout
from cki.memory.views import CacheTensor

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
