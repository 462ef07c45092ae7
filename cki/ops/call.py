"""The way of a call, common to all operations: `call(SPEC, inputs, attributes, outs, stream)`.

The first call with a problem checks, plans and compiles (`cki.ops.bind`, `cki.launch`).  What it found is kept under
a key of all that the plan depends on: the operation, the attributes, and each tensor's shape, strides, dtype, device
and alignment as its adapter's `signature` gives them.  A later call finds it, allocates the outputs with the caller's
framework and launches; it makes no view and checks no rule again, except that outputs and inputs do not overlap, which
depends on addresses.  The last few problems of an operation need no key (`cki.ops.steady`).

Temporary memory is allocated by the caller's framework for each call and dropped after the launch: the framework's
allocator reuses it in stream order.  Under `cki.capture` it is kept with the graph, as a graph's addresses are fixed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any, Protocol

from cki.adapter import BY_TYPE, Adapter, common_adapter, require_valid, stream_handle, type_name
from cki.device import _current
from cki.errors import InvalidTypeError
from cki.ops.bind import bind, out_arguments, require_inputs
from cki.ops.entry import Entry
from cki.ops.match import Recognition
from cki.ops.recent import SteadyCall
from cki.ops.spec import OpSpec
from cki.ops.steady import steady_call

#: Remembered problems; at the limit the oldest half goes.  An entry takes a few kilobytes.
_ENTRY_LIMIT = 4096


_entries: dict[tuple[Any, ...], Entry] = {}
#: Dictionaries of the same kind beside it, as long as their owners live: each encoder's.
other_entries: weakref.WeakSet[EntryOwner] = weakref.WeakSet()
_write_lock = threading.Lock()


class EntryOwner(Protocol):
    """Who remembers problems of its own, under a key."""

    entries: dict[tuple[Hashable, ...], Entry]


def remembered() -> list[Entry]:
    """All problems that are remembered, each owner's oldest first."""
    found = list(_entries.values())
    for owner in list(other_entries):
        found += list(owner.entries.values())
    return found


def call(
    spec: OpSpec,
    inputs: tuple[Any, ...],
    attributes: tuple[Any, ...],
    outs: tuple[Any, ...] = (),
    stream: Any = None,
) -> Any:
    """Run one operation on a framework's tensors.

    inputs, attributes: in the order of the spec; None for an optional tensor left out.  outs: the caller's output
    tensors in the order of `spec.outputs`, None where CKI allocates.  stream: a handle or stream object; None means
    the framework's current stream.

    Returns the one output, or a tuple of all, in the caller's type.  Raises InvalidTypeError, InvalidArgumentError,
    DeviceError, UnsupportedError or CompileError before anything is launched, LaunchError when the driver refuses.
    """
    if stream is None:
        recent = spec.recent
        expected = recent.expected
        if expected is not None:
            result = expected.call(inputs, attributes, outs)
            if result is not None:
                recent.last = expected
                recent.expected = expected.next
                return result
            result = recent.search(inputs, attributes, outs, expected)
            if result is not None:
                return result
    elif stream.__class__ is PlanRequest:
        raise Planned(spec, inputs, attributes, outs)
    tensors = inputs + outs
    adapter = BY_TYPE.get(type(inputs[0]))
    if adapter is None or not (adapter := adapter.here()).direct:
        adapter = common_adapter_of(spec, inputs, outs).here()
    if not adapter.direct:
        result = adapter.own_call(spec, inputs, attributes, outs, stream)
        if result is not NotImplemented:
            return result
        require_valid(adapter, out_arguments(spec), outs, output=True)
        handle = None if stream is None else stream_handle(stream)
        tensors = tuple(adapter.begin(tensor_names(spec), tensors, handle))
    entry, pointers = find_entry(spec, adapter, tensors, attributes)
    steady = _remember(entry, inputs, attributes, outs)
    if steady is not None and stream is None:
        result = steady(inputs, _frozen(attributes), outs)
        if result is not None:
            return result
    if entry.overlaps:
        entry.check_overlap(pointers)
    result = entry.run(pointers, tensors, outs, stream)
    if entry.written and adapter.direct:
        entry.mark_written([tensor for tensor in tensors if tensor is not None])
    return result


def _traced(
    spec: OpSpec,
    inputs: tuple[Any, ...],
    attributes: tuple[Any, ...],
    outs: tuple[Any, ...] = (),
    stream: Any = None,
) -> Any:
    """`call` in a program that torch.compile reads: an operator of torch's."""
    from cki.adapters.torch_ops import traced_call

    return traced_call(spec, inputs, attributes, outs, stream)


# torch.compile follows the function of this name in place of `call`.  So a call needs no test of whether it is traced,
# which would cost every call 50 ns, and nothing of torch is imported before it traces one.
call._torchdynamo_inline = _traced  # type: ignore[attr-defined]


