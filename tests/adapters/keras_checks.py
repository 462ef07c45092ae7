"""What `test_keras` checks on one of Keras's backends; run as a program, as Keras has one backend a process.

    KERAS_BACKEND=torch python tests/adapters/keras_checks.py DIRECTORY NAME ...

prints "ok NAME" for each check that holds, and a traceback with "failed NAME" for another.  DIRECTORY keeps a model and
its outputs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import time
import traceback
from pathlib import Path

if os.environ.get("CKI_DEVICE", "sim") == "sim":  # small programs: compiling them takes all the time
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ.setdefault("XLA_FLAGS", flags)
if os.environ["KERAS_BACKEND"] != "tensorflow":
    # Keras would import it, which takes seconds, where it can. (Torch and JAX, too, but None in their place
    # stops SciPy, which looks for their arrays.)
    sys.modules["tensorflow"] = None

import keras
import numpy as np
import pytest

import cki
from cki.adapters import keras as adapter
from cki.adapters.keras import FusedAttentionLayer, FusedEncoder, FusedEncoderLayer
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.log import logger

BACKEND, DEVICE = keras.backend.backend(), os.environ.get("CKI_DEVICE", "sim")
SHARED = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
layers, ops = keras.layers, keras.ops
if BACKEND == "tensorflow":  # products of fp32 as fp32, which is what Keras's layers are compared in
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
elif BACKEND == "jax":
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
HIDDEN = 32
MASK = np.array([[True] * 3 + [False] * 2, [True] * 5])


def tensor(array):
    return ops.convert_to_tensor(array)


def numpy(found):
    return np.asarray(ops.convert_to_numpy(found)).astype(np.float32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = normal(2, 5, HIDDEN)


def randomised(*models):
    """Weights other than those that layers begin with, which are 0 for biases."""
    rng = np.random.default_rng(5)
    for model in models:
        for weight in model.trainable_variables:
            weight.assign(numpy(weight) + 0.2 * rng.standard_normal(tuple(weight.shape)).astype(np.float32))


def close(found, wanted, atol=1e-5):
    found, wanted = (a if isinstance(a, np.ndarray) else numpy(a) for a in (found, wanted))
    np.testing.assert_allclose(found, wanted, atol=atol, rtol=1e-4)


@contextlib.contextmanager
def launches():
    """The launches made inside."""
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("launch "):
                found.append(record.getMessage())

    handler, level = Handler(logging.INFO), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


class KerasBlock:
    """An encoder layer of Keras's own layers, with random weights."""

    def __init__(self, pre_ln=True, **attention):
        self.pre_ln = pre_ln
        self.attention = layers.MultiHeadAttention(2, 16, **attention)
        self.attention.build((None, None, HIDDEN), (None, None, HIDDEN))
        self.attention_norm, self.output_norm = (layers.LayerNormalization(epsilon=1e-4) for _ in range(2))
        self.inner, self.output = layers.Dense(48, activation="gelu"), layers.Dense(HIDDEN)
        for layer in (self.attention_norm, self.output_norm, self.inner):
            layer.build((None, None, HIDDEN))
        self.output.build((None, None, 48))
        randomised(*self.layers())

    def layers(self):
        return self.attention, self.attention_norm, self.inner, self.output, self.output_norm

    def attend(self, x, **options):
        u = self.attention_norm(x) if self.pre_ln else x
        y = self.attention(u, u, **options) + x
        return y if self.pre_ln else self.attention_norm(y)

    def __call__(self, x, **options):
        y = self.attend(x, **options)
        z = self.output(self.inner(self.output_norm(y) if self.pre_ln else y)) + y
        return z if self.pre_ln else self.output_norm(z)


# ---------------------------------------------------------------------------------------------------------------------
# values


def check_attention_with_the_weights_of_keras_s_layers():
    for pre_ln, causal in ((True, True), (False, False))[: 1 if BACKEND == "jax" else 2]:
        block, x = KerasBlock(pre_ln), tensor(X)
        fused = FusedAttentionLayer.from_keras(
            block.attention, block.attention_norm, causal=causal, pre_ln=pre_ln
        )
        wanted = block.attend(x, use_causal_mask=causal)
        with launches() as made:
            close(fused(x), wanted)
        assert len(made) == 4
        with launches() as made:
            close(fused(x, training=True), wanted)
        assert not made


def check_grouped_queries_without_biases():
    grouped = layers.GroupQueryAttention(8, 4, 2, use_bias=False)
    grouped.build((None, None, HIDDEN), (None, None, HIDDEN))
    x = tensor(X)
    fused = FusedAttentionLayer.from_keras(grouped, residual=False)
    assert (fused.num_heads, fused.num_kv_heads, fused.use_bias, len(fused.weights)) == (4, 2, False, 4)
    norm = layers.LayerNormalization(epsilon=1e-5)
    close(fused(x), grouped(norm(x), norm(x)))


