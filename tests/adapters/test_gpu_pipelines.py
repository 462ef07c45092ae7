"""CuPy, PyCUDA and numba programs on a GPU: streams, events, allocators, graphs, and a fork after CUDA was used."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import cki
from tests.adapters.gpu import keep_busy
from tests.adapters.programs import output_of

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

X = np.random.default_rng(0).standard_normal((4096, 1024)).astype(np.float32)
SQUARE = (np.random.default_rng(1).standard_normal((256, 256)) / 16).astype(np.float16)
TOKENS = np.random.default_rng(2).standard_normal((4, 64, 256)).astype(np.float16)


def softmax(values):
    e = np.exp(values.astype(np.float64) - values.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def block(x, w):
    """An operation with temporary memory."""
    return cki.fused_attention(x, w, w, w, w, num_heads=4, head_dim=64, causal=True)


# ---------------------------------------------------------------------------------------------------------------------
# CuPy


def test_a_pipeline_over_two_streams_and_events():
    """CuPy's own kernels before and after, on two streams that events order; the host waits once, at the end."""
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    source, x = cupy.asarray(X), cupy.zeros_like(cupy.asarray(X))
    expected = softmax(2 * X) + 1
    # Loading a kernel waits for the device, so all are loaded before it is held up.
    cupy.multiply(source, 2, out=x)
    cki.softmax(x) + 1
    for _ in range(10):
        x.fill(0)
        cupy.cuda.runtime.deviceSynchronize()
        ready, done = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True)
        with first:
            release = keep_busy(first.ptr, until_released=True)
            cupy.multiply(source, 2, out=x)
            ready.record()
        with second:
            second.wait_event(ready)
            y = cki.softmax(x)
            done.record()
        assert not done.done
        release()
        with first:
            first.wait_event(done)
            z = y + 1
        first.synchronize()
        np.testing.assert_allclose(cupy.asnumpy(z), expected, atol=1e-5)


def test_outputs_and_workspace_come_from_the_current_allocator():
    """A pool of the caller's own, and an allocator in Python; both are used for every byte and get it back."""
    x, w = cupy.asarray(TOKENS), cupy.asarray(SQUARE)
    wanted = cupy.asnumpy(block(x, w))
    cupy.cuda.runtime.deviceSynchronize()
    pool, default = cupy.cuda.MemoryPool(), cupy.get_default_memory_pool()
    before = default.used_bytes()
    with cupy.cuda.using_allocator(pool.malloc):
        y = block(x, w)
    assert pool.used_bytes() >= y.nbytes
    assert pool.total_bytes() > y.nbytes  # the workspace was there too
    assert default.used_bytes() == before
    np.testing.assert_array_equal(cupy.asnumpy(y), wanted)
    del y
    gc.collect()
    assert pool.used_bytes() == 0

    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return default.malloc(nbytes)

    with cupy.cuda.using_allocator(allocate):
        y = block(x, w)
    assert y.nbytes in asked
    assert len(asked) > 1
    np.testing.assert_array_equal(cupy.asnumpy(y), wanted)


def test_stream_ordered_allocation():
    """cudaMallocAsync's pool: memory of dropped temporaries is handed out again in stream order alone."""
    x, w = cupy.asarray(TOKENS), cupy.asarray(SQUARE)
    wanted = cupy.asnumpy(block(x + 1, w))
    pool, stream = cupy.cuda.MemoryAsyncPool(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        for _ in range(10):
            keep_busy(stream.ptr)
            y = block(x + 1, w)
            cupy.full_like(x, np.nan)  # takes what the temporaries left
            found = cupy.asnumpy(y)
            np.testing.assert_array_equal(found, wanted)
        del y
    stream.synchronize()


def test_torch_as_cupys_allocator():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    from cupy.cuda import PythonFunctionAllocator

    held = torch.cuda.memory_allocated()
    allocator = PythonFunctionAllocator(
        lambda size, device: torch.cuda.caching_allocator_alloc(
            size, device, cupy.cuda.get_current_stream().ptr
        ),
        lambda pointer, device: torch.cuda.caching_allocator_delete(pointer),
    )
    x, w = cupy.asarray(TOKENS), cupy.asarray(SQUARE)
    wanted = cupy.asnumpy(block(x, w))
    with cupy.cuda.using_allocator(allocator.malloc):
        y = block(x, w)
        assert torch.cuda.memory_allocated() >= held + y.nbytes
        np.testing.assert_array_equal(cupy.asnumpy(y), wanted)
    del y
    gc.collect()
    assert torch.cuda.memory_allocated() == held


def test_cupys_graph_with_its_own_kernels_around_ours():
    """cupy.cuda.graph: recorded once, replayed on new contents; workspace of the recording stays its own."""
    x, w = cupy.asarray(TOKENS), cupy.asarray(SQUARE)
    doubled, out = cupy.empty_like(x), cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)

    def step():
        cupy.multiply(x, 2, out=doubled)
        cki.fused_attention(doubled, w, w, w, w, num_heads=4, head_dim=64, causal=True, out=out)
        cupy.add(out, 1, out=out)

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
    for seed in range(3):
        values = np.random.default_rng(seed).standard_normal(TOKENS.shape).astype(np.float16)
        with stream:
            x.set(values)
            junk = [cupy.full((1 << 20,), np.nan, np.float32) for _ in range(8)]
            graph.launch(stream)
            stream.synchronize()
        del junk
        wanted = cupy.asnumpy(block(cupy.asarray(values * np.float16(2)), w) + np.float16(1))
        np.testing.assert_array_equal(cupy.asnumpy(out), wanted)


