"""TensorFlow tensors by DLPack on the CPU: in place, refusals before `to_dlpack`, outputs of TensorFlow's own.

Calls as TensorFlow's operations are in `test_tensorflow_ops.py`.
"""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import cki  # noqa: E402
from cki import dtypes  # noqa: E402
from cki.adapter import adapter_of  # noqa: E402
from cki.adapters.tf_types import DLPACK_TYPES  # noqa: E402
from cki.dlpack import DLPackExport  # noqa: E402
from cki.errors import InvalidTypeError  # noqa: E402
from cki.tensor import DeviceId  # noqa: E402
from tests.adapters import calls  # noqa: E402

pytestmark = pytest.mark.tensorflow
CPU = DeviceId("cpu", 0)


@pytest.fixture(autouse=True)
def _on_cpu():
    """On a machine with a GPU too, these tests use TensorFlow's CPU."""
    with tf.device("CPU:0"):
        yield


with tf.device("CPU:0"):
    ADAPTER = adapter_of(tf.zeros(1))


def address(tensor):
    return np.asarray(tensor).__array_interface__["data"][0]


@pytest.mark.parametrize(("tf_dtype", "dtype"), DLPACK_TYPES.items(), ids=str)
def test_every_dtype_is_viewed_in_place_and_read_only(tf_dtype, dtype):
    tensor = tf.zeros((2, 3, 4), tf_dtype)
    assert ADAPTER.check(tensor) == []
    view = ADAPTER.view(tensor)
    assert (view.ptr, view.shape, view.strides) == (address(tensor), (2, 3, 4), (12, 4, 1))
    assert (view.dtype, view.device, view.readonly) == (dtype, CPU, True)


def test_view_keeps_the_memory():
    view = ADAPTER.view(tf.range(100000, dtype=tf.float32) + 0.0)
    gc.collect()
    tf.zeros(100000) + 1.0  # would reuse the memory were it free
    assert ctypes.c_float.from_address(view.ptr + 4 * 99999).value == 99999.0


def test_variables_are_read_in_place():
    variable = tf.Variable(tf.range(6.0))
    assert adapter_of(variable) is ADAPTER
    assert ADAPTER.check(variable) == []
    assert ADAPTER.view(variable).ptr == address(variable.value())
    variable.assign_add(tf.ones(6))
    assert ctypes.c_float.from_address(ADAPTER.view(variable).ptr).value == 1.0


def test_keras_variables_of_the_tensorflow_backend():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras runs on another backend")
    variable = keras.Variable(np.ones((2, 3), np.float32))
    assert adapter_of(variable) is ADAPTER
    assert ADAPTER.check(variable) == []
    assert ADAPTER.view(variable).ptr == address(variable.value.value())


def test_empty_tensors_and_scalars():
    assert ADAPTER.view(tf.zeros((0, 4))).strides == (4, 1)
    assert ADAPTER.view(tf.constant(2.5)).shape == ()


def test_signature_is_that_of_the_view():
    tensor = tf.zeros((3, 4))
    (view,) = ADAPTER.begin(["x"], [tensor])
    assert ADAPTER.signature(view) == ADAPTER.signature(tensor)
    assert ADAPTER.begin(["x", "w"], [tensor, None])[1] is None


# ---------------------------------------------------------------- refusals


def test_string_tensors_are_refused_before_they_abort_the_process():
    tensor = tf.constant(["a", "b"])
    (problem,) = ADAPTER.check(tensor, "x")
    assert problem.startswith("x is of dtype string, which has no kernels; numbers are f32, f16 or bf16")
    for touch in (ADAPTER.view, ADAPTER.signature, lambda t: ADAPTER.begin(["x"], [t])):
        with pytest.raises(InvalidTypeError, match="string"):
            touch(tensor)


def test_complex_float8_and_quantised_dtypes_are_refused():
    eight = tf.cast(tf.zeros(3), tf.as_dtype("float8_e4m3fn"))
    (problem,) = ADAPTER.check(eight, "w")
    assert "w is of dtype float8_e4m3fn, which cannot pass" in problem
    assert "(float8: tf.bitcast(w, tf.uint8))" in problem
    (problem,) = ADAPTER.check(tf.zeros(3, tf.complex64), "x")
    assert problem.startswith("x is of dtype complex64, which has no kernels")
    assert ADAPTER.check(tf.quantization.quantize(tf.ones(3), 0, 1, tf.qint8).output, "x")


def test_symbolic_tensors_have_no_memory():
    """Only operations become part of a graph; what would read memory says so."""
    seen = []

    @tf.autograph.experimental.do_not_convert
    def body(x):
        assert adapter_of(x, "q") is ADAPTER
        seen.extend(ADAPTER.check(x, "q"))
        with pytest.raises(InvalidTypeError, match="values were asked for of a symbolic tensor"):
            ADAPTER.view(x)
        return x

    tf.function(body)(tf.zeros(3))
    (said,) = seen
    assert said.startswith("q: CKI was called inside a tf.function")
    assert "cki.load(...).operation(rule)" in said


def test_captured_eager_tensors_inside_tf_function_are_refused():
    """They would be computed once, while tracing, and frozen into the graph."""
    captured, variable, seen = tf.zeros(3), tf.Variable([1.0]), []

    @tf.autograph.experimental.do_not_convert
    def body():
        seen.extend(ADAPTER.check(captured, "x") + ADAPTER.check(variable, "w"))
        return tf.zeros(1)

    tf.function(body)()
    assert len(seen) == 2
    assert seen[0].startswith("x: CKI was called inside a tf.function")
    assert seen[1].startswith("w: CKI was called inside a tf.function")