def check_encoder_layer_and_stack_with_the_weights_of_keras_s_layers():
    for pre_ln in (True, False):
        blocks, x = [KerasBlock(pre_ln) for _ in range(2)], tensor(X)
        fused = [FusedEncoderLayer.from_keras(*block.layers(), pre_ln=pre_ln) for block in blocks]
        wanted = one_by_one = x
        for block, layer in zip(blocks, fused):
            wanted, one_by_one = block(wanted), layer(one_by_one)
        close(one_by_one, wanted, 5e-5)
        stack = FusedEncoder.from_layers(fused)
        with launches() as made:
            y = stack(x)
        assert len(made) == 14
        np.testing.assert_array_equal(numpy(y), numpy(one_by_one))
        close(stack(x, training=True), wanted, 5e-5)
    norm = layers.LayerNormalization(epsilon=1e-4)
    norm.build((None, None, HIDDEN))
    randomised(norm)
    close(FusedEncoder.from_layers(fused, norm)(x), norm(wanted), 5e-5)


def check_masks():
    """Of an Embedding layer, of the caller, and both."""
    ids = np.array([[3, 1, 4, 0, 0], [2, 7, 1, 8, 2]])
    embedding, fused = layers.Embedding(9, HIDDEN, mask_zero=True), FusedAttentionLayer(2, 16)
    x = embedding(tensor(ids))
    y = fused(x)
    over_keys = tensor(MASK[:, None, :])
    close(fused(tensor(numpy(x)), attention_mask=over_keys), y)
    assert np.array_equal(numpy(y._keras_mask), MASK)
    causal = tensor(np.tril(np.ones((1, 5, 5), bool)))
    both = fused(x, attention_mask=causal)
    layer = FusedAttentionLayer(2, 16, causal=True)
    layer.build((None, None, HIDDEN))
    layer.assign(fused.tensors)
    close(layer(tensor(numpy(x)), mask=tensor(MASK)), both)
    close(layer(tensor(numpy(x)), mask=tensor(MASK), training=True), both)
    four = tensor(np.broadcast_to(np.tril(np.ones((5, 5), bool)), (1, 2, 5, 5)))
    close(fused(x, attention_mask=four), both)
    ids_in, mask_in = keras.Input((None,), dtype="int32"), keras.Input((None, None), dtype="bool")
    y = FusedEncoder(2, 2, 16, 48)(fused(embedding(ids_in), attention_mask=mask_in))
    model = keras.Model([ids_in, mask_in], layers.GlobalAveragePooling1D()(y))
    longer, triangle = (
        np.pad(ids, ((0, 0), (0, 2))),
        np.broadcast_to(np.tril(np.ones((7, 7), bool)), (2, 7, 7)),
    )
    found = model.predict([longer, triangle], verbose=0)
    close(found, model.predict([ids, triangle[:, :5, :5]], verbose=0))


def check_mixed_precision():
    policies = (("mixed_bfloat16", "bfloat16", 0.1), ("mixed_float16", "float16", 0.02))
    for policy, compute, atol in policies[: 1 if BACKEND == "jax" else 2]:
        exact = FusedEncoderLayer(2, 16, 48)
        layer = FusedEncoderLayer(2, 16, 48, dtype=policy)
        wanted = exact(tensor(X))
        layer.build((None, None, HIDDEN))
        layer.assign(exact.tensors)
        for training in (False, True):
            y = layer(tensor(X), training=training)
            assert keras.backend.standardize_dtype(y.dtype) == compute
            close(y, wanted, atol)
        assert {variable.dtype for variable in layer.variables} == {"float32"}
    layer = FusedEncoderLayer(2, 16, 48, dtype="float16")
    y = layer(tensor(X))
    assert {variable.dtype for variable in layer.variables} == {"float16"}
    assert keras.backend.standardize_dtype(y.dtype) == "float16"


# ---------------------------------------------------------------------------------------------------------------------
# models


def model_of(**options):
    inputs = keras.Input((None, HIDDEN))
    y = FusedAttentionLayer(2, 16, causal=True, name="attention", **options)(inputs)
    y = FusedEncoderLayer(2, 16, 48, pre_ln=False, activation="gelu_tanh", name="layer", **options)(y)
    return keras.Model(inputs, FusedEncoder(2, 2, 16, 48, num_kv_heads=1, name="stack", **options)(y))


