"""The keys and values of running sequences, in blocks: host side.

    cache = PagedKVCache(32, 8192, num_kv_heads=8, head_dim=128, dtype="bf16")
    a = cache.allocate_sequence(prompt_ids)           # blocks for the prompt; a stored prefix is shared
    step = cache.prepare_step([a], [len(prompt_ids) - cache.length(a)])
    for i in range(32):                               # kernels of layer i write step.slot_mapping's slots of
        k, v, *_ = cache.layer(i)                     # cache.layer(i) and read by step.block_table, step.seq_lens
    step = cache.prepare_step([a], 1)                 # one token more
    cache.free_sequence(a)

A step advances every sequence once, whatever the number of layers.  The tables of a step lie in device memory at
addresses that never change: a captured graph of a step is right for any later one.  Beyond the step's own entries they
are inert up to their full size (slot -1, length 0), so a graph captured for more sequences or tokens serves fewer.

Cost of a step on the host: NumPy over the batch, one upload, and one more of the block-table rows when a row changed.
Which block belongs to whom is `cki.memory.blocks`, where it lies `cki.memory.storage`.  Not safe for several threads at
once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cki import dlpack
from cki.adapter import stream_handle
from cki.dtypes import DType
from cki.errors import InvalidArgumentError
from cki.memory import arguments
from cki.memory.arguments import is_integer, is_size, listed, token_counts
from cki.memory.blocks import BlockAllocator, Sequences
from cki.memory.content import Salt
from cki.memory.storage import CacheShape, CacheStorage, StepTables
from cki.memory.views import CacheLayer, CacheTensor, Step


class PagedKVCache:
    """num_blocks blocks of block_size tokens (or as many as fit in `bytes`) for each of num_layers layers.

    dtype: "f16", "bf16", "f32", "e4m3", or a framework's name or object for one of them.  e4m3 has one fp32 scale a
        token and head, unless static_scales=(of keys, of values) gives positive scales, [num_layers, num_kv_heads] or
        what broadcasts to that.
    value_head_dim: of V, when not head_dim.
    max_sequences: sequences at a time.  max_step_tokens: new tokens in one step.
    max_blocks_per_sequence: columns of the block table; default 32768 tokens' worth, at most max_num_blocks.
    window_left: tokens before its own that a query sees, in all layers; steps give up the blocks that lie before those.
    max_num_blocks: lets `grow` add blocks up to that number: addresses for them are reserved now, memory comes later.
    device: "sim", "cuda", "cuda:1" or a GPU's index; default: the current one.
    stream: of the uploads of `prepare_step`, an int or a framework's stream; default: the legacy default stream.

    Raises InvalidArgumentError with every rule that is broken, OutOfBlocksError when the device has too little memory.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int | None = None,
        *,
        bytes: int | None = None,
        block_size: int = 16,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any,
        value_head_dim: int | None = None,
        max_sequences: int = 256,
        max_blocks_per_sequence: int | None = None,
        max_step_tokens: int = 8192,
        max_num_blocks: int | None = None,
        window_left: int | None = None,
        static_scales: tuple[Any, Any] | None = None,
        device: int | str | None = None,
        stream: Any = 0,
    ) -> None:
        wanted = arguments.check(
            num_layers=num_layers, num_blocks=num_blocks, nbytes=bytes, block_size=block_size,
            num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, value_head_dim=value_head_dim,
            max_sequences=max_sequences, max_blocks_per_sequence=max_blocks_per_sequence,
            max_step_tokens=max_step_tokens, max_num_blocks=max_num_blocks, window_left=window_left,
            static_scales=static_scales,
        )  # fmt: skip
        self._window_left = window_left
        self._shape: CacheShape = wanted.shape
        self._max_num_blocks = wanted.max_num_blocks
        self._can_grow = max_num_blocks is not None
        self._stream = stream_handle(stream)
        arguments.refuse_capture("a new cache", self._stream)
        dlpack.collect_unconsumed()  # an export of another cache that nobody took may hold its memory
        self._storage = CacheStorage(
            self._shape, wanted.num_blocks, self._max_num_blocks if self._can_grow else None,
            arguments.gpu_index(device),
        )  # fmt: skip
        self._allocator = BlockAllocator(
            wanted.num_blocks, block_size,
            max_sequences=max_sequences, max_blocks_per_sequence=self._shape.max_blocks_per_sequence,
        )  # fmt: skip
        self._tables = StepTables(self._storage.arena, self._storage.layout, self._allocator)
        # Of the step whose tables the device has, while it can go on from them.
        self._step_ids: tuple[int, ...] | None = None
        self._lost: set[int] = set()
        nothing = np.zeros(0, np.int64)
        self._tables.upload(nothing, nothing, nothing, self._stream)
        if wanted.static_scales is not None:
            self._storage.upload_static_scales(wanted.static_scales, self._stream)

    @classmethod
    def from_config(cls, config: Any, num_blocks: int | None = None, **options: Any) -> PagedKVCache:
        """A cache for a Hugging Face model.

        config: the model's config (or a dict of it), read for num_hidden_layers, num_key_value_heads, head_dim,
        max_position_embeddings and dtype.  options: of the class; they take precedence.  Without num_blocks and bytes=
        it gets 4096 blocks.
        """
        if num_blocks is None and options.get("bytes") is None:
            num_blocks = 4096
        return cls(num_blocks=num_blocks, **arguments.from_config(config, num_blocks, options))

    # ------------------------------------------------------------ tensors and counts

    @property
    def num_layers(self) -> int:
        return self._shape.num_layers

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._shape.block_size

    @property
    def dtype(self) -> DType:
        return self._shape.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in all layers: K, V and scales."""
        return self.num_blocks * self._shape.bytes_per_block

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences own."""
        return self._allocator.num_used

    @property
    def blocks_free(self) -> int:
        """Blocks that can be taken, `blocks_cached` included."""
        return self._allocator.num_free

    @property
    def blocks_shared(self) -> int:
        """Blocks that several sequences own."""
        return self._allocator.num_shared

    @property
    def blocks_cached(self) -> int:
        """Free blocks whose content a prompt with the same prefix would use again."""
        return self._allocator.num_cached

    def layer(self, index: int) -> CacheLayer:
        """Keys, values and scales of a layer.  After `grow` the same addresses with more blocks."""
        if not is_integer(index) or not 0 <= index < self.num_layers:
            raise InvalidArgumentError(
                f"layer: index={index!r}", hint=f"an integer from 0 to {self.num_layers - 1}"
            )
        return self._storage.layers[index]

    def table(self, name: str) -> CacheTensor:
        """A table of the steps in its full size, by its name in `Step`: what a plan made for all steps reads."""
        if not isinstance(name, str) or name not in self._storage.layout.tables:
            names = ", ".join(self._storage.layout.tables)
            raise InvalidArgumentError(f"table: name={name!r}", hint=f"one of {names}")
        return self._tables.tensor(name)

    @property
    def block_table(self) -> CacheTensor:
        """i32 [max_sequences, max_blocks_per_sequence]: row i belongs to the i-th sequence of the last step."""
        return self.table("block_table")

    @property
    def seq_lens(self) -> CacheTensor:
        """i32 [max_sequences]: lengths of the last step's sequences, then zeros."""
        return self.table("seq_lens")

    # ------------------------------------------------------------ sequences

    def allocate_sequence(self, tokens: int | Sequence[int] | np.ndarray = 0, *, salt: Salt = None) -> int:
        """A new sequence with blocks reserved for its prompt: token ids, or only their number; returns its id.

        With ids, blocks of a prefix that is stored already are shared, and `length` says how many tokens that is (never
        all: the last one has to be computed).  Steps then store the rest of that prompt, in one or several parts.
        salt: a str, bytes, an int or a tuple of them; only sequences of the same salt share blocks.  It stands for
        what keys and values depend on besides tokens (an adapter), and for who may know of whose prompts (a tenant).
        Raises OutOfBlocksError when blocks or sequence slots are lacking, and changes nothing.
        """
        return self._allocator.create(tokens, salt=salt)

    def fork(self, sequence: int) -> int:
        """A new sequence that shares all tokens stored so far; blocks part when one of the two writes on."""
        self._refuse_lost([sequence])
        return self._allocator.fork(sequence)

    def free_sequence(self, sequence: int, tokens: Sequence[int] | np.ndarray | None = None) -> int:
        """Give up a sequence; returns the number of blocks that became free.

        tokens: ids of all tokens that it holds: a later prompt can share them (the next turn of a conversation).
        """
        is_lost = is_integer(sequence) and sequence in self._lost
        freed = self._allocator.free(sequence, None if is_lost else tokens)
        self._lost.discard(sequence)
        return freed

    def truncate(self, sequences: Sequences, lengths: int | Sequence[int] | np.ndarray) -> int:
        """Forget sequences' tokens from `lengths` on (drafts not accepted); returns how many blocks became free.

        The next step stores its tokens from there; blocks that were reserved for a prompt's rest are given up, too.
        With a window, the tokens of the last step can be forgotten, and earlier ones while what the next query sees is
        still there.
        """
        ids = listed(sequences)
        if self._window_left is not None:
            self._refuse_behind_window(self._allocator.rows_of(ids), ids, lengths)
        freed = self._allocator.truncate(ids, lengths)
        self._tables.cut(self._allocator.rows_of(ids))
        if self._step_ids is not None and not set(ids).isdisjoint(self._step_ids):
            self._step_ids = None
        return freed

    def _refuse_behind_window(self, rows: np.ndarray, ids: tuple[int, ...], lengths: Any) -> None:
        """A query at one of these positions would see tokens whose blocks may be another sequence's by now."""
        assert self._window_left is not None
        wanted, released = token_counts(lengths, len(rows), "lengths"), self._allocator.released[rows]
        least = released * self.block_size + self._window_left
        for i in np.flatnonzero((released > 0) & (wanted < least))[:1].tolist():
            raise InvalidArgumentError(
                f"length={wanted[i]} of sequence {ids[i]}: its window of {self._window_left} tokens would reach before "
                f"{released[i] * self.block_size}, where its blocks were given up",
                hint=f"an integer from {least[i]} to {self._allocator.lengths[rows[i]]}",
            )

    def release_before(self, sequence: int, position: int) -> int:
        """Give up the blocks whose tokens all lie before `position`, which no query will see any more; returns how many
        blocks became free.

        The sequence's length and positions stay; its table's first entries mean nothing from the next step on.
        """
        return self._allocator.release_before(sequence, position)

    def length(self, sequence: int) -> int:
        """Tokens stored (or shared) so far."""
        return self._allocator.length(sequence)

    def blocks(self, sequence: int) -> list[int]:
        """Block ids of a sequence, in order, from the first that it still has."""
        return self._allocator.blocks(sequence)

    # ------------------------------------------------------------ steps

    def prepare_step(
        self, sequences: Sequences, new_tokens: int | Sequence[int] | np.ndarray = 1, *, stream: Any = None
    ) -> Step:
        """Room for new tokens of these sequences, and the tables that the kernels of one step need.

        sequences: ids, in the order of the batch.  new_tokens: of each, or one number for all.
        stream: on which the step's kernels will run; default: the cache's.  Shared blocks that are about to be written
        are copied on it, and the tables uploaded; nothing waits for the device.  A prepared step has to be run.

        Raises before anything has changed: OutOfBlocksError (a point to preempt a sequence), InvalidArgumentError for
        unknown or repeated sequences, and lengths over the limits; UnsupportedError inside a graph capture.  After a
        DeviceError all lengths are what they were; a sequence whose shared block was not copied can only be freed.
        """
        handle = self._stream if stream is None else stream_handle(stream)
        arguments.refuse_capture("prepare_step", handle)
        ids = listed(sequences)
        rows = self._allocator.rows_of(ids)
        counts = token_counts(new_tokens, len(rows))
        total = int(counts.sum())
        if total > self._shape.max_step_tokens:
            raise InvalidArgumentError(
                f"{total} new tokens in one step; max_step_tokens={self._shape.max_step_tokens}",
                hint="several steps (a prompt may be stored in parts), or a larger max_step_tokens",
            )
        with self._advancing(ids, rows, counts, handle) as copies:
            lengths = self._allocator.lengths[rows]
            self._tables.upload(rows, counts, lengths, handle)
        if self._window_left is not None:
            first_seen = np.maximum(lengths - counts - self._window_left, 0)
            self._allocator.release_rows_before(rows, first_seen)
        longest = int(lengths.max(initial=0))
        views = self._tables.of_step(len(rows), total)
        return Step(num_sequences=len(rows), num_tokens=total, max_seq_len=longest, copies=copies, **views)

    def extend_step(self, sequences: Sequences, *, stream: Any = None) -> None:
        """Room for one more token of each sequence of the last step, whose tables the device itself advances.

        As `prepare_step` with one new token each, but only what is new in the block table is uploaded: slot_mapping,
        positions and seq_lens are the caller's to bring from this step's to the next one's.

        Other sequences than the last step's, another order, and sequences that were truncated since raise
        InvalidArgumentError: a row of the block table would meet another's length.
        """
        handle = self._stream if stream is None else stream_handle(stream)
        arguments.refuse_capture("extend_step", handle)
        ids = listed(sequences)
        rows = self._allocator.rows_of(ids)
        if ids != self._step_ids:
            last = "none to go on from" if self._step_ids is None else f"of {list(self._step_ids)}"
            raise InvalidArgumentError(
                f"extend_step: sequences {list(ids)}, but the last step is {last}",
                hint="the sequences of the last step, in its order; else prepare_step",
            )
        with self._advancing(ids, rows, np.ones(len(rows), np.int64), handle):
            self._tables.upload_blocks(rows, handle)
        if self._window_left is not None:
            first_seen = np.maximum(self._allocator.lengths[rows] - 1 - self._window_left, 0)
            self._allocator.release_rows_before(rows, first_seen)

    @contextlib.contextmanager
    def _advancing(
        self, ids: tuple[int, ...], rows: np.ndarray, counts: np.ndarray, stream: int
    ) -> Iterator[np.ndarray]:
        """A step's sequences grow, and blocks that part are copied; the tables are uploaded inside.  When the device
        refuses, all is as before, but for sequences whose own copy of a shared block was not made: they are lost."""
        self._refuse_lost(ids)
        before = self._allocator.lengths[rows]
        copies = self._allocator.append_rows(rows, counts)
        self._step_ids, missing = None, set(copies[:, 1].tolist())
        try:
            for source, target in copies.tolist():
                self._storage.copy_block(source, target, stream)
                missing.discard(target)
            yield copies
        except BaseException:
            self._lost.update(i for i in ids if not missing.isdisjoint(self._allocator.blocks(i)))
            self._allocator.take_back(ids, before)
            self._tables.forget()
            raise
        self._step_ids = ids

    def _refuse_lost(self, ids: Iterable[int]) -> None:
        # Rarely any: to look at each id of a step takes 40 us of 256 sequences.
        lost = sorted(self._lost.intersection(filter(is_integer, ids))) if self._lost else []
        if lost:
            raise InvalidArgumentError(
                f"sequences {lost} lost a block when the device refused its copy in an earlier step",
                hint="free_sequence, and compute their tokens again",
            )

    def grow(self, num_blocks: int) -> None:
        """More blocks, up to max_num_blocks, at the same addresses; takes effect at once, and is refused in a capture.

        OutOfBlocksError, and nothing changed, when the device has too little memory.
        """
        arguments.refuse_capture("grow", self._stream)
        problems = []
        if not self._can_grow:
            problems.append("this cache was made without max_num_blocks")
        elif not is_size(num_blocks) or not self.num_blocks <= num_blocks <= self._max_num_blocks:
            span = f"{self.num_blocks} to {self._max_num_blocks}"
            problems.append(f"num_blocks={num_blocks!r} is not an integer in {span}")
        if problems:
            raise InvalidArgumentError("grow", problems, "PagedKVCache(..., max_num_blocks=the most of it)")
        self._storage.grow(num_blocks)
        self._allocator.grow(num_blocks)

    def __repr__(self) -> str:
        shape, allocator = self._shape, self._allocator
        return (
            f"PagedKVCache({shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim}, "
            f"{shape.dtype}, {self.nbytes / 2**20:.1f} MiB on {self._storage.arena.device}: "
            f"{allocator.num_blocks} blocks of {shape.block_size} tokens, {allocator.num_used} used, "
            f"{allocator.num_free} free, {allocator.num_cached} cached; "
            f"{allocator.num_sequences} of {shape.max_sequences} sequences)"
        )
