"""Weights in another form: another type, joined, or with a norm in them.  Always new tensors, of the old's framework.

This is the one place where CKI copies weights, and only when it is asked to: the user's tensors are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cki.adapter import adapter_of
from cki.dtypes import DType
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.ops.encoder_model import LAYER_WEIGHTS

_FRAMEWORKS = ("numpy", "cupy", "torch", "jax", "tensorflow")


def convert(framework: str, tensor: Any, dtype: DType) -> Any:
    """The tensor in another type; the tensor itself where it has that type.  framework: the adapter's name."""
    _require_known(framework)
    if framework == "torch":
        return tensor.to(_torch_dtype(dtype))
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.cast(tensor, tf.as_dtype(dtype.numpy.name))
    return tensor if tensor.dtype == dtype.numpy else tensor.astype(dtype.numpy)


def concatenate(framework: str, tensors: Sequence[Any], axis: int) -> Any:
    """Tensors of one type side by side along an axis, row-major."""
    _require_known(framework)
    if framework == "torch":
        import torch

        return torch.cat([*tensors], axis)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.concat([*tensors], axis)
    if framework == "jax":
        import jax.numpy

        return jax.numpy.concatenate([*tensors], axis)
    if framework == "cupy":
        import cupy

        return cupy.concatenate([*tensors], axis)
    import numpy as np

    return np.concatenate([*tensors], axis)


def prepare(weights: Any, *, weight_layout: str = "in_out") -> Any:
    """Weights of a layer, or a `cki.Encoder`, in the form that takes the fewest launches: new tensors, made once.

    weights: the weights and vectors of a pre-LN `encoder_layer` by their names (wq, wk, wv, wo, w1, w2, bq, ...,
        attention_gamma, ...), tensors of one framework, of f16 or bf16.
    weight_layout: how the matrices lie, as in `encoder_layer`.

    Returns arguments of `encoder_layer` by name, without norms, and with `folded=True`:
    `cki.encoder_layer(x, **cki.prepare(weights), num_heads=16, head_dim=64)`; of an encoder, `encoder.prepare()`.
    Raises InvalidArgumentError where a matrix is missing, or where a norm's weights take another beyond its type.
    """
    if hasattr(weights, "prepare"):
        return weights.prepare()
    if not isinstance(weights, Mapping):
        raise InvalidTypeError(f"weights is a {type(weights).__name__}, neither a mapping nor an encoder")
    missing = [name for name in ("wq", "wo", "w1", "w2") if weights.get(name) is None]
    unknown = sorted(map(str, set(weights) - set(LAYER_WEIGHTS)))
    problems = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
    hint = ""
    if weight_layout not in ("in_out", "out_in"):
        problems.append(f"weight_layout is {weight_layout!r}")
        hint = 'weight_layout "in_out" or "out_in"'
    if problems:
        raise InvalidArgumentError("prepare: invalid arguments", problems, hint)
    given = {name: weight for name, weight in weights.items() if weight is not None}
    found = dict.fromkeys(("wk", "wv")) | prepare_layer(given, weight_layout, fold=True)
    return {**found, "weight_layout": weight_layout, "pre_ln": True, "folded": True}


def prepare_layer(layer: Mapping[str, Any], weight_layout: str, *, fold: bool) -> dict[str, Any]:
    """An encoder layer's weights by name, with Q, K and V in one weight, and, to `fold`, its norms in wq and w1."""
    found = dict(layer)
    axis = 0 if weight_layout == "out_in" else 1
    framework = adapter_of(layer["wq"], "wq").name
    parts = [[name for name in (f"{letter}{part}" for part in "qkv") if name in found] for letter in "wb"]
    if len(parts[0]) == 3 and len(parts[1]) in (0, 3):
        for names, joined in zip(parts, (axis, 0)):
            if names:
                found[names[0]] = concatenate(framework, [found.pop(name) for name in names], joined)
    if fold:
        if "wk" in found:
            raise InvalidArgumentError(
                "prepare: Q, K and V have a bias and no bias", hint="zeros for the missing"
            )
        for norm, w, b in (("attention", "wq", "bq"), ("output", "w1", "b1")):
            gamma, beta = (found.pop(f"{norm}_{part}", None) for part in ("gamma", "beta"))
            found[w], found[b] = fold_layer_norm(
                framework, found[w], gamma, beta, found.get(b), weight_layout=weight_layout
            )
    return found