def check_save_load_and_predict():
    model = model_of(dropout=0.1, seed=3)
    randomised(model)
    assert model.output_shape == (None, None, HIDDEN)
    x, longer = tensor(X), normal(3, 9, HIDDEN, seed=1)
    wanted = numpy(model(x))
    close(model.predict(X, verbose=0), wanted)
    close(model.predict(longer, verbose=0), model(tensor(longer)))
    model.save(SHARED / f"{BACKEND}.keras")
    np.save(SHARED / f"{BACKEND}.npy", wanted)
    loaded = keras.saving.load_model(SHARED / f"{BACKEND}.keras")
    np.testing.assert_array_equal(numpy(loaded(x)), wanted)
    for layer in model.layers[1:]:
        assert loaded.get_layer(layer.name).get_config() == layer.get_config()
        assert type(layer).from_config(layer.get_config()).get_config() == layer.get_config()


def check_models_in_the_directory():
    """Whichever backend saved them."""
    found = sorted(SHARED.glob("*.keras"))
    assert found
    for path in found:
        close(keras.saving.load_model(path)(tensor(X)), np.load(path.with_suffix(".npy")))


def check_training_with_dropout():
    """Random in training, and learnt from; without it and in inference the same each time."""
    keras.utils.set_random_seed(1)
    layer, x = FusedEncoderLayer(2, 16, 48, dropout=0.3, attention_dropout=0.2, seed=7), tensor(X)
    layer.build((None, None, HIDDEN))
    first, second, plain = (numpy(layer(x, training=training)) for training in (True, True, False))
    assert np.abs(first - second).max() > 0.01
    assert np.abs(first - plain).max() > 0.01
    np.testing.assert_array_equal(numpy(layer(x)), plain)
    means = np.mean([numpy(layer(x, training=True)) for _ in range(20)], axis=0)
    assert np.abs(means - plain).mean() < 0.6 * np.abs(first - plain).mean()
    inputs = keras.Input((None, HIDDEN))
    model = keras.Model(inputs, layers.Dense(HIDDEN)(layer(inputs)))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    losses = model.fit(X, np.roll(X, 1, axis=1), epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.95 * losses[0], losses


def gradients(function, variables):
    """Of the sum of the sines, by the backend's own means."""
    if BACKEND == "tensorflow":
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(function(tensor(X))))
        return [numpy(g) for g in tape.gradient(loss, [v.value for v in variables])]
    if BACKEND == "torch":
        for variable in variables:
            variable.value.grad = None
        function(tensor(X)).sin().sum().backward()
        return [numpy(variable.value.grad) for variable in variables]

    def loss(values):
        with keras.StatelessScope(list(zip(variables, values))):
            return jax.numpy.sin(function(tensor(X))).sum()

    return [numpy(g) for g in jax.jit(jax.grad(loss))([variable.value for variable in variables])]


