"""Keras 3 layers that run CKI's kernels, on Keras's tensorflow, jax and torch backends.

    layer = FusedAttentionLayer(num_heads=16, head_dim=64, causal=True)         # norm, attention, residual
    layer = FusedEncoderLayer(num_heads=16, head_dim=64, inner_dim=4096)        # and the feed-forward block
    stack = FusedEncoder(num_layers=24, num_heads=16, head_dim=64, inner_dim=4096)      # all layers, one operation

With `training=False` a call is the operation of the backend's module (`cki.adapters.tensorflow` and so on): the kernel,
whose gradient, where one is taken, is that of the plain expression.  With `training=True` (as in `fit`) it is the plain
expression itself, which the backend differentiates, with dropout.

Weights of `keras.layers.MultiHeadAttention`, `Dense` and `LayerNormalization` move over by `from_keras`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from cki.adapters import gradient_attention as expressions
from cki.adapters import keras_backend as backend
from cki.adapters import keras_weights as transfer
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.ops.attention_rules import MAX_HEAD_DIM

_MATRICES = ("wq", "wo", "w1", "w2")
_COMPUTE_TYPES = ("float32", "float16", "bfloat16")
_ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu")


class _FusedLayer(keras.layers.Layer):  # type: ignore[misc]
    """What the layers share: options, weights by the operation's names for them, masks, the two ways of a call.

    Q, K and V are one weight, `wq`, and one bias, `bq`: one product computes them.
    """

    #: Of the operation and of its plain expression.
    operation = ""
    expression: Any = None
    #: Options of the constructor besides those of Keras, in its order.
    options: tuple[str, ...] = ()

    def __init__(
        self, num_heads: int, head_dim: int, causal: bool = False, pre_ln: bool = True, *,
        num_kv_heads: int | None = None, use_bias: bool = True, epsilon: float = 1e-5, dropout: float = 0.0,
        attention_dropout: float = 0.0, kernel_initializer: Any = "glorot_uniform", bias_initializer: Any = "zeros",
        seed: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.causal, self.pre_ln, self.use_bias, self.epsilon = causal, pre_ln, use_bias, epsilon
        self.dropout, self.attention_dropout, self.seed = dropout, attention_dropout, seed
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.supports_masking = True
        # Keras compiles models with XLA where it may; a plain tf.function calls operations for less.
        self.supports_jit = keras.backend.backend() != "tensorflow"
        self._dropout_seed = keras.random.SeedGenerator(seed) if dropout or attention_dropout else None
        self._names: tuple[str, ...] = ()  # of the weights, which are attributes of the layer

    def _check_options(self) -> None:
        problems = []
        for name in ("num_heads", "head_dim", "num_kv_heads", "inner_dim", "num_layers"):
            value = getattr(self, name, None)
            is_optional = name == "num_kv_heads" or not hasattr(self, name)
            if value is None and is_optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name} is {value!r}, not an integer of 1 or more")
            elif name == "head_dim" and value > MAX_HEAD_DIM:
                problems.append(f"head_dim is {value}, not an integer of 1 to {MAX_HEAD_DIM}")
        if not problems and self.num_heads % (self.num_kv_heads or self.num_heads):
            problems.append(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads {self.num_heads}"
            )
        for name in ("causal", "pre_ln", "use_bias", "residual", "final_norm"):
            if not isinstance(getattr(self, name, True), bool):
                problems.append(f"{name} is {getattr(self, name)!r}, not True or False")
        for name in ("dropout", "attention_dropout", "epsilon"):
            value, is_rate = getattr(self, name), name != "epsilon"
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < (1 if is_rate else float("inf")):
                problems.append(
                    f"{name} is {value!r}, not {'in [0, 1)' if is_rate else 'a number of 0 or more'}"
                )
        if getattr(self, "activation", None) not in _ACTIVATIONS:
            problems.append(
                f"activation is {self.activation!r}, not one of {', '.join(map(repr, _ACTIVATIONS))}"
            )
        if self.compute_dtype not in _COMPUTE_TYPES:
            problems.append(f"dtype computes in {self.compute_dtype}, not one of {', '.join(_COMPUTE_TYPES)}")
        if problems:
            raise InvalidArgumentError(f"{type(self).__name__}: invalid options", problems)

    # -----------------------------------------------------------------------------------------------------------------
    # weights

    def _shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Of the weights, by the operation's names."""
        raise AssertionError("each layer has its own")

    def _block_shapes(self, hidden: int, gamma: str, beta: str) -> dict[str, tuple[int, ...]]:
        kv_heads = self.num_kv_heads or self.num_heads
        columns = self.num_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            gamma: (hidden,), beta: (hidden,), "wq": (hidden, columns + 2 * kv_heads * self.head_dim),
            "wo": (columns, hidden),
        }  # fmt: skip
        return {**shapes, "bq": shapes["wq"][1:], "bo": (hidden,)} if self.use_bias else shapes

    def build(self, input_shape: Any) -> None:
        """Make the weights.  input_shape: [batch, seq, hidden], of which hidden must be known."""
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise InvalidArgumentError(
                f"{type(self).__name__}: the input has shape {tuple(input_shape)}",
                hint="[batch, seq, hidden], with a hidden size that is known",
            )
        shapes = self._shapes(input_shape[-1])
        for name, shape in shapes.items():
            # Norms and biases stay in the variables' type: kernels take them in fp32 beside 16-bit activations.
            initializer, is_cast = self._initializer(name), name in _MATRICES
            weight = self.add_weight(name=name, shape=shape, initializer=initializer, autocast=is_cast)
            setattr(self, name, weight)
        self._names = tuple(shapes)
        self.built = True

    def _initializer(self, name: str) -> Any:
        if name.endswith("gamma"):
            return "ones"
        if name not in _MATRICES:
            return "zeros" if name.endswith("beta") else self.bias_initializer

        def initialize(shape: tuple[int, ...], dtype: Any = None) -> Any:
            if len(shape) == 3:  # of a stack: each layer's matrix by itself
                return keras.ops.stack([initialize(shape[1:], dtype) for _ in range(shape[0])])
            if name != "wq":
                return self._draw(shape, dtype)
            heads = [self.num_heads, *[self.num_kv_heads or self.num_heads] * 2]
            parts = [self._draw((shape[0], count * self.head_dim), dtype) for count in heads]
            return keras.ops.concatenate(parts, axis=1)

        return initialize

    def _draw(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """From a fresh copy of the initializer: one instance draws the same values again."""
        fresh = self.kernel_initializer
        if isinstance(fresh, keras.initializers.Initializer):
            fresh = fresh.clone()
        return fresh(shape, dtype=dtype)

    # -----------------------------------------------------------------------------------------------------------------
    # calls

    def _attributes(self) -> dict[str, Any]:
        """Of the operation and its expression."""
        names = ("num_heads", "head_dim", "num_kv_heads", "causal", "pre_ln", "epsilon")
        return {name: getattr(self, name) for name in names}

    def call(
        self, x: Any, mask: Any = None, attention_mask: Any = None, training: bool | None = None, x_mask: Any = None
    ) -> Any:  # fmt: skip
        """x [batch, seq, hidden] of the compute type.

        mask: [batch, seq], True keeps a token: Keras passes on what an `Embedding` or `Masking` layer found (as x_mask
            where attention_mask is given too).
        attention_mask: [batch, seq, seq] or [batch, heads, seq, seq], True where a query sees a key; extents may be 1.
        training: True computes the plain, differentiable expression, with dropout; else the kernels run.
        """
        mask = x_mask if mask is None else mask
        weights = {n: keras.ops.convert_to_tensor(variable) for n, variable in self.tensors.items()}
        # Absent, as wq holds all three.
        weights |= {"wk": None, "wv": None, "mask": backend.joined_masks(mask, attention_mask)}
        if not training:
            return backend.call(self.operation, x, weights, self._attributes())
        return type(self).expression(
            backend.arrays(), x, **weights, **self._attributes(), dropout=self._dropped(self.dropout),
            attention_dropout=self._dropped(self.attention_dropout),
        )  # fmt: skip

    def _dropped(self, rate: float) -> Any:
        if not rate:
            return lambda x: x
        return lambda x: keras.random.dropout(x, rate, seed=self._dropout_seed)

    def compute_output_shape(self, input_shape: Any, **masks: Any) -> tuple[Any, ...]:
        """That of the input."""
        del masks
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = (
            "num_heads", "head_dim", "causal", "pre_ln", "num_kv_heads", "use_bias", "epsilon", "dropout",
            "attention_dropout", "seed", *self.options,
        )  # fmt: skip
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in names},
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }

    @property
    def tensors(self) -> dict[str, Any]:
        """The weights' variables by the operation's names."""
        return {name: getattr(self, name) for name in self._names}

    def assign(self, arrays: Mapping[str, Any]) -> None:
        """Set the weights from NumPy arrays by the operation's names."""
        for name, variable in self.tensors.items():
            variable.assign(arrays[name])


