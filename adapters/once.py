"""What may be done once a process, whichever threads ask for it: a framework aborts the process at a second try."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def once(function: Callable[[], T]) -> Callable[[], T]:
    """The function, run by the first call alone.  Others wait for that, and get its result or its error."""
    lock = threading.RLock()
    results: list[T] = []
    errors: list[Exception] = []

    @functools.wraps(function)
    def run() -> Any:
        if results:  # without the lock, which would cost every call
            return results[0]
        with lock:
            if not results and not errors:
                try:
                    results.append(function())
                except Exception as error:
                    errors.append(error)
            if errors:
                raise errors[0]
            return results[0]

    return run
