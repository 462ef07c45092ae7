"""CuPy, torch, JAX and protocol objects on a GPU: addresses, streams, lifetimes, graphs, several GPUs."""

from __future__ import annotations

import gc
import timeit
import weakref

import ml_dtypes
import numpy as np
import pytest

import cki
from cki import dtypes
from cki.adapter import adapter_of
from cki.errors import CkiError, InvalidTypeError
from cki.tensor import DeviceId
from tests.adapters import calls
from tests.adapters.gpu import OnGpu, keep_busy

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

ROWS, WIDTH = 4096, 1024


def on_gpu(values):
    """A CuPy array, bfloat16 bit for bit."""
    values = np.ascontiguousarray(values)
    if values.dtype == ml_dtypes.bfloat16:
        return cupy.asarray(values.view(np.uint16)).view(values.dtype)
    return cupy.asarray(values)


def normal(dtype=np.float32, rows=ROWS, width=WIDTH, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(dtype)


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch has no CUDA")
    return module


@pytest.fixture
def jax():
    module = pytest.importorskip("jax")
    if module.default_backend() != "gpu":
        pytest.skip("JAX has no CUDA")
    return module


# ---------------------------------------------------------------- CuPy


CUPY_DTYPES = [dtype for dtype in dtypes.ALL if dtype not in (dtypes.e4m3, dtypes.e5m2)]


@pytest.mark.parametrize("dtype", CUPY_DTYPES, ids=repr)
def test_cupy_arrays_are_viewed_in_place(dtype):
    array = cupy.ndarray((4, 6), dtype.numpy)[1:, ::2]
    adapter = adapter_of(array)
    assert adapter.check(array) == []
    view = adapter.view(array)
    assert (view.ptr, view.shape, view.strides) == (array.data.ptr, (3, 3), (6, 2))
    assert (view.dtype, view.device) == (dtype, DeviceId("cuda", array.data.device_id))


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (
            lambda: cupy.zeros((3, 2), np.float32)[::-1],
            "x has negative strides (-8, 4); cupy.ascontiguousarray(x)",
        ),
        (lambda: cupy.zeros(3, np.complex64), "x is of dtype complex64, which has no kernels; one of f64"),
    ],
)
def test_cupy_refusals(array, said):
    (problem,) = adapter_of(array()).check(array(), "x")
    assert problem.startswith(said)


def test_cupy_outputs_and_stream():
    like = cupy.zeros(3)
    adapter = adapter_of(like)
    with pytest.raises(InvalidTypeError, match="CuPy has no arrays of e4m3"):
        adapter.empty((5, 7), dtypes.e4m3, like)
    for dtype in CUPY_DTYPES:
        output = adapter.empty((5, 7), dtype, like)
        assert (type(output), output.dtype, output.shape) == (cupy.ndarray, dtype.numpy, (5, 7))
        assert adapter.pointer(output) == output.data.ptr
        assert output.data.ptr % 256 == 0
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert adapter.stream(0) == stream.ptr
    assert adapter.stream(0) == cupy.cuda.Stream.null.ptr
    assert adapter.empty((5,), dtypes.f32, like, stream.ptr).shape == (5,)
    assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null


def test_order_after_makes_a_stream_wait_without_the_host():
    from cki.adapters.cupy import device_of_pointer, order_after, synchronize

    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    source, target = cupy.zeros(1 << 20, np.float32), cupy.zeros(1 << 20, np.float32)
    source.fill(1)  # its kernel is loaded before the producer is held up (0 would be a memset)
    cupy.cuda.runtime.deviceSynchronize()
    release = keep_busy(producer.ptr, until_released=True)
    with producer:
        source.fill(3)
    order_after(consumer.ptr, producer.ptr, 0)
    assert not producer.done  # the host went on
    release()
    with consumer:
        target[...] = source
    synchronize(consumer.ptr, 0)
    assert float(target.sum()) == 3.0 * (1 << 20)
    assert device_of_pointer(source.data.ptr) == 0


def test_keep_alive_lets_go_after_the_stream_has_passed():
    from cki.adapters.cupy import KeepAlive

    class Owner:
        pass

    owner, stream, keep = Owner(), cupy.cuda.Stream(non_blocking=True), KeepAlive()
    alive = weakref.ref(owner)
    keep_busy(stream.ptr)
    keep.hold(owner, stream.ptr, 0)
    del owner
    keep.release()
    assert alive() is not None
    stream.synchronize()
    keep.release()
    assert alive() is None


def test_cupy_call_runs_on_the_current_stream():
    """Interop case kernel_on_the_callers_stream for CuPy: right 20 times of 20 behind a busy side stream."""
    source = on_gpu(normal())
    wanted = cki.layer_norm(source)
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros_like(source)
    for _ in range(20):
        x.fill(0)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            release = keep_busy(stream.ptr, until_released=True)
            x[...] = source
            y = cki.layer_norm(x)
            assert not stream.done  # the call did not wait
            release()
            assert bool((y == wanted).all())


