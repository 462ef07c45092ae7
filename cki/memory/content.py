"""What a block holds, as a digest: how a prefix that was computed before is found again.

The digest of a full block is that of its tokens chained to the digest of all blocks before it, so equal digests mean
equal prefixes.  The chain begins with a salt: sequences of different salts never share a block, however equal their
tokens are.  Keys and values depend on more than tokens (an adapter's weights, an image behind a placeholder token), and
a prompt's time to the first token tells whether someone else sent its beginning: such things belong in the salt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from cki.errors import InvalidTypeError
from cki.memory.arguments import is_integer

#: A tenant's name, the id of an adapter, a hash of an image, several of them; None is a salt like any other.
Salt: TypeAlias = "str | bytes | int | Sequence[Salt] | None"

_DIGEST_BYTES = 16
_SALT = "a str, bytes, an int, or a tuple of them"


def first_digest(salt: Salt) -> bytes:
    """What the chain of a sequence begins with.  InvalidTypeError for a salt that is no Salt."""
    if salt is None:
        return b""
    try:
        return _digest(_plain(salt).encode())
    except RecursionError:
        raise InvalidTypeError("salt: a sequence within sequences without end", hint=_SALT) from None


def prefix_digests(ids: np.ndarray, block_size: int, first: bytes) -> list[bytes]:
    """Of each full block of these tokens, int64 [tokens]; first: of `first_digest`."""
    digests, digest = [], first
    for end in range(block_size, len(ids) + 1, block_size):
        digest = _digest(digest + ids[end - block_size : end].tobytes())
        digests.append(digest)
    return digests


class StoredBlocks:
    """Blocks whose content is known, by its digest: one block a digest, one digest a block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def longest_prefix(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the first of these digests, as far as all before are stored, too."""
        found: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, digests: Iterable[bytes], blocks: Iterable[int]) -> None:
        """The same content may lie in two blocks that were computed side by side: the first one is found."""
        for digest, block in zip(digests, blocks):
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest], self._digest_of[block] = block, digest

    def forget(self, block: int) -> None:
        """The block's content is no longer what it was, if it was known."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _plain(salt: Salt) -> str:
    """A text that differs for different salts."""
    if salt is None or isinstance(salt, (str, bytes)):
        return repr(salt)
    if is_integer(salt):
        return str(int(salt))  # type: ignore[arg-type]
    if isinstance(salt, (tuple, list)):
        return f"({','.join(map(_plain, salt))})"
    raise InvalidTypeError(f"salt: {type(salt).__name__}", hint=_SALT)
