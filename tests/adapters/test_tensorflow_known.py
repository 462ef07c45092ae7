"""Eager TensorFlow calls like earlier ones, which one function recognises, and the threads that kernels run in."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import cki  # noqa: E402
from cki.adapters import tf_eager, xla_ffi  # noqa: E402
from cki.adapters.tf_ops import register  # noqa: E402
from cki.errors import InvalidTypeError, UnsupportedError  # noqa: E402
from tests.adapters.programs import output_of  # noqa: E402

pytestmark = pytest.mark.tensorflow
X = np.random.default_rng(4).standard_normal((4, 6, 96)).astype(np.float32)


@pytest.fixture(autouse=True)
def _place(device):
    if device.kind == "cuda" and not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no CUDA")
    with tf.device("GPU:0" if device.kind == "cuda" else "CPU:0"):
        yield


@pytest.fixture
def searched(monkeypatch):
    """The calls that were not recognised, by the shape of their first tensor."""
    shapes, run = [], tf_eager.run

    def counted(spec, inputs, *rest):
        shapes.append(tuple(inputs[0].shape))
        return run(spec, inputs, *rest)

    monkeypatch.setattr(tf_eager, "run", counted)
    return shapes


def test_a_call_like_an_earlier_one_is_recognised(searched):
    x, weight = tf.constant(X[:3, :5]), tf.Variable(X[0, 0])
    first = cki.layer_norm(x, weight, eps=0.25)
    del searched[:]
    np.testing.assert_array_equal(cki.layer_norm(tf.constant(X[:3, :5]), weight, eps=0.25), first)
    weight.assign(2 * X[0, 0])  # its memory is read at each call
    np.testing.assert_allclose(cki.layer_norm(x, weight, eps=0.25), 2 * first, rtol=1e-6)
    assert not searched
    for other in (
        lambda: cki.layer_norm(x, tf.Variable(X[0, 0]), eps=0.25),  # another variable
        lambda: cki.layer_norm(x, weight, eps=0.5),
        lambda: cki.layer_norm(x[:2], weight, eps=0.25),
        lambda: cki.layer_norm(tf.cast(x, tf.bfloat16), tf.cast(weight, tf.bfloat16), eps=0.25),
        lambda: cki.layer_norm(x, weight, weight, eps=0.25),
    ):
        other()
    assert len(searched) == 5
    cki.layer_norm(x, weight, eps=1)
    with pytest.raises(InvalidTypeError, match="eps is True of type bool"):  # equal, but no number
        cki.layer_norm(x, weight, eps=True)


def test_a_variable_that_is_gone_is_not_taken_for_none():
    x = tf.constant(X[0])
    plain = cki.layer_norm(x).numpy()
    for _ in range(2):
        weight = tf.Variable(3 * X[0, 0])
        for _ in range(2):
            assert not np.array_equal(cki.layer_norm(x, weight), plain)
        del weight
        gc.collect()
        np.testing.assert_array_equal(cki.layer_norm(x), plain)


def test_threads_that_come_first_at_once(device):
    """TensorFlow ends the process when an operation is registered twice."""
    program = (
        "import threading, numpy as np, tensorflow as tf, cki\n"
        "def work(results):\n"
        "    x = tf.ones((3, 8))\n"
        "    results.append(float(tf.reduce_sum(cki.softmax(x) + tf.function(cki.softmax)(x))))\n"
        "results = []\n"
        "threads = [threading.Thread(target=work, args=(results,)) for _ in range(6)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print([round(result, 3) for result in results] == [6.0] * 6)\n"
    )
    assert output_of(program, CKI_DEVICE=device.kind).split() == ["True"]


def test_slices_of_recognised_shapes_may_lie_anywhere():
    whole = tf.constant(X[0, :, :31].copy())
    rows = tf.unstack(tf.reshape(whole, (6, 1, 31)))
    wanted = cki.softmax(whole).numpy()
    for _ in range(2):
        for row, right in zip(rows, wanted):
            np.testing.assert_array_equal(cki.softmax(row)[0], right)


def test_a_recognised_call_in_a_graph_is_a_node_of_it():
    """Captured tensors are eager ones, of the shapes of the call before."""
    x = tf.constant(X)
    eager = cki.softmax(x)
    graph = tf.function(lambda: cki.softmax(x)).get_concrete_function()
    assert [op.type for op in graph.graph.get_operations() if op.type.startswith("Cki")] == ["CkiSoftmax"]
    np.testing.assert_array_equal(graph(), eager)


def test_a_function_of_constants():
    """TensorFlow's optimiser runs nodes of constants on the CPU while it prepares a function, where it can."""
    matrix = X[0]

    @tf.function
    def function(y):
        return cki.layer_norm(cki.softmax(tf.constant(matrix))) + y

    wanted = cki.layer_norm(cki.softmax(tf.constant(matrix))) + 1.0
    for _ in range(2):
        np.testing.assert_array_equal(function(tf.ones(())), wanted)


def test_gradients_of_recognised_calls_name_the_operation():
    x = tf.constant(X)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = cki.softmax(x)
        with pytest.raises(UnsupportedError, match="softmax has no gradient"):
            tape.gradient(y, x)


def test_another_device_is_not_taken_for_the_current_one(device):
    x = tf.constant(X)
    cki.softmax(x)
    with cki.device("cuda" if device.kind == "sim" else "sim"), pytest.raises(cki.CkiError, match="x"):
        cki.softmax(x)


def test_threads_of_tensorflow_s_keep_python_s_state(monkeypatch):
    """One state a thread, not one a call: in a graph every kernel may run in a thread of TensorFlow's pool."""
    made, keep = [], xla_ffi._keep_thread_state
    monkeypatch.setattr(xla_ffi, "_keep_thread_state", lambda: (made.append(threading.get_ident()), keep()))
    monkeypatch.setattr(register()._activity, "_thread", threading.local())
    function = tf.function(lambda x: cki.softmax(cki.softmax(x)))
    for _ in range(60):
        function(tf.constant(X))
    assert made and len(made) == len(set(made))