def test_cupy_call_on_a_named_stream():
    source = on_gpu(normal())
    wanted = cki.layer_norm(source)
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros_like(source)
    cupy.cuda.runtime.deviceSynchronize()
    release = keep_busy(stream.ptr, until_released=True)
    with stream:
        x[...] = source
    y = cki.layer_norm(x, stream=stream)
    assert not stream.done
    release()
    stream.synchronize()
    assert bool((y == wanted).all())


# ---------------------------------------------------------------- torch


@pytest.mark.torch
def test_torch_tensors_are_viewed_in_place(torch):
    adapter = adapter_of(torch.zeros(1))
    for name in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "bool"):
        tensor = torch.zeros(4, 6, device="cuda").to(getattr(torch, name))[1:, ::2]
        view = adapter.view(tensor)
        assert (view.ptr, view.strides, view.device) == (tensor.data_ptr(), (6, 2), DeviceId("cuda", 0))
        assert adapter.signature(tensor)[1] != adapter.signature(tensor.cpu()[:, :3])[1]


@pytest.mark.torch
def test_torch_stream_and_outputs(torch):
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


@pytest.mark.torch
def test_torch_signature_costs_about_a_microsecond(torch):
    tensor = torch.zeros(16, 64, device="cuda")
    signature = adapter_of(tensor).signature
    best = min(timeit.repeat(lambda: signature(tensor), number=5000, repeat=20)) / 5000
    print(f"torch signature: {best * 1e9:.0f} ns")
    assert best < 1.5e-6


@pytest.mark.torch
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_call_gives_the_bits_of_cupy(torch, name):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    arrays = calls.norm_inputs(dtype)
    tensors = [torch.from_numpy(a.view(np.uint8)).cuda().view(getattr(torch, name)) for a in arrays]
    for got, wanted in zip(calls.layer_norm(tensors), calls.layer_norm([on_gpu(a) for a in arrays])):
        assert (got.dtype, got.device.type) == (getattr(torch, name), "cuda")
        wanted_bytes = cupy.asnumpy(wanted.view(np.uint8)) if dtype != ml_dtypes.bfloat16 else None
        if wanted_bytes is None:
            wanted_bytes = cupy.asnumpy(wanted.view(np.uint16)).view(np.uint8)
        np.testing.assert_array_equal(got.view(torch.uint8).cpu().numpy(), wanted_bytes)


@pytest.mark.torch
def test_torch_call_runs_on_the_current_stream(torch):
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


@pytest.mark.torch
def test_torch_temporaries_may_be_dropped_after_the_call(torch):
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


@pytest.mark.torch
def test_torch_graph_capture(torch):
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


@pytest.mark.torch
def test_torch_first_call_inside_a_capture(torch):
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


def test_cupy_graph_capture():
    """Interop case dlpack_during_graph_capture, CuPy's begin_capture."""
    x, other = on_gpu(normal()), on_gpu(normal(seed=2))
    wanted, y = cki.layer_norm(other), cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cki.layer_norm(x, out=y)
        stream.begin_capture()
        cki.layer_norm(x, out=y)
        graph = stream.end_capture()
        x[...] = other
        graph.launch(stream)
        stream.synchronize()
    assert bool((y == wanted).all())


@pytest.mark.torch
def test_device_and_stream_are_left_as_they_were(torch):
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


@pytest.mark.torch
def test_cpu_tensors_beside_gpu_tensors_are_refused(torch):
    """Interop case mixed_devices: the argument and the device are named; the process stays usable."""
    x = torch.rand(4, 64, device="cuda")
    with pytest.raises(CkiError, match="x is on cuda:0, weight is on cpu"):
        cki.layer_norm(x, torch.ones(64))
    with pytest.raises(CkiError, match="x lies in memory of device cpu"):
        cki.layer_norm(x.cpu())
    np.testing.assert_allclose(cki.layer_norm(x).cpu(), calls.plain_layer_norm(x.cpu().numpy()), atol=1e-5)


# ---------------------------------------------------------------- several GPUs


@pytest.mark.torch
@pytest.mark.multi_gpu
def test_tensors_on_the_second_gpu_while_the_first_is_current(torch):
    """Interop case second_gpu_while_device0_current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    values = normal(rows=64)
    wanted = calls.plain_layer_norm(values)
    torch.cuda.set_device(0)
    y = cki.layer_norm(torch.from_numpy(values).to("cuda:1"))
    assert y.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    np.testing.assert_allclose(y.cpu(), wanted, atol=1e-5)
    with cupy.cuda.Device(1):
        x = cupy.asarray(values)
    y = cki.layer_norm(x)
    assert (y.device.id, cupy.cuda.Device().id) == (1, 0)
    np.testing.assert_allclose(cupy.asnumpy(y), wanted, atol=1e-5)


@pytest.mark.torch
@pytest.mark.multi_gpu
def test_tensors_on_two_gpus_are_refused(torch):
    """Interop case mixed_devices."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, weight = torch.rand(4, 64, device="cuda:0"), torch.rand(64, device="cuda:1")
    with pytest.raises(CkiError, match="x is on cuda:0, weight is on cuda:1"):
        cki.layer_norm(x, weight)