HINTS = {
    "ragged": r"x\.to_tensor\(\)",
    "sparse": r"tf\.sparse\.to_dense\(x\)$",
    "specification": "a tf.Tensor, a tf.Variable or a Keras variable$",
}


@pytest.mark.parametrize("kind", HINTS)
def test_ragged_and_sparse_tensors_are_refused(kind):
    tensor = {
        "ragged": lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]),
        "sparse": lambda: tf.sparse.from_dense([[1.0]]),
        "specification": lambda: tf.TensorSpec([2, 2]),
    }[kind]()
    with pytest.raises(
        InvalidTypeError, match=r"^x is a tensorflow\..*, not a dense tensor\n  hint: " + HINTS[kind]
    ):
        adapter_of(tensor, "x")


def test_out_is_refused_because_tensors_are_immutable():
    (problem,) = ADAPTER.check(tf.zeros(3), "out", output=True)
    assert problem.startswith(
        "out is a TensorFlow tensor, which is immutable; leave out= out and use what is"
    )


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize(("tf_dtype", "dtype"), DLPACK_TYPES.items(), ids=str)
def test_outputs_are_tensorflows_own_memory(tf_dtype, dtype):
    like = ADAPTER.view(tf.zeros(2))
    for shape in [(), (0, 3), (3, 5)]:
        output = ADAPTER.empty(shape, dtype, like)
        pointer = ADAPTER.pointer(output)
        assert pointer % 64 == 0
        nbytes = int(np.prod(shape)) * dtype.itemsize
        ctypes.memset(pointer, 1, nbytes)
        (result,) = ADAPTER.finish([output], [like], 0, CPU)
        assert result is output
        assert (tuple(result.shape), result.dtype) == (shape, tf_dtype)
        assert tf.reshape(result, [-1]).numpy().tobytes() == b"\x01" * nbytes
        assert ADAPTER.view(result).ptr == pointer or not nbytes


def test_outputs_are_distinct_memory():
    like = ADAPTER.view(tf.zeros(2))
    first, second = (ADAPTER.empty((64,), dtypes.f32, like) for _ in range(2))
    assert abs(ADAPTER.pointer(first) - ADAPTER.pointer(second)) >= 256


def test_float8_outputs_are_refused():
    with pytest.raises(
        InvalidTypeError, match="TensorFlow tensors of e4m3 cannot pass\n  hint: one of f64, f32"
    ):
        ADAPTER.empty((3,), dtypes.e4m3, ADAPTER.view(tf.zeros(2)))


# ---------------------------------------------------------------- round trips


def test_tensorflow_to_torch_and_back_is_one_memory():
    torch = pytest.importorskip("torch")
    source = tf.reshape(tf.range(6.0), (2, 3))
    view = ADAPTER.view(source)
    view.readonly = False  # torch warns of read-only memory, and nothing writes here
    tensor = torch.from_dlpack(DLPackExport(view))
    assert tensor.data_ptr() == address(source)
    np.testing.assert_array_equal(tensor.numpy(), source)
    back = tf.experimental.dlpack.from_dlpack(DLPackExport(adapter_of(tensor).view(tensor)).__dlpack__())
    assert address(back) == address(source)
    np.testing.assert_array_equal(back, source)


def test_numpy_to_tensorflow_through_cki():
    from cki.adapters.numpy import aligned_empty

    array = aligned_empty((8,), dtypes.bf16)
    array[:] = np.arange(8)
    pointer = array.__array_interface__["data"][0]
    imported = tf.experimental.dlpack.from_dlpack(DLPackExport(adapter_of(array).view(array)).__dlpack__())
    del array
    gc.collect()
    assert ADAPTER.view(imported).ptr == pointer
    np.testing.assert_array_equal(tf.cast(imported, tf.float32), np.arange(8))


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("dtype", calls.FLOATS, ids=str)
def test_calls_give_tensors_with_the_same_bits_as_numpy(dtype):
    def read(tensor):
        return tf.bitcast(tensor, tf.uint16 if dtype.itemsize == 2 else tf.uint32).numpy().view(dtype)

    results = calls.assert_same_bits(tf.constant, read, dtype)
    assert all(type(result) is type(tf.constant(0)) for result in results)
    assert {result.dtype.name for result in results} == {dtype.name}


def test_call_with_variables_as_weights():
    x, weight, bias, _ = calls.norm_inputs(np.dtype(np.float32))
    with cki.device("sim"):
        got = cki.layer_norm(tf.constant(x), tf.Variable(weight), tf.Variable(bias))
        np.testing.assert_array_equal(got, cki.layer_norm(x, weight, bias))


def test_call_with_out_is_refused():
    x = tf.ones((2, 8))
    with (
        cki.device("sim"),
        pytest.raises(InvalidTypeError, match="out is a TensorFlow tensor, which is immutable"),
    ):
        cki.layer_norm(x, out=tf.zeros((2, 8)))


def test_call_mixed_with_numpy_is_refused():
    with cki.device("sim"), pytest.raises(InvalidTypeError, match="x is of tensorflow, weight is of numpy"):
        cki.layer_norm(tf.ones((2, 8)), np.ones(8, np.float32))


def test_attributes_are_told_apart_by_type():
    calls.assert_attributes_are_told_apart_by_type(tf.ones((1, 3, 1, 8)))
