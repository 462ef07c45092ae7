"""The block allocator: the cases from public bug reports, prefix sharing and eviction, arguments that are refused."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest

from cki import CkiError
from cki.errors import InvalidArgumentError, InvalidTypeError, OutOfBlocksError
from cki.memory import BlockAllocator
from tests import cases

SCRIPTS = {case.name: case for case in cases.build() if case.op == "block_allocator"}

#: What an error of a script has to be here: its class, and words of its message.
ERRORS = {
    "DoubleFree": (InvalidArgumentError, "freed already"),
    "UnknownSequence": (InvalidArgumentError, "never created"),
    "BadArgument": (InvalidArgumentError, "0 or more"),
    "OutOfBlocks": (OutOfBlocksError, r"\d+ needed, \d+ of \d+ free"),
}


class Named:
    """The allocator under names of the scripts' choice; it issues ids itself, so a name cannot be taken twice."""

    def __init__(self, blocks: int, page: int) -> None:
        self.allocator = BlockAllocator(blocks, page)
        self.ids: dict[str, int] = {}

    def create(self, name: str, tokens: int) -> int:
        sequence = self.allocator.create(tokens)
        self.allocator.append(sequence, tokens)
        self.ids[name] = sequence
        return len(self.allocator.blocks(sequence))

    def append(self, name: str, tokens: int) -> tuple[int, int]:
        sequence = self.ids.get(name, 999)
        before = set(self.allocator.blocks(sequence)) if name in self.ids else set()
        copies = self.allocator.append(sequence, tokens)
        return len(set(self.allocator.blocks(sequence)) - before) - len(copies), len(copies)

    def fork(self, name: str, child: str) -> int:
        self.ids[child] = self.allocator.fork(self.ids[name])
        return len(self.allocator.blocks(self.ids[child]))

    def free(self, name: str) -> int:
        return self.allocator.free(self.ids.get(name, 999))

    def num_free(self) -> int:
        return self.allocator.num_free

    def tokens(self, name: str) -> int:
        return self.allocator.length(self.ids[name])

    def shares_last_block(self, a: str, b: str) -> bool:
        return self.allocator.blocks(self.ids[a])[-1] == self.allocator.blocks(self.ids[b])[-1]


def state(allocator: BlockAllocator) -> bytes:
    return pickle.dumps(allocator)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str) -> None:
    case = SCRIPTS[name]
    named = Named(**case.params)
    for method, arguments, expected in case.script:
        if not isinstance(expected, dict):
            assert getattr(named, method)(*arguments) == expected, (method, arguments)
            continue
        if method == "create" and arguments[0] in named.ids and arguments[1] >= 0:
            first = named.ids[arguments[0]]
            assert named.allocator.create(0) != first  # the id is new: nothing to refuse
            continue
        before = state(named.allocator)
        kind, words = ERRORS[expected["error"]]
        with pytest.raises(kind, match=words) as caught:
            getattr(named, method)(*arguments)
        assert isinstance(caught.value, CkiError)
        assert state(named.allocator) == before, "a refused request changed something"


def filled(allocator: BlockAllocator, tokens: list[int]) -> tuple[int, int]:
    """A sequence that holds these tokens, and how many of them were shared."""
    sequence = allocator.create(tokens)
    shared = allocator.length(sequence)
    allocator.append(sequence, len(tokens) - shared)
    return sequence, shared


def test_prefix_share_counts_and_blocks() -> None:
    allocator = BlockAllocator(16, 4)
    prompt = list(range(10))
    a, shared = filled(allocator, prompt)
    assert shared == 0
    b, shared = filled(allocator, [*prompt[:9], 99])
    assert shared == 8
    assert allocator.blocks(a)[:2] == allocator.blocks(b)[:2]
    assert allocator.blocks(a)[2] != allocator.blocks(b)[2]
    assert (allocator.num_used, allocator.num_shared, allocator.num_free) == (4, 2, 12)
    c, shared = filled(allocator, [*prompt[:4], 77, *prompt[5:]])
    assert shared == 4, "the second block differs, so nothing after it is shared"
    d, shared = filled(allocator, [77, *prompt[1:]])
    assert shared == 0, "an equal second block after another first one is another prefix"
    for sequence in (a, b, c, d):
        allocator.free(sequence)
    assert allocator.num_free == 16


