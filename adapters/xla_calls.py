"""Calls of CKI's operations inside XLA programs, whichever framework made the program.

A call is written into the program as one text: the operation, its tensors' shapes and dtypes, its attributes, the
device and the bytes of workspace.  The handler finds the prepared launch by that text, or makes it from the text alone,
so a program that comes out of a compilation cache on disk runs in another process too.

An XLA call takes the tensors that are given, in the order of the spec, and returns the outputs, then the new values of
the inputs that the operation writes (which XLA places in the same memory, after a copy unless it was donated), then the
workspace.  All memory is XLA's.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cki import dtypes
from cki.adapter import ALIGNMENT, adapter_of
from cki.adapters import known_operations
from cki.adapters.xla_ffi import Invocation
from cki.device import device as use_device
from cki.errors import CkiError
from cki.launch import prepare
from cki.operand import dense
from cki.ops.bind import attribute_values, bind
from cki.ops.call import attribute_kinds
from cki.ops.spec import OpSpec, OutputSpec, Problem
from cki.tensor import DeviceId, TensorView, contiguous_strides

#: Bytes that divide the address of any XLA buffer, and of those that XLA makes for results, by kind of device.
_ANY_ALIGNMENT = 16
_RESULT_ALIGNMENT = {"cuda": 256, "sim": 64}
_WORKSPACE_ALIGNMENT = 256
#: From two encoder layers on: a driver takes longer to launch their kernels one by one than a graph of them.
_GRAPH_STEPS = 14
#: Prepared calls; at the limit the oldest half goes.  One that is needed again is made again.
_LIMIT = 4096
#: A made-up address of the best alignment, for calls without memory yet.
_NOWHERE = 4096


@dataclass(frozen=True)
class XlaCall:
    """One call.

    tensors: (name, dtype, shape) of each that is given, in the order of the spec.  attributes: in the spec's order.
    device: "cuda", or "sim:" and the architecture that the simulated device stands for.  workspace: bytes.
    """

    operation: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    attributes: tuple[Any, ...]
    device: str
    workspace: int = 0

    def text(self) -> str:
        """The call as one line of JSON."""
        return json.dumps([self.operation, self.tensors, self.attributes, self.device, self.workspace])

    @classmethod
    def from_text(cls, text: bytes) -> XlaCall:
        """The call that `text` wrote; CkiError for anything else."""
        try:
            operation, tensors, attributes, device, workspace = json.loads(text)
            named = tuple((name, dtype, tuple(shape)) for name, dtype, shape in tensors)
            values = tuple(tuple(value) if isinstance(value, list) else value for value in attributes)
        except (ValueError, TypeError) as error:
            raise CkiError(f"no call of CKI: {text[:200]!r}") from error
        spec = known_operations.find(operation)
        wanted = len(spec.attributes)
        if len(values) != wanted:  # compiled by another version
            raise CkiError(f"no call of CKI: {text[:200]!r} has {len(values)} attributes, not {wanted}")
        return cls(operation, named, values, device, workspace)

    @property
    def spec(self) -> OpSpec:
        """The operation's entry in the table."""
        found: OpSpec = known_operations.find(self.operation)
        return found

    def checked(self) -> XlaCall:
        """The call with its attributes in their declared types.

        Raises InvalidArgumentError or InvalidTypeError that names every violated rule.
        """
        try:
            hash(self.attributes)
        except TypeError:
            return _checked.__wrapped__(self)
        return _checked(self, attribute_kinds(self.attributes))

    def outputs(self) -> tuple[tuple[str, OutputSpec], ...]:
        """Names, shapes and dtypes of the outputs of a call that was checked; no device is needed."""
        return _outputs(self)

    def written(self) -> tuple[int, ...]:
        """Positions among `tensors` of those that the operation writes: their new values are results."""
        items = {item.name: item for item in self.spec.inputs}
        return tuple(
            index for index, (name, _, shape) in enumerate(self.tensors) if items[name].is_written(len(shape))
        )


