"""One call of a whole encoder: the way of `cki.ops.call`, for an operation most of whose inputs never change.

An encoder has hundreds of weights.  They are read once, as views, and kept; a call looks at what it brings alone, and
its plan is remembered by that.  So weights may even be of another framework than the ids, as long as both lie in the
memory of one device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from cki.adapter import Adapter, common_adapter, require_valid, stream_handle
from cki.device import current
from cki.errors import DeviceError, InvalidTypeError
from cki.ops.bind import bind
from cki.ops.call import other_entries
from cki.ops.encoder_model import CALL_INPUTS
from cki.ops.entry import Entry
from cki.ops.spec import OpSpec
from cki.tensor import TensorView

_NAMES = (*CALL_INPUTS, "out")
#: Remembered problems of one encoder; at the limit the oldest half goes.
_ENTRY_LIMIT = 256


class Forward:
    """Runs `spec`, whose inputs are CALL_INPUTS and then the weights.  May be called from several threads."""

    def __init__(self, spec: OpSpec, weights: Sequence[TensorView | None]) -> None:
        self._spec = spec
        self._weights = tuple(weights)
        self._pointers = [view.ptr for view in weights if view is not None]
        self._device = next(view.device for view in weights if view is not None)
        self.entries: dict[tuple[Hashable, ...], Entry] = {}
        other_entries.add(self)

    def run(self, inputs: tuple[Any, ...], attributes: tuple[Any, ...], out: Any, stream: Any) -> Any:
        """Run the model on what a call brings.  inputs: in the order of CALL_INPUTS, None for what is left out."""
        entry, pointers, tensors = self.find(inputs, attributes, out, stream)
        if entry.overlaps:
            entry.check_overlap(pointers)
        return entry.run(pointers, tensors[: len(inputs)], (out,), stream)

    def find(
        self, inputs: tuple[Any, ...], attributes: tuple[Any, ...], out: Any, stream: Any
    ) -> tuple[Entry, list[int], tuple[Any, ...]]:
        """The compiled problem, the addresses of its tensors, and the call's tensors as the adapter reads them."""
        if inputs[0] is None:
            raise InvalidTypeError("encoder: input_ids is None, not a tensor")
        tensors = (*inputs, out)
        adapter = common_adapter(_NAMES, tensors)
        if not adapter.direct:
            require_valid(adapter, ("out",), (out,), output=True)
            handle = None if stream is None else stream_handle(stream)
            tensors = tuple(adapter.begin(_NAMES, tensors, handle))
        pointers: list[int] = []
        key: list[Hashable] = [current(), adapter, attributes]
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                continue
            pointer, signature = adapter.signature(tensor)
            pointers.append(pointer)
            key.append(signature)
        last = len(pointers) - (out is not None)
        pointers[last:last] = self._pointers
        try:
            entry = self.entries.get(tuple(key))
        except TypeError:  # an attribute without a hash, of a wrong type: the rules refuse it
            entry = None
        return entry or self._new_entry(adapter, tensors, attributes, tuple(key)), pointers, tensors

    def _new_entry(
        self,
        adapter: Adapter,
        tensors: tuple[Any, ...],
        attributes: tuple[Any, ...],
        key: tuple[Hashable, ...],
    ) -> Entry:
        self._check_device(adapter, tensors[0])
        inputs, outs = (*tensors[:-1], *self._weights), tensors[-1:]
        bound = bind(self._spec, adapter, inputs, attributes, outs)
        names = [*(item.name for item in self._spec.inputs), "out"]
        given = [name for name, tensor in zip(names, (*inputs, *outs)) if tensor is not None]
        entry = Entry(self._spec, adapter, bound, given)
        if len(self.entries) >= _ENTRY_LIMIT:
            for old in list(self.entries)[: _ENTRY_LIMIT // 2]:
                self.entries.pop(old, None)
        self.entries[key] = entry
        return entry

    def _check_device(self, adapter: Adapter, ids: Any) -> None:
        """One line, where the operation's own rules would name every weight."""
        is_readable = type(ids) is TensorView or not adapter.check(ids, "input_ids")
        if not is_readable:
            return  # bind says why
        place = (ids if type(ids) is TensorView else adapter.view(ids)).device
        if place != self._device:
            raise DeviceError(
                f"encoder: input_ids is on {place}, the weights are on {self._device}",
                hint="both on one device",
            )
        if (place.kind == "cpu") != (current().kind == "sim"):
            raise DeviceError(
                f"encoder: input_ids and weights are on {place}, but the current device is {current().kind}",
                hint='the simulated device takes CPU tensors (`with cki.device("sim"):` or CKI_DEVICE=sim), '
                "a GPU the tensors on it",
            )
