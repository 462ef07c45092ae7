"""A step of the paged cache that the device refuses half-way: nothing is forgotten, and what is lost says so."""

from __future__ import annotations

import numpy as np
import pytest

from cki.errors import DeviceError, InvalidArgumentError
from cki.memory import PagedKVCache


def _failing(monkeypatch, cache, name):
    def refuse(*_):
        raise DeviceError(f"{name} is refused")

    monkeypatch.setattr(cache._storage.arena, name, refuse)


def _two_of_one_prompt() -> tuple[PagedKVCache, int, int]:
    cache = PagedKVCache(
        1, 8, block_size=4, num_kv_heads=1, head_dim=4, dtype="f32", max_sequences=4, device="sim"
    )
    first = cache.allocate_sequence(6)
    cache.prepare_step([first], 6)
    return cache, first, cache.fork(first)


def test_a_refused_upload_leaves_lengths_and_the_step_can_be_tried_again(monkeypatch):
    cache, first, second = _two_of_one_prompt()
    third = cache.allocate_sequence(list(range(8)))
    with monkeypatch.context() as patch:
        _failing(patch, cache, "upload_rows")
        with pytest.raises(DeviceError):
            cache.prepare_step([first, second, third], [1, 4, 8])
    assert [cache.length(i) for i in (first, second, third)] == [6, 6, 0]
    assert cache.length(cache.allocate_sequence(list(range(8)))) == 0  # nobody finds what was never written
    step = cache.prepare_step([first, second, third], [1, 4, 8])
    assert np.from_dlpack(step.seq_lens).tolist() == [7, 10, 8]
    for row, sequence in enumerate((first, second, third)):
        blocks = cache.blocks(sequence)
        assert np.from_dlpack(step.block_table)[row, : len(blocks)].tolist() == blocks


@pytest.mark.parametrize("extends", [False, True])
def test_a_sequence_whose_copy_was_refused_can_only_be_freed(monkeypatch, extends):
    cache, first, second = _two_of_one_prompt()
    if extends:
        cache.prepare_step([first, second], [0, 0])
    with monkeypatch.context() as patch:
        _failing(patch, cache, "copy")
        with pytest.raises(DeviceError):
            cache.extend_step([first, second]) if extends else cache.prepare_step([first, second], 1)
    lost, kept = (i for _, i in sorted((cache.blocks(i)[1] == 1, i) for i in (first, second)))
    for call in (cache.fork, lambda i: cache.prepare_step([kept, i])):
        with pytest.raises(InvalidArgumentError, match=rf"sequences \[{lost}\] lost a block"):
            call(lost)
    assert cache.length(lost) == cache.length(kept) == 6
    cache.free_sequence(lost, list(range(6)))
    assert np.from_dlpack(cache.prepare_step([kept]).seq_lens).tolist() == [7]
