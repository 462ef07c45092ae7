"""The encoder by TensorFlow: tf.function, and tf.function compiled by XLA.

As Keras's and Hugging Face's layers compute it: a product each for Q, K and V, weights [in, out], attention as matmul,
softmax, matmul, norms in float32.  The time is the host's clock around calls that a wait for the device follows.
"""

from __future__ import annotations

import time
from typing import Any

import bert_model
from bert_model import Array, Model, Problem

#: Microseconds that the calls of one time take together, at least, and their largest number.
_SPAN_US, _MOST_CALLS = 10_000.0, 20


class TensorFlow:
    """device: "cuda" needs a GPU that TensorFlow sees."""

    def __init__(self, model: Model, device: str, *, xla: bool) -> None:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if device == "cuda" and not gpus:
            raise ImportError("TensorFlow sees no GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)  # other implementations live on the same one
        self._model, self._xla = model, xla
        self._weights: dict[str, Any] = {}
        self._function: Any = None
        self._calls = 1
        bert_model.state_dict(model)  # seconds of a core, while other implementations are prepared

    def _load(self, problem: Problem) -> None:
        """Makes the weights, once."""
        import tensorflow as tf

        if not self._weights:
            for name, value in bert_model.state_dict(self._model).items():
                self._weights[name] = tf.constant(value.T if _is_product(name) else value)

    def prepare(self, problem: Problem) -> Array:
        import tensorflow as tf

        self._load(problem)
        self._ids = tf.constant(bert_model.token_ids(self._model, problem))
        self._mask = None
        if problem.lengths:
            self._mask = self._mask_of(bert_model.kept_tokens(problem))

        def forward(ids: Any, mask: Any) -> Any:
            return self._forward(ids, mask, problem.pre_ln)

        self._function = tf.function(forward, jit_compile=self._xla)
        for _ in range(3):
            output = self._function(self._ids, self._mask)
        self._calls = 1
        self._calls = max(1, min(_MOST_CALLS, round(_SPAN_US / self.elapsed_us())))
        rows: Array = tf.cast(output, tf.float32).numpy()[bert_model.kept_tokens(problem)]
        return rows

    def _mask_of(self, kept: Array) -> Any:
        """What `_forward` takes for padding.  kept: bool [batch, seq], of the tokens that count."""
        import tensorflow as tf

        return tf.cast(tf.constant(~kept[:, None, None, :]), tf.float16) * -30000.0

    def elapsed_us(self) -> float:
        import tensorflow as tf

        tf.test.experimental.sync_devices()
        begin = time.perf_counter()
        for _ in range(self._calls):
            self._function(self._ids, self._mask)
        tf.test.experimental.sync_devices()
        return (time.perf_counter() - begin) / self._calls * 1e6

    def _forward(self, ids: Any, mask: Any, pre_ln: bool) -> Any:
        import tensorflow as tf

        model, weights = self._model, self._weights
        batch, seq = ids.shape
        head_dim = model.hidden // model.heads

        def norm(x: Any, name: str) -> Any:
            wide = tf.cast(x, tf.float32)
            mean, variance = tf.nn.moments(wide, -1, keepdims=True)
            gamma, beta = (tf.cast(weights[f"{name}.{part}"], tf.float32) for part in ("weight", "bias"))
            return tf.cast(
                tf.nn.batch_normalization(wide, mean, variance, beta, gamma, bert_model.EPSILON), x.dtype
            )

        def product(x: Any, name: str) -> Any:
            rows = tf.matmul(tf.reshape(x, (batch * seq, -1)), weights[f"{name}.weight"])
            return tf.reshape(tf.nn.bias_add(rows, weights[f"{name}.bias"]), (batch, seq, -1))

        def heads(x: Any) -> Any:
            return tf.transpose(tf.reshape(x, (batch, seq, model.heads, head_dim)), (0, 2, 1, 3))

        def attend(u: Any, layer: str) -> Any:
            q, k, v = (heads(product(u, f"{layer}.attention.self.{n}")) for n in ("query", "key", "value"))
            scores = tf.matmul(q * tf.constant(head_dim**-0.5, q.dtype), k, transpose_b=True)
            context = tf.matmul(tf.nn.softmax(scores if mask is None else scores + mask), v)
            context = tf.reshape(tf.transpose(context, (0, 2, 1, 3)), (batch, seq, model.hidden))
            return product(context, f"{layer}.attention.output.dense")

        def feed(u: Any, layer: str) -> Any:
            return product(tf.nn.gelu(product(u, f"{layer}.intermediate.dense")), f"{layer}.output.dense")

        x = tf.gather(weights["embeddings.word_embeddings.weight"], ids)
        x += weights["embeddings.position_embeddings.weight"][:seq]
        x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for number in range(model.layers):
            layer = f"encoder.layer.{number}"
            attention_norm, output_norm = f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"
            if pre_ln:
                x = x + attend(norm(x, attention_norm), layer)
                x = x + feed(norm(x, output_norm), layer)
            else:
                x = norm(x + attend(x, layer), attention_norm)
                x = norm(x + feed(x, layer), output_norm)
        return norm(x, "LayerNorm") if pre_ln else x


def tf_function(model: Model, device: str) -> TensorFlow:
    return TensorFlow(model, device, xla=False)


def tf_xla(model: Model, device: str) -> TensorFlow:
    return TensorFlow(model, device, xla=True)


def _is_product(name: str) -> bool:
    """Whether a weight is a matrix of a product, which TensorFlow stores [in, out]."""
    return name.startswith("encoder.") and name.endswith(".weight") and "LayerNorm" not in name
