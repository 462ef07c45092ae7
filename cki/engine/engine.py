"""Runs requests on a model: step after step what the scheduler says, tokens to the requests.

Requests are added and ended from any thread; the steps themselves belong to whoever holds the lock, one at a time.
There is no thread of the engine's own: whoever waits for a request drives all of them.

The host runs one step behind the device: when the next decode step has the same requests as the one under way, it is
launched before the tokens of that one are read.  The device has them; the host only needs them to know who is finished.
A request that has ended by then is left alone by that step, if the device can tell (by a token, or the length); if a
text ended it, one token too many is computed, and dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cki.engine.model import GREEDY, DecoderModel, RowSampling, StepResult, StepRow, StepTokens
from cki.engine.output import TokenLogprob
from cki.engine.request import Request
from cki.engine.scheduler import Part, Scheduler
from cki.errors import DeviceError, OutOfBlocksError

#: One decode step under way: its result and requests.
_Flight = tuple[StepResult, list[Request]]


class Engine:
    """Requests over one model.

    num_steps: (prefill, decode) steps so far.  overlap: read tokens one step late.
    """

    def __init__(self, model: DecoderModel, *, overlap: bool = True) -> None:
        self.model = model
        self.scheduler = Scheduler(model.cache, model.limits)
        self.num_steps = [0, 0]
        self._overlap = overlap
        self._flight: _Flight | None = None
        self._incoming: list[Request] = []
        self._incoming_lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._broken: BaseException | None = None

    def add(self, request: Request) -> None:
        """A new request; from any thread."""
        with self._incoming_lock:
            self._incoming.append(request)

    def advance(self, request: Request) -> None:
        """Run a step, unless the request has something to read or is finished by the time it is this thread's turn."""
        with self._step_lock:
            if not request.chunks and not request.is_finished:
                self._guarded_step()

    def warm_up(self, prompt_lengths: Sequence[int]) -> None:
        """See `DecoderModel.warm_up`."""
        with self._step_lock:
            self.model.warm_up(prompt_lengths)

    def _guarded_step(self) -> None:
        try:
            if self._broken is None:
                self.step()
        except BaseException as error:
            # The device's state is unknown: every request ends, now and later.
            self._broken = error
            self._flight = None
            self._end_all(error)
            raise
        if self._broken is not None:
            self._end_all(self._broken)

    def _end_all(self, cause: BaseException) -> None:
        """Each request gets an error of its own: what interrupted one thread (Ctrl-C) is not for others to raise."""
        with self._incoming_lock:
            incoming, self._incoming = self._incoming, []
        for request in [*self.scheduler.running, *self.scheduler.waiting, *incoming]:
            if not request.is_finished:
                error = DeviceError(
                    f"a step of this engine ended by {type(cause).__name__}: {cause}", hint="make a new LLM"
                )
                error.__cause__ = cause
                request.end("error", error)

    def step(self) -> None:
        """One turn: a prefill step, if any prompt has parts left, and a decode step."""
        self._take_incoming()
        for request in self.scheduler.admit():
            if request.seen_row >= 0:
                self.model.remember(request.seen_row, request.tokens)
        if self._flight is not None and self._follow(self._flight):
            return
        self._land()
        parts = self.scheduler.prefill_parts()
        prefill = self._prefill(parts) if parts else None
        self._flight = self._decode(self.scheduler.decode_batch())
        if prefill is not None:
            last = [(row, part.request) for row, part in enumerate(parts) if part.is_last]
            self._hand_out(prefill.wait(), last)
        if not self._overlap:
            self._land()

    def _take_incoming(self) -> None:
        with self._incoming_lock:
            incoming, self._incoming = self._incoming, []
        for request in incoming:
            self.scheduler.add(request)
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.is_aborted and not request.is_finished:
                self.scheduler.remove(request)
                request.end("abort")

    def _prefill(self, parts: Sequence[Part]) -> StepResult:
        rows = []
        for part in parts:
            request, first, size = part
            assert request.sequence is not None
            sampling = self._sampling(request) if part.is_last else GREEDY
            rows.append(StepRow(request.sequence, request.tokens[first : first + size], sampling))
        self.num_steps[0] += 1
        return self.model.prefill(rows)

    def _decode(self, requests: list[Request], *, chained: bool = False) -> _Flight | None:
        while requests:
            try:
                result = self.model.decode([self._row(request) for request in requests], chained=chained)
            except OutOfBlocksError:
                if chained:
                    raise
                victim = self.scheduler.preempt()
                requests = [request for request in requests if request is not victim]
                continue
            self.num_steps[1] += 1
            for request in requests:
                request.in_flight += 1
            return result, requests
        return None

    def _follow(self, flight: _Flight) -> bool:
        """Launch the next decode step of the requests under way, and read the tokens of the one before; if nothing else
        is to be done than to go on with them."""
        result, requests = flight
        if self.scheduler.prefill_parts() or self.scheduler.decode_batch() != requests:
            return False
        try:
            self._flight = self._decode(requests, chained=True)
        except OutOfBlocksError:
            return False
        self._receive(result, requests)
        return True

    def _land(self) -> None:
        """Read the tokens of the step under way."""
        if self._flight is not None:
            result, requests = self._flight
            self._flight = None
            self._receive(result, requests)

    def _receive(self, result: StepResult, requests: list[Request]) -> None:
        tokens = result.wait()
        for request in requests:
            request.in_flight -= 1
        self._hand_out(tokens, list(enumerate(requests)))

    def _hand_out(self, tokens: StepTokens, requests: Sequence[tuple[int, Request]]) -> None:
        """Tokens by row to their requests.  Those that ended in the meantime have no use for them."""
        for row, request in requests:
            if request.is_finished:
                continue
            logprob = (
                None if request.params.logprobs is None else _logprob(tokens, row, request.params.logprobs)
            )
            request.receive(int(tokens.tokens[row]), logprob, self.model.limits.max_length)
            if request.is_finished:
                self.scheduler.remove(request)

    def _row(self, request: Request) -> StepRow:
        assert request.sequence is not None
        return StepRow(request.sequence, request.tokens[-1:], self._sampling(request))

    def _sampling(self, request: Request) -> RowSampling:
        p, longest = request.params, self.model.limits.max_length
        return RowSampling(
            p.temperature, max(p.top_k, 0), p.top_p, p.min_p, p.repetition_penalty, request.seed, request.seen_row,
            p.logprobs or 0, request.ends, min(request.prompt_length + p.max_tokens, longest),
        )  # fmt: skip


def _logprob(tokens: StepTokens, row: int, alternatives: int) -> TokenLogprob:
    likeliest = {}
    if alternatives and tokens.top_tokens is not None and tokens.top_logprobs is not None:
        pairs = zip(
            tokens.top_tokens[row, :alternatives].tolist(), tokens.top_logprobs[row, :alternatives].tolist()
        )
        likeliest = dict(pairs)
    return TokenLogprob(int(tokens.tokens[row]), float(tokens.logprobs[row]), likeliest)
