"""Compiled kernels: memory, then the user's cache directory, then the prebuilt directory, then the compiler.

The key of a kernel is the sha256 of its full source (prelude, kernel, headers: `cki.source`) and the compiler's
options, which name the architecture.  On disk the NVRTC version joins in, so another compiler means another file.
A prebuilt directory (CKI_CUBIN_DIR) is looked up by the source key alone: it serves machines without a compiler.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from dataclasses import dataclass, replace

from cki import compiler, config, source
from cki.compiler import Compiled
from cki.disk import KernelDirectory
from cki.errors import CompileError
from cki.fork_gate import gate
from cki.kernel import KernelSpec

#: Part of every key; raised when the meaning of a key or the file format changes.
_FORMAT = 1


@dataclass(frozen=True)
class Statistics:
    """Where this process's kernels came from.  compiled: runs of NVRTC."""

    compiled: int = 0
    from_cache_dir: int = 0
    from_cubin_dir: int = 0


class _InFlight:
    """One compilation that several threads wait for."""

    def __init__(self) -> None:
        self.done = threading.Event()


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kernels: dict[str, Compiled] = {}
        self.in_flight: dict[str, _InFlight] = {}
        self.statistics = Statistics()


_state = _State()


def _after_fork_in_child() -> None:
    _state.lock = threading.Lock()
    _state.in_flight.clear()  # those threads are the parent's
    for directory in _directories.values():
        directory.forget_locks_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
_directories: dict[str, KernelDirectory] = {}


def _directory(path: str) -> KernelDirectory:
    return _directories.setdefault(path, KernelDirectory(path))


def statistics() -> Statistics:
    """Counts since the process started."""
    return _state.statistics


def source_key(text: str, options: tuple[str, ...]) -> str:
    """The key of a source and its options; the same wherever and with whatever compiler."""
    return hashlib.sha256(json.dumps([_FORMAT, text, options]).encode()).hexdigest()[:40]


def cache_key(key: str) -> str:
    """The file name in the user's cache directory: source key and NVRTC."""
    return hashlib.sha256(f"{key} {compiler.fingerprint()}".encode()).hexdigest()[:40]


@functools.lru_cache(maxsize=1024)
def _package_source(spec: KernelSpec) -> str:
    return source.full_source(spec)


def request(spec: KernelSpec, arch: str) -> tuple[str, str, tuple[str, ...]]:
    """(key, full source, options) of a kernel.  A user's own file is read anew each time, the package's once."""
    text = source.full_source(spec) if os.path.isabs(spec.source) else _package_source(spec)
    compile_options = compiler.options(arch, include_cuda_headers=compiler.uses_cuda_headers(text))
    return source_key(text, compile_options), text, compile_options


def get(spec: KernelSpec, arch: str) -> tuple[str, Compiled]:
    """The compiled kernel and its key, from wherever it is nearest.  Raises CompileError."""
    key, text, compile_options = request(spec, arch)
    return key, get_text(key, text, spec.source, arch, compile_options)


def get_text(key: str, text: str, name: str, arch: str, compile_options: tuple[str, ...]) -> Compiled:
    """The same for a source text whose key is known.  Of several threads that ask at once, one compiles."""
    with gate:
        return _get_text(key, text, name, arch, compile_options)


def _get_text(key: str, text: str, name: str, arch: str, compile_options: tuple[str, ...]) -> Compiled:
    while True:
        with _state.lock:
            found = _state.kernels.get(key)
            if found is not None:
                return found
            other = _state.in_flight.get(key)
            if other is None:
                mine = _state.in_flight[key] = _InFlight()
                break
        other.done.wait()
    try:
        compiled = _find_or_compile(key, text, name, arch, compile_options)
        _state.kernels[key] = compiled
        return compiled
    finally:
        with _state.lock:
            _state.in_flight.pop(key, None)
        mine.done.set()


def _find_or_compile(key: str, text: str, name: str, arch: str, compile_options: tuple[str, ...]) -> Compiled:
    has_compiler = compiler.fingerprint() is not None
    directory = _directory(config.cache_dir())
    disk_key = cache_key(key)
    if has_compiler and (found := directory.read(disk_key)):
        _count(from_cache_dir=1)
        return found
    prebuilt = config.text("CKI_CUBIN_DIR")
    if prebuilt and (found := _directory(prebuilt).read(key)):
        _count(from_cubin_dir=1)
        return found
    if not has_compiler:
        where = f"CKI_CUBIN_DIR={prebuilt} does not hold it" if prebuilt else "CKI_CUBIN_DIR is not set"
        raise CompileError(
            f"{name} for {arch} must be compiled, but NVRTC, CUDA's run-time compiler, was not found, and {where}\n"
            f"  hint: {compiler.INSTALL_HINT}; or `python -m cki compile --arch {arch} --out DIR` on another machine"
        )
    with directory.lock(disk_key):
        if found := directory.read(disk_key):  # another process was faster
            _count(from_cache_dir=1)
            return found
        compiled = compiler.compile_text(text, name, arch, compile_options)
        _count(compiled=1)
        directory.write(disk_key, compiled)
    return compiled


def _count(*, compiled: int = 0, from_cache_dir: int = 0, from_cubin_dir: int = 0) -> None:
    with _state.lock:
        old = _state.statistics
        _state.statistics = replace(
            old,
            compiled=old.compiled + compiled,
            from_cache_dir=old.from_cache_dir + from_cache_dir,
            from_cubin_dir=old.from_cubin_dir + from_cubin_dir,
        )
