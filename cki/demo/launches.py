"""Follows kernels by CKI's own log.

The logger "cki" gets one line at level INFO for each kernel that is compiled, and one before each launch; whoever
listens knows exactly what ran on the device.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import TracebackType

from cki.log import logger

_LINE = re.compile(r"(compiled|launch) ([\w/.]+)")


class LaunchCounter(logging.Handler):
    """While it is active, `count` is the number of launches so far.

    on_launch, on_compiled: told the name of a kernel before it is launched, of a source when it was compiled.
    """

    def __init__(
        self,
        on_launch: Callable[[str], object] | None = None,
        on_compiled: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(logging.INFO)
        self.count = 0
        self._told = {"launch": on_launch, "compiled": on_compiled}

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
        line = _LINE.match(record.getMessage())
        if line is None:
            return
        what, name = line.groups()
        self.count += what == "launch"
        tell = self._told[what]
        if tell is not None:
            tell(name)
