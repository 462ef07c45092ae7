"""An encoder captured for a few shapes: `encoder.capture([(1, 64), (1, 256), (8, 128)])`.

A graph runs one shape on fixed addresses.  So each bucket has its own input tensors, a call copies its inputs into the
smallest bucket that holds them, hides the rest, and replays.  The buckets share one workspace and one output, as large
as the largest needs, because they run one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from cki import dtypes, graph
from cki.adapter import adapter_of, type_name
from cki.dtypes import DType
from cki.encoder.weights import refuse_recording
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

if TYPE_CHECKING:
    from cki.encoder.encoder import Encoder

_CAPTURABLE = ("numpy", "cupy", "torch")
#: Element types of ids and lengths, and of a padding mask.
_ID_TYPES = ("int32", "int64")
_MASK_TYPES = ("bool", "uint8", "int8", "int32", "int64")
#: Inputs of the graphs by kind of padding.
_PADDINGS = {None: (), "mask": ("attention_mask",), "lengths": ("lengths",)}


@dataclass
class _Bucket:
    """One shape, its input tensors by name, its piece of the output, and its graph."""

    batch: int
    seq: int
    inputs: dict[str, Any]
    out: Any
    graph: graph.Graph


class EncoderGraphs:
    """Captured forward passes.  Made by `Encoder.capture`; use it from one thread and one stream at a time.

    buckets: the shapes (batch, seq), the smallest first.  num_kernels: launches of a replay, by bucket.
    The tensor that a call returns is overwritten by the next call.
    """

    def __init__(
        self, encoder: Encoder, buckets: Sequence[tuple[int, int]], *, pooling: Any, normalize: bool, padding: Any,
        token_types: bool, like: Any,
    ) -> None:  # fmt: skip
        """See `Encoder.capture`."""
        self.buckets = _checked(buckets, encoder.config.max_tokens)
        if padding is not None and not (isinstance(padding, str) and padding in _PADDINGS):
            raise InvalidArgumentError(f"padding is {padding!r}", hint="'mask', 'lengths' or None")
        self._adapter = adapter_of(like, "like")
        if self._adapter.name not in _CAPTURABLE:
            raise UnsupportedError(
                f"an encoder cannot be captured with {self._adapter.name} tensors",
                hint="like= a torch or CuPy tensor on the weights' device",
            )
        self._like, self._hides, self._trainable = like, padding is not None, encoder._trainable
        self._names = ("input_ids", *_PADDINGS[padding], *(("token_type_ids",) if token_types else ()))
        self._fill = {"input_ids": encoder.config.padding_id or 0}
        self._pooled = pooling is not None
        hidden = encoder.config.hidden
        element = dtypes.from_name(encoder.dtype)
        shapes = [(b,) if self._pooled else (b, s) for b, s in self.buckets]
        rows = max(shape[0] * (1 if self._pooled else shape[-1]) for shape in shapes)
        nbytes = max(encoder.workspace_nbytes(b, s, pooling=pooling) for b, s in self.buckets)
        output, self._workspace = self._empty((rows, hidden), element), self._empty((nbytes,), dtypes.u8)

        def forward(inputs: dict[str, Any], out: Any) -> Any:
            options = {"workspace": self._workspace, "out": out, **inputs}
            if pooling is None:
                return encoder(**options)
            return encoder.embed(**options, pooling=pooling, normalize=normalize)

        self._buckets: list[_Bucket] = []
        for (batch, seq), shape in zip(self.buckets, shapes):
            inputs = {name: self._input(name, batch, seq) for name in self._names}
            count = batch if self._pooled else batch * seq
            out = output[:count].reshape((*shape, hidden))
            captured = graph.capture(forward, inputs, out)
            self._buckets.append(_Bucket(batch, seq, inputs, out, captured))
        self.num_kernels = {(bucket.batch, bucket.seq): bucket.graph.num_kernels for bucket in self._buckets}

    def __call__(
        self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, *, lengths: Any = None,
        stream: Any = None,
    ) -> Any:  # fmt: skip
        """Copies the inputs into the smallest bucket that holds them and replays its graph.

        The inputs are those that the graphs were captured with; a padding mask or lengths may be left out.  Graphs that
        were captured without padding take sequences of a bucket's own length alone.
        stream: of the replay; the copies are made on the framework's current stream, so it must be ordered after that.

        Returns [batch, seq, hidden], or [batch, hidden] where a vector is pooled: a view of the common output, valid
        until the next call.  Raises InvalidArgumentError for inputs of other shapes, or that no bucket holds, and
        InvalidTypeError for other element types than a call of the encoder takes: a copy would round numbers.
        """
        if self._trainable:
            refuse_recording(self._trainable)
        given = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "lengths": lengths}
        batch, seq = self._check(input_ids, given)
        # Without padding nothing hides what fills a longer bucket; rows behind the batch concern nobody.
        fits = (
            b for b in self._buckets if batch <= b.batch and (seq <= b.seq if self._hides else seq == b.seq)
        )
        bucket = next(fits, None)
        if bucket is None:
            raise InvalidArgumentError(
                f"input_ids has shape {(batch, seq)}, which no captured graph holds",
                hint=f"up to {self.buckets}"
                if self._hides
                else f"sequences of just these lengths: {self.buckets}; graphs captured with padding take shorter ones",
            )
        exact = (batch, seq) == (bucket.batch, bucket.seq)
        for name, target in bucket.inputs.items():
            source = input_ids if name == "input_ids" else given[name]
            if name == "lengths":
                target[batch:] = 0
                # As a plain call cuts them off, and before 64 bits become 32.
                target[:batch] = seq if source is None else source.clip(0, seq)
                continue
            if not exact:
                target[...] = self._fill.get(name, 0)
            if name == "attention_mask":
                source = 1 if source is None else source != 0
            target[:batch, :seq] = 0 if source is None else source
        bucket.graph.replay(stream)
        return bucket.out[:batch] if self._pooled else bucket.out[:batch, :seq]

    def close(self) -> None:
        """Free the graphs and their memory.  Idempotent."""
        for bucket in self._buckets:
            bucket.graph.close()
        self._buckets = []
        self._workspace = None

    def __enter__(self) -> EncoderGraphs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return self._adapter.empty(shape, dtype, self._like)

    def _input(self, name: str, batch: int, seq: int) -> Any:
        """A static input with contents that are safe to run on."""
        if name == "lengths":
            tensor = self._empty((batch,), dtypes.i32)
        else:
            tensor = self._empty((batch, seq), dtypes.u8 if name == "attention_mask" else dtypes.i64)
        tensor[...] = 0
        return tensor

    def _check(self, input_ids: Any, given: dict[str, Any]) -> tuple[int, int]:
        if not self._buckets:
            raise InvalidArgumentError("these graphs were closed")
        if not hasattr(input_ids, "shape"):
            raise InvalidTypeError(f"input_ids is of type {type_name(type(input_ids))}, which is no tensor")
        shape = tuple(input_ids.shape)
        if len(shape) != 2:
            raise InvalidArgumentError(f"input_ids has shape {shape}", hint="input_ids of shape [batch, seq]")
        problems, wrong_types = [], []
        for name, tensor in {"input_ids": input_ids, **given}.items():
            if tensor is None:
                continue
            wanted = shape[:1] if name == "lengths" else shape
            types = _MASK_TYPES if name == "attention_mask" else _ID_TYPES
            found = getattr(tensor, "dtype", None)
            if name not in self._names:
                problems.append(f"{name} is given, but the graphs were captured without")
            elif found is None:
                wrong_types.append(f"{name} is of type {type_name(type(tensor))}, which is no tensor")
            elif adapter_of(tensor, name).name != self._adapter.name:
                wrong_types.append(
                    f"{name} is of {adapter_of(tensor, name).name}, the graphs were captured for {self._adapter.name}"
                )
            elif _name_of(found) not in types:
                wrong_types.append(f"{name} is {_name_of(found)}, not {', '.join(types)}")
            elif tuple(tensor.shape) != wanted:
                problems.append(f"{name} has shape {tuple(tensor.shape)}, not {wanted}")
        if problems or wrong_types:
            error = InvalidTypeError if wrong_types else InvalidArgumentError
            raise error("inputs that these graphs do not take", wrong_types + problems)
        return shape[0], shape[1]


@functools.lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    """Of NumPy's, CuPy's or torch's dtype."""
    return str(dtype).removeprefix("torch.")


def _checked(buckets: Sequence[tuple[int, int]], longest: int) -> tuple[tuple[int, int], ...]:
    """The shapes, the cheapest first."""
    try:
        shapes = [(batch, seq) for batch, seq in buckets]
    except (TypeError, ValueError):
        shapes = [("", "")]  # type: ignore[list-item]
    if any(not isinstance(size, Integral) or isinstance(size, bool) for shape in shapes for size in shape):
        raise InvalidTypeError(
            f"buckets is {buckets!r}, not a list of (batch, seq)", hint="[(1, 128), (8, 128)]"
        )
    shapes = [(int(batch), int(seq)) for batch, seq in shapes]
    problems = [
        f"bucket {(batch, seq)} is not of 1 to {longest} tokens, for 1 sequence or more"
        for batch, seq in shapes
        if batch < 1 or not 1 <= seq <= longest
    ]
    if problems or not shapes:
        raise InvalidArgumentError("an encoder is captured for shapes", problems or ["buckets is empty"])
    return tuple(sorted(set(shapes), key=lambda shape: (shape[0] * shape[1], shape)))
