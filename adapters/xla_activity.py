"""Whether handlers of XLA's are running, so that a process can wait for them before it ends."""

from __future__ import annotations

import time


class Activity:
    """How many handlers run, in all threads of XLA's, and when the last one ended."""

    def __init__(self) -> None:
        self._running: list[None] = []  # append and pop are atomic
        self._ended = 0.0

    def enter(self) -> None:
        self._running.append(None)

    def leave(self) -> None:
        self._running.pop()
        self._ended = time.monotonic()

    @property
    def was_used(self) -> bool:
        """Whether any has run."""
        return bool(self._running) or self._ended > 0

    def wait_quiet(self, seconds: float, patience: float) -> None:
        """Wait until no handler has run for so long, from now on; `patience` seconds at most."""
        begin = time.monotonic()
        while (now := time.monotonic()) < begin + patience:
            if not self._running and now - max(begin, self._ended) >= seconds:
                break
            time.sleep(seconds / 10)


activity = Activity()
