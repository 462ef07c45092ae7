"""Source text to CUBIN through NVRTC, with ptxas's report.

NVRTC is reached through `cuda.bindings`, which the launcher needs anyway: it finds the library of the wheel, of conda
or of a toolkit, releases the GIL while it compiles, and gives the whole CUBIN (CuPy's private path drops its last
byte, and CuPy's own compile step adds `-arch=sm_90`, never `sm_90a`).  No GPU and no driver is needed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cki import log
from cki.errors import CompileError
from cki.fork_gate import gate

INSTALL_HINT = "pip install 'cki-runtime[cuda13]' (CUDA 13 driver) or 'cki-runtime[cuda12]'"


@dataclass(frozen=True)
class KernelReport:
    """What ptxas says of one entry.  registers: of a thread.  Sizes in bytes; spills of a thread."""

    entry: str
    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    static_shared_bytes: int = 0


@dataclass(frozen=True)
class CompileReport:
    """kernels: one report an entry.  messages: ptxas's C75xx notes (ignored setmaxnreg, serialised or repaired wgmma).
    warnings: the front end's.  compiler: which NVRTC."""

    arch: str
    kernels: tuple[KernelReport, ...]
    messages: tuple[str, ...]
    warnings: tuple[str, ...]
    compiler: str
    seconds: float

    def kernel(self, entry: str) -> KernelReport:
        """The report of one entry."""
        return next(kernel for kernel in self.kernels if kernel.entry == entry)


@dataclass(frozen=True)
class Compiled:
    """A loadable kernel binary."""

    cubin: bytes
    report: CompileReport


def options(arch: str, *, include_cuda_headers: bool = False) -> tuple[str, ...]:
    """NVRTC's options.  A function without an execution space is a device function, so headers need no macros."""
    fixed = (f"-arch={arch}", "-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")
    return fixed + (
        tuple(f"-I{directory}" for directory in cuda_include_dirs()) if include_cuda_headers else ()
    )


def uses_cuda_headers(text: str) -> bool:
    """Whether a source includes any `<header>`: CKI's own kernels never do."""
    return re.search(r"^[ \t]*#[ \t]*include[ \t]*<", text, re.MULTILINE) is not None


@functools.cache
def cuda_include_dirs() -> tuple[str, ...]:
    """Directories of CUDA's headers for users' own kernels: pip wheels first, then a toolkit."""
    candidates: list[Path] = []
    for name in (
        "nvidia-cuda-runtime",
        "nvidia-cuda-runtime-cu12",
        "nvidia-cuda-cccl",
        "nvidia-cuda-cccl-cu12",
    ):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        headers = [f for f in files if f.name == "cuda_fp16.h" or f.as_posix().endswith("cuda/std/version")]
        candidates += [
            Path(str(header.locate())).parent for header in headers if header.name == "cuda_fp16.h"
        ]
        candidates += [
            Path(str(header.locate())).parents[2] for header in headers if header.name == "version"
        ]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    found = [str(path) for path in candidates if path.is_dir()]
    found += [str(path) for path in (Path(directory) / "cccl" for directory in found) if path.is_dir()]
    return tuple(dict.fromkeys(found))


@functools.cache
def fingerprint() -> str | None:
    """Which NVRTC would compile, to the last digit: bug-fix releases change code too.  None when there is none.

    A wheel's version is read from its metadata, so a start with a warm cache never loads the 100 MB library.
    """
    try:
        bindings = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return None
    wheel = "nvidia-cuda-nvrtc-cu12" if bindings.startswith("12.") else "nvidia-cuda-nvrtc"
    try:
        return f"{wheel} {importlib.metadata.version(wheel)}"
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        nvrtc = _nvrtc()
        major, minor = _check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    except CompileError:
        return None
    return f"nvrtc {major}.{minor} {_library_stamp()}"


