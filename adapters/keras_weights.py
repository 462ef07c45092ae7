"""Weights of Keras's own layers, as the fused layers hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from cki.adapter import type_name
from cki.errors import InvalidArgumentError, InvalidTypeError

_ATTENTIONS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
#: Methods in which layers compute, which a subclass may have of its own.
_COMPUTING = ("call", "_compute_attention", "_masked_softmax")
#: Options that the weights decide.
_DECIDED = {"num_heads", "head_dim", "num_kv_heads", "inner_dim", "use_bias", "num_layers", "epsilon"}


@dataclass
class Found:
    """arrays: weights by the operation's names.  options: of the fused layer.  problems: why it cannot be made."""

    arrays: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    epsilons: list[float] = field(default_factory=list)

    def note(self, problem: str) -> None:
        """One more reason."""
        self.problems.append(problem)


def _array(variable: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.asarray(keras.ops.convert_to_numpy(variable))
    return found


def _require(layer: Any, kinds: tuple[Any, ...], argument: str) -> None:
    names = " or ".join(kind.__name__ for kind in kinds)
    if not isinstance(layer, kinds):
        raise InvalidTypeError(
            f"{argument} is a {type_name(type(layer))}", hint=f"{argument} of type {names}"
        )
    kind = next(kind for kind in kinds if isinstance(layer, kind))
    own = [n for n in _COMPUTING if getattr(type(layer), n, None) is not getattr(kind, n, None)]
    if own:
        raise InvalidArgumentError(
            f"{argument} is a {type_name(type(layer))} with {' and '.join(own)} of its own",
            hint=f"a {kind.__name__} with its weights, if that computes the same",
        )
    if not layer.built:
        raise InvalidArgumentError(
            f"{argument} has no weights yet", hint=f"{argument}.build(...), or call the model once"
        )


def _require_plain(found: Found, layer: Any, argument: str) -> None:
    """Note a layer whose weights are codes, or which rounds what it multiplies."""
    mode = getattr(layer, "quantization_mode", None)
    variables = [
        v for v in (getattr(layer, n, None) for n in ("_kernel", "gamma", "beta", "bias")) if v is not None
    ]
    codes = [variable.dtype for variable in variables if not keras.backend.is_float_dtype(variable.dtype)]
    if mode is not None or codes:
        found.note(f"{argument} is quantised to {mode or codes[0]}")


def read_attention(found: Found, layer: Any) -> int:
    """Projections of an attention layer; returns the hidden size."""
    _require(layer, _ATTENTIONS, "attention")
    is_grouped = isinstance(layer, keras.layers.GroupQueryAttention)
    heads = layer.num_query_heads if is_grouped else layer.num_heads
    kv_heads = layer.num_key_value_heads if is_grouped else heads
    head_dim = layer.head_dim if is_grouped else layer.key_dim
    for name in ("query", "key", "value", "output"):
        _require_plain(found, getattr(layer, f"_{name}_dense"), f"attention's {name} projection")
    _refuse(found, "attention")
    kernels = [_array(part.kernel) for part in (layer._query_dense, layer._key_dense, layer._value_dense)]
    output = _array(layer._output_dense.kernel)
    hidden = int(kernels[0].shape[0])
    if any(kernel.ndim != 3 or kernel.shape[0] != hidden for kernel in kernels):
        found.note(
            f"attention has projections of shapes {', '.join(str(k.shape) for k in kernels)}, not [hidden, heads, dim] "
            "of one hidden size"
        )
    elif any(kernel.shape[2] != head_dim for kernel in kernels):
        found.note(
            f"attention has key_dim {head_dim} and value_dim {kernels[2].shape[2]}, which are not alike"
        )
    if output.ndim != 3 or output.shape[2] != hidden:
        found.note(f"attention has an output projection of shape {output.shape}, not [heads, dim, {hidden}]")
    for option in ("use_gate", "sliding_window"):
        value = getattr(layer, option if is_grouped else f"_{option}", None)
        if value:
            found.note(f"attention has {option}={value}, which is not computed")
    _refuse(found, "attention")
    found.arrays |= {
        "wq": np.concatenate([kernel.reshape(hidden, -1) for kernel in kernels], axis=1),
        "wo": output.reshape(-1, hidden),
    }
    use_bias = layer._query_dense.bias is not None
    if use_bias:
        parts = (layer._query_dense, layer._key_dense, layer._value_dense)
        found.arrays |= {
            "bq": np.concatenate([_array(part.bias).reshape(-1) for part in parts]),
            "bo": _array(layer._output_dense.bias),
        }
    found.options |= {
        "num_heads": heads, "head_dim": head_dim, "use_bias": use_bias, "dtype": layer.dtype_policy,
        "attention_dropout": layer.dropout if is_grouped else layer._dropout,
    }  # fmt: skip
    if kv_heads != heads:
        found.options["num_kv_heads"] = kv_heads
    return hidden


def read_norm(found: Found, layer: Any, gamma: str, beta: str, hidden: int) -> None:
    """Weights of a layer norm over the last axis, by the names given; of None, 1 and 0."""
    found.arrays |= {gamma: np.ones(hidden, np.float32), beta: np.zeros(hidden, np.float32)}
    if layer is None:
        return
    _require(layer, (keras.layers.LayerNormalization,), gamma.replace("gamma", "norm"))
    _require_plain(found, layer, layer.name)
    if layer.axis not in (-1, 2, [-1], [2]) or getattr(layer, "rms_scaling", False):
        found.note(f"{layer.name} is not a layer norm over the last axis")
    for name, variable in ((gamma, layer.gamma), (beta, layer.beta)):
        if variable is None:
            continue
        found.arrays[name] = _array(variable)
        if found.arrays[name].shape != (hidden,):
            found.note(f"{layer.name} has weights of shape {found.arrays[name].shape}, not ({hidden},)")
    found.epsilons.append(float(layer.epsilon))


def read_feed_forward(found: Found, inner: Any, output: Any, hidden: int) -> None:
    """Weights of the two dense layers, and the activation between them."""
    for layer, argument in ((inner, "inner"), (output, "output")):
        _require(layer, (keras.layers.Dense,), argument)
        _require_plain(found, layer, argument)
    _refuse(found, "the feed-forward block")
    w1, w2 = _array(inner.kernel), _array(output.kernel)
    if w1.shape[0] != hidden or w2.shape != w1.shape[::-1]:
        found.note(
            f"inner has shape {w1.shape} and output {w2.shape}, not [{hidden}, inner] and [inner, {hidden}]"
        )
    if _activation(output.activation) is not None:
        found.note(f"output has the activation {_name(output.activation)}, which is not computed")
    activation = _activation(inner.activation)
    if activation == "unknown":
        found.note(
            f"inner has the activation {_name(inner.activation)}: activation= says which of CKI's it is"
        )
    found.options |= {"inner_dim": w1.shape[1], "activation": activation}
    found.arrays |= {"w1": w1, "w2": w2}
    biases = {"b1": inner.bias, "b2": output.bias}
    found.arrays |= {name: _array(bias) for name, bias in biases.items() if bias is not None}


def _activation(function: Any) -> str | None:
    """By CKI's name; "unknown" for others."""
    known = {
        keras.activations.linear: None, keras.activations.gelu: "gelu", keras.activations.silu: "silu",
        keras.activations.relu: "relu",
    }  # fmt: skip
    try:
        return known.get(function, "unknown")
    except TypeError:  # a layer, or another object without a hash
        return "unknown"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _refuse(found: Found, what: str) -> None:
    if found.problems:
        raise InvalidArgumentError(f"{what} computes something else than the fused layer", found.problems)


def made(cls: Any, found: Found, hidden: int, options: dict[str, Any]) -> Any:
    """The fused layer, built, with the weights."""
    if "activation" in options:
        found.problems = [problem for problem in found.problems if "activation=" not in problem]
    epsilons = sorted(set(found.epsilons))
    if len(epsilons) > 1:
        found.note(f"the norms have the epsilons {', '.join(map(str, epsilons))}, not one")
    _refuse(found, cls.__name__)
    if epsilons:
        found.options["epsilon"] = epsilons[0]
    vectors = {"bq", "bo", "b1", "b2"}
    found.options["use_bias"] = bool(vectors & set(found.arrays))
    asked = {**found.options, **options}
    for chosen in (found.options, asked):
        chosen["num_kv_heads"] = chosen.get("num_kv_heads") or chosen["num_heads"]
    for name in _DECIDED & found.options.keys():
        if asked[name] != found.options[name]:
            found.note(f"{name} is {asked[name]!r}, the layers given have {found.options[name]!r}")
    _refuse(found, cls.__name__)
    layer = cls(**asked)
    layer.build((None, None, hidden))
    for name, variable in layer.tensors.items():  # a bias that only some of the layers have
        if name in vectors and name not in found.arrays:
            found.arrays[name] = np.zeros(tuple(variable.shape), np.float32)
    layer.assign(found.arrays)
    return layer


def stacked(layers: Sequence[Any]) -> Found:
    """Weights of fused encoder layers, with an axis of layers in front, and their options."""
    left_out = ("name", "seed", "trainable")
    configs = [{k: v for k, v in layer.get_config().items() if k not in left_out} for layer in layers]
    differing = [key for key in configs[0] if any(config[key] != configs[0][key] for config in configs)]
    if differing:
        raise InvalidArgumentError(
            f"layers differ in {', '.join(differing)}", hint="FusedEncoderLayers of the same options"
        )
    arrays = {name: np.stack([_array(layer.tensors[name]) for layer in layers]) for name in layers[0].tensors}
    config = {**configs[0], "dtype": layers[0].dtype_policy}
    return Found(arrays, config, epsilons=[config["epsilon"]])
