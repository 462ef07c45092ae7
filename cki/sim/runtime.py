"""The runtime library of the simulated device: built once for a compiler and a version of its sources, then cached."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cki._checkout import cuda_src
from cki.sim import store, toolchain
from cki.sim.headers import CompilerCall

#: The C++ library's headers, which the runtime's files mostly consist of for the compiler.
_STANDARD = "runtime/standard.h"


class Extent(ctypes.Structure):
    """`cki_sim_extent`: a tensor's first byte and size, for the bounds check."""

    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class SharedArray(ctypes.Structure):
    """`cki_sim_shared_array` of cuda_src/sim/runtime/shared_window.h."""

    _fields_ = [("offset", ctypes.c_uint), ("bytes", ctypes.c_uint)]


class Module(ctypes.Structure):
    """`cki_sim_module` of cuda_src/sim/runtime/launch.h."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("dynamic_address", ctypes.c_void_p),
        ("window_size", ctypes.c_uint),
        ("dynamic_offset", ctypes.c_uint),
        ("arrays", ctypes.POINTER(SharedArray)),
        ("array_count", ctypes.c_uint),
    ]


class Config(ctypes.Structure):
    """`cki_sim_config` of cuda_src/sim/runtime/launch.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("dynamic_bytes", ctypes.c_uint),
        ("checks", ctypes.c_uint),
        ("cooperative", ctypes.c_uint),
        ("os_threads", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
        ("extents", ctypes.POINTER(Extent)),
        ("extent_count", ctypes.c_uint64),
    ]


def source_dir() -> Path:
    """Of the device side of the simulation: headers for kernels, and runtime/."""
    return cuda_src() / "sim"


def _sources() -> list[Path]:
    runtime = source_dir() / "runtime"
    return sorted(p for p in runtime.iterdir() if p.suffix in (".cpp", ".S"))


@functools.lru_cache(maxsize=1)
def key() -> str:
    """Changes with the runtime's sources, the compiler, or the flags."""
    total = hashlib.sha256(repr((toolchain.find_compiler().identity, _flags())).encode())
    directory = source_dir()
    for path in sorted([directory / "runtime_api.h", *(directory / "runtime").iterdir()]):
        if path.suffix in (".cpp", ".h", ".S"):
            total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:24]


def _flags() -> list[str]:
    return [*toolchain.common_flags(), "-O3", "-g1", "-Wall", "-Wextra", "-fno-semantic-interposition"]


def _build(working: Path, result: Path) -> None:
    call = CompilerCall(_flags(), [source_dir(), cuda_src()], _STANDARD)
    call.precompile(working / "headers")

    def compile_one(source: Path) -> Path:
        object_file, what = working / (source.name + ".o"), f"runtime/{source.name}"
        if source.suffix == ".S":
            toolchain.run_compiler(["-c", str(source), "-o", str(object_file)], what)
        else:
            call.compile(source, object_file, what, working / "headers")
        return object_file

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, _sources()))
    toolchain.run_compiler(
        [
            "-shared",
            "-pthread",
            "-Wl,-z,defs",
            "-Wl,-Bsymbolic",
            *map(str, objects),
            "-o",
            str(result),
            "-ldl",
        ],
        "the runtime library",
    )


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded runtime, one for the process.  Its symbols are global: the kernels' shared objects refer to them."""
    path = store.get_or_build(store.directory() / f"runtime-{key()}.so", _build)
    loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    loaded.cki_sim_launch.argtypes = [
        ctypes.POINTER(Module), ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ]  # fmt: skip
    loaded.cki_sim_launch.restype = ctypes.c_int
    loaded.cki_sim_free.argtypes = [ctypes.c_void_p]
    return loaded
