"""The block allocator against a naive model, under random requests.

The model keeps for every sequence the tokens it holds and writes them into an array of slots, block by block, as
kernels would: what a sequence reads back through its table must be its own tokens, whoever shares or copies blocks.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cki.errors import OutOfBlocksError
from cki.memory import BlockAllocator


class Model:
    """An allocator, the memory it governs, and what each sequence should hold."""

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int = 6) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size, max_sequences=max_sequences)
        self.memory = np.full((num_blocks, block_size), -1)
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.salts: dict[int, int | None] = {}
        self.released: dict[int, int] = {}
        self.ever: list[tuple[object, ...]] = []
        self.fresh = itertools.count(1000)
        self.num_copies = 0

    def create(self, prompt: list[int], salt: int | None = None) -> int | None:
        free = self.allocator.num_free
        try:
            sequence = self.allocator.create(prompt, salt=salt)
        except OutOfBlocksError:
            assert self.allocator.num_free == free
            return None
        found = self.allocator.length(sequence)
        assert found % self.allocator.block_size == 0
        assert found < max(len(prompt), 1)
        self.tokens[sequence] = prompt[:found]
        self.prompts[sequence] = prompt[found:]
        self.salts[sequence], self.released[sequence] = salt, 0
        if found:
            assert (salt, *prompt[:found]) in self.ever, "shared a prefix that nobody of this salt stored"
        assert self.read(sequence) == prompt[:found], "a shared prefix holds other tokens"
        return sequence

    def append(self, counts: dict[int, int]) -> None:
        before = {s: self.allocator.blocks(s) for s in self.tokens}
        reported = None
        free = self.allocator.num_free
        try:
            copies = self.allocator.append(list(counts), list(counts.values()))
        except OutOfBlocksError as error:
            reported = error.needed, error.free
        if reported is not None:
            assert reported[0] > reported[1] == free == self.allocator.num_free
            assert {s: self.allocator.blocks(s) for s in self.tokens} == before
            return
        self.num_copies += len(copies)
        sources, targets = copies.T
        assert len(set(targets)) == len(targets)
        assert not set(targets.tolist()) & {b for blocks in before.values() for b in blocks}
        self.memory[targets] = self.memory[sources]
        for sequence, count in counts.items():
            for _ in range(count):
                prompt = self.prompts[sequence]
                token = prompt.pop(0) if prompt else next(self.fresh)
                place, offset = divmod(len(self.tokens[sequence]), self.allocator.block_size)
                block = self.allocator.blocks(sequence)[place - self.released[sequence]]
                self.memory[block, offset] = token
                self.tokens[sequence].append(token)
            self.remember(sequence)

    def remember(self, sequence: int) -> None:
        size, tokens = self.allocator.block_size, self.tokens[sequence]
        ends = range(size, len(tokens) + 1, size)
        self.ever += [(self.salts[sequence], *tokens[:end]) for end in ends]

    def fork(self, sequence: int) -> int | None:
        try:
            child = self.allocator.fork(sequence)
        except OutOfBlocksError:
            assert self.allocator.num_sequences == len(self.allocator.lengths)
            return None
        self.tokens[child] = list(self.tokens[sequence])
        self.prompts[child] = []
        self.salts[child], self.released[child] = self.salts[sequence], self.released[sequence]
        return child

    def truncate(self, sequence: int, length: int) -> None:
        length = max(length, self.released[sequence] * self.allocator.block_size)
        if length <= len(self.tokens[sequence]):
            self.allocator.truncate(sequence, length)
            del self.tokens[sequence][length:]
            self.prompts[sequence] = []

    def release_before(self, sequence: int, position: int) -> None:
        before = self.allocator.num_free
        freed = self.allocator.release_before(sequence, min(position, len(self.tokens[sequence])))
        assert self.allocator.num_free == before + freed
        blocks = min(position, len(self.tokens[sequence])) // self.allocator.block_size
        self.released[sequence] = max(self.released[sequence], blocks)

    def free(self, sequence: int, with_tokens: bool) -> None:
        owners = Counter(b for s in self.tokens for b in self.allocator.blocks(s))
        alone = sum(owners[b] == 1 for b in self.allocator.blocks(sequence))
        tokens = self.tokens.pop(sequence)
        del self.prompts[sequence]
        assert self.allocator.free(sequence, tokens if with_tokens else None) == alone

    def read(self, sequence: int) -> list[int]:
        flat = self.memory[self.allocator.blocks(sequence)].reshape(-1)
        begin = self.released[sequence] * self.allocator.block_size
        return [int(token) for token in flat[: self.allocator.length(sequence) - begin]]

    def check(self) -> None:
        """No leak, no double ownership, every count right, every sequence reads its own tokens."""
        allocator = self.allocator
        owners: Counter[int] = Counter()
        for sequence, tokens in self.tokens.items():
            blocks = allocator.blocks(sequence)
            assert len(set(blocks)) == len(blocks)
            begin = self.released[sequence] * allocator.block_size
            assert begin + len(blocks) * allocator.block_size >= len(tokens) == allocator.length(sequence)
            owners.update(blocks)
            assert self.read(sequence) == tokens[begin:]
        for block, count in owners.items():
            if count > 1:
                holders = [s for s in self.tokens if block in allocator.blocks(s)]
                places = {self.released[s] + allocator.blocks(s).index(block) for s in holders}
                assert len(places) == len({self.salts[s] for s in holders}) == 1
        assert allocator.num_used == len(owners)
        assert allocator.num_shared == sum(count > 1 for count in owners.values())
        assert allocator.num_free + allocator.num_used == allocator.num_blocks
        assert allocator.num_cached <= allocator.num_free
        assert allocator.num_sequences == len(self.tokens)
        np.testing.assert_array_equal(allocator._owners, [owners[b] for b in range(allocator.num_blocks)])
        empty = allocator._empty[: allocator._num_empty].tolist()
        assert sorted([*empty, *allocator._cached, *owners]) == list(range(allocator.num_blocks))


def prompts() -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that prefixes meet."""
    return st.lists(st.integers(0, 1), max_size=12)


