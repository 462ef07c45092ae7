"""A 12-layer Keras encoder, its blocks replaced by CKI's: outputs and times side by side.

The model is made of Keras's own `MultiHeadAttention`, `Dense` and `LayerNormalization`.  `from_keras` moves the weights
of each block into one layer, and `FusedEncoder.from_layers` puts all layers into one operation.  Runs on whichever
backend KERAS_BACKEND names; with no GPU through the simulated device, where times say nothing of a GPU's.

    KERAS_BACKEND=tensorflow python examples/keras_encoder.py --hidden 1024 --batch 4 --seq 512
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

import cki
from cki.adapters.keras import FusedEncoder, FusedEncoderLayer

LAYERS = 12


class Block(NamedTuple):
    """The layers of one pre-LN encoder block, in the order of `FusedEncoderLayer.from_keras`."""

    attention: Any
    attention_norm: Any
    inner: Any
    output: Any
    output_norm: Any

    def __call__(self, x: Any) -> Any:
        u = self.attention_norm(x)
        y = self.attention(u, u) + x
        return self.output(self.inner(self.output_norm(y))) + y


def block(heads: int, head_dim: int, inner: int) -> Block:
    """A block whose weights are made when the model first sees it."""
    norms = [keras.layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
    return Block(
        keras.layers.MultiHeadAttention(heads, head_dim), norms[0], keras.layers.Dense(inner, activation="gelu"),
        keras.layers.Dense(heads * head_dim), norms[1],
    )  # fmt: skip


def forward(model: Any, x: Any) -> Callable[[], Any]:
    """The model on a tensor that is on the device, compiled as its backend does; returns one number, which waits."""
    backend, x = keras.backend.backend(), keras.ops.convert_to_tensor(x)
    if backend == "tensorflow":
        import tensorflow as tf

        traced = tf.function(lambda: model(x, training=False)[0, 0, 0])
        return lambda: traced().numpy()
    if backend == "jax":
        import jax

        weights = [variable.value for variable in model.trainable_variables]
        others = [variable.value for variable in model.non_trainable_variables]
        compiled = jax.jit(lambda *values: model.stateless_call(*values, training=False)[0][0, 0, 0])
        return lambda: float(compiled(weights, others, x))
    import torch

    def eager() -> float:
        with torch.inference_mode():
            return float(model(x, training=False)[0, 0, 0])

    return eager


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """The median over calls, each waited for."""
    run()
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return float(np.median(found)) * 1e3


def has_gpu() -> bool:
    from cki.nvml import gpu_count

    return gpu_count() > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    options = parser.parse_args()
    on_gpu = has_gpu()
    hidden = options.hidden or (1024 if on_gpu else 32)
    batch, seq = options.batch or (4 if on_gpu else 2), options.seq or (512 if on_gpu else 6)
    head_dim = 64 if on_gpu else 16
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float16" if on_gpu else "float32")

    inputs = keras.Input((None, hidden))
    blocks = [block(hidden // head_dim, head_dim, 4 * hidden) for _ in range(LAYERS)]
    y = inputs
    for each in blocks:
        y = each(y)
    theirs = keras.Model(inputs, y)

    fused = [FusedEncoderLayer.from_keras(*each) for each in blocks]
    y = inputs
    for layer in fused:
        y = layer(y)
    models = {
        "Keras's layers": theirs,
        "12 FusedEncoderLayers": keras.Model(inputs, y),
        "one FusedEncoder": keras.Model(inputs, FusedEncoder.from_layers(fused)(inputs)),
    }

    x = np.random.default_rng(0).standard_normal((batch, seq, hidden)).astype(keras.config.floatx())
    wanted = np.asarray(theirs.predict(x, batch_size=batch, verbose=0)).astype(np.float64)
    print(f"{keras.backend.backend()}, {LAYERS} layers of {hidden}, {batch} x {seq} tokens")
    with cki.device("cuda" if on_gpu else "sim"):
        for name, model in models.items():
            found = np.asarray(model.predict(x, batch_size=batch, verbose=0)).astype(np.float64)
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            took = milliseconds(forward(model, x), 50 if on_gpu else 2)
            print(f"{name:24} {took:9.2f} ms  largest difference {error:.2e} of the largest output")


if __name__ == "__main__":
    main()
