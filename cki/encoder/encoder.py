"""`cki.Encoder`: a BERT-like encoder on the user's own weights.

    encoder = cki.Encoder.from_weights(model.state_dict(), model.config)
    hidden = encoder(input_ids, attention_mask)              # [batch, seq, hidden]
    vectors = encoder.embed(input_ids, attention_mask)       # [batch, hidden], mean of the kept tokens, length 1

A forward pass is one operation (`cki.ops.encoder_model`).  Weights are read where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from cki import config as settings
from cki import dtypes
from cki.adapter import adapter_of
from cki.encoder.config import EncoderConfig
from cki.encoder.forward import Forward
from cki.encoder.prepare import fuse_post_norms, prepare_layer
from cki.encoder.weights import EncoderWeights, read_weights, refuse_recording
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.operand import dense
from cki.ops.embedding import validate_ids
from cki.ops.encoder_blocks import tile_length
from cki.ops.encoder_inputs import validate_offsets
from cki.ops.encoder_model import LAYER_WEIGHTS, POOLINGS, encoder_spec, model_memory, weight_names
from cki.ops.linear import WeightLayout
from cki.ops.spec import Problem
from cki.ops.validate import shape_of
from cki.tensor import TensorView

if TYPE_CHECKING:
    from cki.encoder.graphs import EncoderGraphs

Pooling = Literal["mean", "first"]


class Encoder:
    """An encoder of the BERT family: embeddings, transformer layers in either norm order, last hidden state.

    config: its numbers (`cki.encoder.config.EncoderConfig`).  dtype: of the activations, as of the weights ("f16").
    May be called from several threads.  Made by `from_weights`.
    """

    def __init__(self, weights: EncoderWeights) -> None:
        if not isinstance(weights, EncoderWeights):
            raise InvalidTypeError(
                f"weights is a {type(weights).__name__}", hint="cki.Encoder.from_weights(state_dict, config)"
            )
        self.config: EncoderConfig = weights.config
        self._trainable = weights.trainable
        self._tensors = weights.tensors
        self._views = weights.views
        self._spec = encoder_spec(self.config.layers)
        names = weight_names(self.config.layers)
        self._forward = Forward(self._spec, [self._views.get(name) for name in names])
        self._is_prepared = False

    @classmethod
    def from_weights(
        cls, weights: Mapping[str, Any], config: Any = None, *, num_heads: int | None = None,
        pre_ln: bool | None = None, activation: str | None = None, epsilon: float | None = None,
        padding_id: int | None = None, weight_layout: WeightLayout | None = None, dtype: str | None = None,
        ignore: Sequence[str] = (),
    ) -> Encoder:  # fmt: skip
        """An encoder on the weights of a state dict.

        weights: names to tensors of torch, NumPy, CuPy, JAX, or variables of TensorFlow, with the names of Hugging
            Face's BERT, RoBERTa and their relatives (`cki.encoder.names`), under any prefix.  Used where they lie, not
            copied; never changed.  f32, f16 or bf16; vectors may be f32 beside 16-bit matrices.
        config: Hugging Face's configuration, an object or the dict of config.json.  What is given by name wins:
        num_heads: attention heads; the one number that weights do not tell.
        pre_ln: norms before the blocks instead of after; None is what the names of the norms say.
        activation: of the feed-forward block, by Hugging Face's name; default "gelu", the one with the error function.
        epsilon: of the layer norms; default 1e-12.
        padding_id: RoBERTa's rule for positions with this id of padding.  Without it positions count from 0, unless
            the configuration's model_type, or the prefix of the names, is RoBERTa's.
        weight_layout: "out_in" as torch stores matrices, "in_out" as TensorFlow and Flax do; None is what the names
            say (.weight or kernel).
        dtype: converts every weight to this type, into new memory; None uses them as they are.
        ignore: beginnings of names to leave out.  Heads and poolers are left out by themselves.

        Weights that are trained (torch's parameters, trainable variables) are detached: a call raises UnsupportedError
        while gradients of them are being recorded.
        Raises InvalidArgumentError with every missing, unexpected, wrongly shaped or wrongly typed weight and every
        other rule that is broken; InvalidTypeError where an argument's type is wrong, and for what is no state dict.
        """
        arguments = {
            "num_heads": num_heads, "pre_ln": pre_ln, "activation": activation, "epsilon": epsilon,
            "padding_id": padding_id,
        }  # fmt: skip
        wanted = None if dtype is None else dtypes.from_name(dtype)
        return cls(
            read_weights(weights, config, arguments, ignore=ignore, dtype=wanted, weight_layout=weight_layout)
        )

    @property
    def dtype(self) -> str:
        """Element type of weights and activations: "f32", "f16" or "bf16"."""
        return self._views["words"].dtype.name

    @property
    def weights(self) -> dict[str, Any]:
        """The tensors in use, by CKI's names: "words", "layers.0.wq", ... (`cki.ops.encoder_model.weight_names`)."""
        return dict(self._tensors)

    def __call__(
        self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, position_ids: Any = None, *,
        lengths: Any = None, cu_seqlens: Any = None, max_seqlen: int | None = None, workspace: Any = None,
        out: Any = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """The last hidden state.

        input_ids: [batch, seq] of int32 or int64.
        attention_mask: [batch, seq], bool, uint8, int8, int32 or int64, nonzero keeps a token; or lengths: [batch],
            int32 or int64, the first tokens are kept.  Neither keeps all.  Hidden tokens do not influence others; their
            own rows of the result mean nothing.
        token_type_ids: [batch, seq]; None is type 0.  position_ids: [batch, seq] or [seq]; None counts.
        cu_seqlens: int32 or int64 [batch + 1], for sequences one behind the other without padding: input_ids and the
            like are [tokens], sequence b from cu_seqlens[b] up to cu_seqlens[b + 1], and the result is
            [tokens, hidden].  It is read on the device.  max_seqlen: the longest, if known: a hint for speed.
        workspace: uint8, `workspace_nbytes` of them, for temporary tensors; None allocates with the caller's framework.
        out: where to write the result.

        Returns [batch, seq, hidden] of the weights' type, in the framework of the ids.  An id outside its table counts
        as zeros, offsets beyond the tokens are cut off; with CKI_VALIDATE=1 both raise.  Raises InvalidArgumentError,
        InvalidTypeError or DeviceError before any launch, with every rule that is broken.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, lengths, cu_seqlens, workspace)
        return self._run(inputs, self._attributes(None, False, max_seqlen), out, stream)

    def embed(
        self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, position_ids: Any = None, *,
        lengths: Any = None, cu_seqlens: Any = None, max_seqlen: int | None = None, pooling: Pooling = "mean",
        normalize: bool = True, workspace: Any = None, out: Any = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """One vector a sequence.

        pooling: "mean" over the kept tokens, or "first", the last hidden state of the first token ([CLS]).
        normalize: divide by max(L2 norm, 1e-12).  Other arguments: see a call.

        Returns [batch, hidden].
        """
        if pooling is None:
            raise InvalidArgumentError(
                "encoder: pooling is None", hint='"mean" or "first"; a call pools nothing'
            )
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, lengths, cu_seqlens, workspace)
        return self._run(inputs, self._attributes(pooling, normalize, max_seqlen), out, stream)

    def build(
        self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, position_ids: Any = None, *,
        lengths: Any = None, cu_seqlens: Any = None, max_seqlen: int | None = None, pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> int:  # fmt: skip
        """Check, plan and compile what a call with tensors like these launches, and run nothing.

        pooling: that of `embed`, or None for a call.  Returns the number of launches.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, lengths, cu_seqlens, None)
        entry = self._forward.find(inputs, self._attributes(pooling, normalize, max_seqlen), None, None)[0]
        return 0 if entry.executable is None else len(entry.executable.plan.steps)

    def workspace_nbytes(self, batch: int, seq: int, *, pooling: Pooling | None = None) -> int:
        """Bytes of temporary memory that a call, or `embed` with that pooling, needs for batch x seq tokens.

        Packed sequences need that of one sequence of all their tokens.  It does not grow with the number of layers, and
        grows linearly with the number of tokens.
        """
        for name, value in (("batch", batch), ("seq", seq)):
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise InvalidTypeError(f"encoder: {name} is {value!r}, not an integer")
            if value < 0:
                raise InvalidArgumentError(f"encoder: {name} is {value}", hint=f"{name} of at least 0")
        if pooling is not None and not (isinstance(pooling, str) and pooling in POOLINGS):
            raise InvalidArgumentError(
                f"encoder: pooling is {pooling!r}", hint='pooling "mean", "first" or None'
            )
        names = weight_names(self.config.layers)
        operands = {name: _operand(name, self._views.get(name)) for name in names}
        attributes = dict(zip((a.name for a in self._spec.attributes), self._attributes(pooling, False)))
        return model_memory(
            Problem({**operands, "input_ids": dense("input_ids", (batch, seq), dtypes.i64)}, attributes)
        ).nbytes

    def prepare(self) -> Encoder:
        """The same encoder in fewer launches, with weights that are made here once; its other weights are shared.

        Q, K and V of each layer become one weight: one launch by every kernel, also by Hopper's, which takes a single
        weight.  In a model of 16-bit types each layer's norms go into the weights behind them, in a post-LN model
        besides those that it has: on sm_90a a layer is then 5 launches, not 7.  No tensor of the user is changed.  A
        prepared encoder returns itself.
        """
        if self._is_prepared:
            return self
        c, tensors = self.config, dict(self._tensors)
        fuses = self._views["words"].dtype.itemsize == 2
        fold, before = fuses and c.pre_ln, None
        for number in range(c.layers):
            start = f"layers.{number}."
            layer = {name: tensors.pop(start + name) for name in LAYER_WEIGHTS if start + name in tensors}
            layer = prepare_layer(layer, c.weight_layout, fold=fold)
            besides = fuse_post_norms(layer, before, c.weight_layout) if fuses and not fold else {}
            tensors |= {start + name: tensor for name, tensor in (layer | besides).items()}
            before = layer
        views = {role: self._views[role] for role in tensors if tensors[role] is self._tensors.get(role)}
        for role in tensors.keys() - views.keys():
            views[role] = adapter_of(tensors[role], role).view(tensors[role])
        made = Encoder(EncoderWeights(replace(c, folded=fold), tensors, views, self._trainable))
        made._is_prepared = True
        return made

    def capture(
        self, buckets: Sequence[tuple[int, int]], *, pooling: Pooling | None = None, normalize: bool = True,
        padding: Literal["mask", "lengths"] | None = "mask", token_types: bool = False, like: Any = None,
    ) -> EncoderGraphs:  # fmt: skip
        """A graph for each shape (batch, seq); all share one workspace and one output.  See `EncoderGraphs`.

        pooling, normalize: of the result, as in `embed`; None is the last hidden state.
        padding: which inputs the graphs have besides the ids: "mask", "lengths" or None.  token_types: those too.
        like: a tensor of the framework (torch, CuPy; on the simulated device also NumPy) and device that the inputs
            will be of; default that of the weights.
        """
        from cki.encoder.graphs import EncoderGraphs

        return EncoderGraphs(
            self, buckets, pooling=pooling, normalize=normalize, padding=padding, token_types=token_types,
            like=self._tensors["words"] if like is None else like,
        )  # fmt: skip

    def __repr__(self) -> str:
        c = self.config
        order = "pre-LN" if c.pre_ln else "post-LN"
        return f"Encoder({c.layers} layers, hidden {c.hidden}, {c.num_heads} heads, {order}, {self.dtype})"

    def _attributes(
        self, pooling: str | None, normalize: bool, max_seqlen: int | None = None
    ) -> tuple[Any, ...]:
        c = self.config
        return (
            c.num_heads, c.head_dim, c.pre_ln, c.activation, c.epsilon, c.weight_layout, c.padding_id, pooling,
            normalize, tile_length(max_seqlen), c.folded,
        )  # fmt: skip

    def _run(self, inputs: tuple[Any, ...], attributes: tuple[Any, ...], out: Any, stream: Any) -> Any:
        if self._trainable:
            refuse_recording(self._trainable)
        if settings.flag("CKI_VALIDATE"):
            ids, _, types, positions, _, offsets, _ = inputs
            v = self._views
            if offsets is not None and shape_of(ids):
                longest = self.config.max_tokens if positions is None else None
                validate_offsets(offsets, int(ids.shape[0]), longest)
            validate_ids(ids, v["words"], v["positions"], types, v.get("types"), positions)
        return self._forward.run(inputs, attributes, out, stream)


def _operand(name: str, view: TensorView | None) -> Any:
    return None if view is None else dense(name, view.shape, view.dtype)