def test_prefix_share_leaves_the_last_token_to_compute() -> None:
    allocator = BlockAllocator(16, 4)
    a, _ = filled(allocator, list(range(8)))
    assert filled(allocator, list(range(8)))[1] == 4
    assert filled(allocator, list(range(9)))[1] == 8
    assert filled(BlockAllocator(4, 1), [5])[1] == 0
    allocator.free(a)


def test_prefix_is_shared_only_once_it_is_stored() -> None:
    allocator = BlockAllocator(16, 4)
    a = allocator.create(list(range(12)))
    assert allocator.length(allocator.create(list(range(12)))) == 0
    allocator.append(a, 5)
    assert allocator.length(allocator.create(list(range(12)))) == 4
    allocator.append(a, 3)
    assert allocator.length(allocator.create(list(range(12)))) == 8


def test_freed_blocks_keep_their_content_until_it_is_their_turn() -> None:
    allocator = BlockAllocator(4, 2)
    old, _ = filled(allocator, [1, 2, 3, 4])
    allocator.free(old)
    young, _ = filled(allocator, [5, 6, 7, 8])
    allocator.free(young)
    assert (allocator.num_free, allocator.num_cached, allocator.num_used) == (4, 4, 0)
    # One block is needed: the least recently used goes, and of a prefix its end first.
    other = allocator.create(1)
    assert allocator.num_cached == 3
    assert filled(allocator, [1, 2, 9])[1] == 2
    assert allocator.num_cached == 1
    allocator.free(other)
    assert filled(allocator, [5, 6, 9])[1] == 2


