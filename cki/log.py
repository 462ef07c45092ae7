"""The logger "cki": what CKI does and why, one line for each compile and each launch.

`CKI_LOG=1` writes it to stderr; a program may instead configure the logger as any other.
"""

from __future__ import annotations

import logging

from cki import config

logger = logging.getLogger("cki")


def configure() -> None:
    """Attach a stderr handler when CKI_LOG=1.  Called once, at the first use of a device."""
    if config.flag("CKI_LOG") and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("cki: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
