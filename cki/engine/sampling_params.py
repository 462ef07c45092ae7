"""How a request's tokens are chosen, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from cki.engine.step_plan import MAX_ALTERNATIVES
from cki.errors import InvalidArgumentError, InvalidTypeError

#: Of fp32, in which kernels take these values.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
#: Names in generation_config.json and here.
_RECOMMENDED = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a request.

    max_tokens: at most so many new tokens.
    temperature: 0 takes the likeliest token each time.
    top_k: only the k likeliest tokens; 0 or -1 is all.
    top_p: of those the fewest with at least this probability together.
    min_p: only tokens with this much of the largest probability or more.
    repetition_penalty: divides (positive) or multiplies (negative) logits of tokens that prompt or answer hold.
    seed: a request with a seed has the same draws in any company, and so the same tokens up to what its company changes
        in logits: last bits, and with e4m3 weights percents, as batches of over 32 round activations too.  None takes a
        random one.
    stop: texts that end the answer; they are not part of it.  stop_token_ids: tokens that do, besides the model's own.
    ignore_eos: the model's own ends do not end it.
    logprobs: report the logprob of each token and of so many alternatives, 0 to 20; None reports nothing.
    The values are checked here; tests/engine/sampling_definition.py defines them.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        rules = (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature <= _LARGEST, "0 or more, as a 32-bit number"),
            ("top_k", -1 <= self.top_k < 2**31, "1 or more, or 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", _SMALLEST <= self.repetition_penalty <= _LARGEST, "above 0, as a 32-bit number"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer or None"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_ALTERNATIVES, f"0 to {MAX_ALTERNATIVES}"),
            ("stop", all(self.stop_strings), "texts that are not empty"),
            ("stop_token_ids", all(0 <= token < 2**31 for token in self.stop_token_ids), "ids of tokens, 0 or more"),
        )  # fmt: skip
        broken = [(name, allowed) for name, holds, allowed in rules if not holds]
        if broken:
            raise InvalidArgumentError(
                "SamplingParams out of range", [f"{name} is {getattr(self, name)!r}" for name, _ in broken],
                "; ".join(f"{name}: {allowed}" for name, allowed in broken),
            )  # fmt: skip

    @classmethod
    def recommended(cls, generation: Mapping[str, Any]) -> SamplingParams:
        """What a model's authors recommend: the values of its generation_config.json, where that has any.

        Its temperature is 1 where it says `do_sample` and gives none, and 0 where it says `"do_sample": false`.
        Raises InvalidArgumentError for values that SamplingParams refuses.
        """
        values = {
            ours: generation[theirs]
            for theirs, ours in _RECOMMENDED.items()
            if generation.get(theirs) is not None
        }
        if generation.get("do_sample") not in (None, True, False):
            raise InvalidArgumentError(
                f"generation_config.json's do_sample is {generation['do_sample']!r}", hint="true or false"
            )
        if generation.get("do_sample") is False:
            values["temperature"] = 0.0
        elif generation.get("do_sample"):
            values.setdefault("temperature", 1.0)
        if isinstance(values.get("top_k"), float) and values["top_k"].is_integer():
            values["top_k"] = int(values["top_k"])
        try:
            return cls(**values)
        except (InvalidArgumentError, InvalidTypeError) as error:
            raise InvalidArgumentError(
                f"generation_config.json recommends what cannot be: {error}", hint="mend or remove that file"
            ) from error

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """stop as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check_types(params: SamplingParams) -> None:
    def is_number(value: object, kind: type) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool)

    kinds = {
        "max_tokens": Integral, "top_k": Integral, "seed": Integral, "logprobs": Integral, "temperature": Real,
        "top_p": Real, "min_p": Real, "repetition_penalty": Real,
    }  # fmt: skip
    problems = [
        f"{name} is {value!r}, not {'an integer' if kind is Integral else 'a number'}"
        for name, kind in kinds.items()
        if not is_number(value := getattr(params, name), kind)
        and not (value is None and name in ("seed", "logprobs"))
    ]
    if not isinstance(params.ignore_eos, bool):
        problems.append(f"ignore_eos is {params.ignore_eos!r}, not a bool")
    is_texts = isinstance(params.stop, Sequence) and all(isinstance(text, str) for text in params.stop)
    if not is_texts:
        problems.append(f"stop is {params.stop!r}, not a text or a list of texts")
    ids = params.stop_token_ids
    if not isinstance(ids, Sequence) or not all(is_number(token, Integral) for token in ids):
        problems.append(f"stop_token_ids is {ids!r}, not a list of integers")
    if problems:
        raise InvalidTypeError("SamplingParams of wrong types", problems)