# ---------------------------------------------------------------------------------------------------------------------
# PyCUDA and numba


@pytest.fixture
def pycuda_context():
    """PyCUDA in the primary context, which CuPy and CKI use."""
    driver = pytest.importorskip("pycuda.driver")
    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    yield driver
    context.pop()


def test_pycuda_gpuarrays(pycuda_context):
    import pycuda.gpuarray as gpuarray

    x = gpuarray.to_gpu(X)
    y = cki.softmax(x)
    np.testing.assert_allclose(cupy.asnumpy(y), softmax(X), atol=1e-6)
    out = gpuarray.empty_like(x)
    assert cki.softmax(x, out=out) is out
    np.testing.assert_allclose(out.get(), softmax(X), atol=1e-6)
    stream = pycuda_context.Stream()
    staged = gpuarray.empty_like(x)
    staged.set_async(X * 2, stream)
    y = cki.softmax(staged, out=out, stream=stream)
    stream.synchronize()
    np.testing.assert_allclose(out.get(), softmax(X * 2), atol=1e-6)
    transposed = cki.softmax(gpuarray.to_gpu(np.asfortranarray(X)))
    np.testing.assert_allclose(cupy.asnumpy(transposed), softmax(X), atol=1e-6)


def test_numba_device_arrays():
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("numba has no CUDA")
    x = cuda.to_device(X)
    np.testing.assert_allclose(cupy.asnumpy(cki.softmax(x)), softmax(X), atol=1e-6)
    out = cuda.device_array_like(x)
    assert cki.softmax(x, out=out) is out
    np.testing.assert_allclose(out.copy_to_host(), softmax(X), atol=1e-6)
    stream = cuda.stream()
    keep_busy(int(getattr(stream.handle, "value", stream.handle)))  # a ctypes pointer or a CUstream
    staged = cuda.to_device(X * 2, stream=stream)  # its interface names the stream
    assert staged.__cuda_array_interface__["stream"]
    for _ in range(5):
        y = cki.softmax(staged)
        np.testing.assert_allclose(cupy.asnumpy(y), softmax(X * 2), atol=1e-6)
    columns = cuda.to_device(np.asfortranarray(X))
    np.testing.assert_allclose(cupy.asnumpy(cki.softmax(columns)), softmax(X), atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# a whole encoder in one operation of a framework's: its launches become a graph when memory repeats itself


def layers(place):
    """Keyword arguments of four layers in fp16."""
    rng = np.random.default_rng(3)
    shapes = {"wq": (4, 128, 384), "wo": (4, 128, 128), "w1": (4, 128, 256), "w2": (4, 256, 128)}
    weights = {n: (rng.standard_normal(s) / s[1] ** 0.5).astype(np.float16) for n, s in shapes.items()}
    weights |= {"final_gamma": np.linspace(0.5, 1.5, 128).astype(np.float32)}
    return {
        "wk": None,
        "wv": None,
        "num_heads": 2,
        "head_dim": 64,
        **{n: place(w) for n, w in weights.items()},
    }


def check_repeated_calls(place, call):
    """Fifty calls on other values; results are dropped, so that their memory comes again."""
    for number in range(50):
        x = np.random.default_rng(number).standard_normal((2, 32, 128)).astype(np.float16)
        found = np.asarray(call(place(x)))
        if number % 7 == 0:
            wanted = cki.encoder_layers(cupy.asarray(x), **layers(cupy.asarray))
            np.testing.assert_array_equal(found, cupy.asnumpy(wanted))


@pytest.mark.jax
def test_all_layers_in_one_call_of_xla_s():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no CUDA")
    weights = layers(lambda a: a)
    arrays = {name: jax.device_put(value) for name, value in weights.items() if isinstance(value, np.ndarray)}
    others = {name: value for name, value in weights.items() if name not in arrays}
    compiled = jax.jit(lambda x, arrays: cki.encoder_layers(x, **arrays, **others))
    check_repeated_calls(jax.device_put, lambda x: compiled(x, arrays))


@pytest.mark.tensorflow
def test_all_layers_in_one_operation_of_tensorflow_s():
    tf = pytest.importorskip("tensorflow")
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no CUDA")
    from cki.adapters.tensorflow import encoder_layers

    weights = layers(tf.constant)
    traced = tf.function(lambda x: encoder_layers(x, **weights))
    check_repeated_calls(tf.constant, traced)
    check_repeated_calls(tf.constant, lambda x: encoder_layers(x, **weights))


# ---------------------------------------------------------------------------------------------------------------------
# processes


def test_a_child_forked_after_cuda_was_used_says_so():
    """Interop case import_is_inert: the parent's context is of no use to the child, and the error says what to do."""
    program = (
        "import os, cupy, cki\n"
        "x, out = cupy.ones((4, 64), 'f4'), cupy.empty((4, 64), 'f4')\n"
        "cki.softmax(x, out=out)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        cki.softmax(x, out=out)\n"
        "    except cki.CkiError as error:\n"
        "        os._exit(0 if 'forked' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "cki.softmax(x, out=out)\n"
        "print(status, float(out.sum()))\n"
    )
    assert output_of(program) == "0 4.0\n"
