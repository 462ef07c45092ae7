"""One request while it runs: its tokens, its place in the cache, its text so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cki.engine.output import Chunk, FinishReason, RequestOutput, Stats, TokenLogprob
from cki.engine.sampling_params import SamplingParams
from cki.engine.stop import StopTexts

if TYPE_CHECKING:
    from cki.engine.tokenizer import Tokenizer


class Request:
    """tokens: prompt and answer so far.  in_flight: tokens that a step under way will bring.

    sequence: of the cache, None while it waits.  seen_row: its row of remembered tokens, -1 without a penalty.
    """

    def __init__(
        self, prompt: Sequence[int], params: SamplingParams, seed: int, ends: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:  # fmt: skip
        """ends: tokens that end it, the model's own and those of params."""
        self.params, self.seed = params, seed
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.in_flight = 0
        self.sequence: int | None = None
        self.seen_row = -1
        self.cached_tokens = -1
        self.preemptions = 0
        self.is_aborted = False
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.chunks: deque[Chunk] = deque()
        self._ends = ends
        self.ends = tuple(sorted(ends))
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._stops = StopTexts(params.stop_strings)
        self._stop: str | int | None = None
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._begun = self._first = self._last = time.perf_counter()

    @property
    def length(self) -> int:
        """Tokens with those in flight."""
        return len(self.tokens) + self.in_flight

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def receive(self, token: int, logprob: TokenLogprob | None, longest: int) -> None:
        """Take the next token; ends the request if it is the last.  longest: tokens that a sequence can have."""
        self._last = time.perf_counter()
        if self.new_tokens == 0:
            self._first = self._last
        self.tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        piece, reason = "", None
        if token in self._ends:
            reason, self._stop = "stop", token
        else:
            piece, stop = self._stops.push("" if self._stream is None else self._stream.push(token))
            if stop is not None:
                reason, self._stop = "stop", stop
        if reason is None and (self.new_tokens >= self.params.max_tokens or len(self.tokens) >= longest):
            reason = "length"
        if reason is not None and not isinstance(self._stop, str):
            piece += self._rest()
        self._text.append(piece)
        self.chunks.append(Chunk(piece, (token,), () if logprob is None else (logprob,)))
        if reason is not None:
            self.finish_reason = "stop" if reason == "stop" else "length"

    def _rest(self) -> str:
        """Text that waited for more: it is all there will be."""
        text, stop = self._stops.push("" if self._stream is None else self._stream.end())
        if stop is not None:
            self._stop = stop
            return text
        return text + self._stops.end()

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End it from outside."""
        rest = self._rest()
        if rest:
            self._text.append(rest)
            self.chunks.append(Chunk(rest, ()))
        # Last, for another thread may be reading: a finished request has no more chunks to come.
        self.error = error
        self.finish_reason = reason

    def output(self) -> RequestOutput:
        """The result of a finished request."""
        assert self.finish_reason is not None
        count = self.new_tokens
        decoding = self._last - self._first
        stats = Stats(
            new_tokens=count, prefill_len=self.prompt_length, cached_tokens=max(self.cached_tokens, 0),
            elapsed_s=self._last - self._begun, time_to_first_token_s=self._first - self._begun,
            tok_per_sec=(count - 1) / decoding if count > 1 and decoding > 0 else 0.0,
            ms_per_tok=1e3 * decoding / (count - 1) if count > 1 else 0.0,
            preemptions=self.preemptions, seed=self.seed,
        )  # fmt: skip
        return RequestOutput(
            "".join(self._text), tuple(self.tokens[self.prompt_length :]), tuple(self.tokens[: self.prompt_length]),
            self.finish_reason, self._stop,
            None if self.params.logprobs is None else tuple(self._logprobs), stats,
        )  # fmt: skip
