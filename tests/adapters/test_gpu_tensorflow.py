"""TensorFlow on a GPU: its stream and memory, order without waiting, several GPUs; and by DLPack.

The bodies that the simulated device runs too are in `test_tensorflow_ops.py` and `test_tensorflow_models.py`.
"""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
cupy = pytest.importorskip("cupy")

import cki  # noqa: E402
import cki.adapters.tensorflow as cki_tf  # noqa: E402
from cki import dtypes  # noqa: E402
from cki.adapter import adapter_of  # noqa: E402
from cki.adapters import tf_ops, tf_xla  # noqa: E402
from cki.errors import CkiError  # noqa: E402
from cki.tensor import DeviceId  # noqa: E402
from tests.adapters import calls  # noqa: E402
from tests.adapters.gpu import keep_busy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.tensorflow]

ROWS, WIDTH = 4096, 1024


@pytest.fixture(autouse=True)
def _on_gpu():
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no CUDA")
    with tf.device("GPU:0"):
        yield


def normal(seed=1, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def is_done(stream):
    return cupy.cuda.runtime.streamQuery(stream) == 0


# ---------------------------------------------------------------- the operation: stream and memory


def test_operations_can_be_registered_here():
    assert tf_ops.missing() == ""


def test_the_learned_stream_is_tensorflow_s():
    """TensorFlow's own work waits for what is put on it."""
    x = tf.constant(normal())
    wanted = (x * 2.0).numpy()  # the first call compiles
    stream = tf_xla.place(0).stream
    keep_busy(stream)  # so does this
    for _ in range(5):
        cupy.cuda.runtime.streamSynchronize(stream)
        release = keep_busy(stream, until_released=True)
        y = x * 2.0
        assert not is_done(stream)
        release()
        np.testing.assert_array_equal(y.numpy(), wanted)


@pytest.mark.parametrize("way", ["eager", "function"])
def test_calls_do_not_wait(way):
    call = cki.layer_norm if way == "eager" else tf.function(cki.layer_norm)
    x = tf.constant(normal())
    wanted = call(x + 0.0).numpy()
    stream = tf_xla.place(0).stream
    keep_busy(stream)
    for _ in range(5):
        cupy.cuda.runtime.streamSynchronize(stream)
        release = keep_busy(stream, until_released=True)
        y = call(x + 0.0)
        assert not is_done(stream)
        release()
        np.testing.assert_array_equal(y.numpy(), wanted)


def test_outputs_are_tensorflow_s_memory_and_workspace_goes_back():
    x = tf.cast(tf.random.normal((2, 128, 1024)), tf.bfloat16)
    weights = [tf.cast(tf.random.normal((1024, 1024)) / 32, tf.bfloat16) for _ in range(4)]
    gamma, beta = tf.ones(1024, tf.bfloat16), tf.zeros(1024, tf.bfloat16)
    y = cki_tf.fused_attention(x, *weights, gamma, beta)
    assert "GPU:0" in y.backing_device
    in_use = []
    for _ in range(3):
        for _ in range(50):
            z = cki_tf.fused_attention(x, *weights, gamma, beta)
        np.testing.assert_array_equal(tf.cast(z, tf.float32).numpy(), tf.cast(y, tf.float32).numpy())
        in_use.append(tf.config.experimental.get_memory_info("GPU:0")["current"])
    # 50 workspaces are 130 MiB; TensorFlow's allocator hands out chunks that are larger than asked for.
    assert max(in_use[1:]) < in_use[0] + (8 << 20), in_use


def test_int32_results_that_lie_in_host_memory_are_taken():
    """TensorFlow copies them to the operation's device."""
    table = tf.constant(normal(rows=16))
    ids = tf.constant([[1, 2, 3]]) + 1
    wanted = normal(rows=16)[[[2, 3, 4]]]
    np.testing.assert_array_equal(cki.embed_tokens(ids, table), wanted)
    np.testing.assert_array_equal(tf.function(cki.embed_tokens)(ids, table), wanted)


@pytest.mark.parametrize("way", ["eager", "function", "jit"])
def test_hundred_calls_in_a_row_without_synchronising(way):
    """Interop case tensorflow_streams: every call reads TensorFlow's newest values, and is read by the next op."""
    x, weight = normal(), np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
    state, tensor, gamma = x.astype(np.float64), tf.constant(x), tf.Variable(weight)
    shift = tf.constant(normal(2))

    def step(tensor):
        return cki.layer_norm(tensor * 0.5 + shift, gamma)

    if way != "eager":
        step = tf.function(step, jit_compile=way == "jit")
    for _ in range(100):
        tensor = step(tensor)
        state = calls.plain_layer_norm(state * 0.5 + normal(2), weight)
    assert "GPU" in tensor.backing_device
    np.testing.assert_allclose(tensor.numpy(), state, atol=2e-5)


@pytest.mark.parametrize("way", ["eager", "function", "jit"])
def test_results_are_read_right_behind_a_long_queue(way):
    call = cki.layer_norm if way == "eager" else tf.function(cki.layer_norm, jit_compile=way == "jit")
    heavy, source = tf.eye(4096), tf.constant(normal())
    wanted = call(source).numpy()
    for _ in range(20):
        product = (heavy @ heavy @ heavy)[:, :WIDTH] * 0.0
        y = call(source + product)
        np.testing.assert_array_equal((y + 0.0).numpy(), wanted)


def test_temporaries_may_be_dropped_after_the_call():
    """Interop case dlpack_lifetime_async for TensorFlow."""
    source = tf.constant(normal())
    wanted = cki.layer_norm(source + 1.0).numpy()
    for _ in range(20):
        y = cki.layer_norm(source + 1.0)
        gc.collect()
        tf.fill((ROWS, WIDTH), float("nan"))
        np.testing.assert_array_equal(y.numpy(), wanted)


def test_many_sizes_one_after_another():
    """Memory is reused while kernels are queued; every size is a new plan."""
    for index in range(100):
        x = tf.random.normal((1 + index * 7919 % 300, 256))
        y = cki.layer_norm(x, tf.ones(256))
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        plain = (x - mean) * tf.math.rsqrt(variance + 1e-5)
        assert float(tf.reduce_max(tf.abs(y - plain))) < 1e-4


def test_half_precision_gives_the_bits_of_cupy():
    x = normal().astype(np.float16)
    got = cki.layer_norm(tf.constant(x))
    assert got.dtype == tf.float16
    np.testing.assert_array_equal(got.numpy(), cupy.asnumpy(cki.layer_norm(cupy.asarray(x))))


def test_cpu_tensors_are_refused():
    with tf.device("CPU:0"):
        x = tf.zeros((2, 8))
    with pytest.raises(CkiError, match="x lies in memory of device cpu"):
        cki.layer_norm(x)


# ---------------------------------------------------------------- several GPUs


@pytest.fixture
def two_gpus():
    if tf_xla.num_gpus() < 2:
        pytest.skip("one GPU")


@pytest.mark.multi_gpu
def test_each_gpu_has_its_own_stream(two_gpus):
    first, second = tf_xla.place(0), tf_xla.place(1)
    assert first.stream != second.stream
    assert (first.ordinal, second.ordinal) == (0, 1)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", ["eager", "function", "jit"])
def test_tensors_on_the_second_gpu_while_the_first_is_current(two_gpus, way):
    """Interop case second_gpu_while_device0_current: in eager mode the tensors decide."""
    call = cki.layer_norm if way == "eager" else tf.function(cki.layer_norm, jit_compile=way == "jit")
    with tf.device("GPU:1"):
        x = tf.constant(normal(rows=64))
        (x + 1.0).numpy()
        current = (
            cupy.cuda.runtime.getDevice()
        )  # TensorFlow's own operations may leave the second one current
        y = call(x)
    assert "GPU:1" in y.backing_device
    np.testing.assert_allclose(y.numpy(), calls.plain_layer_norm(normal(rows=64)), atol=1e-5)
    if way == "eager":
        assert "GPU:1" in cki.layer_norm(x).backing_device
    assert cupy.cuda.runtime.getDevice() == current


@pytest.mark.multi_gpu
def test_tensors_on_two_gpus_are_refused(two_gpus):
    """Interop case mixed_devices."""
    with tf.device("GPU:1"):
        weight = tf.ones(WIDTH)
    with pytest.raises(CkiError, match="x is on cuda:0, weight is on cuda:1"):
        cki.layer_norm(tf.constant(normal(rows=64)), weight)


@pytest.mark.multi_gpu
def test_two_threads_drive_two_gpus(two_gpus):
    errors = []

    def work(number):
        try:
            with tf.device(f"GPU:{number}"):
                x = tf.constant(normal(number, 64))
                wanted = calls.plain_layer_norm(normal(number, 64))
                function = tf.function(cki.layer_norm)
                for _ in range(50):
                    np.testing.assert_allclose(cki.layer_norm(x), wanted, atol=1e-5)
                    np.testing.assert_allclose(function(x), wanted, atol=1e-5)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# ---------------------------------------------------------------- by DLPack


class _Capsule:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return tf.experimental.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self):
        return (2, 0)


