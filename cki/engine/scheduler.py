"""Which requests run in the next step: continuous batching over a paged cache.

A request waits, is admitted when the cache has blocks for its whole prompt, is computed in parts (prefill), brings a
token a step (decode), and leaves.

    add -> waiting -> admit -> running: prefill parts -> decode ... -> finish
              ^                            |
              '------- preempt ------------'

- **Order**: requests are admitted in the order in which they came, and none overtakes one that waits for blocks.  When
  a decode step finds no block, the running request that was admitted last gives way: its blocks are freed, and it waits
  in front of all others with what it has brought so far as its prompt.  So the oldest request always goes on, and each
  becomes the oldest: none starves.
- **Prefill**: parts of prompts share a step of at most max_step_tokens tokens, the oldest first.  A prefill step and a
  decode step take turns, so a long prompt delays running answers by one part at a time.
- **Sharing**: a prompt starts with the blocks of its longest stored prefix (`PagedKVCache.allocate_sequence`).
  Requests that finish or give way leave their blocks findable, so a preempted one is mostly not computed again.
- **Reserve**: admission leaves a free block for each running request, lest the newcomer gives way at once.

All of it is bookkeeping on the host; nothing here touches the device.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from cki.engine.model import ModelLimits
from cki.engine.request import Request
from cki.errors import OutOfBlocksError
from cki.memory import PagedKVCache


class Part(NamedTuple):
    """The next tokens of a request's prompt: `size` of them from `first` on."""

    request: Request
    first: int
    size: int

    @property
    def is_last(self) -> bool:
        """Whether the token that follows the part is the request's next."""
        return self.first + self.size == len(self.request.tokens)


class Scheduler:
    """waiting: in the order of admission.  running: in the order in which they were admitted."""

    def __init__(self, cache: PagedKVCache, limits: ModelLimits) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._cache, self._limits = cache, limits
        self._seen_rows = list(range(limits.max_sequences))
        # The first in line, and how many blocks were free when they were too few for it.
        self._too_few: tuple[Request | None, int] = (None, 0)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """A new request, behind all others."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Let waiting requests in, in their order, while the cache has room; returns them."""
        admitted = []
        while self.waiting and len(self.running) < self._limits.max_sequences:
            request, free = self.waiting[0], self._cache.blocks_free
            if self._too_few[0] is request and free <= self._too_few[1]:
                break
            try:
                sequence = self._cache.allocate_sequence(request.tokens)
            except OutOfBlocksError:
                self._too_few = request, free
                break
            if self.running and self._cache.blocks_free < len(self.running):
                self._cache.free_sequence(sequence)
                self._too_few = request, free
                break
            self._too_few = None, 0
            self.waiting.popleft()
            request.sequence = sequence
            if request.cached_tokens < 0:
                request.cached_tokens = self._cache.length(sequence)
            if request.params.repetition_penalty != 1:
                request.seen_row = self._seen_rows.pop()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def prefill_parts(self) -> list[Part]:
        """What the next prefill step computes: of requests that lack more than their last token."""
        parts: list[Part] = []
        room, keys = self._limits.max_step_tokens, self._limits.max_step_keys
        for request in self.running:
            stored = self._stored(request)
            if request.length - stored > 1 and room:
                size = min(len(request.tokens) - stored, room)
                keys -= stored + size
                if parts and keys < 0:
                    break
                parts.append(Part(request, stored, size))
                room -= size
        return parts

    def decode_batch(self) -> list[Request]:
        """Requests of which only the last token is not stored, and which go on after it.

        A token in flight is taken to be there, unless it is the last that its request may have.
        """
        return [
            request
            for request in self.running
            if request.length - self._stored(request) == 1 and not self._ends_in_flight(request)
        ]

    def preempt(self) -> Request:
        """Make the request that was admitted last give way; returns it.  Not while one of its tokens is in flight."""
        request = self.running.pop()
        assert not request.in_flight
        self._release(request)
        request.preemptions += 1
        self.waiting.appendleft(request)
        return request

    def remove(self, request: Request) -> None:
        """A request that has ended leaves, wherever it is."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _release(self, request: Request) -> None:
        assert request.sequence is not None
        if request.in_flight:
            # The step under way stores a token, unless it finds that the sequence has ended: nobody relies on it.
            self._cache.truncate([request.sequence], [self._stored(request) - request.in_flight])
        self._cache.free_sequence(request.sequence, request.tokens[: self._stored(request)])
        request.sequence = None
        if request.seen_row >= 0:
            self._seen_rows.append(request.seen_row)
            request.seen_row = -1

    def _stored(self, request: Request) -> int:
        assert request.sequence is not None
        return self._cache.length(request.sequence)

    def _ends_in_flight(self, request: Request) -> bool:
        longest = min(request.prompt_length + request.params.max_tokens, self._limits.max_length)
        return bool(request.in_flight) and request.length >= longest
