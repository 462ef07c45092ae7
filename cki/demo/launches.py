"""Counts kernel launches, and tells the progress bar what is compiled: both read from CKI's own log.

The logger "cki" gets one line at level INFO before each launch and each compile; whoever listens knows exactly what
ran on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from cki.log import logger


class LaunchCounter(logging.Handler):
    """While it is active: `count` launches so far; `on_compile(text)` is called with the log line of each compile."""

    def __init__(self, on_compile: Callable[[str], object] = lambda text: None) -> None:
        super().__init__(logging.INFO)
        self.count = 0
        self.on_compile = on_compile

    def __enter__(self) -> LaunchCounter:
        self._level, self._propagate = logger.level, logger.propagate
        if logger.getEffectiveLevel() > logging.INFO:
            # The lines are for this handler alone, unless the user asked for them.
            logger.propagate = False
            logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger.removeHandler(self)
        logger.setLevel(self._level)
        logger.propagate = self._propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger for each line."""
        text = record.getMessage()
        if text.startswith("launch "):
            self.count += 1
        elif text.startswith("compil"):
            self.on_compile(text)
