"""Text from tokens one at a time, without halves of characters.

A token may hold a part of a character's bytes: decoded alone it is U+FFFD, the replacement character.  So text is given
out only up to where it cannot change any more, and tokens are decoded together with those before them, since decoders
treat the first token of a text otherwise (SentencePiece's take a space from it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
#: Tokens without a whole character after which replacement characters are no beginning of one: UTF-8 has 4 bytes.
_LONGEST_WAIT = 8


class TokenStream:
    """An incremental decoder; one for each sequence.  The joined pieces are the decoded sequence."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # tokens that are decoded again, from the beginning of a character on
        self._written = 0  # characters of the context's text that were given out
        self._piece: list[int] = []  # tokens since the last time that all text was given out

    def push(self, token: int) -> str:
        """The text that is certain now, after one more token; often "", at times several characters."""
        self._context.append(token)
        self._piece.append(token)
        text = self._decode(self._context)
        if not text.endswith(_REPLACEMENT):
            return self._whole(text)
        # Of many replacement characters in a row only the last can still become a character.
        held = len(text) - len(text.rstrip(_REPLACEMENT)) if len(self._piece) <= _LONGEST_WAIT else 1
        new = text[self._written : len(text) - held]
        self._written += len(new)
        return new

    def end(self) -> str:
        """What is left: replacement characters for bytes that no token completed."""
        rest = self._decode(self._context)[self._written :] if self._context else ""
        self._context, self._piece, self._written = [], [], 0
        return rest

    def _whole(self, text: str) -> str:
        new = text[self._written :]
        alone = self._decode(self._piece)
        if alone:  # else special tokens only: they are no context
            self._context, self._written = self._piece, len(alone)
            self._piece = []
        else:
            self._written = len(text)
        return new
