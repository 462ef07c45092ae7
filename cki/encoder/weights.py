"""Reads an encoder's weights from a state dict, without a copy, and says everything that is wrong with them at once.

Weights that are being trained are refused while gradients are recorded, for the result would have none.  A state dict
of torch's is detached, and so is what the encoder reads; this is about parameters and variables given as they are.
They are asked at each call, since the caller may freeze or train them at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cki import dtypes
from cki.adapter import adapter_of
from cki.dtypes import DType
from cki.encoder.config import EncoderConfig, Settings
from cki.encoder.names import NamedWeights, find_names, layout_of
from cki.encoder.prepare import convert
from cki.errors import CkiError, InvalidTypeError, UnsupportedError
from cki.ops.encoder_model import LAYER_VECTORS
from cki.problems import Problems
from cki.tensor import TensorView

_FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)
_TABLES = ("words", "positions", "types")


class EncoderWeights(NamedTuple):
    """tensors: the user's own, or converted ones, by the names of `cki.ops.encoder_model.weight_names`.

    trainable: those of the user's of which gradients may be asked.
    """

    config: EncoderConfig
    tensors: dict[str, Any]
    views: dict[str, TensorView]
    trainable: tuple[Any, ...] = ()


def read_weights(
    weights: Mapping[str, Any], config: Any, arguments: Mapping[str, Any], *, ignore: Sequence[str],
    dtype: DType | None, weight_layout: str | None,
) -> EncoderWeights:  # fmt: skip
    """The encoder in a state dict.  config, arguments: see `Settings`; the rest as in `Encoder.from_weights`.

    Raises InvalidArgumentError with every missing, unexpected, wrongly shaped or wrongly typed weight.
    """
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise InvalidTypeError(f"weights is a {type(weights).__name__}, not a mapping of names to tensors")
    if weight_layout is not None and not (
        isinstance(weight_layout, str) and weight_layout in ("in_out", "out_in")
    ):
        raise InvalidTypeError(f"weight_layout is {weight_layout!r}, not 'in_out', 'out_in' or None")
    if isinstance(ignore, str) or not (
        isinstance(ignore, Sequence) and all(isinstance(start, str) for start in ignore)
    ):
        raise InvalidTypeError(f"ignore is {ignore!r}, not a sequence of str", hint='ignore=("classifier.",)')
    problems = Problems("these weights make no encoder")
    settings = Settings(config, arguments, problems)
    names = find_names(weights, ignore, settings.pre_ln, problems)
    tensors, views, trainable = _read(names, weights, dtype, problems)
    layout = weight_layout or layout_of(names, problems)
    found = _shapes(names, views, settings, layout, problems)
    problems.refuse()
    assert found is not None
    return EncoderWeights(found, tensors, views, trainable)


def _read(
    names: NamedWeights, weights: Mapping[str, Any], dtype: DType | None, problems: Problems
) -> tuple[dict[str, Any], dict[str, TensorView], tuple[Any, ...]]:
    trainable: list[Any] = []
    tensors: dict[str, Any] = {}
    views: dict[str, TensorView] = {}
    for role, weight in names.by_role.items():
        tensor = weights[weight.original]
        try:
            adapter = adapter_of(tensor, weight.original)
            if is_trainable(adapter.name, tensor):
                trainable.append(tensor)
            if adapter.name == "torch":
                # Parameters may be given.  What we hold keeps its memory even when the parameter gets another.
                tensor = tensor.detach()
            refused = adapter.check(tensor, weight.original)
            if not refused:
                tensor = tensor if dtype is None else convert(adapter.name, tensor, dtype)
                tensors[role], views[role] = tensor, adapter.view(tensor)
        except CkiError as error:
            refused = [str(error).replace("\n  hint:", ";")]
        for problem in refused:
            problems.note(problem)
    return tensors, views, tuple(trainable)


def _shapes(
    names: NamedWeights, views: Mapping[str, TensorView], settings: Settings, layout: str, problems: Problems
) -> EncoderConfig | None:
    """Notes every weight of a wrong shape, type or device.  Returns the configuration that the weights have, or None
    when one of those that tell the sizes is missing or is no matrix."""
    telling = ("words", "positions", "layers.0.wq", "layers.0.w1")
    sizes = {role: views[role].shape for role in telling if role in views}
    for role, shape in sizes.items():
        if len(shape) != 2 or 0 in shape:
            problems.note(f"{names.by_role[role].original} has shape {shape}, not two axes of 1 or more")
    if len(sizes) < len(telling) or any(len(shape) != 2 or 0 in shape for shape in sizes.values()):
        return None
    out_axis = 0 if layout == "out_in" else 1
    (vocabulary, hidden), position_rows = sizes["words"], sizes["positions"][0]
    columns, inner = sizes["layers.0.wq"][out_axis], sizes["layers.0.w1"][out_axis]
    stated = {
        "hidden_size": hidden, "num_hidden_layers": names.layers, "intermediate_size": inner, "vocab_size": vocabulary,
        "max_position_embeddings": position_rows,
    }  # fmt: skip
    for name, value in stated.items():
        settings.compare(name, value)
    heads = settings.num_heads
    if columns % heads:
        problems.note(f"num_heads is {heads}, {names.by_role['layers.0.wq'].original} has {columns} outputs")
    padding_id = settings.padding_id
    if padding_id is None and not settings.model_type and "roberta" in names.prefix:
        padding_id = 1
    max_tokens = position_rows - (0 if padding_id is None else padding_id + 1)
    if max_tokens < 1:
        problems.note(
            f"{names.by_role['positions'].original} has {position_rows} rows, none of them for a token"
        )
    _compare(names, views, _wanted(hidden, inner, columns, layout), problems)
    pre_ln = names.pre_names if settings.pre_ln is None else settings.pre_ln
    return EncoderConfig(
        names.layers, hidden, inner, heads, columns // heads, vocabulary, max_tokens, pre_ln, settings.activation,
        settings.epsilon, padding_id, layout,
    )  # fmt: skip


def _wanted(hidden: int, inner: int, columns: int, layout: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights, by the last part of the role."""
    out_in = dict.fromkeys(("wq", "wk", "wv"), (columns, hidden))
    out_in |= {"wo": (hidden, columns), "w1": (inner, hidden), "w2": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        name: shape if layout == "out_in" else shape[::-1] for name, shape in out_in.items()
    }
    shapes |= dict.fromkeys(LAYER_VECTORS, (hidden,))
    shapes |= dict.fromkeys(("bq", "bk", "bv"), (columns,))
    return shapes | {"b1": (inner,)}


