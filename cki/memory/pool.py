"""The blocks of a paged cache themselves: which are free, how many own each, which can be found by their content.

A block that loses its last owner is free.  One whose content is known keeps it and can be shared again by who finds it,
until no other block is free: then the least recently used is emptied.  The order is that of vLLM's v1.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from cki.memory.content import StoredBlocks


class BlockPool:
    """num_blocks blocks, all free and empty at first.

    owners: int32 [num_blocks]; only the methods write it.  stored: the blocks of known content; who fills a block adds
    it, who writes over it forgets it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.owners = np.zeros(num_blocks, np.int32)
        self.stored = StoredBlocks()
        # Free blocks without content: a stack, the lowest ids on top at first.
        self._empty = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_empty = num_blocks
        # Free blocks with content, the least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those with reusable content included."""
        return self._num_empty + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be shared."""
        return len(self._cached)

    @property
    def num_shared(self) -> int:
        """Blocks with two owners or more."""
        return int(np.count_nonzero(self.owners > 1))

    def count_free(self, blocks: np.ndarray) -> int:
        """How many of these blocks are free: sharing them takes so many of `num_free`."""
        return int(np.count_nonzero(self.owners[blocks] == 0))

    def take(self, count: int) -> np.ndarray:
        """Ids of `count` blocks, at most `num_free`, each of one owner now: int32 [count]."""
        while self._num_empty < count:
            block, _ = self._cached.popitem(last=False)
            self.stored.forget(block)
            self._put(block)
        self._num_empty -= count
        taken = self._empty[self._num_empty : self._num_empty + count][::-1].copy()
        self.owners[taken] = 1
        return taken

    def share(self, blocks: np.ndarray) -> None:
        """One owner more of each of these: different blocks that have owners or content."""
        for block in blocks[self.owners[blocks] == 0].tolist():
            del self._cached[block]
        self.owners[blocks] += 1

    def leave(self, blocks: np.ndarray) -> int:
        """One owner less of each of a sequence's blocks, in its order; returns how many became free."""
        self.owners[blocks] -= 1
        left = blocks[self.owners[blocks] == 0]
        # The end first: of a prefix that is cached, the tail goes before what it hangs on.
        for block in left[::-1].tolist():
            if block in self.stored:
                self._cached[block] = None
            else:
                self._put(block)
        return len(left)

    def leave_to_others(self, blocks: np.ndarray) -> None:
        """One owner less of each of these, as often as it is named; each keeps at least one."""
        np.subtract.at(self.owners, blocks, 1)

    def grow(self, num_blocks: int) -> None:
        """Up to `num_blocks` in all; those that exist keep their ids."""
        fresh = np.arange(num_blocks - 1, len(self.owners) - 1, -1, dtype=np.int32)
        self._empty = np.resize(np.concatenate([fresh, self._empty[: self._num_empty]]), num_blocks)
        self._num_empty += len(fresh)
        self.owners = np.concatenate([self.owners, np.zeros(len(fresh), np.int32)])

    def _put(self, block: int) -> None:
        self._empty[self._num_empty] = block
        self._num_empty += 1
