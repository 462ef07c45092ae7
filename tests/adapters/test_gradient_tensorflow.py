"""Gradients of operations in TensorFlow: the derivatives are PyTorch's; without being asked for there is an error."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("torch")

import cki  # noqa: E402
from cki.adapters.gradient_tensorflow import gradients, with_gradient  # noqa: E402
from cki.errors import InvalidTypeError, UnsupportedError  # noqa: E402
from cki.ops.table import public_specs  # noqa: E402
from tests.adapters.gradient_cases import CASES, arrays_of, call_of, torch_gradients  # noqa: E402

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]


def call(case):
    """The table's entry, tensors and attributes."""
    arrays, attributes = call_of(case)
    return public_specs()[case.operation], [None if a is None else tf.constant(a) for a in arrays], attributes


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_expression_are_torch_s(name):
    from cki.adapters import gradient
    from cki.adapters.gradient_tensorflow import ARRAYS

    case = CASES[name]
    spec, tensors, attributes = call(case)
    named = dict(zip([item.name for item in spec.inputs], tensors))
    outputs = gradient.expression(spec.name)(
        ARRAYS, named, dict(zip([a.name for a in spec.attributes], attributes))
    )
    given = [tf.where(tf.math.is_finite(y), tf.cos(y), 0.0) for y in outputs]  # of the sum of sines
    found = dict(zip(named, gradients(spec, tensors, attributes, given)))
    wanted = torch_gradients(case)
    assert {argument for argument, value in found.items() if value is not None} == set(wanted)
    for argument, expected in wanted.items():
        np.testing.assert_allclose(found[argument], expected, rtol=2e-4, atol=2e-5, err_msg=argument)


def test_symbolic_gradients_with_unknown_dimensions():
    case = CASES["fused_attention"]
    spec, tensors, attributes = call(case)
    signature = [
        tf.TensorSpec([None] * len(tensors[0].shape), tf.float32),
        tf.TensorSpec([None, None], tf.bool),
    ]
    signature[0] = tf.TensorSpec([None, None, 12], tf.float32)
    index = [item.name for item in spec.inputs].index("mask")

    @tf.function(input_signature=signature)
    def traced(x, mask):
        inputs = [x, *tensors[1:]]
        inputs[index] = mask
        return gradients(spec, inputs, attributes, [x * 2.0])[0]

    wanted = gradients(spec, tensors, attributes, [tensors[0] * 2.0])[0]
    np.testing.assert_allclose(traced(tensors[0], tensors[index]), wanted, rtol=1e-5, atol=1e-6)


def run_layer_norm(x, weight, bias, residual):
    return cki.layer_norm(x, weight, bias, residual=residual)


def test_a_tape_over_a_call():
    spec = public_specs()["layer_norm"]
    x = tf.Variable(np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32))
    weight = tf.constant(np.linspace(0.5, 1.5, 16), tf.float32)
    inputs, attributes = [x, weight, None, x], [1e-5, "rounded"]
    with cki.device("sim"), tf.GradientTape() as tape:
        y, total = with_gradient(spec, inputs, attributes, run_layer_norm, recomputes=True)
        loss = tf.reduce_sum(tf.sin(y)) + tf.reduce_sum(total * total)
    found = tape.gradient(loss, x)
    with tf.GradientTape() as tape:
        v = x + x
        mean = tf.reduce_mean(v, -1, keepdims=True)
        variance = tf.reduce_mean((v - mean) ** 2, -1, keepdims=True)
        plain = (v - mean) / tf.sqrt(variance + 1e-5) * weight
        loss = tf.reduce_sum(tf.sin(plain)) + tf.reduce_sum(v * v)
    np.testing.assert_allclose(found, tape.gradient(loss, x), rtol=1e-4, atol=1e-5)


def test_refusals_name_the_operation():
    from cki.adapters import tensorflow as adapter

    spec, x = public_specs()["layer_norm"], tf.Variable(tf.ones((2, 8)))
    with cki.device("sim"), tf.GradientTape() as tape:
        y = with_gradient(spec, [x, None, None, None], [1e-5, "rounded"], run_layer_norm, recomputes=False)
    with pytest.raises(UnsupportedError, match="layer_norm has no gradient(.|\n)*recompute_gradient=True"):
        tape.gradient(y, x)
    for value in ("y", 1, None):
        with pytest.raises(
            InvalidTypeError, match=f"layer_norm: recompute_gradient is {value!r}\n.*True or False"
        ):
            adapter.layer_norm(x, recompute_gradient=value)
    with pytest.raises(UnsupportedError, match="mean_pool: recompute_gradient=True, but it has no"):
        with_gradient(public_specs()["mean_pool"], [x, x], [True], cki.mean_pool, recomputes=True)


@pytest.mark.parametrize("name", ["attention-window"])
def test_the_functions_of_the_adapter(name):
    """Eager and traced: the kernel's values, the expression's gradients; not asked for, an error by name."""
    from cki.adapters import tensorflow as adapter

    case = CASES[name]
    arrays = {n: None if a is None else tf.constant(a) for n, a in arrays_of(case).items()}
    variables = [n for n, a in arrays.items() if a is not None and a.dtype.is_floating]

    def loss(tensors, **asked):
        outputs = getattr(adapter, case.operation)(**tensors, **case.attributes, **asked)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return sum(tf.reduce_sum(tf.sin(tf.where(tf.math.is_finite(y), y, 0.0))) for y in outputs)

    def gradients_of(tensors, **asked):
        with tf.GradientTape() as tape:
            tape.watch([tensors[n] for n in variables])
            value = loss(tensors, **asked)
        return tape.gradient(value, [tensors[n] for n in variables])

    wanted = torch_gradients(case)
    with cki.device("sim"):
        for function in (gradients_of, tf.function(gradients_of)):
            found = function(arrays, recompute_gradient=True)
            for argument, value in zip(variables, found):
                np.testing.assert_allclose(value, wanted[argument], rtol=2e-4, atol=2e-5, err_msg=argument)
        for function in (gradients_of, tf.function(gradients_of)):
            with pytest.raises(UnsupportedError, match=f"{case.operation} has no gradient"):
                function(arrays)
