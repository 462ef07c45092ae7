"""The encoder that `bert_large.py` measures: sizes, random weights, inputs.  NumPy alone.

Every implementation, in whatever process and framework, makes the same weights and ids from here: the generators are
seeded, so that nothing of their hundreds of megabytes has to travel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

EPSILON = 1e-12
#: Lengths of a packed batch: from, to.
PACKED_LENGTHS = (32, 512)
#: Products of a layer, by the names of Hugging Face's BERT: (inputs, outputs) of ("hidden" or "inner").
_MATRICES = {
    "attention.self.query": ("hidden", "hidden"), "attention.self.key": ("hidden", "hidden"),
    "attention.self.value": ("hidden", "hidden"), "attention.output.dense": ("hidden", "hidden"),
    "intermediate.dense": ("hidden", "inner"), "output.dense": ("inner", "hidden"),
}  # fmt: skip


class Model(NamedTuple):
    """Sizes of an encoder of the BERT family.  positions: rows of the position table."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    positions: int


BERT_LARGE = Model(24, 1024, 16, 4096, 30522, 4096)


class Problem(NamedTuple):
    """A batch.  lengths: of its sequences, all `seq` long where there are none; then seq is the longest."""

    batch: int
    seq: int
    pre_ln: bool
    lengths: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that count: padding does not."""
        return sum(self.lengths) or self.batch * self.seq

    def __str__(self) -> str:
        order = "pre-LN" if self.pre_ln else "post-LN"
        if not self.lengths:
            return f"batch={self.batch} seq={self.seq} {order}"
        return f"batch={self.batch} seq={min(self.lengths)}..{self.seq} tokens={self.tokens} {order}"


def packed_problem(batch: int, pre_ln: bool) -> Problem:
    """A batch of random lengths, PACKED_LENGTHS."""
    first, last = PACKED_LENGTHS
    lengths = np.random.default_rng(7).integers(first, last + 1, batch)
    return Problem(batch, int(lengths.max()), pre_ln, tuple(int(length) for length in lengths))


@functools.lru_cache(maxsize=1)
def state_dict(model: Model) -> dict[str, Array]:
    """float16 weights by the names of Hugging Face's BERT, matrices [out, in], and a last norm, which the pre-LN order
    alone uses.  Products keep the size of their input; norms and biases are near those of a trained model."""
    generator = np.random.default_rng(2026)
    weights: dict[str, Array] = {}

    def normal(name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        values = generator.standard_normal(shape, np.float32)
        weights[name] = (values * np.float32(scale) + np.float32(mean)).astype(np.float16)

    def norm(name: str) -> None:
        normal(f"{name}.weight", model.hidden, scale=0.1, mean=1.0)
        normal(f"{name}.bias", model.hidden, scale=0.1)

    for table, rows in (("word", model.vocabulary), ("position", model.positions), ("token_type", 2)):
        normal(f"embeddings.{table}_embeddings.weight", rows, model.hidden, scale=1.0)
    norm("embeddings.LayerNorm")
    for number in range(model.layers):
        layer = f"encoder.layer.{number}"
        for name, (source, target) in _MATRICES.items():
            inputs, outputs = getattr(model, source), getattr(model, target)
            normal(f"{layer}.{name}.weight", outputs, inputs, scale=inputs**-0.5)
            normal(f"{layer}.{name}.bias", outputs, scale=0.1)
        norm(f"{layer}.attention.output.LayerNorm")
        norm(f"{layer}.output.LayerNorm")
    norm("LayerNorm")
    return weights


def token_ids(model: Model, problem: Problem) -> Array:
    """int64 [batch, seq]."""
    shape = (problem.batch, problem.seq)
    return np.random.default_rng(5).integers(0, model.vocabulary, shape, np.int64)


def kept_tokens(problem: Problem) -> Array:
    """bool [batch, seq]: False is padding."""
    lengths = np.array(problem.lengths or (problem.seq,) * problem.batch)
    return np.arange(problem.seq) < lengths[:, None]


def offsets(problem: Problem) -> Array:
    """int32 [batch + 1]: where each sequence begins when all lie one behind the other without padding."""
    return np.concatenate([[0], np.cumsum(kept_tokens(problem).sum(1))]).astype(np.int32)


def flops(model: Model, problem: Problem) -> float:
    """Multiply-adds of the tokens that count, times two, of all layers' products and attention."""
    products = 4 * model.hidden**2 + 2 * model.hidden * model.inner
    pairs = sum(length**2 for length in problem.lengths) or problem.batch * problem.seq**2
    return 2.0 * model.layers * (problem.tokens * products + 2 * pairs * model.hidden)