@pytest.mark.parametrize("dtype", [dtypes.f32, dtypes.f16, dtypes.bf16, dtypes.i64, dtypes.u8], ids=repr)
def test_tensors_are_viewed_in_place_and_outputs_are_tensorflows_own(dtype):
    name = {"bf16": "bfloat16", "u8": "uint8"}.get(dtype.name, str(dtype.numpy))
    tensor = tf.identity(tf.zeros((3, 4), name))
    adapter = adapter_of(tensor)
    assert adapter.check(tensor) == []
    (view,) = adapter.begin(["x"], [tensor])
    pointer = cupy.from_dlpack(_Capsule(tensor)).data.ptr if dtype is not dtypes.bf16 else view.ptr
    assert (view.ptr, view.device, view.dtype) == (pointer, DeviceId("cuda", 0), dtype)
    output = adapter.empty((3, 5), dtype, view)
    assert "GPU" in output.backing_device
    pointer = adapter.pointer(output)
    assert pointer % 256 == 0
    cupy.cuda.runtime.memset(pointer, 1, 15 * dtype.itemsize)
    (result,) = adapter.finish([output], [view], adapter.stream(0), view.device)
    assert result is output
    assert tf.reshape(result, [-1]).numpy().tobytes() == b"\x01" * 15 * dtype.itemsize


def test_int32_in_host_memory_cannot_be_viewed():
    lengths = tf.constant([1, 2, 3]) + 1
    if "GPU" in lengths.backing_device:
        pytest.skip("this TensorFlow keeps int32 results on the GPU")
    (problem,) = adapter_of(lengths).check(lengths, "seq_lens")
    assert (
        "seq_lens is of dtype int32 and TensorFlow keeps it in host memory although its device is" in problem
    )
    assert "tf.cast(seq_lens, tf.int64) lies on the GPU" in problem
    assert adapter_of(lengths).check(tf.cast(lengths, tf.int64), "seq_lens") == []


def test_a_named_stream_goes_by_dlpack_and_is_right():
    stream = cupy.cuda.Stream(non_blocking=True)
    x = tf.constant(normal())
    wanted = cki.layer_norm(x).numpy()
    for _ in range(5):
        np.testing.assert_array_equal(cki.layer_norm(x + 0.0, stream=stream).numpy(), wanted)