def check_gradients_are_those_of_keras_s_layers():
    """In inference, where the kernels run, and in training."""
    block = KerasBlock()
    layer = FusedEncoderLayer.from_keras(*block.layers())
    of_block = [
        block.attention.query_dense.kernel,
        block.attention_norm.gamma,
        block.inner.kernel,
        block.output.bias,
    ]
    of_layer = [layer.wq, layer.attention_gamma, layer.w1, layer.b2]
    wanted = gradients(block, of_block)
    wanted[0] = wanted[0].reshape(HIDDEN, -1)
    for training in (False, True):
        found = gradients(lambda x: layer(x, training=training), of_layer)  # noqa: B023
        found[0] = found[0][:, :HIDDEN]
        for ours, theirs in zip(found, wanted):
            close(ours, theirs, 1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# refusals


def refused(kind, said, function):
    with pytest.raises(kind, match=re.escape(said)):
        function()


def check_refusals_of_what_weights_decide():
    """An option beside them would read the same weights as others, and a subclass computes what no weight says."""
    block = KerasBlock()
    block.output_norm.epsilon = 1e-4
    for name, value, found in (
        ("num_heads", 4, 2), ("head_dim", 8, 16), ("num_kv_heads", 1, 2), ("use_bias", False, True),
        ("epsilon", 1e-3, 1e-4), ("inner_dim", 24, 48),
    ):  # fmt: skip
        said = f"{name} is {value}, the layers given have {found}"
        make = functools.partial(FusedEncoderLayer.from_keras, *block.layers(), **{name: value})
        refused(InvalidArgumentError, said, make)
    fused = FusedEncoderLayer.from_keras(*block.layers(), num_heads=2, num_kv_heads=2)
    said = "num_layers is 3, the layers given have 1"
    refused(InvalidArgumentError, said, lambda: FusedEncoder.from_layers([fused], num_layers=3))

    class Sharper(layers.MultiHeadAttention):
        def _compute_attention(self, query, *others, **options):
            return super()._compute_attention(3 * query, *others, **options)

    sharper = Sharper(2, 16)
    sharper.build((None, None, HIDDEN), (None, None, HIDDEN))
    refused(
        InvalidArgumentError, "Sharper with _compute_attention of its own",
        lambda: FusedAttentionLayer.from_keras(sharper),
    )  # fmt: skip


def check_refusals():
    refused(
        InvalidArgumentError, "num_heads is 0, not an integer of 1 or more",
        lambda: FusedEncoderLayer(0, 16, 8, dropout=1.5),
    )  # fmt: skip
    for dtype in ("float64", "int32"):
        refused(
            InvalidArgumentError, f"dtype computes in {dtype}, not one of float32, float16, bfloat16",
            lambda dtype=dtype: FusedAttentionLayer(2, 16, dtype=dtype),
        )  # fmt: skip
    refused(
        InvalidArgumentError,
        "dropout is 1.5, not in [0, 1)",
        lambda: FusedEncoderLayer(1, 16, 8, dropout=1.5),
    )
    for wrong in (
        {"dropout": "x"},
        {"causal": 1},
        {"pre_ln": "no"},
        {"epsilon": float("nan")},
        {"epsilon": -1},
        {"residual": None},
        {"head_dim": 512},
    ):
        ((name, value),) = wrong.items()
        make = functools.partial(FusedAttentionLayer, **{"num_heads": 2, "head_dim": 16, **wrong})
        refused(InvalidArgumentError, f"{name} is {value!r}, not ", make)
    refused(
        InvalidArgumentError, "final_norm is 'x', not ", lambda: FusedEncoder(1, 2, 16, 8, final_norm="x")
    )
    refused(
        InvalidArgumentError,
        "does not divide num_heads 3",
        lambda: FusedAttentionLayer(3, 16, num_kv_heads=2),
    )
    refused(
        InvalidArgumentError, "activation is 'tanh'", lambda: FusedEncoderLayer(2, 16, 8, activation="tanh")
    )
    refused(
        InvalidArgumentError, "the input has shape (2, 32)", lambda: FusedAttentionLayer(2, 16).build((2, 32))
    )
    unbuilt, block = layers.MultiHeadAttention(2, 16), KerasBlock(value_dim=8)
    refused(
        InvalidArgumentError, "attention has no weights yet", lambda: FusedAttentionLayer.from_keras(unbuilt)
    )
    refused(InvalidTypeError, "attention is a", lambda: FusedAttentionLayer.from_keras(block.inner))
    refused(
        InvalidArgumentError, "key_dim 16 and value_dim 8",
        lambda: FusedAttentionLayer.from_keras(block.attention),
    )  # fmt: skip
    for mode in ("int8", "float8"):
        block = KerasBlock()
        for quantised in (block.inner, block.attention._key_dense):
            quantised.quantize(mode)
        refused(
            InvalidArgumentError, f"inner is quantised to {mode}",
            lambda: FusedEncoderLayer.from_keras(KerasBlock().attention, None, block.inner, block.output, None),  # noqa: B023
        )  # fmt: skip
        refused(
            InvalidArgumentError, f"attention's key projection is quantised to {mode}",
            lambda: FusedAttentionLayer.from_keras(block.attention),  # noqa: B023
        )  # fmt: skip
    block = KerasBlock()
    block.inner.activation = keras.activations.tanh
    block.output_norm.epsilon = 1e-6
    for said in ("inner has the activation tanh", "epsilons 1e-06, 0.0001"):
        refused(InvalidArgumentError, said, lambda: FusedEncoderLayer.from_keras(*block.layers()))
    refused(InvalidTypeError, "layers is not a list", lambda: FusedEncoder.from_layers([block.inner]))
    x = tensor(X)
    refused(
        InvalidArgumentError, "mask has shape (2, 4)",
        lambda: FusedAttentionLayer(2, 16)(x, mask=tensor(MASK[:, :4])),
    )  # fmt: skip


CHECKS = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def main() -> None:
    assert adapter.backend.name() == BACKEND
    for name in sys.argv[2:]:
        check = CHECKS[name]
        begun = time.process_time()
        try:
            with cki.device(DEVICE):
                check()
        except Exception:
            print(f"failed {name}\n{traceback.format_exc()}\nend {name}", flush=True)
        else:
            print(f"ok {name} {time.process_time() - begun:.1f}", flush=True)


if __name__ == "__main__":
    main()