class Requests(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.model: Model | None = None

    @rule(blocks=st.integers(1, 12), size=st.integers(1, 5))
    def start(self, blocks: int, size: int) -> None:
        if self.model is None:
            self.model = Model(blocks, size)

    def one(self, sequence: int | None) -> bool:
        return self.model is not None and sequence in self.model.tokens

    @rule(target=sequences, prompt=prompts(), salt=st.sampled_from([None, None, 1]))
    def create(self, prompt: list[int], salt: int | None) -> int | None:
        model = self.model
        if model is None or len(prompt) > model.allocator.num_blocks * model.allocator.block_size:
            return None
        return model.create(prompt, salt)

    @rule(batch=st.dictionaries(sequences, st.integers(0, 6), min_size=1, max_size=4))
    def append(self, batch: dict[int | None, int]) -> None:
        if self.model is None:
            return
        model, room = self.model, self.model.allocator.num_blocks * self.model.allocator.block_size
        counts = {s: n for s, n in batch.items() if s is not None and self.one(s)}
        model.append({s: min(n, room - len(model.tokens[s])) for s, n in counts.items()})

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int | None) -> int | None:
        return (
            self.model.fork(sequence) if self.model and sequence is not None and self.one(sequence) else None
        )

    @rule(sequence=sequences, length=st.integers(0, 20))
    def truncate(self, sequence: int | None, length: int) -> None:
        if self.model and sequence is not None and self.one(sequence):
            self.model.truncate(sequence, length)

    @rule(sequence=sequences, position=st.integers(0, 20))
    def release_before(self, sequence: int | None, position: int) -> None:
        if self.model and sequence is not None and self.one(sequence):
            self.model.release_before(sequence, position)

    @rule(sequence=consumes(sequences), with_tokens=st.booleans())
    def free(self, sequence: int | None, with_tokens: bool) -> None:
        if self.model and sequence is not None and self.one(sequence):
            self.model.free(sequence, with_tokens)

    @invariant()
    def consistent(self) -> None:
        if self.model is not None:
            self.model.check()

    def teardown(self) -> None:
        if self.model is not None:
            for sequence in list(self.model.tokens):
                self.model.free(sequence, False)
            self.model.check()
            assert self.model.allocator.num_free == self.model.allocator.num_blocks


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize(("blocks", "size"), [(40, 1), (24, 4), (12, 16)])
def test_free_returns_all_after_thousands_of_requests(blocks: int, size: int) -> None:
    """10000 requests in all; the model is compared after each."""
    rng = random.Random(blocks)
    model = Model(blocks, size, max_sequences=16)
    shared = refused = 0
    for _ in range(3334):
        live = list(model.tokens)
        action = rng.random()
        if action < 0.35:
            stem = rng.choice(([], [0] * 3 * size, [0] * size + [1] * size))
            limit = blocks * size // 3
            prompt = [*stem, *(rng.randrange(2) for _ in range(rng.randrange(limit)))]
            created = model.create(prompt, rng.choice((None, None, 7)))
            refused += created is None
            shared += created is not None and bool(model.tokens[created])
        elif action < 0.65 and live:
            batch = rng.sample(live, rng.randint(1, len(live)))
            room = {s: blocks * size - len(model.tokens[s]) for s in batch}
            model.append({s: min(rng.randrange(2 * size + 1), room[s]) for s in batch})
        elif action < 0.75 and live:
            model.fork(rng.choice(live))
        elif action < 0.85 and live:
            sequence = rng.choice(live)
            place = rng.randrange(len(model.tokens[sequence]) + 1)
            (model.truncate if rng.random() < 0.6 else model.release_before)(sequence, place)
        elif live:
            model.free(rng.choice(live), rng.random() < 0.5)
        model.check()
    for sequence in list(model.tokens):
        model.free(sequence, False)
    model.check()
    assert model.allocator.num_free == blocks
    assert min(shared, refused) > 10, "the requests never met the paths that they are to test"
    assert size == 1 or model.num_copies > 10
