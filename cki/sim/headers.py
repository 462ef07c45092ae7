"""The text of a kernel's headers, for the key under which the compiled kernel is cached.

A compiler can list the files that it read, but only after it ran; the key is needed before.  So `#include "..."` lines
are followed here.  Conditions are ignored: a header too many in the key does no harm.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@functools.lru_cache(maxsize=4096)
def _read(path: str, modified: int, size: int) -> tuple[bytes, tuple[str, ...]]:
    """Digest and included names of one file; the modification time and size make the memory notice an edit."""
    text = Path(path).read_bytes()
    return hashlib.sha256(text).digest(), included_names(text)


def included_names(text: bytes) -> tuple[str, ...]:
    """The names in the `#include "..."` lines of a source."""
    return tuple(name.decode() for name in _INCLUDE.findall(text))


def digest(names: Iterable[str], include_dirs: Sequence[Path]) -> bytes:
    """One digest of all headers that are reached from `names`, searched beside the includer, then in `include_dirs`."""
    total = hashlib.sha256()
    seen: set[str] = set()
    pending: list[tuple[str, Path | None]] = [(name, None) for name in names]
    while pending:
        name, includer = pending.pop()
        for directory in ([includer] if includer else []) + list(include_dirs):
            path = os.path.normpath(directory / name)
            try:
                status = os.stat(path)
            except OSError:
                continue
            if path not in seen:
                seen.add(path)
                file_digest, included = _read(path, status.st_mtime_ns, status.st_size)
                total.update(name.encode() + b"\0" + file_digest)
                pending += [(inner, Path(path).parent) for inner in included]
            break
    return total.digest()
