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
    """The largest error allowed: 2 x that of `plain` + 1e-5 of the truth's largest finite magnitude."""
    truth64 = np.asarray(truth).astype(np.float64)
    finite = np.abs(truth64[np.isfinite(truth64)])
    return 2.0 * errors(plain, truth).largest + 1e-5 * (float(finite.max()) if finite.size else 0.0)


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
