"""CKI on TensorFlow's eager tensors.  With no GPU they run through the simulated device."""

from __future__ import annotations

import tensorflow as tf

import cki


def main() -> None:
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    width = 1024 if on_gpu else 96
    tf.random.set_seed(0)
    x = tf.random.normal((2, 24, width))
    weight = tf.random.normal((width, 2 * width)) / width**0.5

    with cki.device("cuda" if on_gpu else "sim"):
        normalised = cki.layer_norm(x, tf.ones(width), tf.zeros(width), eps=1e-3)
        hidden = cki.linear(normalised, weight, activation="gelu")

    layer = tf.keras.layers.LayerNormalization(epsilon=1e-3)
    expected = tf.nn.gelu(layer(x) @ weight, approximate=False)
    difference = float(tf.reduce_max(tf.abs(hidden - expected)))
    print(
        "layer_norm, linear + gelu:", tuple(hidden.shape), hidden.dtype.name, "largest difference", difference
    )


if __name__ == "__main__":
    main()
