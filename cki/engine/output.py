"""What a user gets of a request: pieces of text while it runs, and the whole with its statistics at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Why a request ended: its own end, a stop text or token; max_tokens or the longest sequence; `abort`; an error.
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability under the model (no temperature, no penalty), and the likeliest
    tokens with theirs, the likeliest first."""

    token: int
    logprob: float
    alternatives: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """What came since the last chunk.  text may be empty while a character, or what may become a stop text, is not
    complete.  token_ids: usually one."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Stats:
    """Of one request, in a batch or alone; times from when it was submitted.

    prefill_len: tokens of the prompt.  cached_tokens: of them, those whose keys and values another request had left.
    tok_per_sec, ms_per_tok: of the new tokens after the first.  preemptions: how often it gave way and began again.
    """

    new_tokens: int
    prefill_len: int
    cached_tokens: int
    elapsed_s: float
    time_to_first_token_s: float
    tok_per_sec: float
    ms_per_tok: float
    preemptions: int
    seed: int


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    text: without stop texts and special tokens.  token_ids: all new tokens, with the one that ended it.
    stop: the text or token that ended it, where one did.  logprobs: None where none were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None
    stats: Stats

    @property
    def new_tokens(self) -> int:
        """Number of new tokens."""
        return self.stats.new_tokens
