"""The definitions of paged attention, appending to a cache and merging of attention states, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


def merge_states(outs: Any, lses: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out [..., dim], lse [...]) of outs [states, ..., dim] and lses [states, ...]; see `cki.merge_states`.

    lse = ln sum_i exp(lses_i),  out = sum_i exp(lses_i - lse) outs_i  over the states with lses_i > -inf; 0 and -inf
    where there is none.
    """
    outs, lses = np.asarray(outs).astype(np.float64), np.asarray(lses).astype(np.float64)
    largest = lses.max(axis=0)
    subtract = np.where(largest == -np.inf, 0.0, largest)
    weights = np.exp(lses - subtract)
    total = weights.sum(axis=0)
    used = np.where((lses == -np.inf)[..., None], 0.0, outs)
    out = (weights[..., None] * used).sum(axis=0) / np.where(total == 0, 1.0, total)[..., None]
    with np.errstate(divide="ignore"):
        return out, subtract + np.log(total)