def _remember(
    entry: Entry, inputs: tuple[Any, ...], attributes: tuple[Any, ...], outs: tuple[Any, ...]
) -> SteadyCall | None:
    """The problem's own function, which will be tried by its key no more.

    None on the first call, as making it takes longer than ten calls by the key and many problems never come again; and
    where its tensors cannot be recognised.
    """
    if entry.steady is None:
        if not entry.adapter.direct or entry.is_settled:
            return None
        if not entry.was_called:
            entry.was_called = True
            return None
        entry.is_settled = True
        tensors = inputs + outs
        guards = [None if tensor is None else entry.adapter.guard(tensor) for tensor in tensors]
        if any(guard is None and tensor is not None for guard, tensor in zip(guards, tensors)):
            return None
        likeness = entry.adapter.likeness([tensor for tensor in tensors if tensor is not None])
        entry.steady = steady_call(entry, Recognition(guards, likeness), len(inputs), _frozen(attributes))
    if entry.steady is not None and entry.steady not in entry.spec.recent:
        entry.spec.recent.add(entry.steady)
    return entry.steady


def _frozen(attributes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Attributes as they are remembered: lists, which may change, as tuples."""
    return tuple(tuple(value) if value.__class__ is list else value for value in attributes)


def attribute_kinds(attributes: tuple[Any, ...]) -> tuple[type, ...]:
    """The types of a call's attributes.  Python takes True, 1 and 1.0 for equal; the rules of an attribute do not."""
    found = (*map(type, attributes),)
    if tuple in found:
        for value in attributes:
            if value.__class__ is tuple:
                found += (*map(type, value),)
    return found


def tensor_names(spec: OpSpec) -> list[str]:
    """The argument names of all tensors of a call: inputs, then `out=` tensors."""
    return [*(item.name for item in spec.inputs), *out_arguments(spec)]


def common_adapter_of(spec: OpSpec, inputs: tuple[Any, ...], outs: tuple[Any, ...]) -> Adapter:
    """The adapter of a call's tensors; an error when one is missing, is no tensor, or is of another framework."""
    require_inputs(spec, inputs)
    return common_adapter(tensor_names(spec), inputs + outs)


def find_entry(
    spec: OpSpec, adapter: Adapter, tensors: tuple[Any, ...], attributes: tuple[Any, ...]
) -> tuple[Entry, list[int]]:
    """The remembered problem, or a new one, and the addresses of the tensors that are not None."""
    adapter.require_callable(spec.name)
    pointers: list[int] = []
    frozen = _frozen(attributes)
    key: list[Any] = [id(spec), _current.get(), adapter, frozen, attribute_kinds(frozen)]
    signature = adapter.signature
    first = type(tensors[0])
    for tensor in tensors:
        if tensor is None:
            key.append(None)
            continue
        # `common_adapter` raises, unless this is a subclass seen the first time, or one of a trace, outside of it.
        if (
            type(tensor) is not first
            and BY_TYPE.get(type(tensor)) is not adapter
            and common_adapter(tensor_names(spec), tensors) is not adapter
        ):
            raise InvalidTypeError(
                f"{spec.name}: tensors with data beside one of a trace ({type_name(type(tensor))})",
                hint="such calls inside the trace that made it",
            )
        pointer, tensor_key = signature(tensor)
        pointers.append(pointer)
        key.append(tensor_key)
    try:
        entry = _entries.get(tuple(key))
    except TypeError:  # an attribute without a hash: of a wrong type
        entry = None
    return entry or _new_entry(spec, adapter, tensors, attributes, key), pointers


def _new_entry(
    spec: OpSpec, adapter: Adapter, tensors: tuple[Any, ...], attributes: tuple[Any, ...], key: list[Any]
) -> Entry:
    inputs, outs = tensors[: len(spec.inputs)], tensors[len(spec.inputs) :]
    require_inputs(spec, inputs)
    bound = bind(spec, adapter, inputs, attributes, outs)
    entry = Entry(
        spec, adapter, bound, [name for name, t in zip(tensor_names(spec), tensors) if t is not None]
    )
    if len(_entries) >= _ENTRY_LIMIT:
        with _write_lock:
            for old in list(_entries)[: _ENTRY_LIMIT // 2]:
                _entries.pop(old, None)
    _entries[tuple(key)] = entry
    return entry


class PlanRequest:
    """Passed as `stream=` by `cki.hold` to learn which operation a public function would call, without running it."""


class Planned(BaseException):
    """Carries the arguments of `call` back to `cki.hold`."""

    def __init__(
        self, spec: OpSpec, inputs: tuple[Any, ...], attributes: tuple[Any, ...], outs: tuple[Any, ...]
    ) -> None:
        super().__init__(spec.name)
        self.spec, self.inputs, self.attributes, self.outs = spec, inputs, attributes, outs
