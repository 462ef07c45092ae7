"""Saved models, Keras, and processes that only load and run what another one saved: the node must be enough."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import cki  # noqa: E402
import cki.adapters.tensorflow as cki_tf  # noqa: E402
from tests.adapters.examples import EXAMPLES, X, normal  # noqa: E402
from tests.adapters.programs import run_program  # noqa: E402

pytestmark = pytest.mark.tensorflow

LOAD = """
import sys, cki, numpy as np, tensorflow as tf
# Importing cki beside TensorFlow has not initialised its devices: they may still be configured.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()]
)
loaded = tf.saved_model.load(sys.argv[1])
x, wanted = np.load(sys.argv[1] + "/x.npy"), np.load(sys.argv[1] + "/wanted.npy")
place = "GPU:0" if sys.argv[2] == "cuda" else "CPU:0"
with tf.device(place):
    y = loaded(tf.constant(x))
    assert y.numpy().tobytes() == wanted.tobytes()
    print(y.shape, loaded.signatures["serving_default"].structured_outputs)
    try:
        with tf.GradientTape() as tape:
            tape.watch(source := tf.constant(x))
            result = loaded(source)
        tape.gradient(result, source)
    except Exception as error:
        print(type(error).__name__, *str(error).split())
if place == "CPU:0":  # a pipeline that runs ahead when the interpreter ends
    ahead = tf.data.Dataset.range(10**6).map(lambda i: cki.softmax(tf.ones((8, 96)) * tf.cast(i, tf.float32)))
    ahead = iter(ahead.prefetch(500))
    next(ahead)
"""


class Block(tf.Module):
    """Fused attention with its weights as variables."""

    def __init__(self) -> None:
        super().__init__()
        arrays, self.attributes = EXAMPLES["fused_attention"]
        self.weights = {name: tf.Variable(array) for name, array in arrays.items() if name != "x"}

    @tf.function(input_signature=[tf.TensorSpec([None, None, 32], tf.float32)])
    def __call__(self, x):
        return cki_tf.fused_attention(x, **self.weights, **self.attributes)


class CompiledBlock(Block):
    """The same, compiled by XLA."""

    @tf.function(input_signature=[tf.TensorSpec([None, None, 32], tf.float32)], jit_compile=True)
    def __call__(self, x):
        return cki_tf.fused_attention(x, **self.weights, **self.attributes)


@pytest.fixture
def saved(device, tmp_path):
    """The folder of a saved block, an input and its output."""
    return save(Block, device, tmp_path)


def save(kind, device, tmp_path):
    if device.kind == "cuda" and not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no CUDA")
    with tf.device("GPU:0" if device.kind == "cuda" else "CPU:0"):
        block, x = kind(), normal(3, 5, 32)
        wanted = block(tf.constant(x))
        assert block.__call__.get_concrete_function().output_shapes == tf.TensorShape([None, None, 32])
        tf.saved_model.save(block, str(tmp_path))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "wanted.npy", wanted.numpy())
    return tmp_path


def test_a_saved_model_runs_in_a_process_that_imports_cki(device, saved):
    """cki before TensorFlow (here it is after); with its shapes, without gradients, and the process ends cleanly."""
    done = run_program(LOAD, str(saved), device.kind, CKI_DEVICE=device.kind)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("(3, 5, 32)") and "shape=(None, None, 32)" in said[0]
    assert said[1].startswith("UnsupportedError fused_attention has no gradient: CKI is for inference")
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr


def test_a_saved_program_of_xla_s_runs_in_a_process_that_imports_cki(device, tmp_path):
    """TensorFlow saves its gradient too, which says by name that there is none."""
    done = run_program(LOAD, str(save(CompiledBlock, device, tmp_path)), device.kind, CKI_DEVICE=device.kind)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("(3, 5, 32)")
    assert said[1].startswith("InvalidArgumentError") and "fused_attention_has_no_gradient" in said[1]
    assert "Fatal" not in done.stderr


def test_a_saved_model_reloads_in_this_process(device, saved):
    loaded = tf.saved_model.load(str(saved))
    with tf.device("GPU:0" if device.kind == "cuda" else "CPU:0"):
        found = loaded(tf.constant(np.load(saved / "x.npy")))
    np.testing.assert_array_equal(found, np.load(saved / "wanted.npy"))


@pytest.mark.parametrize("jit", [False, True])
def test_a_keras_model_predicts(device, jit):
    """Batches that do not divide the data; layers that compute with CKI beside Keras's own."""
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras runs on another backend")

    class Norm(keras.layers.Layer):
        def build(self, shape):
            self.gamma = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return cki_tf.layer_norm(x, self.gamma)

        def compute_output_shape(self, shape):
            return shape

    with tf.device("GPU:0" if device.kind == "cuda" else "CPU:0"):
        model = keras.Sequential([keras.Input((None, 96)), Norm(), keras.layers.Dense(4)])
        model.compile(jit_compile=jit)
        data = normal(5, 7, 96)
        found = model.predict(data, batch_size=2, verbose=0)
        wanted = model.layers[-1](cki.layer_norm(tf.constant(data))).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_keras_input_is_no_tensor_yet():
    keras = pytest.importorskip("keras")
    with pytest.raises(cki.CkiError, match="softmax: a keras.*KerasTensor is no tensor yet"):
        cki_tf.softmax(keras.Input((96,)))


def test_importing_cki_imports_no_tensorflow_and_hides_nothing():
    program = (
        "import sys, cki\n"
        "assert 'tensorflow' not in sys.modules and 'numpy' not in sys.modules\n"
        "import importlib.util\n"
        "spec = importlib.util.find_spec('tensorflow')\n"
        "assert spec.origin.endswith('__init__.py')\n"
        "assert importlib.util.find_spec('tensorflow_that_is_not_there') is None\n"
    )
    done = run_program(program)
    assert done.returncode == 0, done.stderr


def test_a_node_on_the_cpu_without_the_simulated_device_says_so():
    """Never a silent fallback: what was traced for a GPU does not run on the CPU."""
    with cki.device("cuda"):
        function = tf.function(cki.softmax).get_concrete_function(tf.TensorSpec([None, 96], tf.float32))
    with tf.device("CPU:0"), pytest.raises(tf.errors.OpError, match="softmax: TensorFlow runs it on the CPU"):
        function(tf.constant(X))