@keras.saving.register_keras_serializable(package="cki")
class FusedAttentionLayer(_FusedLayer):
    """The self-attention block of a transformer as `cki.fused_attention` computes it: norm, projections, attention,
    output projection, and the residual addition.

    num_heads, head_dim: of the queries; num_kv_heads: of keys and values, default num_heads.
    causal: a token sees those before it.  pre_ln: the norm comes first (GPT-2, ViT) or last (BERT).
    residual: False leaves out the addition of x.  use_bias: of the four projections.  epsilon: of the norm.
    dropout: of the block's output, attention_dropout: of the weights; in training alone.
    dtype: a type or policy; under a mixed policy the kernels run in the compute type.
    """

    operation = "fused_attention"
    expression = staticmethod(expressions.fused_attention)
    options: tuple[str, ...] = ("residual",)

    def __init__(
        self, num_heads: int, head_dim: int, causal: bool = False, pre_ln: bool = True, *, residual: bool = True,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, causal, pre_ln, **kwargs)
        self.residual = residual
        self._check_options()

    def _shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return self._block_shapes(hidden, "gamma", "beta")

    def _attributes(self) -> dict[str, Any]:
        return {**super()._attributes(), "residual": self.residual}

    @classmethod
    def from_keras(cls, attention: Any, norm: Any = None, **options: Any) -> FusedAttentionLayer:
        """A layer with the weights of a built `MultiHeadAttention` (or `GroupQueryAttention`) and
        `LayerNormalization`.

        norm: None for a norm with weights 1 and 0.  options: of the constructor; sizes, biases, epsilon and dropout of
        the weights are those of the layers given, as is the dtype unless it is among the options.
        Raises InvalidTypeError or InvalidArgumentError for layers that compute something else.
        """
        found = transfer.Found()
        hidden = transfer.read_attention(found, attention)
        transfer.read_norm(found, norm, "gamma", "beta", hidden)
        layer: FusedAttentionLayer = transfer.made(cls, found, hidden, options)
        return layer


