"""Held plans: `held = cki.hold(cki.layer_norm, x, weight, bias)`, then `held(x, weight, bias, out=y)`.

A held plan is one remembered problem without the look-up: a call checks that each tensor has the shape, strides, dtype,
device and alignment of the example, and launches.  Other arguments are as they were when it was made.  It does not
look for memory that overlaps, nor at gradients: nothing is recorded for autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cki.adapter import ALIGNMENT, BY_TYPE, Adapter, type_name
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.ops.bind import out_arguments
from cki.ops.call import Planned, PlanRequest, common_adapter_of, find_entry, tensor_names
from cki.ops.entry import Entry
from cki.ops.match import Recognition
from cki.ops.steady import ABSENT, held_call
from cki.tensor import TensorView


class HeldPlan:
    """A checked, planned and compiled problem.  May run in several threads at once."""

    __slots__ = ("_entry", "_keys", "_match", "_names", "_num_inputs", "_outputs", "_planned")

    def __init__(self, entry: Entry, names: Sequence[str], examples: Sequence[Any], num_inputs: int) -> None:
        """names, examples: of the tensors that are given, inputs first, then outputs."""
        self._entry = entry
        self._names = tuple(names)
        self._keys = tuple(entry.adapter.signature(example)[1] for example in examples)
        self._planned = tuple(described(entry.adapter.view(example)) for example in examples)
        self._num_inputs = num_inputs
        #: For each output of the operation its place among those given, or None.
        self._outputs = [self._place(argument) for argument in out_arguments(entry.spec)]

    def _place(self, argument: str) -> int | None:
        outs = self._names[self._num_inputs :]
        return outs.index(argument) if argument in outs else None

    def function(self, examples: Sequence[Any]) -> Callable[..., Any]:
        """What `hold` returns.  A function: calling an object with `__call__` takes 0.2 us longer."""
        run, entry = self.run, self._entry
        recognition = _recognition(entry.adapter, examples)
        self._match = self._by_signature if recognition is None else recognition.matcher()
        if recognition is not None and entry.is_direct:
            return held_call(entry, recognition, self._num_inputs, self._outputs, run)

        def held(*inputs: Any, out: Any = None, stream: Any = None) -> Any:
            return run(out, stream, *inputs)

        return held

    def run(self, out: Any, stream: Any, *inputs: Any) -> Any:
        """One call.  Raises InvalidArgumentError when a tensor does not match."""
        inputs = tuple(tensor for tensor in inputs if tensor is not ABSENT)
        outs = () if out is None else out if type(out) is tuple else (out,)
        tensors = inputs + outs
        entry = self._entry
        num_outs = len(self._names) - self._num_inputs
        if len(inputs) != self._num_inputs or len(outs) != num_outs:
            raise InvalidArgumentError(
                f"{entry.spec.name}: a held plan of {self._num_inputs} inputs and {num_outs} outputs was given "
                f"{len(inputs)} and {len(outs)}"
            )
        pointers = self._match(tensors)
        if pointers is None:
            raise self._refusal(tensors)
        results = tuple(None if place is None else outs[place] for place in self._outputs)
        returned = entry.run(pointers, inputs, results, stream)
        entry.mark_written(tensors)
        return None if type(returned) is tuple and not returned else returned

    def _by_signature(self, tensors: Sequence[Any]) -> list[int] | None:
        """The addresses, where no code recognises the tensors."""
        adapter, pointers = self._entry.adapter, []
        for tensor, key in zip(tensors, self._keys):
            if BY_TYPE.get(type(tensor)) is not adapter:
                return None
            pointer, found = adapter.signature(tensor)
            if found != key:
                return None
            pointers.append(pointer)
        return pointers

    def _refusal(self, tensors: Sequence[Any]) -> InvalidArgumentError:
        adapter = self._entry.adapter
        problems = []
        for name, tensor, key, planned in zip(self._names, tensors, self._keys, self._planned):
            if BY_TYPE.get(type(tensor)) is not adapter:
                problems.append(f"{name} is of type {type_name(type(tensor))}, planned for {adapter.name}")
                continue
            if adapter.signature(tensor)[1] != key:
                found = described(adapter.view(tensor)) if not adapter.check(tensor, name) else "not usable"
                problems.append(f"{name} is {found}, planned for {planned}")
        return InvalidArgumentError(
            f"{self._entry.spec.name}: tensors that this plan is not for",
            problems,
            "cki.hold again for this problem",
        )


def described(view: TensorView) -> str:
    """A tensor in words: f32[4, 8] on cuda:0, strides where they are not row-major, alignment where it is under 16."""
    text = f"{view.dtype}{list(view.shape)} on {view.device}"
    if view.readonly:
        text += ", read-only"
    if not view.is_contiguous():
        text += f" with strides {view.strides}"
    if view.ptr & 15:
        text += f" at an address that is a multiple of {ALIGNMENT[view.ptr & 15]} only"
    return text


def _recognition(adapter: Adapter, examples: Sequence[Any]) -> Recognition | None:
    guards = [adapter.guard(example, trusted=True) for example in examples]
    return None if None in guards else Recognition(guards, adapter.likeness(examples))


def _takes_stream(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a built-in function
        return False
    return any(p.name == "stream" or p.kind is p.VAR_KEYWORD for p in parameters)


def hold(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Check, plan and compile a call once: `hold(cki.layer_norm, x, weight, bias, eps=1e-6)`.

    function: an operation of CKI.  args, kwargs: as for a call of it; tensors serve as examples and are not kept.
    Nothing is launched.  Only for frameworks whose tensors have an address (NumPy, CuPy, torch).

    Returns a function `held(*inputs, out=None, stream=None)`: inputs are the tensors that `hold` was given, in order,
    those left out there left out here; out is the output tensor, or a tuple of all of them, when `hold` was given
    `out=`, else outputs are allocated.  It raises InvalidArgumentError when a tensor does not match.  For speed it does
    not look for an output that overlaps an input, nor whether a tensor requires a gradient: none is recorded.

    Raises what the operation raises, InvalidTypeError for what is no function with `stream=`, and InvalidArgumentError
    for a function that calls no operation with it.
    """
    if not callable(function) or not _takes_stream(function):
        raise InvalidTypeError(
            f"{function!r} is no operation of CKI: it takes no stream=", hint="cki.layer_norm and the like"
        )
    if kwargs.get("stream") is not None:
        raise InvalidArgumentError(
            f"stream is {kwargs['stream']!r}: a plan is held for any",
            hint="stream= in the calls of what hold returns",
        )
    try:
        function(*args, **{**kwargs, "stream": PlanRequest()})
    except Planned as planned:
        spec, inputs, attributes, outs = planned.spec, planned.inputs, planned.attributes, planned.outs
    else:
        raise InvalidArgumentError(
            f"{function!r} is no single operation of CKI", hint="cki.layer_norm and the like"
        )
    adapter = common_adapter_of(spec, inputs, outs)
    if not adapter.direct:
        raise InvalidArgumentError(
            f"{adapter.name} tensors have no stable address, so a plan cannot be held",
            hint="call the operation itself",
        )
    entry, _ = find_entry(spec, adapter, inputs + outs, attributes)
    given = [(name, t) for name, t in zip(tensor_names(spec), inputs + outs) if t is not None]
    num_inputs = sum(t is not None for t in inputs)
    examples = [tensor for _, tensor in given]
    return HeldPlan(entry, [name for name, _ in given], examples, num_inputs).function(examples)
