"""Work on a large array in parts, shared by threads: NumPy lets go of Python's lock while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

#: Fewer parts than this are done faster than threads begin.
_FOR_THREADS = 16
_MOST_THREADS = 16


def in_parts(count: int, size: int, work: Callable[[slice], None]) -> None:
    """Call `work` with slices of `size` that cover `count` rows, from several threads where there are many."""
    parts = [slice(first, min(first + size, count)) for first in range(0, count, size)]
    if len(parts) < _FOR_THREADS:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
        list(pool.map(work, parts))  # raises what a part raised
