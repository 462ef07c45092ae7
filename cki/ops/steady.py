"""Calls with a problem that is known, each one generated function: tensors recognised, outputs allocated, launched.

Between a call and its launch stands nothing but straight-line code made for the problem: attributes and tensors are
compared with what was planned for (`cki.ops.match`), outputs and workspace come from the framework's allocator, and the
plan's launch gets the addresses.  A loop over tensors or a further function costs 50 to 200 ns each, so there is none.

`steady_call` is for `cki.ops.call`, `held_call` for `cki.hold`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cki import capture_state
from cki.adapter import stream_handle
from cki.device import _current
from cki.dtypes import u8
from cki.generated import Expression, define
from cki.ops.entry import WORKSPACE_ALIGNMENT, Entry
from cki.ops.match import Recognition
from cki.ops.recent import SteadyCall

#: (out, stream, *inputs) -> the call's result or an error: for what is not as planned, and for calls that are rare.
GeneralCall = Callable[..., Any]

_SCALARS = (bool, int, float, str, np.generic)


def steady_call(
    entry: Entry, recognition: Recognition, num_inputs: int, attributes: Sequence[Any]
) -> SteadyCall | None:
    """Calls of this problem on the current choice of device; None where attributes cannot be compared safely.

    recognition: of all inputs and then all `out=` tensors.
    """
    names: dict[str, Any] = {**recognition.names, "choice": _current.get(), "chosen": _current.get}
    tests = attribute_tests(attributes, names)
    if tests is None:
        return None
    tensors = [f"t{index}" for index in range(recognition.count)]
    body = [f"{_listed(f'a{index}' for index in range(len(attributes)))} = attributes"] if attributes else []
    body.append(f"if not ({' and '.join([*tests, 'chosen() is choice'])}): return None")
    unpacked = [f"({_listed(tensors[:num_inputs])}) = inputs", f"({_listed(tensors[num_inputs:])}) = outs"]
    body += [*recognition.lines(unpacked), "if not known: return None"]
    body += _overlap_tests(entry, recognition.pointers, names)
    run = f"result = run([{', '.join(recognition.pointers)}], (t0,), outs, None); "
    run += f"{_marking(entry, recognition, names)}return result"
    names["run"] = entry.run
    if not entry.is_direct:
        body.append(run)
    else:
        body.append(f"if capture.active: {run}")
        body += _launch(entry, recognition, tensors[num_inputs:], names, entry.current_stream, repeated=False)
    made: SteadyCall = define("steady", "inputs, attributes, outs", body, names)
    return made


def held_call(
    entry: Entry,
    recognition: Recognition,
    num_inputs: int,
    outputs: Sequence[int | None],
    general: GeneralCall,
) -> Callable[..., Any]:
    """`held(*inputs, out=None, stream=None)` of a direct entry.

    recognition: of inputs and outs, all given.  outputs: for each output of the operation, its place among the outs.
    """
    names: dict[str, Any] = {**recognition.names, "general": general, "absent": ABSENT}
    inputs = [f"t{index}" for index in range(num_inputs)]
    outs = [f"t{index}" for index in range(num_inputs, recognition.count)]
    otherwise = f"return general(out, stream, {_listed(inputs)} *more)"
    # With the outputs given, a call is nothing but the launch: on any stream, and perhaps as before.
    is_bare = not entry.new_outputs and not entry.has_workspace
    body = [f"if {'' if is_bare else 'stream is not None or '}more or capture.active: {otherwise}"]
    unpacked = []
    if len(outs) == 1:
        body.append(f"{outs[0]} = out")
    elif outs:
        body.append(f"if out.__class__ is not tuple: {otherwise}")
        unpacked.append(f"{_listed(outs)} = out")
    else:
        body.append(f"if out is not None: {otherwise}")
    body += [*recognition.lines(unpacked), f"if not known: {otherwise}"]
    stream = entry.current_stream
    if is_bare:
        names["handle_of"] = stream_handle
        stream = Expression(f"{stream.text} if stream is None else handle_of(stream)", stream.constants)
    results = ["" if place is None else outs[place] for place in outputs]
    body += _launch(entry, recognition, results, names, stream, repeated=is_bare, nothing="None")
    head = ", ".join([*(f"{name}=absent" for name in inputs), "*more", "out=None", "stream=None"])
    made: Callable[..., Any] = define("held", head, body, names)
    return made


#: Stands for an input that a held plan was not given.
ABSENT = object()


def _listed(names: Any) -> str:
    return "".join(f"{name}, " for name in names)


def attribute_tests(attributes: Sequence[Any], names: dict[str, Any]) -> list[str] | None:
    """Conditions under which `a0`, `a1`, ... are these values, and of these types: Python takes True, 1 and 1.0 for
    equal, the rules of an attribute do not."""
    tests = []
    for index, value in enumerate(attributes):
        a, same = f"a{index}", f"value{index}"
        names |= {same: value, f"class{index}": value.__class__}
        equal = f"{a}.__class__ is class{index} and {a} == {same}"
        if value.__class__ is tuple and all(isinstance(item, _SCALARS) for item in value):
            # Types first: an array in the tuple has no single truth.
            names |= {f"kinds{index}": [*map(type, value)], "kind": type}
            equal = f"{a}.__class__ is class{index} and [*map(kind, {a})] == kinds{index} and {a} == {same}"
        elif value is not None and not isinstance(value, _SCALARS):
            return None  # a list, say, which may change
        tests.append(
            f"{a} is {same}" if value is None or value.__class__ is bool else f"({a} is {same} or {equal})"
        )
    return tests


def _overlap_tests(entry: Entry, pointers: Sequence[str], names: dict[str, Any]) -> list[str]:
    """Statements that raise when an output lies over another tensor of the call."""
    names["check_overlap"] = entry.check_overlap
    return [
        f"if {low - other_high} < {pointers[other]} - {pointers[output]} < {high - other_low}: "
        f"check_overlap([{', '.join(pointers)}])"
        for output, other, low, high, other_low, other_high, _ in entry.overlaps
    ]


def _marking(entry: Entry, recognition: Recognition, names: dict[str, Any]) -> str:
    """The statement that tells the framework of the tensors that were written, or nothing."""
    marker = entry.adapter.written_marker()
    if marker is None or not entry.written or entry.executable is None:
        return ""
    names["mark_written"] = marker
    return f"mark_written(({_listed(f't{recognition.given[place]}' for place in entry.written)})); "


def _launch(
    entry: Entry,
    recognition: Recognition,
    outs: Sequence[str],
    names: dict[str, Any],
    stream: Expression,
    *,
    repeated: bool,
    nothing: str = "()",
) -> list[str]:
    """Statements that allocate, launch and return.

    outs: the variables of the caller's output tensors.  nothing: what an operation without outputs returns.
    """
    assert entry.executable is not None
    adapter, like = entry.adapter, f"t{recognition.given[0]}"

    address = adapter.address()
    pointers, body = [*recognition.pointers], []
    for index, (shape, dtype) in enumerate(entry.new_outputs):
        allocation = adapter.allocation(shape, dtype, entry.device_id)
        body += [
            f"o{index} = {allocation.inline(names, f'o{index}', like=like)}",
            f"q{index} = {address.inline(names, 'address', t=f'o{index}')}",
        ]
        pointers.append(f"q{index}")
    if entry.has_workspace:
        allocation = adapter.allocation((entry.workspace_nbytes,), u8, entry.device_id)
        body += [
            f"w = {allocation.inline(names, 'w', like=like)}",
            f"base = {address.inline(names, 'address', t='w')} + {WORKSPACE_ALIGNMENT - 1} & {-WORKSPACE_ALIGNMENT}",
        ]
        for index, offset in enumerate(entry.workspace_offsets):
            body.append(f"w{index} = base + {offset}")
            pointers.append(f"w{index}")
    results = [outs[index] if is_given else f"o{index}" for is_given, index in entry.order]
    finish = f"return {results[0] if len(results) == 1 else f'({_listed(results)})' if results else nothing}"
    finish = _marking(entry, recognition, names) + finish
    names["capture"] = capture_state
    body.append(f"stream = {stream.inline(names, 'stream')}")
    return body + entry.executable.statements(names, pointers, finish, repeated)
