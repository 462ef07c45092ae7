"""Building kernels and the runtime: errors, the cache and its key, many processes, odd names; ELF and DWARF readers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from cki import sim
from cki.errors import CkiError, CompileError, InvalidArgumentError, InvalidTypeError
from cki.sim import Checks, toolchain
from cki.sim.dwarf import LineTable
from cki.sim.elf import RED_ZONE_BYTES, ElfFile
from tests.sim.harness import kernel, run

ADD = """
#include "add.cuh"
extern "C" __global__ void add(float* y, float x) { y[threadIdx.x] += plus(x); }
"""


def built_files(directory: Path) -> set[str]:
    return {path.name for path in (directory / "sim").glob("*.so")}


def test_compile_error_holds_the_compilers_words_and_the_kernels_line():
    source = '#line 7 "broken.cu"\nextern "C" __global__ void broken(float* y) { y[0] = undeclared; }\n'
    with pytest.raises(CompileError) as error:
        sim.compile_kernel(source, "broken", name="broken.cu")
    assert isinstance(error.value, CkiError)
    assert "broken.cu:7" in str(error.value)
    assert "undeclared" in str(error.value)


def test_missing_entry():
    with pytest.raises(CompileError, match="absent"):
        sim.compile_kernel('extern "C" __global__ void present() {}', "absent")


def test_no_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    toolchain.find_compiler.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"install g\+\+") as error:
            toolchain.find_compiler()
        assert "CKI_CXX" in str(error.value)
    finally:
        toolchain.find_compiler.cache_clear()


def test_a_named_compiler_is_not_replaced_by_another(monkeypatch):
    monkeypatch.setenv("CKI_CXX", "no-such-compiler")
    toolchain.find_compiler.cache_clear()
    try:
        with pytest.raises(CompileError, match="tried no-such-compiler"):
            toolchain.find_compiler()
    finally:
        toolchain.find_compiler.cache_clear()


@pytest.mark.parametrize("wrong", [{"races": "no"}, {"bounds": 1}, {"seed": "x"}, {"seed": 1.5}])
def test_checks_of_a_wrong_type(wrong):
    with pytest.raises(InvalidTypeError, match=f"{next(iter(wrong))} is "), sim.checks(**wrong):
        pass


def test_cache_key_follows_headers(tmp_path):
    include, cache = tmp_path / "include", tmp_path / "cache"
    include.mkdir()
    header = include / "add.cuh"

    def compile_and_run(text: str) -> float:
        header.write_text(text)
        y = np.zeros(32, np.float32)
        built = sim.compile_kernel(ADD, "add", include_dirs=[include], cache_dir=cache)
        run(built, 1, 32, y, 1.0)
        return float(y[0])

    assert compile_and_run("__device__ inline float plus(float x) { return x; }") == 1.0
    first = built_files(cache)
    assert len(first) == 1
    assert compile_and_run("__device__ inline float plus(float x) { return x; }") == 1.0
    assert built_files(cache) == first
    assert compile_and_run("__device__ inline float plus(float x) { return x + 1; }") == 2.0
    assert len(built_files(cache)) == 2
    left = [p.name for p in (cache / "sim").iterdir() if p.is_dir()]
    assert [name.partition("-")[0] for name in left] == ["cuda_builtins"]  # working directories are gone


def test_read_only_cache_directory(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    y = np.zeros(1, np.float32)
    built = sim.compile_kernel(
        'extern "C" __global__ void one(float* y) { *y = 1; }', "one", cache_dir=blocked / "x"
    )
    run(built, 1, 1, y)
    assert y[0] == 1.0


def test_many_processes_build_one_kernel(tmp_path):
    program = textwrap.dedent(f"""
        import ctypes, numpy as np
        from cki import sim
        k = sim.compile_kernel('extern "C" __global__ void k(float* y) {{ *y = 7; }}', "k", cache_dir={str(tmp_path)!r})
        y = np.zeros(1, np.float32)
        p = ctypes.c_void_p(y.ctypes.data)
        sim.launch(k, 1, 1, (ctypes.c_void_p * 1)(ctypes.addressof(p)))
        assert y[0] == 7
        """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    running = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(4)]
    assert [p.wait() for p in running] == [0] * 4
    assert len(built_files(tmp_path)) == 1


def test_launch_in_a_forked_child():
    built = kernel("races.cu", "order")
    y = np.zeros(10 * 128, np.int32)
    run(built, 10, 128, y)  # the pool's threads exist now
    child = os.fork()
    if child == 0:
        try:
            run(built, 10, 128, y)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", ["sync", "write", "main_", "exp2f_kernel"])
def test_a_kernel_may_be_named_like_a_function_of_the_c_library(name):
    y = np.zeros(1, np.float32)
    built = sim.compile_kernel(f'extern "C" __global__ void {name}(float* y) {{ *y = 3; }}', name)
    run(built, 1, 1, y)
    assert y[0] == 3.0


def test_impossible_geometry_lists_every_rule():
    built = kernel("races.cu", "order")
    with pytest.raises(InvalidArgumentError) as error:
        run(built, (0, 1), (64, 64), np.zeros(1, np.int32), smem=300_000)
    problems = "\n".join(error.value.problems)
    assert "grid" in problems
    assert "at most 1024" in problems
    assert "232448" in problems


def test_line_table_of_inlined_calls():
    source = textwrap.dedent("""\
        #line 1 "lines.cu"
        __device__ __forceinline__ void inner(float* p) {
          *p = 1.0f;
        }
        __device__ __forceinline__ void outer(float* p) {
          inner(p);
        }
        extern "C" __global__ void lines(float* p) {
          outer(p + 100);
        }
        """)
    built = sim.compile_kernel(source, "lines")
    y = np.zeros(8, np.float32)
    with pytest.raises(
        sim.SimulationError, match=r"at lines.cu:2, inlined at lines.cu:5, inlined at lines.cu:8"
    ):
        run(built, 1, 1, y, checks=Checks(bounds=True))
    table = LineTable(built.build(True).path)
    assert table.frames(0) == []


def test_elf_reader_finds_the_shared_window():
    built = kernel("builtins.cu", "shared_layout").build()
    elf = ElfFile(built.path)
    names = {symbol.name for symbol in elf.symbols() if symbol.is_thread_local and symbol.is_defined}
    assert {"smem", "words", "cki_sim_dynamic_area"} <= names
    assert elf.thread_local_size() == built.module.window_size
    assert built.module.dynamic_offset % 1024 == 0
    assert built.static_bytes >= 3 + 128


def test_instrumented_kernels_have_gaps_behind_static_arrays():
    plain, instrumented = (kernel("faults.cu", "bounds").build(checks) for checks in (False, True))
    assert plain.static_bytes == instrumented.static_bytes
    sizes = []
    for built, gap in ((plain, 0), (instrumented, RED_ZONE_BYTES)):
        module = built.module
        arrays = [(array.offset, array.bytes) for array in module.arrays[: module.array_count]]
        assert {128, 16, 20} <= {size for _, size in arrays}
        starts = [offset for offset, _ in arrays[1:]] + [module.dynamic_offset]
        assert all(start >= offset + size + gap for (offset, size), start in zip(arrays, starts))
        sizes.append(sorted(size for _, size in arrays))
    assert sizes[0] == sizes[1]


def test_not_an_elf_file(tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match="not a 64-bit"):
        ElfFile(path)
