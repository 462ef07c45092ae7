"""A user's kernel, and cki.Encoder, as TensorFlow operations: eager, in functions of unknown sizes, under XLA."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import cki  # noqa: E402
from cki.adapters import known_operations  # noqa: E402
from cki.errors import InvalidArgumentError, UnsupportedError  # noqa: E402
from tests.adapters.programs import ROOT, output_of  # noqa: E402

pytestmark = pytest.mark.tensorflow

SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
"""
X = np.arange(600, dtype=np.float32).reshape(3, 200)


def rule(x, *, factor):
    n = x.size
    return cki.LaunchRule(outputs={"y": (x.shape, x.dtype)}, grid=-(-n // 256), block=256, numbers={"n": n})


@pytest.fixture
def scale(device):
    if device.kind == "cuda" and not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no CUDA")
    with tf.device("GPU:0" if device.kind == "cuda" else "CPU:0"):
        yield cki.load(SCALE).operation(rule)


def test_eager_and_in_a_function_of_unknown_sizes(scale):
    assert cki.load(SCALE).operation(rule) is not scale
    np.testing.assert_array_equal(scale(tf.constant(X), factor=0.5), X / 2)

    @tf.function(input_signature=[tf.TensorSpec([None, 200], tf.float32)])
    def function(x):
        y = scale(x + 1.0, factor=2.0)
        assert y.shape.as_list() == [None, 200]
        return y - 1.0

    for rows in (3, 1, 2):
        np.testing.assert_array_equal(function(tf.constant(X[:rows])), 2 * X[:rows] + 1)


def test_under_jit_compile(scale):
    function = tf.function(lambda x: scale(x + 1.0, factor=2.0) - 1.0, jit_compile=True)
    np.testing.assert_array_equal(function(tf.constant(X)), 2 * X + 1)


def test_refusals_and_gradients(scale):
    with pytest.raises(InvalidArgumentError, match="factor"):
        tf.function(scale)(tf.constant(X))
    x = tf.Variable(X)
    with (
        tf.GradientTape() as tape,
        pytest.raises(UnsupportedError, match="scale.* has no gradient: .*\n  hint: a custom gradient"),
    ):
        tape.gradient(scale(x, factor=1.0), x)


def test_a_saved_model_with_one_says_that_it_stays_here(scale, tmp_path):
    """In this process it runs; in another its kernel is not known."""
    module = tf.Module()
    module.call = tf.function(
        lambda x: scale(x, factor=3.0), input_signature=[tf.TensorSpec([None, 200], tf.float32)]
    )
    np.testing.assert_array_equal(module.call(tf.constant(X)), 3 * X)
    tf.saved_model.save(module, str(tmp_path))
    np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path)).call(tf.constant(X)), 3 * X)
    from cki.adapters import known_operations

    with pytest.raises(
        cki.CkiError,
        match="CKI has no operation 'scale' here: .* in the process that traced it, unless .*importable_as",
    ):
        known_operations.find("scale@0")


MODULE = """
import cki

SCALE = {source!r}


def rule(x, *, factor):
    return cki.LaunchRule({{"y": (x.shape, x.dtype)}}, grid=-(-x.size // 256), block=256, numbers={{"n": x.size}})


scale = cki.load(SCALE).operation(rule, importable_as="own_kernels:scale")
elsewhere = cki.load(SCALE).operation(rule, importable_as="own_kernels:scale")
"""
LOADS = """
import sys
import tensorflow as tf
import cki

call = tf.saved_model.load(sys.argv[1]).call
assert "own_kernels" not in sys.modules
print(call(tf.constant([[2.0] * 200])).numpy().sum())
"""


def test_a_saved_model_finds_an_importable_kernel_in_another_process(tmp_path, monkeypatch):
    (tmp_path / "own_kernels.py").write_text(MODULE.format(source=SCALE))
    monkeypatch.syspath_prepend(tmp_path)
    own_kernels = importlib.import_module("own_kernels")
    module = tf.Module()
    module.call = tf.function(
        lambda x: own_kernels.scale(x, factor=3.0), input_signature=[tf.TensorSpec([None, 200], tf.float32)]
    )
    with cki.device("sim"):
        tf.saved_model.save(module, str(tmp_path / "model"))
        with pytest.raises(
            InvalidArgumentError, match="importable_as is 'own_kernels:scale', which is another"
        ):
            tf.function(own_kernels.elsewhere)(tf.constant(X), factor=1.0)

    printed = output_of(
        LOADS,
        str(tmp_path / "model"),
        CKI_DEVICE="sim",
        CUDA_VISIBLE_DEVICES="",
        PYTHONPATH=f"{ROOT}:{tmp_path}",
    )
    assert printed.split() == ["1200.0"]
    for place, why in (
        ("no_such_module:scale", "cannot be imported here: No module named"),
        ("own_kernels:gone", "cannot be imported here: .* has no attribute 'gone'"),
        ("own_kernels:rule", "is a function, no operation"),
    ):
        with pytest.raises(cki.CkiError, match=f"a program calls the kernel {place}, which {why}"):
            known_operations.find(place)
