"""`cki.capture`: replays compute what eager calls compute, on new contents; kernels are counted; memory is freed."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import cki
from cki import capture_state
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.conftest import DeviceUnderTest
from tests.toy import affine

X = np.arange(300, dtype=np.float32)


def write(array: object, values: np.ndarray, device: DeviceUnderTest) -> None:
    """New contents at the same address."""
    array[...] = device.array(values)  # type: ignore[index]


def test_replay_equals_eager_over_changed_inputs(device: DeviceUnderTest) -> None:
    x = device.array(X)
    with cki.capture(lambda t: affine(affine(t, factor=2.0), offset=1.0, steps=1), x) as graph:
        assert graph.num_kernels == 3
        for shift in (0.0, 1.0, 5.0):
            write(x, X + shift, device)
            got = device.numpy(graph.replay())
            np.testing.assert_array_equal(got, 4.0 * (X + shift) + 1.0)


def test_bad_arguments() -> None:
    with cki.device("sim"):
        with pytest.raises(InvalidTypeError, match="function is None"):
            cki.capture(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidTypeError, match="warmup is 'a'"):
            cki.capture(affine, X, warmup="a")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="warmup is -1"):
            cki.capture(affine, X, warmup=-1)
        with pytest.raises(ZeroDivisionError):
            cki.capture(lambda: 1 / 0, warmup=0)
        assert cki.capture(affine, X, steps=1).num_kernels == 1


def test_recording_computes_nothing(device: DeviceUnderTest) -> None:
    x, out = device.array(X), device.empty(X.shape, np.float32)
    graph = cki.capture(affine, x, factor=2.0, out=out, warmup=0)
    device.synchronize()
    assert np.isnan(device.numpy(out)).all()
    assert graph.outputs is out
    graph.replay()
    np.testing.assert_array_equal(device.numpy(out), 4.0 * X)


def test_first_call_inside_a_capture_compiles_there(device: DeviceUnderTest) -> None:
    text = (
        'extern "C" __global__ void fill(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] = kFill; }'
    )
    kernel = cki.load(text, constants={"kFill": 41.5 + (device.kind == "sim")})
    out = device.empty((100,), np.float32)
    graph = cki.capture(lambda t: kernel(1, 128, t, 100), out, warmup=0)
    assert graph.num_kernels == 1
    graph.replay()
    np.testing.assert_array_equal(device.numpy(out), 41.5 + (device.kind == "sim"))


def test_workspaces_live_with_the_graph(device: DeviceUnderTest) -> None:
    x = device.array(X)
    graph = cki.capture(affine, x, factor=2.0)
    noise = [affine(device.array(X + i), factor=9.0) for i in range(20)]  # would take freed memory
    graph.replay()
    np.testing.assert_array_equal(device.numpy(graph.outputs), 4.0 * X)
    assert len(noise) == 20


def test_closing_frees_and_a_closed_graph_says_so(device: DeviceUnderTest) -> None:
    graph = cki.capture(affine, device.array(X))
    output = weakref.ref(graph.outputs)
    graph.close()
    graph.close()
    gc.collect()
    assert output() is None
    with pytest.raises(InvalidArgumentError, match="closed"):
        graph.replay()


def test_dropping_a_graph_frees_its_memory(device: DeviceUnderTest) -> None:
    graph = cki.capture(affine, device.array(X))
    output = weakref.ref(graph.outputs)
    del graph
    gc.collect()
    assert output() is None


def test_an_error_inside_leaves_no_capture_behind(device: DeviceUnderTest) -> None:
    x = device.array(X)
    with pytest.raises(InvalidArgumentError):
        cki.capture(affine, x, factor=float("nan"), warmup=0)
    assert capture_state.active == 0
    np.testing.assert_array_equal(device.numpy(affine(x)), X)


def test_other_frameworks_are_refused() -> None:
    class Tensor:
        def __dlpack__(self) -> None: ...

    Tensor.__module__ = "somewhere"
    with pytest.raises(UnsupportedError, match="cki.capture does not take"):
        cki.capture(lambda t: t, Tensor())


@pytest.mark.gpu
@pytest.mark.torch
def test_torch_graph() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(300, dtype=torch.float32, device="cuda")
    graph = cki.capture(lambda t: affine(affine(t, factor=2.0) * 1.0, offset=1.0, steps=1), x)
    assert graph.num_kernels == 4
    x += 1.0
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(graph.outputs.cpu().numpy(), 4.0 * (X + 1.0) + 1.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph.replay(stream)
    stream.synchronize()


@pytest.mark.gpu
@pytest.mark.torch
def test_inside_torchs_own_capture() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(300, dtype=torch.float32, device="cuda")
    affine(x, factor=2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = affine(x, factor=2.0)
    x += 1.0
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(y.cpu().numpy(), 4.0 * (X + 1.0))


@pytest.mark.gpu
def test_inside_cupys_own_capture_workspaces_survive() -> None:
    import cupy

    x = cupy.asarray(X)
    out = cupy.empty_like(x)
    affine(x, factor=2.0, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        affine(x, factor=2.0, out=out)
        graph = stream.end_capture()
    noise = [affine(cupy.asarray(X + i), factor=9.0) for i in range(20)]
    cupy.cuda.runtime.deviceSynchronize()
    out.fill(0)
    graph.launch()
    np.testing.assert_array_equal(out.get(), 4.0 * X)
    assert len(noise) == 20
