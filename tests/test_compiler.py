"""Prelude, header inlining, NVRTC, its report and its errors.  No GPU needed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from cki import cache, compiler, dtypes, source
from cki.errors import CompileError
from cki.kernel import kernel_spec

ARCHS = ("sm_80", "sm_90a", "sm_120a")


def spec_of(path: Path, text: str, entry: str = "kernel", **constants: object):  # type: ignore[no-untyped-def]
    path.write_text(text)
    return kernel_spec(str(path), entry, "P", **constants)  # type: ignore[arg-type]


def build(spec, arch: str = "sm_90a") -> compiler.Compiled:  # type: ignore[no-untyped-def]
    _, text, options = cache.request(spec, arch)
    return compiler.compile_text(text, spec.source, arch, options)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (64, "constexpr int kValue = 64;"),
        (-1, "constexpr int kValue = -1;"),
        (2**40, "constexpr long long kValue = 1099511627776LL;"),
        (True, "constexpr bool kValue = true;"),
        (0.1, "constexpr float kValue = 0x1.99999a0000000p-4f;"),
        (dtypes.bf16, "using kValue = cki::bf16;"),
    ],
)
def test_constants(value: object, line: str) -> None:
    assert source.constant_text("kValue", value) == line  # type: ignore[arg-type]


def test_float_constant_keeps_its_bits(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path / "k.cu",
        'static_assert(kEps == 1e-5f); extern "C" __global__ void kernel(float* x) { x[0] = kEps; }',
        kEps=1e-5,
    )
    assert build(spec).cubin.startswith(b"\x7fELF")


def test_infinite_constant_is_refused() -> None:
    with pytest.raises(CompileError, match="kScale is inf"):
        source.constant_text("kScale", float("inf"))


def test_headers_are_inlined_once(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#pragma once\n#include "b.h"\nint from_a;\n')
    (tmp_path / "b.h").write_text('#pragma once\n#include "a.h"\nint from_b;\n')
    text = source.full_source(
        spec_of(tmp_path / "k.cu", '#include "a.h"\n#include "b.h"\n/*\n#include "none.h"\n*/\n')
    )
    assert text.count("int from_a;") == 1
    assert text.count("int from_b;") == 1
    assert "u32 = unsigned int" in text  # common/types.cuh, from the prelude


def test_header_in_a_conditional_is_there_when_it_is_needed_later(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("#pragma once\n__device__ inline int one() { return 1; }\n")
    spec = spec_of(
        tmp_path / "k.cu",
        '#if 0\n#include "a.h"\n#endif\n#include "a.h"\n#ifdef __CUDACC__\n#include "a.h"\n#endif\n'
        'extern "C" __global__ void kernel(int* x) { x[0] = one(); }\n',
    )
    assert build(spec).report.kernel("kernel").registers > 0


def test_missing_header_names_the_line(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "k.cu", '\n#include "gone.cuh"\n')
    with pytest.raises(CompileError, match=r'k\.cu:2: #include "gone\.cuh"'):
        source.full_source(spec)


@pytest.mark.parametrize("arch", ARCHS)
def test_report(tmp_path: Path, arch: str) -> None:
    text = """
extern "C" __global__ void kernel(float* x) {
  __shared__ float s[256];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[255 - threadIdx.x];
}
"""
    compiled = build(spec_of(tmp_path / "k.cu", text), arch)
    report = compiled.report.kernel("kernel")
    assert compiled.report.arch == arch
    assert report.static_shared_bytes == 1024
    assert 0 < report.registers < 64
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
    assert compiled.report.messages == ()
    assert "nvrtc" in compiled.report.compiler


def test_spills_are_reported(tmp_path: Path) -> None:
    text = """
extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* x) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[(95 - i) * 1024 + threadIdx.x] = v[i] * v[(i * 7) % 96];
}
"""
    report = build(spec_of(tmp_path / "k.cu", text)).report.kernel("kernel")
    assert report.spill_store_bytes > 0
    assert report.registers <= 32


def test_ptxas_notes_are_collected(tmp_path: Path) -> None:
    # Without a minimum of blocks in __launch_bounds__, ptxas ignores setmaxnreg and says so (C7508).
    text = """
extern "C" __global__ void __launch_bounds__(256) kernel(float* x) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  x[threadIdx.x] = 1.f;
}
"""
    messages = build(spec_of(tmp_path / "k.cu", text)).report.messages
    assert any("C7508" in message for message in messages), messages


def test_error_names_file_and_line_of_the_author(tmp_path: Path) -> None:
    (tmp_path / "wrong.cuh").write_text("#pragma once\n\n__device__ void broken() { undefined_name(); }\n")
    spec = spec_of(
        tmp_path / "k.cu",
        '#include "wrong.cuh"\n\nextern "C" __global__ void kernel(int* x) { x[0] = other_name; }\n',
    )
    with pytest.raises(CompileError) as caught:
        build(spec)
    text = str(caught.value)
    assert "wrong.cuh(3): error" in text
    assert f"{tmp_path / 'k.cu'}(3): error" in text
    assert "other_name" in text
    assert "sm_90a" in text


def test_cuda_headers_for_users(tmp_path: Path) -> None:
    if not compiler.cuda_include_dirs():
        pytest.skip("no CUDA headers here")
    text = '#include <cuda_fp16.h>\nextern "C" __global__ void kernel(__half* x) { x[0] = __hadd(x[0], x[1]); }\n'
    assert build(spec_of(tmp_path / "k.cu", text)).cubin


def test_missing_cuda_headers_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cuda_include_dirs", lambda: ())
    text = '#include <cuda_fp16.h>\nextern "C" __global__ void kernel(__half* x) {}\n'
    with pytest.raises(CompileError) as caught:
        build(spec_of(tmp_path / "k.cu", text))
    assert "pip install nvidia-cuda-runtime" in str(caught.value)


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler._nvrtc.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"cki-runtime\[cuda13\]"):
            compiler.compile_text("", "k.cu", "sm_90a", ())
    finally:
        compiler._nvrtc.cache_clear()


def test_package_kernels_use_no_toolkit_header() -> None:
    from cki import registry

    of_source = {spec.source: spec for spec in registry.all_specs("sm_90a")}
    for spec in of_source.values():
        assert not compiler.uses_cuda_headers(cache.request(spec, "sm_90a")[1]), spec.source


def test_fork_waits_for_the_compiler_and_the_child_can_compile(tmp_path: Path) -> None:
    import os
    import threading

    spec = spec_of(tmp_path / "k.cu", 'extern "C" __global__ void kernel(int* x) { x[0] = kN; }', kN=1)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            build(spec)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0 if build(spec).cubin else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("log", [b"\0", b"a\0", b"ptxas info\0"])
def test_what_nvrtc_writes_into_is_no_string_that_python_shares(log: bytes) -> None:
    """An empty log has one byte, and strings of one byte are shared by the whole process."""
    before = bytes(range(256))

    def size_of_log(program: object) -> tuple[int, int]:
        return 0, len(log)

    def read_log(program: object, buffer: bytes) -> tuple[int]:
        ctypes.memmove(buffer, log, len(log))
        return (0,)

    assert compiler._read(size_of_log, read_log, None) == log
    assert b"".join(bytes([value]) for value in range(256)) == before
