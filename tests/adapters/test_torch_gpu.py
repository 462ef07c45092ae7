"""torch on a GPU: addresses, streams, lifetimes, graphs."""

from __future__ import annotations

import gc
import timeit

import ml_dtypes
import numpy as np
import pytest

import cki
from cki import dtypes
from cki.adapter import adapter_of
from cki.errors import CkiError
from cki.tensor import DeviceId
from tests.adapters import calls
from tests.adapters.gpu import WIDTH, keep_busy, normal, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def has_cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")


def test_torch_tensors_are_viewed_in_place():
    adapter = adapter_of(torch.zeros(1))
    for name in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "bool"):
        tensor = torch.zeros(4, 6, device="cuda").to(getattr(torch, name))[1:, ::2]
        view = adapter.view(tensor)
        assert (view.ptr, view.strides, view.device) == (tensor.data_ptr(), (6, 2), DeviceId("cuda", 0))
        assert adapter.signature(tensor)[1] != adapter.signature(tensor.cpu()[:, :3])[1]


def test_torch_stream_and_outputs():
    like = torch.zeros(3, device="cuda")
    adapter = adapter_of(like)
    assert adapter.stream(0) == torch.cuda.current_stream().cuda_stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert adapter.stream(0) == stream.cuda_stream
    before = torch.cuda.current_stream()
    output = adapter.empty((1 << 20,), dtypes.f32, like, stream.cuda_stream)
    assert torch.cuda.current_stream() == before
    pointer = adapter.pointer(output)
    segments = [
        s for s in torch.cuda.memory_snapshot() if s["address"] <= pointer < s["address"] + s["total_size"]
    ]
    assert [segment["stream"] for segment in segments] == [stream.cuda_stream]  # memory of that stream's pool


def test_torch_signature_costs_about_a_microsecond():
    tensor = torch.zeros(16, 64, device="cuda")
    signature = adapter_of(tensor).signature
    best = min(timeit.repeat(lambda: signature(tensor), number=5000, repeat=20)) / 5000
    print(f"torch signature: {best * 1e9:.0f} ns")
    assert best < 1.5e-6


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_call_gives_the_bits_of_cupy(name):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    arrays = calls.norm_inputs(dtype)
    tensors = [torch.from_numpy(a.view(np.uint8)).cuda().view(getattr(torch, name)) for a in arrays]
    for got, wanted in zip(calls.layer_norm(tensors), calls.layer_norm([on_gpu(a) for a in arrays])):
        assert (got.dtype, got.device.type) == (getattr(torch, name), "cuda")
        wanted_bytes = cupy.asnumpy(wanted.view(np.uint8)) if dtype != ml_dtypes.bfloat16 else None
        if wanted_bytes is None:
            wanted_bytes = cupy.asnumpy(wanted.view(np.uint16)).view(np.uint8)
        np.testing.assert_array_equal(got.view(torch.uint8).cpu().numpy(), wanted_bytes)


def test_torch_call_runs_on_the_current_stream():
    """Interop case kernel_on_the_callers_stream: x filled by a long kernel on s; call under s; read under s."""
    source = torch.from_numpy(normal()).cuda()
    wanted = cki.layer_norm(source)
    stream = torch.cuda.Stream()
    x = torch.zeros_like(source)
    for _ in range(20):
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            release = keep_busy(stream.cuda_stream, until_released=True)
            x.copy_(source)
            y = cki.layer_norm(x)
            assert not stream.query()  # the call did not wait
            release()
            same = torch.equal(y, wanted)
        assert same


def test_torch_temporaries_may_be_dropped_after_the_call():
    """Interop case dlpack_lifetime_async: temporaries deleted right after a call on a busy side stream."""
    source, weight = torch.from_numpy(normal()).cuda(), torch.rand(WIDTH, device="cuda")
    wanted = cki.layer_norm(source + 1, weight * 2)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        with torch.cuda.stream(stream):
            keep_busy(stream.cuda_stream)
            y = cki.layer_norm(source + 1, weight * 2)
            torch.full_like(source, float("nan"))  # takes the temporaries' memory, in stream order
            assert torch.equal(y, wanted)
    del y
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_torch_graph_capture():
    """Interop case dlpack_during_graph_capture: the call captures on a side stream, and replays on new contents."""
    x = torch.from_numpy(normal()).cuda()
    other = torch.from_numpy(normal(seed=2)).cuda()
    wanted = cki.layer_norm(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cki.layer_norm(x)
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, wanted)


def test_torch_first_call_inside_a_capture():
    """Interop case graph_capture_no_allocation: works, or says to warm up first; the process stays usable."""
    x = torch.rand(3, 1528, device="cuda")  # a shape that nothing else uses
    wanted, refused = calls.plain_layer_norm(x.cpu().numpy()), None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            try:
                y = cki.layer_norm(x)
            except CkiError as error:
                refused = error
    except RuntimeError:
        assert refused is not None
    if refused is not None:
        assert "warm" in str(refused)
        y = cki.layer_norm(x)
    else:
        graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_allclose(y.cpu().numpy(), wanted, atol=1e-5)


def test_device_and_stream_are_left_as_they_were():
    """Interop case current_device_not_changed."""
    x, c = torch.rand(4, 64, device="cuda"), on_gpu(normal(rows=4, width=64))
    stream = torch.cuda.Stream()

    def state():
        return (
            torch.cuda.current_device(),
            torch.cuda.current_stream().cuda_stream,
            cupy.cuda.Device().id,
            cupy.cuda.get_current_stream().ptr,
        )

    before = state()
    cki.layer_norm(x)
    cki.layer_norm(c)
    cki.layer_norm(x, stream=stream)
    cki.layer_norm(c, stream=stream)
    assert state() == before
    with torch.cuda.stream(stream):
        before = state()
        cki.layer_norm(x)
        assert state() == before


def test_cpu_tensors_beside_gpu_tensors_are_refused():
    """Interop case mixed_devices: the argument and the device are named; the process stays usable."""
    x = torch.rand(4, 64, device="cuda")
    with pytest.raises(CkiError, match="x is on cuda:0, weight is on cpu"):
        cki.layer_norm(x, torch.ones(64))
    with pytest.raises(CkiError, match="x lies in memory of device cpu"):
        cki.layer_norm(x.cpu())
    np.testing.assert_allclose(cki.layer_norm(x).cpu(), calls.plain_layer_norm(x.cpu().numpy()), atol=1e-5)
