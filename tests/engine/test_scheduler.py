"""The engine's loop over a model without arithmetic: whatever is shared or preempted, tokens are the right ones."""

from __future__ import annotations

import numpy as np
import pytest

from cki.engine.engine import Engine
from cki.engine.model import ModelLimits
from cki.engine.request import Request
from cki.engine.sampling_params import SamplingParams
from cki.errors import DeviceError
from tests.engine.fake_model import FakeModel, answer


def request_for(prompt: list[int], max_tokens: int, **options: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **options)
    return Request(prompt, params, 0, frozenset(params.stop_token_ids), None)


def engine_of(
    num_blocks: int, *, overlap: bool = True, sequences: int = 4, length: int = 64, part: int = 16
) -> Engine:
    return Engine(FakeModel(ModelLimits(sequences, part, length), num_blocks, 4), overlap=overlap)


def run(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.add(request)
    while not all(request.is_finished for request in requests):
        engine.step()


def check(engine: Engine, requests: list[Request], longest: int = 64) -> None:
    """Every request has its answer, and nothing is left behind."""
    for request in requests:
        prompt = request.tokens[: request.prompt_length]
        count = min(request.params.max_tokens, longest - len(prompt))
        assert request.tokens[request.prompt_length :] == answer(prompt, count)
        assert request.finish_reason == "length"
    engine.step()  # lets go of what was in flight
    assert engine.model.cache.blocks_used == 0
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_are_those_of_lonely_requests(overlap: bool) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, n).tolist() for n in (1, 3, 4, 5, 17, 40, 16, 2, 33)]
    requests = [request_for(prompt, 10) for prompt in prompts]
    engine = engine_of(64, overlap=overlap)
    run(engine, requests)
    check(engine, requests)
    assert not any(request.preemptions for request in requests)


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_requests_begin_again_and_end_right(overlap: bool) -> None:
    rng = np.random.default_rng(1)
    requests = [request_for(rng.integers(0, 1000, 9).tolist(), 40) for _ in range(5)]
    engine = engine_of(20, overlap=overlap)  # each needs 13 blocks at its end
    run(engine, requests)
    check(engine, requests)
    assert sum(request.preemptions for request in requests) > 0
    assert requests[0].preemptions == 0  # the oldest never gives way
    # What a request finds of its own, when it begins again, was no other request's.
    assert not any(request.cached_tokens for request in requests)


def test_requests_end_in_the_order_in_which_they_came_when_alike() -> None:
    engine = engine_of(18, sequences=3)
    requests = [request_for([number] * 8, 40) for number in range(6)]
    ended: list[Request] = []
    for request in requests:
        engine.add(request)
    while len(ended) < len(requests):
        engine.step()
        ended += [request for request in requests if request.is_finished and request not in ended]
    assert ended == requests
    check(engine, requests)


def test_a_stored_prefix_is_shared() -> None:
    engine = engine_of(64)
    first = request_for(list(range(30)), 5)
    run(engine, [first])
    again = request_for([*range(20), 7, 7], 5)
    follow_up = request_for([*first.tokens, 1, 2, 3], 5)
    run(engine, [again, follow_up])
    check(engine, [first, again, follow_up])
    assert (first.cached_tokens, again.cached_tokens, follow_up.cached_tokens) == (0, 20, 32)


def test_a_long_prompt_comes_in_parts_while_others_go_on() -> None:
    engine = engine_of(64, length=200, part=8)
    short, long = request_for([1, 2], 30), request_for(list(range(100)), 3)
    engine.add(short)
    engine.step()
    engine.add(long)
    while not long.new_tokens:
        before = short.new_tokens
        engine.step()
        assert short.new_tokens > before or short.is_finished or engine.num_steps[0] <= 2
    assert engine.num_steps[0] == 1 + 13  # 12 parts of 8 tokens and one of 4
    run(engine, [])
    while not short.is_finished:
        engine.step()
    check(engine, [short, long], 200)


def test_a_prompt_that_finds_no_room_is_looked_at_again_when_blocks_come_free() -> None:
    engine = engine_of(16, sequences=4)
    running, large = request_for([1] * 30, 20), request_for([2] * 40, 2)
    asked = []
    allocate = engine.model.cache.allocate_sequence
    engine.model.cache.allocate_sequence = lambda ids: asked.append(len(ids)) or allocate(ids)  # type: ignore
    run(engine, [running, large])
    check(engine, [running, large])
    assert asked == [30, 40, 40]