def _problem(call: XlaCall) -> Problem:
    spec = call.spec
    given = {
        name: dense(name, shape, dtypes.from_name(dtype), alignment=_ANY_ALIGNMENT)
        for name, dtype, shape in call.tensors
    }
    values, wrong_types, wrong_values = attribute_values(spec, call.attributes)
    operands = {item.name: given.get(item.name) for item in spec.inputs}
    return Problem(operands, values, wrong_types + wrong_values, has_wrong_type=bool(wrong_types))


@functools.lru_cache(maxsize=_LIMIT)
def _checked(call: XlaCall, kinds: tuple[type, ...] = ()) -> XlaCall:
    """kinds: of the attributes, which calls that are equal may have of other types."""
    problem = _problem(call)
    call.spec.check(problem)
    if problem.violations:
        raise problem.refusal(f"{call.spec.name}: invalid arguments")
    return replace(call, attributes=tuple(problem.attributes.values()))


@functools.lru_cache(maxsize=_LIMIT)
def _outputs(call: XlaCall) -> tuple[tuple[str, OutputSpec], ...]:
    return tuple(call.spec.infer(_problem(call)).items())


class Prepared:
    """A call planned and compiled for one device."""

    def __init__(
        self, call: XlaCall, index: int, addresses: Sequence[int] = (), results: Sequence[int] = ()
    ) -> None:
        """index: of the CUDA device.  addresses, results: memory that is aligned worse than XLA promises."""
        kind, _, arch = call.device.partition(":")
        place = DeviceId("cpu") if kind == "sim" else DeviceId("cuda", index)
        spec = call.spec
        given = {
            name: _view(shape, dtypes.from_name(dtype), place, address)
            for (name, dtype, shape), address in zip(call.tensors, addresses or [0] * len(call.tensors))
        }
        outs: list[TensorView | None] = []
        if results:
            position = {name: i for i, name in enumerate(spec.outputs)}
            outs = [None] * len(position)
            for (name, output), address in zip(call.outputs(), results):
                outs[position[name]] = _view(output.shape, output.dtype, place, address)
        inputs = [given.get(item.name) for item in spec.inputs]
        with use_device(kind, arch=arch or None):
            bound = bind(spec, adapter_of(np.empty(0)), inputs, call.attributes, outs)
        self.num_outputs = len(bound.outputs)
        self.aliases = tuple((place, self.num_outputs + n) for n, place in enumerate(call.written()))
        self._offsets: list[int] = []
        self.workspace = 0
        self._launch: Callable[..., None] | None = None
        if bound.plan is not None:
            names = [
                *given,
                *(name for name, _ in bound.outputs),
                *(slot for slot, _ in bound.plan.workspace),
            ]
            sizes = [math.prod(view.shape) * view.dtype.itemsize for view in given.values()]
            sizes += [math.prod(output.shape) * output.dtype.itemsize for _, output in bound.outputs]
            sizes += [nbytes for _, nbytes in bound.plan.workspace]
            self._place_workspace([nbytes for _, nbytes in bound.plan.workspace])
            executable = prepare(bound.plan, bound.device, names, sizes)
            # Many launches become one graph where the framework's allocator gives the same memory again and again.
            is_long = len(bound.plan.steps) >= _GRAPH_STEPS
            self._launch = executable.launcher(repeated=is_long)

    def _place_workspace(self, sizes: Sequence[int]) -> None:
        """One result of the XLA call holds all slots, each aligned whatever XLA's alignment is."""
        total = 0
        for nbytes in sizes:
            self._offsets.append(total)
            total += -(-nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        self.workspace = total + _WORKSPACE_ALIGNMENT if total else 0

    def launch(self, invocation: Invocation) -> None:
        """Launch on the invocation's stream and memory."""
        arguments, results = invocation.arguments, invocation.results
        for argument, result in self.aliases:
            if arguments[argument] != results[result]:
                raise CkiError("XLA placed the new value of a written tensor in other memory than the tensor")
        self.launch_at(
            invocation.stream, arguments + results[: self.num_outputs], results[-1] if self.workspace else 0
        )

    def launch_at(self, stream: int, pointers: list[int], workspace: int) -> None:
        """Launch on memory that fits.  pointers: of tensors, then of outputs.  workspace: of temporary memory."""
        if self._launch is None:
            return
        if self._offsets:
            base = -(-workspace // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
            pointers = pointers + [base + offset for offset in self._offsets]
        self._launch(stream, *pointers)


def _view(shape: tuple[int, ...], dtype: dtypes.DType, place: DeviceId, address: int) -> TensorView:
    return TensorView(_NOWHERE + address % 16, shape, contiguous_strides(shape), dtype, place)


_prepared: dict[tuple[Any, ...], Prepared] = {}
_lock = threading.Lock()


def _remember(key: tuple[Any, ...], prepared: Prepared) -> None:
    with _lock:
        if len(_prepared) >= _LIMIT:
            for old in list(_prepared)[: _LIMIT // 2]:
                del _prepared[old]
        _prepared[key] = prepared


def prepare_call(call: XlaCall, indices: Sequence[int]) -> XlaCall:
    """Plan and compile a call for devices of these indices; the call with the workspace that the greediest needs.

    Raises what the operation raises where it cannot run there: UnsupportedError, CompileError, DeviceError.
    """
    made = [(index, Prepared(call, index)) for index in indices]
    whole = replace(call, workspace=max(prepared.workspace for _, prepared in made))
    text = whole.text().encode()
    for index, prepared in made:
        _remember((text, index), prepared)
    return whole


def run(invocation: Invocation) -> None:
    """What XLA's handlers do: launch the call that the invocation's text describes."""
    bits = 0
    for address in invocation.arguments:
        bits |= address
    index = device_index(invocation)
    key: tuple[Any, ...] = (invocation.text, index)
    prepared = None
    if not bits % _ANY_ALIGNMENT:
        prepared = _prepared.get(key)
    if prepared is None or _is_misaligned(invocation, prepared):
        prepared = _find(invocation, index)
    prepared.launch(invocation)


def _is_misaligned(invocation: Invocation, prepared: Prepared) -> bool:
    bits = 0
    for address in invocation.results[: prepared.num_outputs]:
        bits |= address
    return bits % _RESULT_ALIGNMENT["cuda" if invocation.stream else "sim"] != 0


def _find(invocation: Invocation, index: int) -> Prepared:
    """The prepared call for memory as it lies, made if this is the first of its kind."""
    call = XlaCall.from_text(invocation.text)
    if len(call.tensors) != len(invocation.arguments):
        raise CkiError(
            f"no call of CKI: {invocation.text[:200]!r} of {len(call.tensors)} tensors, "
            f"{len(invocation.arguments)} addresses"
        )
    given = [
        address if math.prod(shape) else 0
        for address, (_, _, shape) in zip(invocation.arguments, call.tensors)
    ]
    outputs = invocation.results[: len(call.outputs())]
    is_plain = not any(address % _ANY_ALIGNMENT for address in given) and not any(
        address % _RESULT_ALIGNMENT[call.device.partition(":")[0]] for address in outputs
    )
    alignments = () if is_plain else tuple(ALIGNMENT[address & 15] for address in [*given, *outputs])
    key = (invocation.text, index, *alignments)
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = Prepared(call, index) if is_plain else Prepared(call, index, given, outputs)
        if prepared.workspace > call.workspace:
            raise CkiError(
                f"{call.spec.name} needs {prepared.workspace} bytes of workspace here, the XLA program has "
                f"{call.workspace}: it was compiled for another device or by another version of CKI; compile it again"
            )
        _remember(key, prepared)
    return prepared


def device_index(invocation: Invocation) -> int:
    """The CUDA device that a handler is called for; 0 on the CPU."""
    ordinal: int = invocation.ordinal
    if ordinal >= 0:
        return ordinal
    from cki import driver

    return driver.current_device()
