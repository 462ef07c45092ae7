"""Counts kernel launches by CKI's own log.

The logger "cki" gets one line at level INFO before each launch; whoever listens knows exactly what ran on the device.
"""

from __future__ import annotations

import logging
from types import TracebackType

from cki.log import logger


class LaunchCounter(logging.Handler):
    """While it is active, `count` is the number of launches so far."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

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
        self.count += record.getMessage().startswith("launch ")
