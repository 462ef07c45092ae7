"""Dropout of attention weights, as `attention` and `varlen_attention` take it (`cuda_src/attention/dropout.cuh`)."""

from __future__ import annotations

from typing import NamedTuple

from cki.operand import Operand
from cki.ops.pointwise_dropout import check_counter, threshold_of
from cki.ops.spec import Input, Problem
from cki.plan import ArgumentValue, NullPointer

DROPOUT_INPUTS = (Input("dropout_seed", optional=True), Input("dropout_offset", optional=True))
#: The kernel's last parameters where nothing is dropped.
NO_DROPOUT: tuple[ArgumentValue, ...] = (NullPointer(), NullPointer(), 0, 1.0)


class AttentionDropout(NamedTuple):
    """Weights are dropped with probability p, by a seed and an offset of one 64-bit integer each."""

    p: float
    seed: Operand
    offset: Operand

    def arguments(self) -> tuple[ArgumentValue, ...]:
        """The kernel's last parameters."""
        return self.seed, self.offset, threshold_of(self.p), 1.0 / (1.0 - self.p)


def dropout_of(problem: Problem) -> AttentionDropout | None:
    """What a checked problem asks for; None when p is 0."""
    p = problem.attribute("dropout_p")
    return AttentionDropout(p, problem["dropout_seed"], problem["dropout_offset"]) if p else None


def check_dropout(problem: Problem) -> None:
    """dropout_p from 0 to below 1; seed and offset in device memory beside a dropout_p above 0."""
    p = problem.attribute("dropout_p")
    if not 0 <= p < 1:
        problem.reject(f"dropout_p is {p}", "dropout_p from 0 to below 1")
    for name in ("dropout_seed", "dropout_offset"):
        if problem.get(name) is not None:
            check_counter(problem, name)
        elif p:
            problem.reject(
                f"dropout_p is {p} without {name}", f"{name}: one int64 or uint64 in device memory"
            )
