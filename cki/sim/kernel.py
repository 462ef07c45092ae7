"""Compiling a kernel's source for the simulated device: host compiler -> shared object -> loaded function."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from cki._checkout import cuda_src
from cki.sim import elf, headers, runtime, store, toolchain
from cki.sim.headers import CompilerCall

#: Where dynamic shared memory may lie, in bytes: the most that a block of sm_90 can have.
DYNAMIC_AREA = 232448
_DYNAMIC = "cki_sim_dynamic_area"
_BUILTINS = "cuda_builtins.h"

# The entry takes cuLaunchKernel's argument array. Asking for the address of the dynamic area on an OS thread is what
# makes that thread's shared memory.
_EPILOGUE = """
#line 1 "cki_sim_entry"
extern thread_local unsigned char {dynamic}[];
extern "C" void* cki_sim_dynamic_address() {{ return {dynamic}; }}
"""
_ENTRY = """
extern "C" CKI_SIM_NOT_INSTRUMENTED void cki_sim_entry_{entry}(void** arguments) {{
  cki_sim_detail::call(&::{entry}, arguments);
}}
"""


def _kernel_flags(instrumented: bool) -> list[str]:
    is_clang = toolchain.find_compiler().is_clang
    flags = [
        # Compiling takes longer than running, and O2 takes a third longer over it for code that runs no faster.
        *toolchain.common_flags(), "-O1", "-w",
        # Line numbers and inlined calls, for the reports; DWARF 4 is what cki/sim/dwarf.py reads. Two calls on two
        # lines stay two calls (here and below).
        "-g1", "-gdwarf-4", "-fno-optimize-sibling-calls",
    ]  # fmt: skip
    if is_clang:
        flags += ["-mllvm", "-simplifycfg-sink-common=false", "-mllvm", "-enable-tail-merge=false"]
    else:
        # `extern thread_local` arrays are plain data: no initialisation function; template statics belong to their own
        # module.
        flags += ["-fno-extern-tls-init", "-fno-gnu-unique", "-fno-crossjumping", "-fno-tree-tail-merge"]
        # Where variables lie, which `-g1` does not record, takes a fifth of the time to find out.
        flags += ["-fno-var-tracking-assignments"]
    if instrumented:
        # Clang's "bounds" also checks pointers into known arrays, by a trap that would end the process.
        flags += [
            "-fsanitize=thread",
            f"-fsanitize={'array-bounds' if is_clang else 'bounds'}",
            *elf.RED_ZONE_FLAGS,
        ]
        volatile = "tsan-distinguish-volatile=1"  # volatile accesses count as relaxed atomics
        flags += ["-mllvm", f"-{volatile}"] if is_clang else ["--param", volatile]
    return flags


def _dynamic_area_source(undefined: Sequence[str]) -> str:
    """Assembly that defines every `extern __shared__` array of the kernel as the same, 1024-aligned, area."""
    names = "".join(f'.globl "{n}"\n.hidden "{n}"\n.type "{n}", %object\n"{n}":\n' for n in undefined)
    area = f'.section .tbss,"awT",%nobits\n.balign 1024\n{names}.zero {DYNAMIC_AREA}\n'
    return area + '.section .note.GNU-stack,"",%progbits\n'


class SimKernel:
    """A kernel of the simulated device.  The plain and the instrumented build are made when they are first needed."""

    def __init__(
        self,
        source: str,
        entry: str,
        name: str,
        include_dirs: Sequence[Path],
        cache_dir: str | None,
        together_with: Sequence[str],
    ) -> None:
        self.entry = entry
        self.name = name
        entries = sorted({entry, *together_with})
        self._source = (
            source + _EPILOGUE.format(dynamic=_DYNAMIC) + "".join(_ENTRY.format(entry=e) for e in entries)
        )
        self._stem = "".join(c if c.isalnum() else "_" for c in entries[0])
        self._include_dirs = [runtime.source_dir(), cuda_src(), *include_dirs]
        self._cache_dir = cache_dir
        self._builds: dict[bool, LoadedKernel] = {}
        self._lock = threading.Lock()

    def build(self, instrumented: bool = False) -> LoadedKernel:
        """The loaded build, compiled when it is in neither memory nor cache.  Raises CompileError."""
        loaded = self._builds.get(instrumented)
        if loaded is None:
            with self._lock:
                loaded = self._builds.get(instrumented)
                if loaded is None:
                    loaded = self._builds[instrumented] = self._load(instrumented)
        return loaded

    def _key(self, flags: list[str]) -> str:
        names = [_BUILTINS, *headers.included_names(self._source.encode())]
        total = hashlib.sha256(repr((runtime.key(), flags, elf.RED_ZONE_BYTES)).encode())
        total.update(headers.digest(names, self._include_dirs))
        total.update(self._source.encode())
        return total.hexdigest()[:24]

    def _load(self, instrumented: bool) -> LoadedKernel:
        flags = _kernel_flags(instrumented)
        runtime.library()

        def build(working: Path, result: Path) -> None:
            source, object_file, area = working / "kernel.cpp", working / "kernel.o", working / "area.s"
            source.write_text(self._source)
            what = f"kernel {self.entry} ({self.name})"
            call = CompilerCall(flags, self._include_dirs, _BUILTINS)
            call.compile(source, object_file, what, call.kept_precompiled(self._cache_dir))
            if instrumented:
                elf.add_red_zones(object_file)
            undefined = [
                s.name for s in elf.ElfFile(object_file).symbols()
                if s.is_thread_local and not s.is_defined and not s.name.startswith(("cki_sim_thread", "cki_sim_block"))
            ]  # fmt: skip
            area.write_text(_dynamic_area_source(undefined))
            # Symbolic: a kernel named like a function of the C library is still the kernel.
            toolchain.run_compiler(
                ["-shared", "-Wl,-Bsymbolic", str(object_file), str(area), "-o", str(result)], what
            )

        path = store.get_or_build(
            store.directory(self._cache_dir) / f"{self._stem}-{self._key(flags)}.so", build
        )
        return LoadedKernel(path, self.entry, instrumented)


class LoadedKernel:
    """A kernel in a shared object, and what the runtime needs to know of it.

    static_bytes: where dynamic shared memory begins, red zones left out.
    """

    def __init__(self, path: Path, entry: str, instrumented: bool) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        file = elf.ElfFile(path)
        shared = [s for s in file.symbols() if s.is_thread_local and s.is_defined]
        dynamic = next(s.value for s in shared if s.name.endswith(_DYNAMIC))
        arrays = sorted((s.value, s.size) for s in shared if s.size)
        self.static_bytes = dynamic - (len(arrays) * elf.RED_ZONE_BYTES if instrumented else 0)
        self.module = runtime.Module(
            ctypes.cast(self._library[f"cki_sim_entry_{entry}"], ctypes.c_void_p),
            ctypes.cast(self._library.cki_sim_dynamic_address, ctypes.c_void_p),
            file.thread_local_size(),
            dynamic,
            (runtime.SharedArray * len(arrays))(*(runtime.SharedArray(*array) for array in arrays)),
            len(arrays),
        )


def compile_kernel(
    source: str,
    entry: str,
    *,
    name: str = "kernel.cu",
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    together_with: Sequence[str] = (),
) -> SimKernel:
    """Compile the `extern "C" __global__` function `entry` of a CUDA source text.

    source: prelude and kernel; write `#line 1 "file.cu"` after a prelude so that reports name the file's own lines.
    name: the source's name in error messages.
    include_dirs: searched after the simulation's own headers and cuda_src.
    cache_dir: where the shared object is kept; None is CKI's cache directory.
    together_with: other entries of the source; kernels that name each other so share one compilation.

    Raises CompileError with the compiler's words, or with what to install when there is no compiler.
    """
    kernel = SimKernel(
        source,
        entry,
        name,
        [Path(d) for d in include_dirs],
        os.fspath(cache_dir) if cache_dir is not None else None,
        together_with,
    )
    kernel.build()
    return kernel
