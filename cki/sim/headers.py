"""A kernel's headers: their text, for the key under which the compiled kernel is cached; one of them parsed once.

A compiler can list the files that it read, but only after it ran; the key is needed before.  So `#include "..."` lines
are followed here.  Conditions are ignored: a header too many in the key does no harm.

Reading the headers of the C and C++ library takes GCC longer than compiling a typical kernel does.  A precompiled
header is its memory of having done so, mapped in some milliseconds.  It serves only the compiler and the flags that
made it.  GCC looks for `NAME.gch` in each include directory before it looks for `NAME`, so the directory that holds it
goes in front; one that GCC cannot use is passed over, and the header itself is found behind it.  Clang would refuse
it, and reads the header itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cki.errors import CompileError
from cki.sim import store, toolchain

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


@dataclass(frozen=True)
class CompilerCall:
    """What compilations share: flags, include directories, and a header, found in those, that comes first."""

    flags: Sequence[str]
    include_dirs: Sequence[Path]
    header: str

    def _arguments(self, precompiled: Sequence[Path] = ()) -> list[str]:
        return [*self.flags, *(f for d in (*precompiled, *self.include_dirs) for f in ("-I", str(d)))]

    def precompile(self, directory: Path) -> None:
        """Make `directory` one that holds the precompiled header; with Clang, an empty one."""
        result = directory / f"{self.header}.gch"
        result.parent.mkdir(parents=True)
        if toolchain.find_compiler().is_clang:
            return
        header = next(d / self.header for d in self.include_dirs if (d / self.header).exists())
        toolchain.run_compiler(
            [*self._arguments(), "-x", "c++-header", str(header), "-o", str(result)], f"header {self.header}"
        )

    def kept_precompiled(self, cache_dir: str | None) -> Path:
        """Such a directory among what the simulated device keeps; made when it is not there."""
        total = hashlib.sha256(repr((toolchain.find_compiler().identity, list(self.flags))).encode())
        total.update(digest([self.header], self.include_dirs))
        name = f"{Path(self.header).stem}-{total.hexdigest()[:24]}"
        return store.get_or_build(store.directory(cache_dir) / name, lambda _, made: self.precompile(made))

    def compile(self, source: Path, object_file: Path, what: str, precompiled: Path) -> None:
        """Compile one source.  precompiled: a directory that may hold the header's precompiled form."""
        rest = ["-include", self.header, "-c", str(source), "-o", str(object_file)]
        try:
            toolchain.run_compiler([*self._arguments([precompiled]), *rest], what)
        except CompileError as error:
            if "PCH" not in str(error):  # "had to relocate PCH": its place in memory was taken
                raise
            toolchain.run_compiler([*self._arguments(), *rest], what)
