"""Which block of a paged cache belongs to which sequence: the whole policy, and nothing of any device.

A cache is cut into blocks of `block_size` tokens.  A sequence owns a list of blocks (a row of `table`); token t of it
lies in block `table[row, t // block_size]` at offset `t % block_size`.

* A block is taken when a token first needs it, or ahead of time when a sequence is created with a known prompt.
* Blocks count their owners.  `fork` shares all blocks that hold tokens; full blocks are never written again, so only a
  shared, partly filled last block has to be copied, by the owner that writes first.  The last owner writes in place.
* A full block whose tokens are known is found again by its content (`cki.memory.content`).  Such a block keeps its
  content when its last owner leaves, and counts as free; it is emptied only when no other block is free, the least
  recently used first.
* A sequence can give up its end (`truncate`: drafts that were not accepted) and its beginning (`release_before`: what a
  sliding window has left behind).
* Every operation either happens whole or raises and changes nothing.

The unit of work is a batch of sequences, in NumPy: 256 cost tens of microseconds.  It belongs to one thread at a time.
Paging is the idea of vLLM (https://arxiv.org/abs/2309.06180); digests and the order of eviction are those of its v1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from cki.errors import InvalidArgumentError, OutOfBlocksError
from cki.memory import arguments
from cki.memory.arguments import is_integer, is_size, listed, require_sizes, token_counts, token_ids
from cki.memory.content import Salt, StoredBlocks, first_digest, prefix_digests

#: Several sequences, or one.
Sequences = int | Sequence[int]


class BlockAllocator:
    """num_blocks blocks of block_size tokens for at most max_sequences sequences at a time.

    max_blocks_per_sequence: columns of `table`; default num_blocks.

    table: int32 [max_sequences, max_blocks_per_sequence], block ids by row and place; stale outside a row's blocks.
    lengths: int64 [max_sequences], tokens of each row.  released, held: int64 [max_sequences], where the places of a
    row's blocks begin and end.
    version: changes when a row is given to a sequence and when an entry changes, not when some are added or given up.
    Read these; only the methods write them.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, max_sequences: int = 256, max_blocks_per_sequence: int | None = None
    ) -> None:  # fmt: skip
        columns = num_blocks if max_blocks_per_sequence is None else max_blocks_per_sequence
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_sequences": max_sequences}
        require_sizes("BlockAllocator", {**sizes, "max_blocks_per_sequence": columns})
        if problems := arguments.table_problems(max_sequences, columns):
            raise InvalidArgumentError("BlockAllocator", problems, "a smaller max_blocks_per_sequence")
        self.num_blocks, self.block_size = int(num_blocks), int(block_size)
        self.table = np.zeros((max_sequences, columns), np.int32)
        self.lengths, self.held, self.released = (np.zeros(max_sequences, np.int64) for _ in range(3))
        self.version = 0
        self._owners = np.zeros(num_blocks, np.int32)
        # Free blocks without content: a stack, the lowest ids on top at first.
        self._empty = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_empty = self.num_blocks
        # Free blocks with content, the least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._stored = StoredBlocks()
        self._rows: dict[int, int] = {}
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._next_id = 0
        # Prompts not yet stored in full: row -> (digests of its full blocks, how many are published).
        self._prompts: dict[int, tuple[list[bytes], int]] = {}
        # Rows that end within a block that was full, whose content is known, perhaps, until they write into it.
        self._cut_short: set[int] = set()
        self._first_digests = [b""] * max_sequences

    # ------------------------------------------------------------ counts

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those with reusable content included."""
        return self._num_empty + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks with two owners or more."""
        return int(np.count_nonzero(self._owners > 1))

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be shared."""
        return len(self._cached)

    @property
    def num_sequences(self) -> int:
        """Live sequences."""
        return len(self._rows)

    # ------------------------------------------------------------ sequences

    def create(self, tokens: int | Sequence[int] | np.ndarray = 0, *, salt: Salt = None) -> int:
        """A new sequence with blocks for its prompt; returns its id (never used twice).

        tokens: the prompt's token ids, or only their number.  With ids the sequence starts with the blocks of the
        longest prefix that is stored already, and `length` says how many tokens that is; at least the last
        token is left to compute, for its logits are needed.  With a number it starts with length 0.  `append` then
        adds the rest; blocks that it fills can be shared from that moment, by sequences of the same salt.
        """
        first = first_digest(salt)
        if is_integer(tokens):
            count, digests = int(token_counts(tokens, 1)[0]), []
        else:
            ids = token_ids(tokens)  # type: ignore[arg-type]
            count, digests = len(ids), prefix_digests(ids, self.block_size, first)
        total = -(-count // self.block_size)
        if total > self.table.shape[1]:
            raise InvalidArgumentError(self._too_long(f"a prompt of {count} tokens", total))
        hits = self._stored.longest_prefix(digests[: max(count - 1, 0) // self.block_size])
        revived = sum(block in self._cached for block in hits)
        self._require_row()
        self._require_blocks(total - len(hits) + revived)
        for block in hits:
            self._cached.pop(block, None)
        self._owners[hits] += 1
        sequence, row = self._new_row()
        self.table[row, : len(hits)] = hits
        self.table[row, len(hits) : total] = self._take(total - len(hits))
        self.held[row] = total
        self.lengths[row] = len(hits) * self.block_size
        self._first_digests[row] = first
        if len(hits) < len(digests):
            self._prompts[row] = digests, len(hits)
        return sequence

    def append(self, sequences: Sequences, counts: int | Sequence[int] | np.ndarray = 1) -> np.ndarray:
        """Room for more tokens at the end of each sequence; their lengths grow by `counts`.

        Returns the copies to make before the tokens are written: int32 [copies, 2], (source, target) block ids.
        """
        rows = self.rows_of(sequences)
        return self.append_rows(rows, token_counts(counts, len(rows)))

    def append_rows(self, rows: np.ndarray, added: np.ndarray) -> np.ndarray:
        """`append` for checked arguments: rows of `table`, int64 counts of new tokens."""
        size = self.block_size
        lengths, held = self.lengths[rows], self.held[rows]
        ends = lengths + added
        wanted = -(-ends // size)
        if wanted.max(initial=0) > self.table.shape[1]:
            worst = int(np.argmax(wanted))
            what = f"sequence {self._id_of(int(rows[worst]))} with {ends[worst]} tokens"
            raise InvalidArgumentError(self._too_long(what, int(wanted[worst])))
        new = np.maximum(wanted - held, 0)
        num_new = int(new.sum())
        copied = self._rows_to_copy(rows, lengths, added)
        self._require_blocks(num_new + len(copied))
        if self._cut_short:
            self._forget_overwritten(rows.tolist(), added, copied)
        taken = self._take(num_new + len(copied))
        copies = np.empty((len(copied), 2), np.int32)
        if len(copied):
            place = rows[copied], lengths[copied] // size
            copies[:, 0], copies[:, 1] = self.table[place], taken[num_new:]
            np.subtract.at(self._owners, copies[:, 0], 1)
            self.table[place] = copies[:, 1]
            self.version += 1
        if num_new:
            owner = np.repeat(np.arange(len(rows)), new)
            ordinal = np.arange(num_new) - (np.cumsum(new) - new)[owner]
            self.table[rows[owner], held[owner] + ordinal] = taken[:num_new]
            self.held[rows] = held + new
        self.lengths[rows] = ends
        for row in list(self._prompts):
            self._publish(row)
        return copies

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens in the same blocks (a partly filled last one too); returns its id."""
        parent = self._row(sequence)
        self._require_row()
        begin, stored = self.released[parent], -(-self.lengths[parent] // self.block_size)
        child_id, child = self._new_row()
        blocks = self.table[parent, begin:stored]
        self._owners[blocks] += 1
        self.table[child, begin:stored] = blocks
        self.released[child], self.held[child], self.lengths[child] = begin, stored, self.lengths[parent]
        self._first_digests[child] = self._first_digests[parent]
        if parent in self._cut_short:
            self._cut_short.add(child)
        return child_id

    def free(self, sequence: int, tokens: Sequence[int] | np.ndarray | None = None) -> int:
        """Give up a sequence; returns how many blocks became free (shared ones stay with their other owners).

        tokens: ids of all tokens that it holds, prompt and generated.  With them all of its full blocks can be found
        by later prompts; without them only those of a prompt given to `create`.
        """
        row = self._row(sequence)
        if tokens is not None:
            ids = token_ids(tokens)
            if len(ids) != self.lengths[row]:
                raise InvalidArgumentError(
                    f"{len(ids)} tokens of sequence {sequence}, which holds {self.lengths[row]}",
                    hint="the ids of all tokens that it holds",
                )
            self._prompts[row] = prefix_digests(ids, self.block_size, self._first_digests[row]), 0
            self._publish(row)
        self._prompts.pop(row, None)
        self._cut_short.discard(row)
        freed = self._leave(row, self.released[row], self.held[row])
        self.lengths[row] = self.held[row] = self.released[row] = 0
        del self._rows[sequence]
        self._free_rows.append(row)
        return freed

    def truncate(self, sequences: Sequences, lengths: int | Sequence[int] | np.ndarray) -> int:
        """Forget the tokens from `lengths` on, and blocks reserved behind; returns how many blocks became free.

        The next `append` goes on from there; a block that others share is copied then.
        """
        rows, size = self.rows_of(sequences), self.block_size
        lengths = token_counts(lengths, len(rows), "lengths")
        least, most, held = self.released[rows] * size, self.lengths[rows], self.held[rows]
        for i in np.flatnonzero((lengths < least) | (lengths > most)).tolist():
            sequence = self._id_of(int(rows[i]))
            what = f"length={lengths[i]} of sequence {sequence}, which holds {most[i]} tokens"
            raise InvalidArgumentError(what, hint=f"an integer from {least[i]} to {most[i]}")
        kept = -(-lengths // size)
        freed = sum(self._leave(rows[i], kept[i], held[i]) for i in np.flatnonzero(held > kept).tolist())
        self.held[rows], self.lengths[rows] = kept, lengths
        self._cut_short.difference_update(rows[lengths < most].tolist())
        self._cut_short.update(rows[(lengths < most) & (lengths % size > 0)].tolist())
        for row in self._prompts.keys() & set(rows.tolist()):
            (digests, published), full = self._prompts[row], int(self.lengths[row]) // size
            self._prompts[row] = digests[:full], min(published, full)
            self._publish(row)
        return freed

    def take_back(self, sequences: Sequences, lengths: np.ndarray) -> None:
        """Back to `lengths` after an `append` whose tokens were never written: nobody may find them as a prefix."""
        for row, length in zip(self.rows_of(sequences).tolist(), lengths.tolist()):
            for block in self.table[row, length // self.block_size : self.held[row]].tolist():
                self._stored.forget(block)
        self.truncate(sequences, lengths)

    def release_before(self, sequence: int, position: int) -> int:
        """Give up the blocks all of whose tokens lie before `position`: none of them will be read any more.

        The sequence's length and positions stay.  Returns how many blocks became free.
        """
        row = self._row(sequence)
        if not is_integer(position) or not 0 <= position <= self.lengths[row]:
            what = f"position={position!r} of sequence {sequence}"
            raise InvalidArgumentError(what, hint=f"an integer from 0 to {self.lengths[row]}")
        return self.release_rows_before(np.array([row]), np.array([position]))

    def release_rows_before(self, rows: np.ndarray, positions: np.ndarray) -> int:
        """`release_before` for checked arguments: rows of `table`, int64 positions."""
        ends, freed = positions // self.block_size, 0
        for i in np.flatnonzero(ends > self.released[rows]).tolist():
            freed += self._leave(rows[i], self.released[rows[i]], ends[i])
            self.released[rows[i]] = ends[i]
        return freed

    def grow(self, num_blocks: int) -> None:
        """More blocks; those that exist keep their ids."""
        if not is_size(num_blocks) or num_blocks < self.num_blocks:
            raise InvalidArgumentError(
                f"num_blocks={num_blocks!r}", hint=f"an integer from {self.num_blocks} to 2^31 - 1"
            )
        fresh = np.arange(num_blocks - 1, self.num_blocks - 1, -1, dtype=np.int32)
        self._empty = np.resize(np.concatenate([fresh, self._empty[: self._num_empty]]), num_blocks)
        self._num_empty += len(fresh)
        self._owners = np.concatenate([self._owners, np.zeros(len(fresh), np.int32)])
        self.num_blocks = int(num_blocks)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return int(self.lengths[self._row(sequence)])

    def blocks(self, sequence: int) -> list[int]:
        """Block ids of a sequence, in order, from the first that it still has; those for tokens to come included."""
        row = self._row(sequence)
        found: list[int] = self.table[row, self.released[row] : self.held[row]].tolist()
        return found

    def rows_of(self, sequences: Sequences) -> np.ndarray:
        """Rows of `table` of live sequences.  Freed, unknown and repeated ids raise InvalidArgumentError."""
        ids = listed(sequences)
        if not ({int}.issuperset(map(type, ids)) and self._rows.keys() >= set(ids)):
            for sequence in ids:
                self._row(sequence)
        if len(set(ids)) != len(ids):
            repeated = sorted({i for i in ids if ids.count(i) > 1})
            raise InvalidArgumentError(f"sequences named twice in one call: {repeated}")
        return np.fromiter(map(self._rows.__getitem__, ids), np.int64, len(ids))

    # ------------------------------------------------------------ inside

    def _row(self, sequence: int) -> int:
        if is_integer(sequence) and sequence in self._rows:
            return self._rows[sequence]
        if is_integer(sequence) and 0 <= sequence < self._next_id:
            raise InvalidArgumentError(f"sequence {sequence} was freed already")
        raise InvalidArgumentError(
            f"sequence {sequence!r} was never created", hint="an id that was given out here"
        )

    def _id_of(self, row: int) -> int:
        return next(sequence for sequence, its_row in self._rows.items() if its_row == row)

    def _too_long(self, what: str, needed: int) -> str:
        columns = self.table.shape[1]
        limit = f"max_blocks_per_sequence={columns} allows {columns * self.block_size} tokens"
        return f"{what} needs {needed} blocks; {limit}"

    def _require_row(self) -> None:
        if not self._free_rows:
            what = f"all {len(self._rows)} sequence slots are occupied"
            raise OutOfBlocksError(what, needed=1, hint="free a sequence, or a larger max_sequences")

    def _require_blocks(self, needed: int) -> None:
        if needed > self.num_free:
            raise OutOfBlocksError(
                f"out of blocks: {needed} needed, {self.num_free} of {self.num_blocks} free "
                f"({len(self._rows)} sequences hold the rest)",
                needed=needed, free=self.num_free,
                hint="free a sequence (preempt it: its tokens can be computed again later), or more blocks",
            )  # fmt: skip

    def _new_row(self) -> tuple[int, int]:
        sequence, row = self._next_id, self._free_rows.pop()
        self._next_id += 1
        self._rows[sequence] = row
        self.version += 1
        return sequence, row

    def _take(self, count: int) -> np.ndarray:
        while self._num_empty < count:
            block, _ = self._cached.popitem(last=False)
            self._stored.forget(block)
            self._put(block)
        self._num_empty -= count
        taken = self._empty[self._num_empty : self._num_empty + count][::-1].copy()
        self._owners[taken] = 1
        return taken

    def _leave(self, row: int, begin: int, end: int) -> int:
        """Give up a row's blocks at the places [begin, end); returns how many became free."""
        blocks = self.table[row, begin:end]
        self._owners[blocks] -= 1
        left = blocks[self._owners[blocks] == 0]
        # The end first: of a prefix that is cached, the tail goes before what it hangs on.
        for block in left[::-1].tolist():
            if block in self._stored:
                self._cached[block] = None
            else:
                self._put(block)
        return len(left)

    def _put(self, block: int) -> None:
        self._empty[self._num_empty] = block
        self._num_empty += 1

    def _rows_to_copy(self, rows: np.ndarray, lengths: np.ndarray, added: np.ndarray) -> np.ndarray:
        """Positions in `rows` of those that are to write into a block which others own too, the last owner excepted."""
        writing = np.flatnonzero((lengths % self.block_size != 0) & (added > 0))
        blocks = self.table[rows[writing], lengths[writing] // self.block_size]
        shared = self._owners[blocks] > 1
        owners: dict[int, int] = {}
        copied = []
        for position, block in zip(writing[shared].tolist(), blocks[shared].tolist()):
            left = owners.get(block, int(self._owners[block]))
            if left > 1:
                copied.append(position)
            owners[block] = left - 1
        return np.array(copied, np.int64)

    def _forget_overwritten(self, rows: list[int], added: np.ndarray, copied: np.ndarray) -> None:
        """Of rows that were cut short and write on: what lies in their last block, if they keep it, is overwritten."""
        for position, row in enumerate(rows):
            if row in self._cut_short and added[position]:
                self._cut_short.discard(row)
                if position not in copied:
                    self._stored.forget(int(self.table[row, self.lengths[row] // self.block_size]))

    def _publish(self, row: int) -> None:
        """Make the blocks of a known prompt that are full by now findable."""
        digests, start = self._prompts[row]
        start = max(start, int(self.released[row]))
        full = min(int(self.lengths[row]) // self.block_size, len(digests))
        self._stored.add(digests[start:full], self.table[row, start:full].tolist())
        if full == len(digests):
            del self._prompts[row]
        else:
            self._prompts[row] = digests, full