def _compare(
    names: NamedWeights,
    views: Mapping[str, TensorView],
    shapes: Mapping[str, tuple[int, ...]],
    problems: Problems,
) -> None:
    words, words_name = views["words"], names.by_role["words"].original
    hidden = words.shape[1]
    conversion = "dtype= converts all weights"
    if words.dtype not in _FLOATS:
        problems.note(f"{words_name} is {words.dtype}, not f32, f16 or bf16", conversion)
    for role, view in views.items():
        name = names.by_role[role].original
        wanted = shapes.get(role.rpartition(".")[2], (hidden,))
        if role in _TABLES:
            wanted = (view.shape[0] if view.ndim else 1, hidden)
            if view.shape == wanted and hidden > 1 and view.strides[1] != 1:
                problems.note(f"{name} has strides {view.strides}: rows with gaps", "row-major tables")
        if view.shape != wanted:
            problems.note(f"{name} has shape {view.shape}, not {wanted}")
        # Vectors may be f32 beside 16-bit matrices.
        allowed = {words.dtype, dtypes.f32} if len(wanted) == 1 else {words.dtype}
        if view.dtype not in allowed and words.dtype in _FLOATS:
            problems.note(f"{name} is {view.dtype}, {words_name} is {words.dtype}", conversion)
        if view.device != words.device:
            problems.note(f"{name} is on {view.device}, {words_name} is on {words.device}", "one device")


def is_trainable(framework: str, tensor: Any) -> bool:
    """Whether a gradient may be asked of this weight."""
    if framework == "torch":
        return bool(tensor.requires_grad)
    return framework == "tensorflow" and bool(getattr(tensor, "trainable", False))


def refuse_recording(trainable: Sequence[Any]) -> None:
    """UnsupportedError where a call on these weights, all of one framework, would silently cut a gradient off."""
    if hasattr(trainable[0], "requires_grad"):
        import torch

        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in trainable)
        who, hint = "autograd", "torch.inference_mode() or torch.no_grad(), or weights of model.state_dict()"
    else:
        from cki.adapters.gradient_tensorflow import is_recorded

        recorded = is_recorded(trainable)
        who, hint = "a tf.GradientTape", "tape.stop_recording(), or variables that are not trainable"
    if recorded:
        raise UnsupportedError(
            f"encoder has no gradient, but {who} records what its weights go into", hint=hint
        )