# ---------------------------------------------------------------- protocol objects (PyCUDA, numba)


def test_interface_arrays_in_and_cupy_arrays_out():
    values = normal(np.float16, 64)
    source = on_gpu(values)
    view = adapter_of(OnGpu(source)).view(OnGpu(source))
    assert (view.ptr, view.device, view.dtype) == (source.data.ptr, DeviceId("cuda", 0), dtypes.f16)
    y = cki.layer_norm(OnGpu(source))
    assert isinstance(y, cupy.ndarray)
    assert bool((y == cki.layer_norm(source)).all())


def test_interface_out_is_written_in_place():
    source = on_gpu(normal(rows=64))
    out = OnGpu(cupy.full_like(source, np.nan))
    assert cki.layer_norm(OnGpu(source), out=out) is out
    assert bool((out.array == cki.layer_norm(source)).all())


def test_interface_stream_is_waited_for_and_temporaries_live():
    """Interop cases dlpack_stream_values, dlpack_lifetime_async: the producer's stream is busy, the array dropped."""
    source = on_gpu(normal())
    wanted = cki.layer_norm(source)
    producer = cupy.cuda.Stream(non_blocking=True)
    for _ in range(10):
        x = cupy.zeros_like(source)
        cupy.cuda.runtime.deviceSynchronize()
        release = keep_busy(producer.ptr, until_released=True)
        with producer:
            x[...] = source
        y = cki.layer_norm(OnGpu(x, stream=producer.ptr))
        del x
        assert not producer.done
        release()
        assert bool((y == wanted).all())


# ---------------------------------------------------------------- JAX


@pytest.mark.jax
@pytest.mark.parametrize("dtype", [d for d in dtypes.ALL if d.bits < 64], ids=repr)
def test_jax_arrays_are_viewed_in_place_and_outputs_adopted(jax, dtype):
    array = jax.device_put(np.zeros((3, 4), dtype.numpy))
    adapter = adapter_of(array)
    assert adapter.check(array) == []
    (view,) = adapter.begin(["x"], [array])
    assert (view.ptr, view.strides, view.dtype) == (array.unsafe_buffer_pointer(), (4, 1), dtype)
    assert (view.device, view.readonly) == (DeviceId("cuda", 0), True)
    output = adapter.empty((3, 5), dtype, view)
    pointer = adapter.pointer(output)
    cupy.cuda.runtime.memset(pointer, 1, 15 * dtype.itemsize)
    (result,) = adapter.finish([output], [view], adapter.stream(0), view.device)
    assert isinstance(result, jax.Array)
    assert (result.unsafe_buffer_pointer(), result.dtype, result.shape) == (pointer, dtype.numpy, (3, 5))
    assert bytes(np.asarray(result).view(np.uint8).ravel()) == b"\x01" * 15 * dtype.itemsize


@pytest.mark.jax
def test_jax_calls_follow_and_precede_jax_s_own_work(jax):
    import jax.numpy as jnp

    source = jax.device_put(normal())
    wanted = np.asarray(cki.layer_norm(source))
    heavy = jax.device_put(np.eye(4096, dtype=np.float32))
    for _ in range(20):
        product = jnp.dot(jnp.dot(heavy, heavy), heavy)[:, :WIDTH] * 0
        y = cki.layer_norm(source + product)
        np.testing.assert_array_equal(np.asarray(y + 0), wanted)


@pytest.mark.jax
def test_memory_lent_to_jax_comes_back_with_the_next_call(jax):
    adapter = adapter_of(jax.device_put(np.zeros(1, np.float32)))
    x = jax.device_put(normal())
    y = cki.layer_norm(x, stream=cupy.cuda.get_current_stream())  # on XLA's own stream the memory is XLA's
    pool = cupy.get_default_memory_pool()
    used = pool.used_bytes()
    del y
    gc.collect()
    assert pool.used_bytes() == used  # kept: JAX's stream may still read it
    adapter.begin(["x"], [x])
    gc.collect()
    assert pool.used_bytes() <= used - ROWS * WIDTH * 4


@pytest.mark.jax
@pytest.mark.torch
def test_torch_to_jax_to_cupy_is_one_memory(jax, torch):
    from cki.dlpack import DLPackExport

    tensor = torch.arange(12.0, device="cuda").reshape(3, 4)
    torch.cuda.synchronize()
    array = jax.dlpack.from_dlpack(DLPackExport(adapter_of(tensor).view(tensor)))
    view = adapter_of(array).view(array)
    view.readonly = False  # CuPy takes old capsules, which cannot carry the flag
    back = cupy.from_dlpack(DLPackExport(view))
    assert tensor.data_ptr() == array.unsafe_buffer_pointer() == back.data.ptr
    np.testing.assert_array_equal(cupy.asnumpy(back), np.arange(12).reshape(3, 4))
