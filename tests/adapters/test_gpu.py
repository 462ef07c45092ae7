"""CuPy and protocol objects on a GPU: addresses, streams, lifetimes, graphs."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import cki
from cki import dtypes
from cki.adapter import adapter_of
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId
from tests.adapters.gpu import OnGpu, keep_busy, normal, on_gpu

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

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
        (
            lambda: cupy.zeros(3, np.complex64),
            "x is of dtype complex64, which has no kernels; numbers are f32",
        ),
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
