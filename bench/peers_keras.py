"""The encoder by CKI inside TensorFlow: a Keras model in a tf.function, whose layers are one operation of TensorFlow's.

What a TensorFlow user gets who replaces the blocks of a model (`cki.adapters.keras.FusedEncoder`), beside what
TensorFlow makes of the same encoder by itself (`peers_tensorflow`).
"""

from __future__ import annotations

import os
from typing import Any

import bert_model
import numpy as np
from bert_model import Array, Model, Problem
from peers_tensorflow import TensorFlow

import cki

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
#: Tables and norm in front of the layers.
_FRONT = (
    *(f"embeddings.{table}_embeddings.weight" for table in ("word", "position", "token_type")),
    "embeddings.LayerNorm.weight", "embeddings.LayerNorm.bias",
)  # fmt: skip
#: Of a layer's weights: name in `cki.adapters.keras.FusedEncoder`, and names of Hugging Face's BERT, side by side.
_WEIGHTS = {
    "wq": [f"attention.self.{name}.weight" for name in ("query", "key", "value")],
    "bq": [f"attention.self.{name}.bias" for name in ("query", "key", "value")],
    "wo": ["attention.output.dense.weight"], "bo": ["attention.output.dense.bias"],
    "attention_gamma": ["attention.output.LayerNorm.weight"], "attention_beta": ["attention.output.LayerNorm.bias"],
    "w1": ["intermediate.dense.weight"], "b1": ["intermediate.dense.bias"],
    "w2": ["output.dense.weight"], "b2": ["output.dense.bias"],
    "output_gamma": ["output.LayerNorm.weight"], "output_beta": ["output.LayerNorm.bias"],
}  # fmt: skip


class KerasModel(TensorFlow):
    """device: "cuda" needs a GPU that TensorFlow sees, "cpu" runs the simulated device."""

    def __init__(self, model: Model, device: str) -> None:
        import keras

        if keras.backend.backend() != "tensorflow":
            raise ImportError(f"Keras runs on {keras.backend.backend()}, not on TensorFlow")
        self._kind = "cuda" if device == "cuda" else "sim"
        self._models: dict[bool, Any] = {}  # by the order of norms
        super().__init__(model, device, xla=False)

    def _load(self, problem: Problem) -> None:
        if problem.pre_ln not in self._models:
            self._models.clear()  # half a gigabyte
            self._models[problem.pre_ln] = _keras_model(self._model, problem.pre_ln)

    def prepare(self, problem: Problem) -> Array:
        with cki.device(self._kind):
            return super().prepare(problem)

    def _mask_of(self, kept: Array) -> Any:
        import tensorflow as tf

        return tf.constant(kept)

    def _forward(self, ids: Any, mask: Any, pre_ln: bool) -> Any:
        return self._models[pre_ln](ids, mask=mask, training=False)


def keras_function(model: Model, device: str) -> KerasModel:
    return KerasModel(model, device)


def _keras_model(model: Model, pre_ln: bool) -> Any:
    """A `keras.Model` with the bench's weights: token ids [batch, seq] -> [batch, seq, hidden]."""
    import keras

    from cki.adapters.keras import FusedEncoder
    from cki.adapters.tensorflow import embed_tokens, layer_norm

    weights = bert_model.state_dict(model)

    class Encoder(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float16")
            self.supports_masking = True
            self.front = [
                self.add_weight(shape=weights[name].shape, initializer="zeros", name=name.replace(".", "_"))
                for name in _FRONT
            ]
            self.encoder = FusedEncoder(
                model.layers, model.heads, model.hidden // model.heads, model.inner, pre_ln=pre_ln,
                epsilon=bert_model.EPSILON, dtype="float16",
            )  # fmt: skip
            self.encoder.build((None, None, model.hidden))

        def call(self, ids: Any, mask: Any = None) -> Any:
            word, position, token_type, gamma, beta = (variable.value for variable in self.front)
            x = embed_tokens(ids, word, position, None, token_type)
            return self.encoder(layer_norm(x, gamma, beta, eps=bert_model.EPSILON), mask=mask)

    made = Encoder()
    for variable, name in zip(made.front, _FRONT):
        variable.assign(weights[name])
    stacked = {
        name: np.stack([
            np.concatenate([weights[f"encoder.layer.{number}.{part}"].T for part in parts], -1)
            for number in range(model.layers)
        ])
        for name, parts in _WEIGHTS.items()
    }  # fmt: skip
    if pre_ln:
        stacked |= {"final_gamma": weights["LayerNorm.weight"], "final_beta": weights["LayerNorm.bias"]}
    made.encoder.assign(stacked)
    return made
