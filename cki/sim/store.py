"""Where the simulated device keeps what it has built: `sim/` in CKI's cache directory.

A file appears under its final name only when it is complete (rename), so any number of processes may build at once.
When the directory cannot be written (a read-only home, a full disk), a private temporary one serves this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cki import config


@functools.lru_cache(maxsize=8)
def _usable(wanted: str) -> Path:
    directory = Path(wanted) / "sim"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        import atexit

        private = Path(tempfile.mkdtemp(prefix="cki-sim-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return private


def directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory of built files, made when missing; `cache_dir` None means `cki.config.cache_dir()`."""
    return _usable(os.fspath(cache_dir) if cache_dir is not None else config.cache_dir())


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keeps other processes from building the same thing twice; where locks do not work, they just do."""
    with contextlib.suppress(OSError), open(path, "a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        return
    yield


def get_or_build(path: Path, build: Callable[[Path, Path], None]) -> Path:
    """`path`, after `build(working_directory, result)` has made it if it was not there."""
    if path.exists():
        return path
    with _lock(path.with_suffix(".lock")):
        if path.exists():
            return path
        working = Path(tempfile.mkdtemp(prefix=path.stem + ".", dir=path.parent))
        try:
            result = working / path.name
            build(working, result)
            os.replace(result, path)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    return path
