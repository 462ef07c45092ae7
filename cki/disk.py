"""Compiled kernels on disk: one file a kernel, published whole, checked when read.

    | "CKI kernel 1\\n" | JSON header, one line: sha256 of the cubin, report | cubin |

Many processes share the directory.  A file is written under a temporary name, synced and renamed, so readers see all
of it or nothing.  A lock for each key makes one process compile while the others wait; the kernel drops it when its
holder dies.  Where locks do not work (some NFS), where a holder hangs, or where nothing can be written, every
process compiles for itself: slower, never wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cki import log
from cki.compiler import Compiled, CompileReport, KernelReport

_MAGIC = b"CKI kernel 1\n"
SUFFIX = ".kernel"
#: Seconds to wait for another process that compiles the same kernel before compiling it here as well.
LOCK_PATIENCE = 60.0


def encode(compiled: Compiled) -> bytes:
    """The file's content."""
    header = {
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "report": dataclasses.asdict(compiled.report),
    }
    return _MAGIC + json.dumps(header).encode() + b"\n" + compiled.cubin


def decode(content: bytes) -> Compiled | None:
    """The kernel in a file's content; None when it is truncated, damaged or of another format."""
    if not content.startswith(_MAGIC):
        return None
    header_end = content.find(b"\n", len(_MAGIC))
    cubin = content[header_end + 1 :]
    try:
        header = json.loads(content[len(_MAGIC) : header_end])
        if header_end < 0 or header["sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        report = header["report"]
        kernels = tuple(KernelReport(**kernel) for kernel in report.pop("kernels"))
        messages, warnings = tuple(report.pop("messages")), tuple(report.pop("warnings"))
        return Compiled(cubin, CompileReport(kernels=kernels, messages=messages, warnings=warnings, **report))
    except (ValueError, KeyError, TypeError):
        return None


class KernelDirectory:
    """A directory of compiled kernels.  Every failure to use it is reported once and then lived with."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._warned = False
        self._held_locks: set[int] = set()

    def file(self, key: str) -> Path:
        """Where the kernel of that key is kept."""
        return self.path / f"{key}{SUFFIX}"

    def read(self, key: str) -> Compiled | None:
        """The kernel of that key, or None when it is not there, unreadable or damaged."""
        try:
            content = self.file(key).read_bytes()
        except OSError:
            return None
        compiled = decode(content)
        if compiled is None:
            log.logger.warning("%s is damaged and will be replaced", self.file(key))
        return compiled

    def write(self, key: str, compiled: Compiled) -> bool:
        """Publish a kernel; False, with one warning a process, where that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.path, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(encode(compiled))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.file(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._warn(f"{error.strerror or error}: kernels are kept in memory only")
            return False
        return True

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the key's lock while the body runs, if locking works here; wait at most LOCK_PATIENCE for it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # read-only or full: `write` will say so
            yield
            return
        self._held_locks.add(descriptor)
        acquired = False
        try:
            acquired = self._acquire(descriptor)
            yield
        finally:
            self._held_locks.discard(descriptor)
            if acquired:  # unlock, not only close: a child forked meanwhile shares the open file
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    @staticmethod
    def _acquire(descriptor: int) -> bool:
        deadline = time.monotonic() + LOCK_PATIENCE
        pause = 0.001
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            except OSError:  # no locks on this file system
                return False

    def forget_locks_after_fork(self) -> None:
        """In a forked child: let go of the parent's locks, which stay held by the parent."""
        for descriptor in self._held_locks:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._held_locks.clear()

    def entries(self) -> list[Path]:
        """All kernel files."""
        try:
            return sorted(path for path in self.path.iterdir() if path.suffix == SUFFIX)
        except OSError:
            return []

    def clear(self) -> int:
        """Delete everything of ours in it; the number of kernels deleted."""
        count = 0
        for path in list(self.path.iterdir()) if self.path.is_dir() else []:
            if path.suffix in (SUFFIX, ".lock", ".tmp", ".done"):
                count += path.suffix == SUFFIX
                with contextlib.suppress(OSError):
                    path.unlink()
        return count

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.logger.warning("cache directory %s cannot be written: %s", self.path, reason)