@keras.saving.register_keras_serializable(package="cki")
class FusedEncoderLayer(_FusedLayer):
    """A transformer encoder layer as `cki.encoder_layer` computes it: attention block and feed-forward block.

    inner_dim: width of the feed-forward block.  activation: "gelu", "gelu_tanh", "silu", "relu" or None.
    dropout: of what is added to the residual, in both blocks.  Others: see `FusedAttentionLayer`.
    """

    operation = "encoder_layer"
    expression = staticmethod(expressions.encoder_layer)
    options: tuple[str, ...] = ("inner_dim", "activation")

    def __init__(
        self, num_heads: int, head_dim: int, inner_dim: int, causal: bool = False, pre_ln: bool = True, *,
        activation: str | None = "gelu", **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, causal, pre_ln, **kwargs)
        self.inner_dim, self.activation = inner_dim, activation
        self._check_options()

    def _shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        shapes = self._block_shapes(hidden, "attention_gamma", "attention_beta")
        shapes |= {"output_gamma": (hidden,), "output_beta": (hidden,)}
        shapes |= {"w1": (hidden, self.inner_dim), "w2": (self.inner_dim, hidden)}
        return {**shapes, "b1": (self.inner_dim,), "b2": (hidden,)} if self.use_bias else shapes

    def _attributes(self) -> dict[str, Any]:
        return {**super()._attributes(), "activation": self.activation}

    @classmethod
    def from_keras(
        cls, attention: Any, attention_norm: Any, inner: Any, output: Any, output_norm: Any, **options: Any
    ) -> FusedEncoderLayer:
        """A layer with the weights of a built block: `MultiHeadAttention`, its `LayerNormalization`, the two `Dense`
        layers of the feed-forward block and its `LayerNormalization`.

        The activation is `inner`'s unless it is among the options; see `FusedAttentionLayer.from_keras`.
        """
        found = transfer.Found()
        hidden = transfer.read_attention(found, attention)
        transfer.read_norm(found, attention_norm, "attention_gamma", "attention_beta", hidden)
        transfer.read_feed_forward(found, inner, output, hidden)
        transfer.read_norm(found, output_norm, "output_gamma", "output_beta", hidden)
        layer: FusedEncoderLayer = transfer.made(cls, found, hidden, options)
        return layer