def test_shared_cached_blocks_do_not_count_as_room() -> None:
    allocator = BlockAllocator(4, 2, max_blocks_per_sequence=8)
    sequence, _ = filled(allocator, [1, 2, 3, 4])
    allocator.free(sequence)
    before = state(allocator)
    with pytest.raises(OutOfBlocksError) as caught:
        allocator.create([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])  # 5 blocks
    assert (caught.value.needed, caught.value.free) == (5, 4)
    assert state(allocator) == before
    filled(allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    assert allocator.num_free == 0


def test_generated_tokens_are_shared_when_their_ids_are_given() -> None:
    allocator = BlockAllocator(8, 2)
    a, _ = filled(allocator, [1, 2, 3])
    allocator.append(a, 3)
    before = state(allocator)
    with pytest.raises(InvalidArgumentError, match="5 tokens of sequence 0, which holds 6"):
        allocator.free(a, [1, 2, 3, 4, 5])
    assert state(allocator) == before
    allocator.free(a, [1, 2, 3, 4, 5, 6])
    assert filled(allocator, [1, 2, 3, 4, 5, 6, 7])[1] == 6


def test_copy_on_write_of_a_batch_leaves_the_original_to_the_last_owner() -> None:
    allocator = BlockAllocator(16, 4)
    a = allocator.create()
    allocator.append(a, 6)
    beams = [a, allocator.fork(a), allocator.fork(a)]
    original = allocator.blocks(a)[1]
    copies = allocator.append(beams, 1)
    assert copies.tolist() == [[original, 2], [original, 3]]
    assert [allocator.blocks(s)[1] for s in beams] == [2, 3, original]
    assert [allocator.blocks(s)[0] for s in beams] == [allocator.blocks(a)[0]] * 3
    assert allocator.append(beams, 1).size == 0
    # One that does not write is copied from, not to.
    c = allocator.fork(a)
    assert len(allocator.append([a, c], [1, 0])) == 0, "the block was full: the next token opens a new one"
    d = allocator.fork(a)
    assert len(allocator.append([a, d], [0, 1])) == 1


def test_fork_shares_tokens_not_reserved_blocks() -> None:
    allocator = BlockAllocator(8, 4)
    a = allocator.create(16)
    allocator.append(a, 5)
    b = allocator.fork(a)
    assert (len(allocator.blocks(a)), len(allocator.blocks(b))) == (4, 2)
    allocator.append([a, b], 8)
    assert set(allocator.blocks(a)[1:]).isdisjoint(allocator.blocks(b)[1:])


def test_on_demand() -> None:
    allocator = BlockAllocator(8, 4)
    a = allocator.create()
    used = []
    for _ in range(9):
        allocator.append(a)
        used.append(allocator.num_used)
    assert used == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_all_slots_occupied() -> None:
    allocator = BlockAllocator(8, 4, max_sequences=2)
    a = allocator.create()
    allocator.create()
    before = state(allocator)
    for request in (lambda: allocator.create(), lambda: allocator.fork(a)):
        with pytest.raises(
            OutOfBlocksError, match=r"all 2 sequence slots are occupied\n  hint: free a sequence"
        ):
            request()
    assert state(allocator) == before
    allocator.free(a)
    allocator.create()


def test_an_id_to_come_was_never_created() -> None:
    allocator = BlockAllocator(4, 4)
    a = allocator.create()
    with pytest.raises(InvalidArgumentError, match=f"sequence {a + 1} was never created"):
        allocator.length(a + 1)


def test_growing_to_the_same_size_changes_nothing() -> None:
    allocator = BlockAllocator(4, 4)
    before = state(allocator)
    allocator.grow(4)
    assert allocator.num_free == 4 and state(allocator) == before


def test_grow_keeps_what_is_there() -> None:
    allocator = BlockAllocator(2, 1, max_blocks_per_sequence=6)
    a = allocator.create()
    allocator.append(a, 2)
    with pytest.raises(OutOfBlocksError):
        allocator.append(a, 1)
    allocator.grow(5)
    allocator.append(a, 3)
    assert sorted(allocator.blocks(a)) == [0, 1, 2, 3, 4]
    assert allocator.blocks(a)[:2] == [0, 1]
    allocator.free(a)
    assert (allocator.num_free, allocator.num_blocks) == (5, 5)
    with pytest.raises(InvalidArgumentError, match="from 5"):
        allocator.grow(4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: BlockAllocator(0, -1), "num_blocks=0.*block_size=-1"),
        (lambda a: BlockAllocator(4, 2.0), "block_size=2.0"),
        (lambda a: BlockAllocator(True, 2), "num_blocks=True"),
        (
            lambda a: BlockAllocator(2**31 - 1, 4, max_sequences=2**31 - 1),
            r"max_sequences=2147483647 \* max_blocks_per_sequence=2147483647.*a smaller",
        ),
        (lambda a: a.create(-1), "0 or more"),
        (lambda a: a.create([1.5]), "float64"),
        (lambda a: a.create([[1]]), r"shape \(1, 1\)"),
        (lambda a: a.create(9), "5 blocks; max_blocks_per_sequence=4 allows 8 tokens"),
        (lambda a: a.append(0, 9), "sequence 0 with 9 tokens needs 5 blocks"),
        (lambda a: a.append([0, 1], [1]), "2 of them"),
        (lambda a: a.append([0, 1], [1, -1]), "0 or more"),
        (lambda a: a.append(0, 1.5), "one integer"),
        # Sums that would leave 64 bits, and what NumPy would wrap: the length became negative.
        (lambda a: a.append(0, 2**63 - 1), "9223372036854775807.*below 2\\^31"),
        (lambda a: a.append([0], [2**63 - 1]), "below 2\\^31"),
        (lambda a: a.append([0], np.array([2**64 - 1], np.uint64)), "18446744073709551615.*below 2\\^31"),
        (lambda a: a.append(0, 2**64), "below 2\\^31"),
        (lambda a: a.append([0, 1], [[1], [1, 2]]), "2 of them"),
        (lambda a: a.create(2**64), "below 2\\^31"),
        (lambda a: a.create(np.array([2**64 - 1], np.uint64)), "18446744073709551615.*below 2\\^63"),
        (lambda a: a.create([[1], [1, 2]]), "one for each token"),
        # What equals an id, or is made of some, is none.
        (lambda a: a.append(True), "sequence True was never created"),
        (lambda a: a.append([0, True]), "sequence True was never created"),
        (lambda a: a.append([1.0]), "sequence 1.0 was never created"),
        (lambda a: a.append(np.array([0.0, 1.0])), "0.0.* was never created"),
        (lambda a: a.append(b"\0"), "was never created.*an id that was given out here"),
        (lambda a: a.append(None), "sequence None was never created"),
        (lambda a: a.append(1.5), "sequence 1.5 was never created"),
        (lambda a: a.append(np.True_), "True.* was never created"),
        (lambda a: a.append(np.array(0.0)), "sequence 0.0 was never created"),
        (lambda a: a.append([[0]]), r"sequence \[0\] was never created"),
        (lambda a: a.truncate(0, 2**64), "lengths: 18446744073709551616"),
        (lambda a: a.append([0, 1, 0]), r"twice in one call: \[0\]"),
        (lambda a: a.append([0, 7, "x"]), "sequence 7 was never created"),
        (lambda a: a.free(None), "sequence None was never created"),
        (lambda a: a.length([0]), r"sequence \[0\] was never created"),
        (lambda a: a.fork(True), "sequence True was never created"),
        (lambda a: a.truncate(0, 1), "length=1 of sequence 0, which holds 0 tokens"),
        (lambda a: a.truncate([1, 0], [0, 3]), "length=3 of sequence 0.*from 0 to 0"),
        (lambda a: a.truncate(0, -1), "lengths: -1"),
        (lambda a: a.truncate([0, 1], [0]), "2 of them"),
        (lambda a: a.truncate(7, 0), "never created"),
        (lambda a: a.release_before(0, 1), "position=1 of sequence 0"),
        (lambda a: a.release_before(0, 0.0), "position=0.0"),
    ],
)
def test_refused(call: Any, words: str) -> None:
    allocator = BlockAllocator(16, 2, max_blocks_per_sequence=4)
    allocator.create()
    allocator.create()
    before = state(allocator)
    with pytest.raises(InvalidArgumentError) as caught:
        call(allocator)
    assert re.search(words, str(caught.value), re.DOTALL)
    assert state(allocator) == before