def _library_stamp() -> str:
    """Size and time of the loaded library's file: tells bug-fix releases of a toolkit apart."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libnvrtc.so" in line}
    stamps = [os.stat(path) for path in sorted(paths) if os.path.exists(path)]
    return " ".join(f"{stamp.st_size}:{stamp.st_mtime_ns}" for stamp in stamps)


def cuda_version() -> tuple[int, int]:
    """The CUDA version of NVRTC: what it compiles needs a driver of that major version."""
    major, minor = _check(_nvrtc().nvrtcVersion(), "nvrtcVersion")
    return int(major), int(minor)


@functools.cache
def _nvrtc() -> Any:
    try:
        with gate:
            from cuda.bindings import nvrtc

            nvrtc.nvrtcVersion()
    except Exception as error:  # ImportError, or the finder's own errors when the library is missing
        raise CompileError(
            f"NVRTC, CUDA's run-time compiler, was not found ({error})\n  hint: {INSTALL_HINT}"
        ) from error
    return nvrtc


def _check(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise CompileError(f"{what}: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


def compile_text(text: str, name: str, arch: str, compile_options: tuple[str, ...]) -> Compiled:
    """Compile a self-contained source.  name: what messages and CKI_LOG call it.

    Raises CompileError with the compiler's log; its lines name file and line as the author wrote them.
    """
    nvrtc = _nvrtc()
    start = time.perf_counter()
    with gate:
        program = _check(
            nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []), "nvrtcCreateProgram"
        )
        try:
            encoded = [option.encode() for option in compile_options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            compile_log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            messages = compile_log.rstrip(b"\0 \n").decode(errors="replace")
            if int(status) != 0:
                raise CompileError(_explain(name, arch, messages, status.name))
            cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
    seconds = time.perf_counter() - start
    log.logger.info("compiled %s for %s in %.2f s", name, arch, seconds)
    return Compiled(cubin, parse_report(messages, arch, fingerprint() or "", seconds))


def ptx(text: str, name: str, arch: str, compile_options: tuple[str, ...]) -> str:
    """The PTX of a source, for looking at."""
    nvrtc = _nvrtc()
    virtual = tuple(o.replace("-arch=sm_", "-arch=compute_") for o in compile_options if "ptxas" not in o)
    with gate:
        program = _check(
            nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []), "nvrtcCreateProgram"
        )
        try:
            encoded = [option.encode() for option in virtual]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            if int(status) != 0:
                messages = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
                raise CompileError(
                    _explain(name, arch, messages.rstrip(b"\0 \n").decode(errors="replace"), status.name)
                )
            return str(_read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0"), "ascii")
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def _read(size_function: Any, read_function: Any, program: Any) -> bytes:
    size: int = _check(size_function(program), size_function.__name__)
    # cuda.bindings writes into it.  Two bytes at least: Python has every string of one byte once for the whole process,
    # and an empty log, whose size is 1, would make each b" " in it a b"\0".
    buffer = bytes(size + 1)
    _check((*read_function(program, buffer), None), read_function.__name__)
    return buffer[:size]


def _explain(name: str, arch: str, messages: str, status: str) -> str:
    text = f"{name} does not compile for {arch} ({status})\n{messages}"
    missing = re.search(r"could not open source file \"([^\"]+)\"", messages)
    if missing:
        searched = ", ".join(cuda_include_dirs()) or "no directory"
        text += (
            f"\n  hint: {missing[1]} is in none of {searched}. CUDA's headers come with `pip install "
            "nvidia-cuda-runtime==13.0.*` (CUDA 12: nvidia-cuda-runtime-cu12), <cuda/...> with nvidia-cuda-cccl"
        )
    return text


def parse_report(messages: str, arch: str, compiler: str, seconds: float) -> CompileReport:
    """Read ptxas's `-v` output and the front end's warnings out of a program log."""
    kernels: list[dict[str, Any]] = []
    notes, warnings = [], []
    for line in messages.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for", line):
            kernels.append({"entry": entry[1]})
        elif re.search(r"\bC75\d\d\b", line):
            notes.append(line.strip())
        elif re.search(r"\bwarning\b", line, re.IGNORECASE):
            warnings.append(line.strip())
        elif kernels and (
            frame := re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
            )
        ):
            kernels[-1].update(
                stack_bytes=int(frame[1]), spill_store_bytes=int(frame[2]), spill_load_bytes=int(frame[3])
            )
        elif kernels and (used := re.search(r"Used (\d+) registers", line)):
            kernels[-1]["registers"] = int(used[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                kernels[-1]["static_shared_bytes"] = int(shared[1])
    reports = tuple(KernelReport(**kernel) for kernel in kernels)
    return CompileReport(arch, reports, tuple(notes), tuple(warnings), compiler, seconds)
