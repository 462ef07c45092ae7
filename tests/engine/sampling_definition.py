"""The definition of choosing the next token, in float64 NumPy.

Distances from the largest logit are rounded to fp32, which decides what counts as equal; all else is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cki.reference.dropout import philox_4x32_10

Array = NDArray[Any]
Float64 = NDArray[np.float64]


def kept_tokens(
    logits: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[NDArray[np.int64], Float64]:
    """(tokens, scaled distances) of one row that may be drawn, the likeliest first; equal ones by token.

    The distance of a token is (largest logit - its logit) / temperature, its weight exp(-distance).  The first top_k;
    of those the fewest whose weights are at least top_p of all; of those the ones of weight min_p or more.
    """
    row = _cleaned(logits)
    with np.errstate(invalid="ignore"):
        distances = np.where(row == row.max(), np.float32(0), row.max() - row).astype(np.float64)
    order = np.argsort(distances, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    scaled = distances[order] / temperature
    weights = np.exp(-scaled)
    before = np.cumsum(weights) - weights
    kept = scaled < np.inf
    if top_p < 1:
        kept &= before < top_p * weights.sum()
    if min_p > 0:
        kept &= weights >= min_p
    kept[0] = True
    return order[kept], scaled[kept]


def penalised(logits: Array, seen: Array, penalty: float) -> NDArray[np.float32]:
    """Logits of one row with the repetition penalty.  seen: bool [vocabulary]."""
    row, factor = _cleaned(logits), np.float32(penalty)
    return np.where(seen, np.where(row > 0, row / factor, row * factor), row)


def gumbel_noise(vocabulary: int, seed: int, step: int) -> Float64:
    """-log(-log(1 - u)) of each token: u = (word + 1/2) / 2^32, the words those of Philox 4x32-10."""
    quads = np.arange(-(-vocabulary // 4), dtype=np.uint64)
    low, high = step % 2**32, step % 2**64 >> 32
    counter = np.stack([quads, np.zeros_like(quads), np.full_like(quads, low), np.full_like(quads, high)], 1)
    words = philox_4x32_10(counter, np.array([seed % 2**32, seed % 2**64 >> 32], np.uint64)).reshape(-1)
    words = words[:vocabulary]
    uniform = np.minimum((words.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-uniform))


def sample_tokens(
    logits: Array, *, temperature: Array | None = None, top_k: Array | None = None, top_p: Array | None = None,
    min_p: Array | None = None, repetition_penalty: Array | None = None, seen: Array | None = None,
    seen_rows: Array | None = None, seed: Array | None = None, step: Array | None = None,
) -> tuple[NDArray[np.int64], Float64]:  # fmt: skip
    """(tokens, logprobs) of `cki.ops.sampling.sample_tokens`, with the same arguments; `seen` is not written."""
    batch, vocabulary = np.shape(logits)
    tokens, logprobs = np.zeros(batch, np.int64), np.zeros(batch)

    def value(values: Array | None, row: int, neutral: float) -> Any:
        return neutral if values is None else values[row]

    for r in range(batch):
        row = _cleaned(logits[r])
        scored = row
        penalty = value(repetition_penalty, r, 1.0)
        if seen is not None and seen_rows is not None and 0 <= seen_rows[r] < len(seen) and penalty != 1:
            words = np.asarray(seen[seen_rows[r]]).view(np.uint8)
            bits = np.unpackbits(words, bitorder="little")[:vocabulary].astype(bool)
            scored = penalised(row, bits, penalty)
        heat = float(value(temperature, r, 1.0))
        if heat <= 0 or scored.max() == -np.inf:
            tokens[r] = np.argmax(scored)
        else:
            kept, distances = kept_tokens(
                scored,
                heat,
                int(value(top_k, r, 0)),
                float(value(top_p, r, 1.0)),
                float(value(min_p, r, 0.0)),
            )
            noise = gumbel_noise(vocabulary, int(value(seed, r, 0)), int(value(step, r, 0)))[kept]
            tokens[r] = kept[np.argmax(noise - distances)]
        logprobs[r] = log_softmax(row)[tokens[r]]
    return tokens, logprobs


def log_softmax(logits: Array) -> Float64:
    """Natural logarithms of softmax(logits) of one row."""
    row = _cleaned(logits).astype(np.float64)
    with np.errstate(invalid="ignore"):
        shifted = np.where(row == row.max(), 0.0, row - row.max())
    shares: Float64 = shifted - np.log(np.exp(shifted).sum())
    return shares


def _cleaned(logits: Array) -> NDArray[np.float32]:
    row = np.asarray(logits).astype(np.float32)
    return np.where(np.isnan(row), np.float32(-np.inf), row) + np.float32(0)
