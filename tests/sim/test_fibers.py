"""The fiber switches: this machine's assembly, the ucontext fallback, and AArch64's where there is an emulator."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from cki.sim import runtime, toolchain
from tests.sim.harness import KERNELS

RUNTIME = runtime.source_dir() / "runtime"
SOURCES = [
    KERNELS / "fibers.cpp",
    *(RUNTIME / f for f in ("fiber.cpp", "switch.S")),
]
FLAGS = ["-std=c++17", "-O2", "-I", str(RUNTIME)]


def build(compiler: str, program, *flags: str) -> None:
    subprocess.run([compiler, *FLAGS, *flags, *map(str, SOURCES), "-o", str(program)], check=True)


@pytest.mark.parametrize("flags", [[], ["-DCKI_SIM_UCONTEXT"]], ids=["assembly", "ucontext"])
def test_switch_of_this_machine(tmp_path, flags):
    build(toolchain.find_compiler().command, tmp_path / "fibers", *flags)
    assert subprocess.run([str(tmp_path / "fibers")], check=False).returncode == 0


def test_switch_of_aarch64(tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not compiler or not emulator:
        pytest.skip(
            "needs aarch64-linux-gnu-g++ and qemu-aarch64 (apt-get install g++-aarch64-linux-gnu qemu-user)"
        )
    build(compiler, tmp_path / "fibers", "-static")
    assert subprocess.run([emulator, str(tmp_path / "fibers")], check=False).returncode == 0