def test_the_first_in_line_is_not_overtaken_by_smaller_requests() -> None:
    engine = engine_of(16, sequences=4)
    running = request_for([1] * 30, 20)
    large = request_for([2] * 40, 2)
    small = [request_for([3 + number], 2) for number in range(3)]
    requests = [running, large, *small]
    for request in requests:
        engine.add(request)
    while not large.is_finished:
        engine.step()
        assert (
            not any(request.new_tokens for request in small)
            or large.sequence is not None
            or large.is_finished
        )
    run(engine, [])
    while not all(request.is_finished for request in requests):
        engine.step()
    check(engine, requests)


def test_stop_tokens_end_a_request_though_a_step_is_under_way() -> None:
    prompt = [5, 6, 7]
    expected = answer(prompt, 12)
    engine = engine_of(64)
    stopped = request_for(prompt, 50, stop_token_ids=[expected[6]])
    other = request_for([9], 30)
    run(engine, [stopped, other])
    assert stopped.tokens[3:] == expected[:7]
    assert stopped.finish_reason == "stop"
    check(engine, [other])


def test_aborted_requests_leave_at_once() -> None:
    engine = engine_of(16, sequences=2)
    requests = [request_for([number] * 5, 50) for number in range(4)]
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    requests[0].is_aborted = requests[3].is_aborted = True  # one that runs, one that waits
    engine.step()
    assert requests[0].finish_reason == requests[3].finish_reason == "abort"
    while not all(request.is_finished for request in requests):
        engine.step()
    assert requests[0].tokens[5:] == answer([0] * 5, requests[0].new_tokens)
    check(engine, requests[1:3])


def test_remembered_tokens_are_those_of_the_sequence_and_rows_come_back() -> None:
    engine = engine_of(20, sequences=2)
    requests = [request_for([number] * 9, 40, repetition_penalty=1.2) for number in range(6)]
    run(engine, requests)
    check(engine, requests)
    assert any(request.preemptions for request in requests)
    assert sorted(engine.scheduler._seen_rows) == [0, 1]
    remembered = engine.model.remembered.values()
    assert any(len(tokens) > 9 for tokens in remembered), "one that began again remembers its answer too"


@pytest.mark.parametrize("cause", [RuntimeError("the device is gone"), KeyboardInterrupt()], ids=repr)
def test_an_error_ends_every_request(cause: BaseException) -> None:
    """With an error of the engine's: what interrupted the thread that ran the step is not for others to raise."""
    engine = engine_of(64)
    requests = [request_for([number], 20) for number in range(3)]
    for request in requests:
        engine.add(request)
    engine.step()

    def fail(*_: object, **__: object) -> None:
        raise cause

    engine.model.decode = fail  # type: ignore[method-assign, assignment]
    for request in requests:
        request.chunks.clear()
    with pytest.raises(type(cause)):  # in the step that fails
        engine.advance(requests[0])
    later = request_for([1], 5)
    engine.add(later)
    engine.advance(later)
    for request in [*requests, later]:
        assert request.finish_reason == "error"
        assert request.error is not None and request.error.__cause__ is cause
        assert str(request.error).startswith(f"a step of this engine ended by {type(cause).__name__}: ")
        assert isinstance(request.error, DeviceError)


def test_no_block_is_lost_over_many_random_requests() -> None:
    rng = np.random.default_rng(7)
    engine = engine_of(40, sequences=6, length=60, part=24)
    stem = rng.integers(0, 1000, 25).tolist()
    live: list[Request] = []
    done = 0
    while done < 700:
        while len(live) < 12:
            prompt = (
                stem[: int(rng.integers(0, 25))] + rng.integers(0, 1000, int(rng.integers(1, 20))).tolist()
            )
            request = request_for(
                prompt, int(rng.integers(1, 30)), repetition_penalty=float(rng.choice([1.0, 1.3]))
            )
            live.append(request)
            engine.add(request)
        if rng.random() < 0.02:
            live[int(rng.integers(len(live)))].is_aborted = True
        engine.step()
        for request in [request for request in live if request.is_finished]:
            live.remove(request)
            done += 1
            prompt = request.tokens[: request.prompt_length]
            assert request.tokens[request.prompt_length :] == answer(prompt, request.new_tokens)
    while engine.scheduler.has_work:
        engine.step()
    engine.step()
    assert engine.model.cache.blocks_used == 0
    assert engine.model.cache.blocks_free == 40
    assert len(engine.scheduler._seen_rows) == 6
