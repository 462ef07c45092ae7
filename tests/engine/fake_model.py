"""A model without arithmetic, over a real cache on the host: what the engine does with it shows in the tokens.

It writes token ids into the slots that the cache's tables name, and reads each sequence back through its block table.
The token after a sequence is a hash of all that it reads there, so a wrong slot, a lost prefix or a stale block gives
other tokens than `next_token` of the right ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from cki.engine.model import ModelLimits, StepRow, StepTokens
from cki.memory import PagedKVCache

VOCABULARY = 1000


def next_token(tokens: Sequence[int]) -> int:
    """The token after a sequence."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCABULARY


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeResult:
    """Results are read when they are waited for, as those of a device are."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def wait(self) -> StepTokens:
        return StepTokens(np.array(self._tokens), np.zeros(len(self._tokens)), None, None)


class FakeModel:
    """What `Engine` needs of a `DecoderModel`."""

    def __init__(self, limits: ModelLimits, num_blocks: int, block_size: int) -> None:
        self.limits = limits
        self.cache = PagedKVCache(
            1, num_blocks, block_size=block_size, num_kv_heads=1, head_dim=1, dtype="f32",
            max_sequences=limits.max_sequences, max_blocks_per_sequence=-(-limits.max_length // block_size),
            max_step_tokens=max(limits.max_step_tokens, limits.max_sequences), device="sim",
        )  # fmt: skip
        self.slots = np.full(num_blocks * block_size, -1, np.int64)
        self.remembered: dict[int, list[int]] = {}
        self._chain: list[int] = []

    def remember(self, seen_row: int, tokens: Sequence[int]) -> None:
        self.remembered[seen_row] = list(tokens)

    def prefill(self, rows: Sequence[StepRow]) -> FakeResult:
        assert sum(len(row.tokens) for row in rows) <= self.limits.max_step_tokens
        return self._step(rows, np.concatenate([np.asarray(row.tokens) for row in rows]))

    def decode(self, rows: Sequence[StepRow], *, chained: bool = False) -> FakeResult:
        """A chained step leaves rows that have ended alone, as the device does."""
        tokens = self._chain if chained else [row.tokens[0] for row in rows]
        for number, (row, token) in enumerate(zip(rows, tokens)):
            length = self.cache.length(row.sequence) + 1  # with the token
            ended = token in row.sampling.ends or length >= row.sampling.limits
            if chained and (tokens[number] < 0 or ended):
                tokens[number] = -1
        return self._step(rows, np.asarray(tokens), decode=True)

    def _step(self, rows: Sequence[StepRow], tokens: np.ndarray, *, decode: bool = False) -> FakeResult:
        counts = [1 if decode else len(row.tokens) for row in rows]
        step = self.cache.prepare_step([row.sequence for row in rows], counts)
        self.slots[step.slot_mapping.numpy()[tokens >= 0]] = tokens[tokens >= 0]
        size = self.cache.block_size
        chosen = []
        for table, length in zip(step.block_table.numpy(), step.seq_lens.numpy()):
            blocks = table[: -(-int(length) // size)]
            places = (blocks[:, None] * size + np.arange(size)).reshape(-1)[:length]
            chosen.append(next_token(self.slots[places].tolist()))
        if decode:
            self._chain = [new if token >= 0 else -1 for new, token in zip(chosen, tokens)]
        return FakeResult(chosen)
