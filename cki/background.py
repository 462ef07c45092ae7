"""Compiling the default kernels while the program starts.

`import cki` starts a daemon thread on a machine with a GPU.  The thread asks NVML for the GPUs (no CUDA context, no
driver initialisation), and compiles `cki.heuristics.default_set` for their architectures when the cache lacks it.  A
file `<name>.done` in the cache directory tells the next process that there is nothing to do, at the cost of one look.

The main thread is never waited for: a call that needs a kernel of the set compiles it or waits for that kernel alone
(`cki.cache`).  All that the thread does is a row of steps, each inside the gate that a fork waits for
(`cki.fork_gate`): the first imports and looks at the machine, then one for each kernel.  The child of a fork has no
such thread and compiles what it needs.  At exit the thread stops after the kernel in hand.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from cki import config

if TYPE_CHECKING:
    from cki.kernel import KernelSpec

_stop = threading.Event()
_thread: threading.Thread | None = None
#: One of them is there when there is an NVIDIA driver (the last: under WSL).
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
#: Seconds of compiling before a line on stderr says so.
_QUIET_SECONDS = 1.0


def start() -> None:
    """Start the thread unless CKI_COMPILE=lazy, CKI_DEVICE=sim, or there is no NVIDIA driver."""
    global _thread
    if os.environ.get("CKI_COMPILE") == "lazy" or os.environ.get("CKI_DEVICE") == "sim":
        return
    if _thread is not None or not any(os.path.exists(path) for path in _DRIVER_FILES):
        return
    import cki.fork_gate  # noqa: F401  (its hooks must be there before the thread is)

    _thread = threading.Thread(target=_run, name="cki-compile", daemon=True)
    _thread.start()
    atexit.register(_finish)


def _finish() -> None:
    """Let the compilation in hand end: NVRTC must not run while the process is torn down."""
    _stop.set()
    if _thread is not None and _thread.is_alive():
        _thread.join(timeout=10.0)


def wait(timeout: float | None = None) -> bool:
    """Wait until the thread is done; False when it is still at work after `timeout` seconds."""
    if _thread is not None:
        _thread.join(timeout)
    return _thread is None or not _thread.is_alive()


def _run() -> None:
    try:
        compile_default_set()
    except Exception as error:
        from cki.fork_gate import gate

        # Nothing depends on it: whatever is wrong is reported in full by the first call that meets it.
        with gate:
            from cki.log import logger

            logger.info("default kernels were not compiled ahead: %s", error)


def architectures() -> list[str]:
    """The architectures of the GPUs that CUDA will show, without those that have no kernels."""
    from cki.device import ARCH_OF_CAPABILITY
    from cki.nvml import visible_gpus

    found = [ARCH_OF_CAPABILITY.get(gpu.capability) for gpu in visible_gpus()]
    return list(dict.fromkeys(arch for arch in found if arch))


def marker(arch: str) -> Path:
    """The file that says that the default set for `arch` is compiled; named after compiler, sources, architecture."""
    import hashlib

    from cki import __version__, compiler
    from cki._checkout import cuda_src

    newest = max(path.stat().st_mtime_ns for path in cuda_src().rglob("*.cu*"))
    content = f"{__version__} {compiler.fingerprint()} {newest} {config.text('CKI_ARCH')}"
    name = hashlib.sha256(content.encode()).hexdigest()[:20]
    return Path(config.cache_dir()) / f"default-{arch}-{name}.done"


def compile_default_set(archs: list[str] | None = None) -> int:
    """Compile what is missing of the default set; the number of kernels compiled or read."""
    from cki.fork_gate import gate

    with gate:
        missing = _missing(archs)
    count = 0
    for arch, done, specs in missing:
        progress = Progress(f"compiling {len(specs)} kernels for {arch}, once", len(specs))
        _compile_all(specs, arch, progress)
        count += len(specs)
        with gate:
            progress.close()
            if not _stop.is_set():
                _touch(done)
    return count


def _missing(archs: list[str] | None) -> list[tuple[str, Path, list[KernelSpec]]]:
    """(architecture, its marker, its default kernels) of those without the marker."""
    from cki import cache, compiler  # noqa: F401  (cache: all imports of the thread in its first step)
    from cki.device import sim_device
    from cki.heuristics.default_set import default_kernels

    if compiler.fingerprint() is None:
        return []
    found = []
    for arch in architectures() if archs is None else archs:
        done = marker(arch)
        if not done.exists():
            found.append((arch, done, default_kernels(sim_device(config.text("CKI_ARCH") or arch))))
    return found


def _compile_all(specs: list[KernelSpec], arch: str, progress: Progress) -> None:
    """Compile in this thread and one more.  Daemon threads, not an executor: an executor's work delays the exit."""
    from cki import cache
    from cki.fork_gate import gate

    waiting = deque(specs)
    errors: list[Exception] = []

    def work() -> None:
        while not _stop.is_set() and not errors:
            with gate:
                try:
                    spec = waiting.popleft()
                except IndexError:
                    return
                try:
                    cache.get(spec, arch)
                except Exception as error:
                    errors.append(error)
                progress.step()

    helper = threading.Thread(target=work, name="cki-compile-2", daemon=True)
    helper.start()
    work()
    helper.join()
    if errors:
        raise errors[0]


def _touch(path: Path) -> None:
    try:
        path.touch()
    except OSError:  # the cache itself warns when it cannot be written
        return


class Progress:
    """A line on stderr for work of over a second; on a terminal, a bar."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._announced = False

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        if time.monotonic() - self._start < _QUIET_SECONDS:
            return
        if sys.stderr.isatty():
            filled = 20 * self._done // max(self._total, 1)
            bar = "#" * filled + "." * (20 - filled)
            print(
                f"\rcki: {self._what} [{bar}] {self._done}/{self._total}", end="", file=sys.stderr, flush=True
            )
        elif not self._announced:
            print(f"cki: {self._what}", file=sys.stderr, flush=True)
        self._announced = True

    def close(self) -> None:
        """All is done."""
        if self._announced and sys.stderr.isatty():
            print(f" {time.monotonic() - self._start:.1f} s", file=sys.stderr, flush=True)


def _after_fork_in_child() -> None:
    global _thread
    _thread = None


os.register_at_fork(after_in_child=_after_fork_in_child)
