"""What norms.py and pointwise.py share: an operation on rows in several ways, beside torch and a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import common


class RowProblem(Protocol):
    """An operation on `rows` rows of `width` elements.  nbytes: what it reads and writes, each byte once."""

    @property
    def op(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


@functools.cache
def _copy_gb_per_s() -> float:
    return common.copy_rate()


def measured(
    problem: RowProblem, variants: Iterable[tuple[str, Callable[..., object]]], tensors: Sequence[tuple[Any, ...]],
    check: Callable[[Callable[..., object], str], float],
) -> list[dict[str, object]]:  # fmt: skip
    """One result row a variant.

    variants: name and call, "torch" the first.  tensors: arguments of a call, to be taken in turns (`common.rotated`).
    check: what a call computes, by the call and its name in messages; returns the error.  torch is not checked.
    """
    rows, torch_us = [], 0.0
    for name, run in variants:
        error = check(run, f"{problem.op} {name}") if name != "torch" else 0.0
        timing = common.graph_time(run, tensors, framework="torch")
        if name == "torch":
            torch_us = timing.median_us
        rows.append(common.row(
            problem.op, f"rows={problem.rows} width={problem.width}", problem.dtype, name, timing,
            nbytes=problem.nbytes, of_copy=round(problem.nbytes / timing.median_us / 1e3 / _copy_gb_per_s(), 3),
            vs_torch=round(torch_us / timing.median_us, 2), error=f"{error:.1e}",
            copy_gb_per_s=round(_copy_gb_per_s(), 1),
        ))  # fmt: skip
    return rows


def shape(text: str) -> tuple[int, int]:
    """(rows, width) of "ROWSxWIDTH"."""
    rows, _, width = text.partition("x")
    return int(rows), int(width)
