"""The built-ins' header is parsed once for all kernels, and a precompiled form that is of no use does no harm."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cki import sim
from cki.sim import toolchain
from cki.sim.toolchain import find_compiler

pytestmark = pytest.mark.skipif(find_compiler().is_clang, reason="Clang reads the header itself")


def value_of(number: int, cache: Path) -> float:
    """What a kernel, compiled for this number, writes."""
    kernel = sim.compile_kernel(
        f'extern "C" __global__ void one(float* y) {{ *y = sqrt({number}.0f); }}', "one", cache_dir=cache
    )
    y = np.zeros(1, np.float32)
    pointer = ctypes.c_void_p(y.ctypes.data)
    sim.launch(kernel, 1, 1, (ctypes.c_void_p * 1)(ctypes.addressof(pointer)))
    return float(y[0])


def precompiled(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.gch"))


def test_one_header_for_all_kernels(tmp_path, monkeypatch):
    calls = []
    run = toolchain.run_compiler
    monkeypatch.setattr(toolchain, "run_compiler", lambda a, what: calls.append((a, what)) or run(a, what))
    assert value_of(4, tmp_path) == 2.0
    assert value_of(9, tmp_path) == 3.0
    assert len(precompiled(tmp_path)) == 1
    assert [what for _, what in calls if what.startswith("header")] == ["header cuda_builtins.h"]

    # GCC says itself that it took the precompiled form: -H marks it with "!".
    arguments = next(a for a, _ in calls if "-include" in a)
    source = tmp_path / "empty.cpp"
    source.write_text("\n")
    again = [str(source) if a.endswith("kernel.cpp") else a for a in arguments]
    again[again.index("-o") + 1] = str(tmp_path / "empty.o")
    said = subprocess.run([find_compiler().command, *again, "-H"], capture_output=True, text=True, check=True)
    assert said.stderr.startswith(f"! {precompiled(tmp_path)[0]}")


@pytest.mark.parametrize("damage", ["emptied", "cut", "overwritten"])
def test_a_damaged_header_is_passed_over(tmp_path, damage):
    assert value_of(16, tmp_path) == 4.0
    (file,) = precompiled(tmp_path)
    whole = file.read_bytes()
    file.write_bytes({"emptied": b"", "cut": whole[: len(whole) // 2], "overwritten": b"x" * 4096}[damage])
    assert value_of(25, tmp_path) == 5.0
