"""The host compiler of the simulated device, and the flags that its two builds (runtime, kernels) share.

The instruction set is fixed, not `-march=native`: a result must not depend on whose machine compiled it.  It is
x86-64-v3 (AVX2, FMA: every x86 server since 2015), because CUDA contracts a*b+c into a fused multiply-add and so must
the simulation; a CPU without it gets x86-64-v2 and, with that, slower and slightly different sums.  AArch64 always has
FMA.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from cki import config, log
from cki.errors import CompileError

_V3_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe")
_V3_FEATURES = ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe")
_V2_FLAGS = ("-msse4.2", "-mpopcnt")


@dataclass(frozen=True)
class Compiler:
    """A C++17 compiler: its command, whether it is Clang, and a text that changes when it is updated."""

    command: str
    is_clang: bool
    identity: str


def _candidates() -> list[str]:
    chosen, environment = config.text("CKI_CXX"), os.environ.get("CXX", "")
    if chosen:
        return [chosen]
    return [*([environment] if environment else []), "g++", "clang++", "c++"]


@functools.lru_cache(maxsize=1)
def find_compiler() -> Compiler:
    """`CKI_CXX`; where that is not set, `$CXX`, g++ or clang++, the first that is there.

    Raises CompileError that says what to install when there is none.
    """
    candidates = _candidates()
    for name in candidates:
        path = shutil.which(name)
        if path is None:
            continue
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, env=_environment(), check=False
        )
        if version.returncode != 0:
            continue
        first_line = version.stdout.splitlines()[0] if version.stdout else ""
        modified = os.stat(os.path.realpath(path)).st_mtime_ns
        return Compiler(
            path, "clang" in version.stdout.lower(), f"{os.path.realpath(path)} {modified} {first_line}"
        )
    raise CompileError(
        f"the simulated device needs a C++17 compiler and found none (tried {', '.join(dict.fromkeys(candidates))}).\n"
        "  hint: install g++ (Debian and Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or clang++, "
        "or name one in CKI_CXX"
    )


@functools.lru_cache(maxsize=1)
def architecture_flags() -> tuple[str, ...]:
    """The fixed instruction set: see the head of this file."""
    if platform.machine() != "x86_64":
        return ()
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return _V2_FLAGS
    return _V3_FLAGS if set(_V3_FEATURES) <= set(words) else _V2_FLAGS


def common_flags() -> list[str]:
    """For the runtime and kernels alike."""
    return [
        "-std=c++17", "-fPIC", "-fno-strict-aliasing", "-fno-math-errno", "-ffp-contract=fast", *architecture_flags(),
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    """Of the compiler's processes: nothing of ours preloaded, messages in English."""
    return {**{k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}, "LC_ALL": "C"}


def run_compiler(arguments: list[str], what: str) -> None:
    """Run the compiler on `what`, and log how long it took; raises CompileError with its own words when it fails."""
    start = time.perf_counter()
    result = subprocess.run(
        [find_compiler().command, *arguments], capture_output=True, text=True, env=_environment(), check=False
    )
    if result.returncode != 0:
        raise CompileError(
            f"compiling {what} for the simulated device failed:\n{result.stderr.strip()[:8000]}"
        )
    log.logger.info("compiled %s for the simulated device in %.2f s", what, time.perf_counter() - start)
