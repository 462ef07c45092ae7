"""The way of a call, common to all operations: `call(SPEC, inputs, attributes, outs, stream)`.

The first call with a problem checks, plans and compiles (`cki.ops.bind`, `cki.launch`).  What it found is kept under
a key of all that the plan depends on: the operation, the attributes, and each tensor's shape, strides, dtype, device
and alignment as its adapter's `signature` gives them.  A later call computes that key, allocates the outputs with the
caller's framework and launches; it makes no view and checks no rule again, except that outputs and inputs do not
overlap, which depends on addresses.

Temporary memory is allocated by the caller's framework for each call and dropped after the launch: the framework's
allocator reuses it in stream order.  Under `cki.capture` it is kept with the graph, as a graph's addresses are fixed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

from cki import capture_state, driver
from cki.adapter import BY_TYPE, Adapter, common_adapter, require_valid, stream_handle
from cki.device import DeviceInfo, _current
from cki.dtypes import DType, u8
from cki.errors import InvalidArgumentError
from cki.launch import Executable, prepare
from cki.ops.bind import Bound, bind, out_arguments, require_inputs
from cki.ops.overlap import OverlapRule, byte_range, overlap_rule
from cki.ops.spec import OpSpec
from cki.tensor import DeviceId

#: Remembered problems; at the limit the oldest half goes.  An entry takes a few kilobytes.
_ENTRY_LIMIT = 4096
_WORKSPACE_ALIGNMENT = 256


class Entry:
    """A checked, planned and compiled problem, ready to run on tensors of the same signature."""

    __slots__ = (
        "adapter", "captured_workspaces", "device", "device_id", "executable", "holds_captured_workspaces",
        "new_outputs", "order", "overlap_rules", "spec", "workspace_nbytes", "workspace_offsets",
    )  # fmt: skip

    def __init__(self, spec: OpSpec, adapter: Adapter, bound: Bound, given: Sequence[str]) -> None:
        """given: names of the tensors that the caller passes, in the order of a call's pointers."""
        self.spec = spec
        self.adapter = adapter
        self.device: DeviceInfo = bound.device
        self.device_id = (
            DeviceId("cpu") if bound.device.kind == "sim" else DeviceId("cuda", bound.device.index)
        )
        position = {name: index for index, name in enumerate(given)}
        argument_of = dict(zip(spec.outputs, out_arguments(spec)))
        # Where each result comes from: the caller's tensor (its position among the outs) or the n-th new one.
        order: list[tuple[bool, int]] = []
        new: list[tuple[tuple[int, ...], DType]] = []
        names = [*given]
        sizes = [byte_range(bound.views[name])[1] for name in given]
        for name, output in bound.outputs:
            argument = argument_of[name]
            if argument in position:
                order.append((True, spec.outputs.index(name)))
                names[position[argument]] = name
            else:
                order.append((False, len(new)))
                new.append((tuple(output.shape), output.dtype))
                names.append(name)
                sizes.append(math.prod(output.shape) * output.dtype.itemsize)
        self.order = tuple(order)
        self.new_outputs = tuple(new)
        self.workspace_offsets: tuple[int, ...] = ()
        self.workspace_nbytes = 0
        self.executable: Executable | None = None
        if bound.plan is not None:
            total, offsets = 0, []
            for slot, nbytes in bound.plan.workspace:
                offsets.append(total)
                total += -(-nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
                names.append(slot)
                sizes.append(nbytes)
            self.workspace_offsets = tuple(offsets)
            self.workspace_nbytes = total + _WORKSPACE_ALIGNMENT if total else 0
            self.executable = prepare(bound.plan, bound.device, names, sizes)
        self.overlap_rules = tuple(_overlap_rules(spec, bound, position, argument_of))
        # torch keeps the memory of a captured call with its graph.  CuPy's pool would hand it out again, so where the
        # caller captures by other means than cki.capture, it is kept here for good.
        self.holds_captured_workspaces = bound.device.kind == "cuda" and adapter.name != "torch"
        self.captured_workspaces: list[Any] = []

    def run(self, pointers: list[int], tensors: Sequence[Any], outs: Sequence[Any], stream: Any) -> Any:
        """Allocate what the caller did not give, launch, and return the outputs."""
        adapter = self.adapter
        like = tensors[0]
        for rule in self.overlap_rules:
            if rule.broken(pointers):
                self._refuse_overlap(pointers)
        named = None if stream is None else stream_handle(stream)
        new = []
        for shape, dtype in self.new_outputs:
            output = adapter.empty(shape, dtype, like, named)
            pointers.append(adapter.pointer(output))
            new.append(output)
        handle = named
        if handle is None:
            handle = adapter.stream(self.device.index) if self.device.kind == "cuda" else 0
        if self.executable is not None:
            memory = new
            if self.workspace_nbytes:
                workspace = self._add_workspace(pointers, like, named)
                memory = [*new, workspace]
                if self.holds_captured_workspaces and driver.capturing_graph(handle) is not None:
                    self.captured_workspaces.append(workspace)
            if capture_state.active:
                capture_state.launch(self.executable, pointers, handle, memory)
            else:
                self.executable.launch(pointers, handle)
        if not adapter.direct:
            new = adapter.finish(new, tensors, handle, self.device_id)
        order = self.order
        if len(order) == 1:
            is_given, index = order[0]
            return outs[index] if is_given else new[index]
        return tuple(outs[index] if is_given else new[index] for is_given, index in order)

    def _add_workspace(self, pointers: list[int], like: Any, stream: int | None) -> Any:
        workspace = self.adapter.empty((self.workspace_nbytes,), u8, like, stream)
        base = -(-self.adapter.pointer(workspace) // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        pointers += [base + offset for offset in self.workspace_offsets]
        return workspace

    def _refuse_overlap(self, pointers: list[int]) -> None:
        broken = [rule for rule in self.overlap_rules if rule.broken(pointers)]
        allowed = sorted({rule.other_name for rule in broken if rule.may_coincide})
        raise InvalidArgumentError(
            f"{self.spec.name}: overlapping memory",
            [f"{rule.output_name} shares memory with {rule.other_name}" for rule in broken],
            "outputs apart from the inputs"
            + (f", or the very same view as {' or '.join(allowed)}" if allowed else ""),
        )


def _overlap_rules(
    spec: OpSpec, bound: Bound, position: dict[str, int], argument_of: dict[str, str]
) -> list[OverlapRule]:
    rules = []
    output_of = {argument: name for name, argument in argument_of.items()}
    arguments = [argument for argument in output_of if argument in bound.views]
    for index, argument in enumerate(arguments):
        inputs = [item.name for item in spec.inputs if item.name in bound.views]
        for other in [*inputs, *arguments[index + 1 :]]:
            rules.append(overlap_rule(
                (argument, other), (position[argument], position[other]), (bound.views[argument], bound.views[other]),
                (output_of[argument], other) in spec.in_place,
            ))  # fmt: skip
    return rules


_entries: dict[tuple[Any, ...], Entry] = {}
_trim_lock = threading.Lock()


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
    if stream.__class__ is PlanRequest:
        raise Planned(spec, inputs, attributes, outs)
    adapter = BY_TYPE.get(type(inputs[0]))
    if adapter is None or not adapter.direct:
        adapter = common_adapter_of(spec, inputs, outs)
    tensors = inputs + outs
    if not adapter.direct:
        require_valid(adapter, out_arguments(spec), outs, output=True)
        handle = None if stream is None else stream_handle(stream)
        tensors = tuple(adapter.begin(tensor_names(spec), tensors, handle))
    entry, pointers = find_entry(spec, adapter, tensors, attributes)
    return entry.run(pointers, tensors, outs, stream)


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
    pointers: list[int] = []
    key: list[Any] = [id(spec), _current.get(), adapter, attributes]
    signature = adapter.signature
    for tensor in tensors:
        if tensor is None:
            key.append(None)
            continue
        if BY_TYPE.get(type(tensor)) is not adapter and adapter.direct:
            common_adapter(
                tensor_names(spec), tensors
            )  # raises, unless this is a subclass seen the first time
        pointer, tensor_key = signature(tensor)
        pointers.append(pointer)
        key.append(tensor_key)
    try:
        entry = _entries.get(tuple(key))
    except TypeError:  # an attribute without a hash: of a wrong type, or a list where a tuple is meant
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
    key[3] = tuple(tuple(value) if isinstance(value, list) else value for value in attributes)
    if len(_entries) >= _ENTRY_LIMIT:
        with _trim_lock:
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
