"""Finds stop texts in text that comes in pieces, and holds back what may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """The texts that end one request."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that is certain, the stop text that was found or None); nothing may be pushed after one was found.

        Of several the one that begins first counts, of those the longest.
        """
        text = self._held + piece
        found = [(text.find(stop), -len(stop), stop) for stop in self._texts if stop in text]
        if found:
            position, _, stop = min(found)
            self._held = ""
            return text[:position], stop
        held = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def end(self) -> str:
        """What was held back: no stop text came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
