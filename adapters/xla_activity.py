"""What holds for every callback from a framework's runtime: its thread, and whether the process may end.

Frameworks call handlers and kernels from threads of their own.  For such a thread Python makes a state when a callback
begins and destroys it when it ends, `threading.local` data included, which takes tens of microseconds; so it is kept.
"""

from __future__ import annotations

import ctypes
import threading
import time

#: Threads whose states are kept.  Those of threads that have ended are kept too, about 20 kB each.
_MOST_THREADS = 256
_kept: list[int] = []


class Activity:
    """How many callbacks run, in all threads, and when the last one ended."""

    def __init__(self) -> None:
        self._running: list[None] = []  # append and pop are atomic
        self._ended = 0.0
        self._thread = threading.local()

    def enter(self) -> None:
        self._running.append(None)
        try:
            self._thread.is_known  # noqa: B018
        except AttributeError:
            self._thread.is_known = True
            _keep_thread_state()

    def leave(self) -> None:
        self._running.pop()
        self._ended = time.monotonic()

    @property
    def was_used(self) -> bool:
        """Whether any has run."""
        return bool(self._running) or self._ended > 0

    def wait_quiet(self, seconds: float, patience: float) -> None:
        """Wait until no callback has run for so long, from now on; `patience` seconds at most."""
        begin = time.monotonic()
        while (now := time.monotonic()) < begin + patience:
            if not self._running and now - max(begin, self._ended) >= seconds:
                break
            time.sleep(seconds / 10)


def _keep_thread_state() -> None:
    """Let Python's state of the calling thread outlive the callback, unless Python made the thread."""
    ident = threading.get_ident()
    if len(_kept) >= _MOST_THREADS or any(thread.ident == ident for thread in threading.enumerate()):
        return
    _kept.append(ident)
    ctypes.pythonapi.PyGILState_Ensure()  # never released: the state is destroyed when nobody holds it


activity = Activity()