def fuse_post_norms(
    layer: Mapping[str, Any], before: Mapping[str, Any] | None, weight_layout: str
) -> dict[str, Any]:
    """Weights of a post-LN layer with the norms in front of its blocks in them, by FUSED_WEIGHTS' names.

    layer: prepared, unfolded.  before: the layer before, whose last norm is in front; None of the first layer.
    Nothing for a norm without weight.
    """
    found: dict[str, Any] = {}
    framework = adapter_of(layer["wq"], "wq").name
    for norms, norm, w, last in ((before, "output", "wq", "bo"), (layer, "attention", "w1", "b2")):
        gamma = None if norms is None else norms.get(f"{norm}_gamma")
        if norms is None or gamma is None or "wk" in layer:
            continue
        beta, b = norms.get(f"{norm}_beta"), "b" + w[1]
        found[f"fused_{w}"], found[f"fused_{b}"] = fold_layer_norm(
            framework, layer[w], gamma, beta, layer.get(b), weight_layout=weight_layout
        )
        parts = [_wide(framework, vector) for vector in (layer.get(last), beta) if vector is not None]
        if parts:  # of the norm's type: the kernel reads both together
            found[f"fused_{last}"] = _like(framework, sum(parts[1:], parts[0]), gamma)
    return found


#: Rows of K that take up what rounding leaves of a column's sum.
_LEVELLED_ROWS = 16


def fold_layer_norm(
    framework: str,
    w: Any,
    gamma: Any = None,
    beta: Any = None,
    bias: Any = None,
    *,
    weight_layout: str = "in_out",
) -> tuple[Any, Any]:
    """(v, c) with LN(x) w + bias = N(x) v + c = rstd x v + c: N is the norm without weights, rstd its factor.

    w: [K, N], or [N, K] for weight_layout "out_in".  gamma, beta: [K], of the norm in front; None: 1 and 0.
    bias: [N] or None.  v: as w, of w's type: gamma w, less its mean over K, which a norm takes from x anyway; a few
    rows are moved by an ulp or so, that v's columns sum to zero as rounded.  So a mean of x adds nothing to x v.
    c: [N], f32.
    """
    _require_known(framework)
    axis = 0 if weight_layout == "in_out" else 1
    wide = _wide(framework, w)

    def along_k(vector: Any) -> Any:
        return _wide(framework, vector)[:, None] if axis == 0 else _wide(framework, vector)[None, :]

    def row(matrix: Any, first: int, last: int | None) -> Any:
        return matrix[first:last] if axis == 0 else matrix[:, first:last]

    shift = _sum(framework, wide * 0 if beta is None else wide * along_k(beta), axis)
    if bias is not None:
        shift = shift + _wide(framework, bias)
    product = wide if gamma is None else wide * along_k(gamma)
    depth = int(w.shape[axis])
    mean = _sum(framework, product, axis) / depth
    product = product - (mean[None, :] if axis == 0 else mean[:, None])
    rounded = _like(framework, product, w)
    if not _is_finite(framework, _wide(framework, rounded)):
        raise InvalidArgumentError(
            f"prepare: a norm's weights take a matrix beyond {w.dtype}, or are not finite"
        )
    rest = _sum(framework, _wide(framework, rounded), axis)
    rest = rest[None, :] if axis == 0 else rest[:, None]
    count, rows = min(_LEVELLED_ROWS, depth), []
    for number in range(count):
        old = _wide(framework, row(rounded, number, number + 1))
        rows.append(_like(framework, old - rest / (count - number), w))
        rest = rest + (_wide(framework, rows[-1]) - old)
    return concatenate(framework, [*rows, row(rounded, count, None)], axis), shift


def _wide(framework: str, tensor: Any) -> Any:
    """In fp32."""
    if framework == "torch":
        return tensor.detach().float()
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.cast(tensor, tf.float32)
    return tensor.astype("float32")


def _like(framework: str, tensor: Any, other: Any) -> Any:
    """In the other's type."""
    if framework == "torch":
        return tensor.to(other.dtype)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.cast(tensor, other.dtype)
    if framework == "numpy":
        import numpy as np

        with np.errstate(over="ignore"):  # what is beyond the type is refused by name
            return tensor.astype(other.dtype)
    return tensor.astype(other.dtype)


def _is_finite(framework: str, tensor: Any) -> bool:
    """Whether all elements are."""
    if framework == "tensorflow":
        import tensorflow as tf

        return bool(tf.reduce_all(tf.math.is_finite(tensor)))
    return bool(abs(tensor).max() < float("inf"))


def _sum(framework: str, tensor: Any, axis: int) -> Any:
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.reduce_sum(tensor, axis)
    return tensor.sum(axis)


def _require_known(framework: str) -> None:
    if framework not in _FRAMEWORKS:
        raise UnsupportedError(
            f"weights of {framework} cannot be converted or joined",
            hint=f"weights of {', '.join(_FRAMEWORKS)}",
        )


def _torch_dtype(dtype: DType) -> Any:
    import torch

    return getattr(torch, dtype.numpy.name)