def test_truncate_gives_up_blocks_and_those_reserved() -> None:
    allocator = BlockAllocator(10, 4)
    a = allocator.create(30)
    allocator.append(a, 11)
    assert (allocator.truncate(a, 9), allocator.length(a)) == (5, 9)
    kept = allocator.blocks(a)
    assert (len(kept), allocator.truncate(a, 9), allocator.truncate(a, 8)) == (3, 0, 1)
    allocator.append(a, 5)
    assert allocator.blocks(a)[:2] == kept[:2]
    assert (allocator.truncate(a, 0), allocator.num_free, allocator.blocks(a)) == (4, 10, [])


def test_a_truncated_block_is_found_until_it_is_overwritten() -> None:
    """Full blocks of a known prompt, of which the second is cut short and then written on."""
    allocator, prompt = BlockAllocator(10, 4), list(range(9))
    a = allocator.create(prompt)
    allocator.append(a, 9)
    allocator.truncate(a, 6)
    b = allocator.create(prompt)
    assert allocator.length(b) == 8, "both blocks hold what they held"
    assert len(allocator.append(a, 1)) == 1, "now that b has it, a writes into a copy"
    allocator.truncate(b, 7)
    assert len(allocator.append(b, 1)) == 0, "the last owner writes in place"
    c = allocator.create(prompt)
    assert allocator.length(c) == 4, "what was overwritten is not found"


def test_a_block_that_became_known_after_the_cut_is_forgotten_too() -> None:
    allocator, tokens = BlockAllocator(10, 4), list(range(8))
    a = allocator.create()
    allocator.append(a, 8)
    b = allocator.fork(a)
    allocator.truncate(b, 6)
    allocator.free(a, tokens)
    assert allocator.length(allocator.create([*tokens, 8])) == 8
    c = allocator.fork(b)
    allocator.append([b, c], 1)
    assert allocator.length(allocator.create([*tokens, 8])) == 8, "c and b wrote into copies"