@keras.saving.register_keras_serializable(package="cki")
class FusedEncoder(FusedEncoderLayer):
    """A whole stack of encoder layers as `cki.encoder_layers` computes it, in one operation of the backend's.

    num_layers: of the stack.  final_norm: a layer norm after the last one, as pre-LN models have; default pre_ln.
    Weights have an axis of layers in front.  Others: see `FusedEncoderLayer`.
    """

    operation = "encoder_layers"
    expression = staticmethod(expressions.encoder_layers)
    options = ("num_layers", "final_norm", *FusedEncoderLayer.options)

    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, inner_dim: int, causal: bool = False,
        pre_ln: bool = True, *, final_norm: bool | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, inner_dim, causal, pre_ln, **kwargs)
        self.num_layers = num_layers
        self.final_norm = pre_ln if final_norm is None else final_norm
        self._check_options()

    def _shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        shapes = {name: (self.num_layers, *shape) for name, shape in super()._shapes(hidden).items()}
        return {**shapes, "final_gamma": (hidden,), "final_beta": (hidden,)} if self.final_norm else shapes

    @classmethod
    def from_layers(cls, layers: Any, final_norm: Any = None, **options: Any) -> FusedEncoder:
        """A stack with the weights of built `FusedEncoderLayer`s, all of the same options.

        final_norm: a built `LayerNormalization` that follows the last of them, or None.
        `FusedEncoder.from_layers([FusedEncoderLayer.from_keras(...) for ...])` takes a model of Keras's own layers.
        """
        layers = list(layers)
        if not layers or not all(type(layer) is FusedEncoderLayer and layer.built for layer in layers):
            raise InvalidTypeError(f"{cls.__name__}: layers is not a list of built FusedEncoderLayers")
        found = transfer.stacked(layers)
        hidden = found.arrays["wo"].shape[-1]
        if final_norm is not None:
            transfer.read_norm(found, final_norm, "final_gamma", "final_beta", hidden)
        found.options |= {"num_layers": len(layers), "final_norm": final_norm is not None}
        stack: FusedEncoder = transfer.made(cls, found, hidden, options)
        return stack
