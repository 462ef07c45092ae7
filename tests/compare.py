"""The error bound of every numerical test.

Truth is `cki.reference` in float64.  A result passes when its largest error is at most twice that of the same
computation done plainly in the input's dtype, plus 1e-5 of the truth's largest magnitude.  NaN passes only where the
truth is NaN, infinities must agree, and the relative Frobenius error is reported with every failure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Errors(NamedTuple):
    """largest: maximal absolute error over finite elements.  frobenius: ||got - truth|| / ||truth||."""

    largest: float
    frobenius: float


def errors(got: np.ndarray, truth: np.ndarray) -> Errors:
    """Errors of `got` against `truth`; infinite where one is not finite and the other differs."""
    got, truth = np.asarray(got).astype(np.float64), np.asarray(truth).astype(np.float64)
    assert got.shape == truth.shape, f"shape {got.shape}, expected {truth.shape}"
    if got.size == 0:
        return Errors(0.0, 0.0)
    special = ~(np.isfinite(got) & np.isfinite(truth))
    same = (got == truth) | (np.isnan(got) & np.isnan(truth))
    if np.any(special & ~same):
        return Errors(np.inf, np.inf)
    difference = np.where(special, 0.0, got - np.where(special, 0.0, truth))
    norm = float(np.linalg.norm(np.where(special, 0.0, truth)))
    return Errors(float(np.max(np.abs(difference))), float(np.linalg.norm(difference)) / max(norm, 1e-300))


def bound(truth: np.ndarray, plain: np.ndarray) -> float:
    """The largest error allowed: 2 x that of `plain` + 1e-5 of the truth's largest finite magnitude.

    Elements where the plain computation overflows or loses itself in NaN, and the truth does not, say nothing.
    """
    truth64, plain64 = np.asarray(truth).astype(np.float64), np.asarray(plain).astype(np.float64)
    assert plain64.shape == truth64.shape, f"shape {plain64.shape}, expected {truth64.shape}"
    finite = np.isfinite(truth64)
    scale = float(np.max(np.abs(truth64[finite]), initial=0.0))
    comparable = finite & np.isfinite(plain64)
    difference = np.abs(plain64[comparable] - truth64[comparable])
    return 2.0 * float(np.max(difference, initial=0.0)) + 1e-5 * scale


def assert_close(got: np.ndarray, truth: np.ndarray, plain: np.ndarray, what: str = "result") -> Errors:
    """Assert the bound.  got: the kernel's result.  truth: float64 reference.  plain: the computation in the dtype."""
    found, limit = errors(got, truth), bound(truth, plain)
    message = (
        f"{what}: largest error {found.largest:.3e} > {limit:.3e}; relative Frobenius {found.frobenius:.3e}"
    )
    if found.largest == np.inf:
        message = f"{what}: NaN or infinity where the reference has another value"
    assert found.largest <= limit, message
    return found
