"""TensorFlow on a GPU, eager: addresses, order against TensorFlow's private stream, host-resident int32."""

from __future__ import annotations

import gc

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
cupy = pytest.importorskip("cupy")

import cki  # noqa: E402
from cki import dtypes  # noqa: E402
from cki.adapter import adapter_of  # noqa: E402
from cki.errors import CkiError  # noqa: E402
from cki.tensor import DeviceId  # noqa: E402
from tests.adapters import calls  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.tensorflow]

ROWS, WIDTH = 4096, 1024


@pytest.fixture(autouse=True)
def _on_gpu():
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no CUDA")
    with tf.device("GPU:0"):
        yield


def normal(seed=1):
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)


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


class _Capsule:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return tf.experimental.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self):
        return (2, 0)


def test_int32_results_that_lie_in_host_memory_are_refused():
    lengths = tf.constant([1, 2, 3]) + 1
    if "GPU" in lengths.backing_device:
        pytest.skip("this TensorFlow keeps int32 results on the GPU")
    (problem,) = adapter_of(lengths).check(lengths, "seq_lens")
    assert (
        "seq_lens is of dtype int32 and TensorFlow keeps it in host memory although its device is" in problem
    )
    assert "tf.cast(seq_lens, tf.int64) lies on the GPU" in problem
    assert adapter_of(lengths).check(tf.cast(lengths, tf.int64), "seq_lens") == []


def test_hundred_calls_in_a_row_without_synchronising():
    """Interop case tensorflow_streams: every call reads TensorFlow's newest values, and is read by the next op."""
    x, weight = normal(), np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
    state, tensor, gamma = x.astype(np.float64), tf.constant(x), tf.Variable(weight)
    shift = tf.constant(normal(2))
    for _ in range(100):
        tensor = cki.layer_norm(tensor * 0.5 + shift, gamma)
        state = calls.plain_layer_norm(state * 0.5 + normal(2), weight)
    assert "GPU" in tensor.backing_device
    np.testing.assert_allclose(tensor.numpy(), state, atol=2e-5)


def test_results_are_read_right_behind_a_long_queue():
    heavy, source = tf.eye(4096), tf.constant(normal())
    wanted = cki.layer_norm(source).numpy()
    for _ in range(20):
        product = (heavy @ heavy @ heavy)[:, :WIDTH] * 0.0
        y = cki.layer_norm(source + product)
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