@pytest.mark.parametrize("meanwhile", ["fork", "the same cut again", "nothing appended", "a longer cut"])
def test_a_cut_is_remembered_until_something_is_written(meanwhile: str) -> None:
    allocator, prompt = BlockAllocator(10, 4), list(range(9))
    a = allocator.create(prompt)
    allocator.append(a, 9)
    allocator.truncate(a, 7 if meanwhile == "a longer cut" else 6)
    if meanwhile == "fork":
        child = allocator.fork(a)
        allocator.free(a)
        a = child
    elif meanwhile == "nothing appended":
        allocator.append(a, 0)
        b = allocator.create(prompt)
        assert allocator.length(b) == 8
        allocator.free(b)
    else:
        allocator.truncate(a, 6)
    assert allocator.append(a, 1).size == 0, "the only owner writes in place"
    assert allocator.length(allocator.create(prompt)) == 4, "what was overwritten is not found"


def test_what_was_never_written_is_not_found() -> None:
    allocator, prompt = BlockAllocator(10, 4), list(range(9))
    a = allocator.create(prompt)
    allocator.append(a, 4)
    allocator.append(a, 5)
    allocator.take_back(a, np.array([4]))
    b = allocator.create(prompt)
    assert (allocator.length(a), allocator.length(b)) == (4, 4)


def test_a_truncated_prompt_is_known_as_far_as_it_is_left() -> None:
    allocator, prompt = BlockAllocator(10, 2), list(range(9))
    a = allocator.create(prompt)
    allocator.append(a, 5)
    allocator.truncate(a, 3)
    allocator.append(a, 6)  # other tokens, perhaps
    assert allocator.length(allocator.create(prompt)) == 2


def test_release_before_keeps_positions_and_what_follows() -> None:
    allocator = BlockAllocator(6, 4)
    a = allocator.create()
    allocator.append(a, 22)
    blocks = allocator.blocks(a)
    assert [allocator.release_before(a, position) for position in (3, 11, 9, 12)] == [0, 2, 0, 1]
    assert (allocator.blocks(a), allocator.length(a), allocator.num_free) == (blocks[3:], 22, 3)
    b = allocator.fork(a)
    assert (allocator.blocks(b), allocator.num_shared) == (blocks[3:], 3)
    with pytest.raises(InvalidArgumentError, match="from 12 to 22"):
        allocator.truncate(a, 11)
    assert [allocator.free(a), allocator.free(b), allocator.num_free] == [0, 3, 6]


@pytest.mark.parametrize("salt", [0, "a", b"a", ("a", 1), ("a", "1"), ("a1",), [None], ""])
def test_only_sequences_of_one_salt_share(salt: Any) -> None:
    allocator, prompt = BlockAllocator(60, 2), list(range(5))
    for tokens_too in (False, True):
        a = allocator.create(prompt, salt=salt)
        allocator.append(a, 5 - allocator.length(a))
        allocator.free(a, prompt if tokens_too else None)
        for other in (None, 1, "b", b"b", ("a", 2)):
            assert allocator.length(allocator.create(prompt, salt=other)) == 0
    again = allocator.create(prompt, salt=salt)
    assert allocator.length(allocator.fork(again)) == allocator.length(again) == 4


def test_a_salt_is_a_plain_value() -> None:
    for salt in (1.5, object(), ("a", 2.0)):
        with pytest.raises(InvalidTypeError, match="salt: "):
            BlockAllocator(2, 2).create([1], salt=salt)


def test_any_block_size_and_numpy_integers() -> None:
    for size in (1, 3, 16, 1000):
        allocator = BlockAllocator(np.int64(10), size)
        sequence = allocator.create(np.arange(2 * size + 1))
        allocator.append(sequence, np.int32(2 * size + 1))
        assert len(allocator.blocks(sequence)) == 3
        assert allocator.free(sequence) == 3
