"""`cki.load`: reading a kernel's parameters, converting arguments, launching on tensors of any framework."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cki
from cki import dtypes
from cki.errors import (
    CkiError,
    CompileError,
    DeviceError,
    InvalidArgumentError,
    InvalidTypeError,
    SimulationError,
)
from cki.signature import Parameter, find_entry, parse_parameters
from tests.conftest import DeviceUnderTest
from tests.threads import in_threads

SCALE = """
#include "common/types.cuh"
using namespace cki;

extern "C" __global__ void __launch_bounds__(kBlock)
scale(const float* __restrict__ x, float* __restrict__ y, float factor, i64 n) {
  const i64 i = i64{blockIdx.x} * kBlock + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
"""
X = np.arange(1000, dtype=np.float32)


@pytest.mark.parametrize(
    ("declaration", "parameter"),
    [
        ("const float* __restrict__ x", Parameter("x", "P", dtypes.f32, True)),
        ("float *y", Parameter("y", "P", dtypes.f32)),
        ("float const *x", Parameter("x", "P", dtypes.f32, True)),
        ("unsigned char x[]", Parameter("x", "P", dtypes.u8)),
        ("const __half* x", Parameter("x", "P", dtypes.f16, True)),
        ("cki::bf16* x", Parameter("x", "P", dtypes.bf16)),
        ("const Element* x", Parameter("x", "P", dtypes.e4m3, True)),
        ("void* x", Parameter("x", "P")),
        ("const float4* __restrict__ x", Parameter("x", "P", None, True)),
        ("float** x", Parameter("x", "P", dtypes.f32)),
        ("int n", Parameter("n", "i")),
        ("const int n", Parameter("n", "i")),
        ("unsigned n", Parameter("n", "I")),
        ("unsigned int", Parameter("argument 0", "I")),
        ("cki::u32 n", Parameter("n", "I")),
        ("long long n", Parameter("n", "q")),
        ("unsigned long long int n", Parameter("n", "Q")),
        ("size_t n", Parameter("n", "Q")),
        ("float factor", Parameter("factor", "f")),
        ("double factor", Parameter("factor", "d")),
        ("const __grid_constant__ TensorMap map", Parameter("map", "T")),
        ("const __grid_constant__ cki::TensorMap map", Parameter("map", "T")),
    ],
)
def test_parameter(declaration: str, parameter: Parameter) -> None:
    assert parse_parameters(declaration, {"Element": dtypes.e4m3}, "k") == (parameter,)


def test_parameters_that_cannot_be_read_are_all_named() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_parameters("const float* x, float4 v, bool flag, int n, std::array<int, 3> a", {}, "k")
    text = str(caught.value)
    for words in ("parameter 1: `float4 v`", "parameter 2: `bool flag`", "parameter 4", 'params="PPi"'):
        assert words in text


def test_no_parameters() -> None:
    assert parse_parameters(" ", {}, "k") == ()
    assert parse_parameters("void", {}, "k") == ()


def test_entry_is_found_behind_attributes_and_comments() -> None:
    text = """
    // extern "C" __global__ void not_this(int a)
    /* extern "C" __global__ void nor_this(int a) */
    extern "C" __global__ void __launch_bounds__((256), 2) this_one(int a /* , int b */, float (*p)[4], int c) {}
    """
    name, parameters = find_entry(text, None, "k.cu")
    assert name == "this_one"
    assert parameters.count(",") == 2


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(
        InvalidArgumentError, match="the source text is no Unicode: surrogates not allowed at 42"
    ):
        cki.load('extern "C" __global__ void k(float* x) {}\n\ud800')


def test_entry_in_an_extern_block() -> None:
    assert find_entry('extern "C" {\n__global__ void a(int x) { if (x) {} }\n}\n', None, "k.cu")[0] == "a"


def test_entry_without_extern_c_is_explained() -> None:
    with pytest.raises(InvalidArgumentError, match=r'lacks extern "C"'):
        find_entry("__global__ void a(int x) {}", None, "k.cu")


def test_several_entries_need_a_name() -> None:
    text = 'extern "C" __global__ void a(int x) {}\nextern "C" __global__ void b(int x) {}'
    with pytest.raises(InvalidArgumentError, match="2 kernels"):
        find_entry(text, None, "k.cu")
    assert find_entry(text, "b", "k.cu")[0] == "b"
    with pytest.raises(InvalidArgumentError, match="its kernels: a, b"):
        find_entry(text, "c", "k.cu")


def test_text_and_file(device: DeviceUnderTest, tmp_path: Path) -> None:
    path = tmp_path / "scale.cu"
    path.write_text(SCALE)
    for given in (SCALE, path, str(path)):
        x, y = device.array(X), device.empty(X.shape, np.float32)
        cki.load(given, constants={"kBlock": 128})(8, 128, x, y, 2.5, X.size)
        np.testing.assert_array_equal(device.numpy(y), 2.5 * X)


def test_header_beside_the_file(device: DeviceUnderTest, tmp_path: Path) -> None:
    (tmp_path / "mine.cuh").write_text(
        "#pragma once\n__device__ inline float twice(float x) { return 2.f * x; }\n"
    )
    (tmp_path / "k.cu").write_text(
        '#include "mine.cuh"\nextern "C" __global__ void k(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }\n'
    )
    x = device.array(X[:64])
    cki.load(tmp_path / "k.cu")(1, 64, x)
    np.testing.assert_array_equal(device.numpy(x), 2.0 * X[:64])


def test_an_edited_file_is_compiled_again(device: DeviceUnderTest, tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    x = device.array(X[:32])
    for value in (3.0, 4.0):
        path.write_text(f'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] = {value}f; }}\n')
        cki.load(path)(1, 32, x)
        np.testing.assert_array_equal(device.numpy(x), value)


def test_every_number_type(device: DeviceUnderTest) -> None:
    text = """
    extern "C" __global__ void k(double* out, int a, unsigned b, long long c, unsigned long long d, float e, double f) {
      out[0] = a; out[1] = b; out[2] = double(c); out[3] = double(d); out[4] = e; out[5] = f;
    }"""
    out = device.array(np.zeros(6))
    values = (-5, 2**32 - 1, -(2**40), 2**50, 0.5, np.float64(1e300))
    cki.load(text)(1, 1, out, *values)
    np.testing.assert_array_equal(device.numpy(out), values)


def test_null_pointer(device: DeviceUnderTest) -> None:
    text = 'extern "C" __global__ void k(int* out, const float* maybe) { out[0] = maybe == nullptr; }'
    out = device.array(np.zeros(1, np.int32))
    cki.load(text)(1, 1, out, None)
    assert device.numpy(out)[0] == 1


def test_bad_arguments_are_all_named_before_any_launch(device: DeviceUnderTest) -> None:
    kernel = cki.load(SCALE, constants={"kBlock": 128})
    x = device.array(X.astype(np.float64))
    y = device.empty(X.shape, np.float32)
    with pytest.raises(InvalidTypeError) as caught:
        kernel(8, 128, x, y, "2.5", 1.5)
    text = str(caught.value)
    for words in ("x is a f64 tensor, the kernel takes f32*", "factor is str", "n is 1.5"):
        assert words in text
    assert np.isnan(device.numpy(y)).all()
    with pytest.raises(InvalidTypeError, match="given 3 arguments, it takes 4"):
        kernel(8, 128, y, y, 2.5)
    with pytest.raises(InvalidArgumentError, match="out of range of long long"):
        kernel(8, 128, y, y, 2.5, 2**63)
    with pytest.raises(InvalidTypeError, match="n is bool"):
        kernel(8, 128, y, y, 2.5, True)
    with pytest.raises(InvalidArgumentError, match="2048 threads"):
        kernel(8, 2048, y, y, 2.5, 1)
    with pytest.raises(InvalidTypeError, match="x is of type list"):
        kernel(8, 128, [1.0], y, 2.5, 1)


@pytest.mark.parametrize("entry", [["scale"], {}, 1, np.array([1, 2])], ids=repr)
def test_an_entry_that_is_no_text(entry: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"entry is .*, not a str\n  hint: its kernels: scale"):
        cki.load(SCALE, entry=entry, constants={"kBlock": 128})


@pytest.mark.parametrize(
    ("kind", "words", "grid", "options"),
    [
        (InvalidTypeError, "grid is 1.0, not one to three integers", 1.0, {}),
        (InvalidTypeError, "grid is b'x', not one to three integers", b"x", {}),
        (InvalidTypeError, "grid is None", None, {}),
        (InvalidTypeError, "grid is '12'", "12", {}),
        (InvalidTypeError, "grid is True", True, {}),
        (InvalidTypeError, "grid is array(3)", np.array(3), {}),
        (InvalidArgumentError, "grid is (1, 1, 1, 1)", (1, 1, 1, 1), {}),
        (InvalidArgumentError, "grid (0, 1, 1) is not three positive sizes", 0, {}),
        (InvalidTypeError, "cluster is None", 1, {"cluster": None}),
        (InvalidTypeError, "smem is 1024.0, not an integer", 1, {"smem": 1024.0}),
        (InvalidTypeError, "smem is [1], not an integer", 1, {"smem": [1]}),
        (InvalidArgumentError, "-1 bytes of shared memory", 1, {"smem": -1}),
    ],
)
def test_geometry_of_a_wrong_type(
    kind: type[CkiError], words: str, grid: Any, options: dict[str, Any]
) -> None:
    kernel = cki.load(SCALE, constants={"kBlock": 128})
    with pytest.raises(kind) as caught, cki.device("sim"):
        kernel(grid, 128, X, X.copy(), 2.5, X.size, **options)
    assert words in str(caught.value)


def test_numpy_integers_for_geometry(device: DeviceUnderTest) -> None:
    x, y = device.array(X), device.empty(X.shape, np.float32)
    cki.load(SCALE, constants={"kBlock": np.int64(128)})(
        np.array([8, 1]), np.int32(128), x, y, 2.5, X.size, smem=np.int64(1024)
    )
    np.testing.assert_array_equal(device.numpy(y), 2.5 * X)


def test_misaligned_tensor() -> None:
    y = np.ndarray(8, np.float32, np.zeros(33, np.uint8), offset=1)
    with pytest.raises(InvalidArgumentError, match="y lies at no multiple of its element size 4"):
        with cki.device("sim"):
            cki.load(SCALE, constants={"kBlock": 128})(1, 128, X, y, 2.5, 8)


def test_constants_that_no_source_can_hold() -> None:
    bad = {
        "k x": 1,
        "kText": "text",
        "kList": [1],
        "kNan": float("nan"),
        "kWide": 2**70,
        5: 1,
        "kLarge": 1e300,
    }
    with pytest.raises(InvalidArgumentError) as caught:
        cki.load(SCALE, constants=bad)  # type: ignore[arg-type]
    for name in bad:
        assert repr(name) in str(caught.value) or f"{name} is " in str(caught.value)
    with pytest.raises(InvalidTypeError, match="constants is list"):
        cki.load(SCALE, constants=[1])  # type: ignore[arg-type]


def test_numpy_constants_keep_their_kind(device: DeviceUnderTest) -> None:
    text = 'extern "C" __global__ void k(float* x) { int a[kN] = {7}; x[0] = a[kN / 2 - 1] / 2 * (kOn ? kF : 0); }'
    x = device.array(X[:1])
    cki.load(text, constants={"kN": np.int32(3), "kOn": np.bool_(True), "kF": np.float32(0.5)})(1, 1, x)
    assert device.numpy(x)[0] == 1.5


def test_bounds_of_the_tensors_are_checked() -> None:
    text = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x + 5] = x ? x[threadIdx.x] : 0; }'
    kernel = cki.load(text)
    with cki.device("sim"), cki.sim.checks(bounds=True):
        kernel(1, 64, X[:64], np.zeros(69, np.float32))
        kernel(1, 64, None, np.zeros(69, np.float32))
        with pytest.raises(SimulationError, match="OUT OF BOUNDS"):
            kernel(1, 64, X[:64], np.zeros(68, np.float32))
        with pytest.raises(SimulationError, match="OUT OF BOUNDS"):
            kernel(1, 64, X[:63], np.zeros(69, np.float32))
        with pytest.raises(SimulationError, match="OUT OF BOUNDS"):
            kernel(1, 64, X[:64], None)


@pytest.mark.parametrize("source", [None, 5, SCALE.encode()])
def test_source_of_a_wrong_type(source: Any) -> None:
    with pytest.raises(InvalidTypeError, match="path_or_text is"):
        cki.load(source)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_text_that_is_no_path(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is no path"):
        cki.load(path)


def test_read_only_array_for_a_written_parameter() -> None:
    y = np.zeros_like(X)
    y.flags.writeable = False
    kernel = cki.load(SCALE, constants={"kBlock": 128})
    with pytest.raises(InvalidArgumentError, match="y is read-only"), cki.device("sim"):
        kernel(8, 128, X, y, 2.5, X.size)
    y.flags.writeable = True
    with cki.device("sim"):
        readonly = X.copy()
        readonly.flags.writeable = False
        kernel(8, 128, readonly, y, 2.0, X.size)
    np.testing.assert_array_equal(y, 2.0 * X)


def test_cpu_tensors_need_the_simulated_device() -> None:
    with pytest.raises(DeviceError, match="current device is cuda"):
        cki.load(SCALE, constants={"kBlock": 128})(8, 128, X, X.copy(), 2.5, X.size)


def test_torch_tensors_on_the_simulated_device() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(1000, dtype=torch.float32)
    y = torch.empty_like(x)
    with cki.device("sim"):
        cki.load(SCALE, constants={"kBlock": 128})(8, 128, x, y, 2.5, x.numel())
    assert torch.equal(y, 2.5 * x)


@pytest.mark.gpu
@pytest.mark.torch
def test_torch_tensors_on_the_gpu() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        cki.load(SCALE, constants={"kBlock": 128})(8, 128, x, y, 2.5, x.numel())
        torch.cuda.current_stream().synchronize()
    assert torch.equal(y, 2.5 * x)


@pytest.mark.gpu
def test_cuda_headers_on_the_gpu() -> None:
    import cupy

    text = """
    #include <cuda_fp16.h>
    extern "C" __global__ void k(const __half* x, __half* y, int n) {
      int i = threadIdx.x;
      if (i < n) y[i] = __hadd(x[i], x[i]);
    }"""
    x = cupy.arange(100, dtype="f2")
    y = cupy.empty_like(x)
    cki.load(text)(1, 128, x, y, 100)
    np.testing.assert_array_equal(y.get(), 2 * np.arange(100, dtype=np.float16))


def test_source_that_does_not_compile(device: DeviceUnderTest) -> None:
    kernel = cki.load('extern "C" __global__ void k(int* x) {\n  nonsense(x);\n}')
    with pytest.raises(CompileError, match="nonsense"):
        kernel(1, 1, device.array(np.zeros(1, np.int32)))


def test_missing_file() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no kernel source /.*/gone\.cu"):
        cki.load("gone.cu")


def test_stated_parameters(device: DeviceUnderTest) -> None:
    text = 'struct Odd { float v; };\nextern "C" __global__ void k(float* x, Odd o) { x[0] = o.v; }'
    x = device.array(X[:1])
    with pytest.raises(InvalidArgumentError, match="`Odd o`"):
        cki.load(text)
    cki.load(text, "k", params="Pf")(1, 1, x, 7.5)
    assert device.numpy(x)[0] == 7.5
    with pytest.raises(InvalidArgumentError, match="unknown letters"):
        cki.load(text, params="Px")
    with pytest.raises(InvalidArgumentError, match="states 1 parameters, k declares 2"):
        cki.load(text, params="P")
    with pytest.raises(InvalidArgumentError, match="parameter 0: `float. x` is P, not q"):
        cki.load(text, params="qf")
    with pytest.raises(InvalidTypeError, match="params of k is 5"):
        cki.load(text, params=5)  # type: ignore[arg-type]
    macro = f"#define ARGUMENTS float* x, Odd o\n{text.replace('float* x, Odd o', 'ARGUMENTS')}"
    cki.load(macro, params="Pf")(1, 1, x, 8.5)
    assert device.numpy(x)[0] == 8.5


def test_threads_load_one_text_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes a file of its own, and the last that is moved into place is as good as the first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (time.sleep(0.002), replace(*paths)))
    start = threading.Barrier(8, timeout=30)

    def load() -> None:
        for number in range(5):
            text = f'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] = {number}.0f; }}\n'
            start.wait()
            cki.load(text)

    assert in_threads(load, 8) == []
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 5
