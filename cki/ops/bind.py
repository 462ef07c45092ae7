"""The first call with a problem: check everything, choose outputs, plan.  `cki.ops.call` remembers the result.

Every violated rule is collected before an error is raised, in two stages: what makes a tensor unreadable at all
(framework, dtype, device, gradients) and attribute types come first, because the operation's own rules need
readable tensors; then the operation's rules and the caller's `out=` tensors.

The error is an InvalidTypeError when any type or dtype is wrong, whatever else is: values mean little before types are
right, and Python itself tests types first.  Otherwise it is an InvalidArgumentError (or a DeviceError).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cki.adapter import ALIGNMENT, Adapter
from cki.device import DeviceInfo, cuda_device, current
from cki.dtypes import LARGEST_F32, SMALLEST_F32
from cki.errors import CkiError, DeviceError, InvalidArgumentError, InvalidTypeError
from cki.operand import Operand, dense
from cki.ops.spec import Attribute, OpSpec, OutputSpec, Problem
from cki.plan import Plan
from cki.tensor import TensorView

#: Bytes that divide the address of what `Adapter.empty` returns.
_OUTPUT_ALIGNMENT = {"cuda": 256, "sim": 64}


class Bound(NamedTuple):
    """A checked problem.  plan is None when there is nothing to compute (an empty batch).

    outputs: (name, specification) in the order in which they are returned.
    views: of every tensor given, by name: inputs, then `out=` tensors.
    """

    device: DeviceInfo
    plan: Plan | None
    outputs: tuple[tuple[str, OutputSpec], ...]
    views: dict[str, TensorView]


def out_arguments(spec: OpSpec) -> tuple[str, ...]:
    """The arguments that carry a caller's output tensors: `out` for the first output, `<name>_out` for others.

    An output whose name ends in `out` is its own argument.
    """
    first, *others = spec.outputs
    return (
        first if first.endswith("out") else "out",
        *(name if name.endswith("out") else f"{name}_out" for name in others),
    )


def require_inputs(spec: OpSpec, inputs: Sequence[Any]) -> None:
    """Raise when a tensor that is not optional is None."""
    missing = [item.name for item, t in zip(spec.inputs, inputs) if t is None and not item.optional]
    if missing:
        raise InvalidTypeError(f"{spec.name}: missing tensors", [f"{name} is None" for name in missing])


def bind(
    spec: OpSpec, adapter: Adapter, inputs: Sequence[Any], attributes: Sequence[Any], outs: Sequence[Any]
) -> Bound:
    """Check one call of `spec` and plan it.

    inputs, outs: tensors of `adapter`'s framework, or views of them; outs in the order of `spec.outputs`.
    """
    adapter.require_callable(spec.name)
    input_names = [item.name for item in spec.inputs]
    out_names = out_arguments(spec)[: len(outs)]
    tensors = dict(zip([*input_names, *out_names], [*inputs, *outs]))
    written = {*out_names, *(item.name for item in spec.inputs if item.written)}
    device, views = _readable(spec, adapter, tensors, written, attributes)

    values, wrong_types, wrong_values = attribute_values(spec, attributes)
    operands = {name: _operand(name, views[name]) if name in views else None for name in input_names}
    problem = Problem(operands, values)
    _check_alignment(problem)
    spec.check(problem)
    problem.violations[:0] = wrong_types + wrong_values
    problem.has_wrong_type |= bool(wrong_types)
    outputs: dict[str, OutputSpec] = {}
    if not problem.violations:
        outputs = dict(spec.infer(problem))
        given = {
            name: views[argument] for name, argument in zip(spec.outputs, out_names) if argument in views
        }
        _check_outs(spec, problem, outputs, given)
        _check_written(spec, problem, views)
    if problem.violations:
        raise problem.refusal(f"{spec.name}: invalid arguments")

    plan = None
    if not outputs or any(math.prod(output.shape) for output in outputs.values()):
        alignment = _OUTPUT_ALIGNMENT[device.kind]
        plan = spec.plan(problem, {
            name: _operand(name, given[name]) if name in given else dense(name, o.shape, o.dtype, alignment=alignment)
            for name, o in outputs.items()
        }, device)  # fmt: skip
    return Bound(device, plan, tuple(outputs.items()), views)


def _operand(name: str, view: TensorView) -> Operand:
    return Operand(name, view.shape, view.strides, view.dtype, 0, ALIGNMENT[view.ptr & 15])


def _readable(
    spec: OpSpec, adapter: Adapter, tensors: Mapping[str, Any], out_names: set[str], attributes: Sequence[Any]
) -> tuple[DeviceInfo, dict[str, TensorView]]:
    """Views of all tensors and the device they run on, or one error with everything that is wrong with them."""
    unreadable: list[str] = []
    read_only: list[str] = []
    views: dict[str, TensorView] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        found = [] if type(tensor) is TensorView else adapter.check(tensor, name)
        unreadable += found
        if name in out_names and type(tensor) is not TensorView:
            read_only += [problem for problem in adapter.check(tensor, name, True) if problem not in found]
        if not found:
            views[name] = tensor if type(tensor) is TensorView else adapter.view(tensor)
    wanted = current()
    device_problems, hint = _device_problems(wanted, views)
    everything = unreadable + read_only + device_problems
    if everything:
        _, wrong_types, wrong_values = attribute_values(spec, attributes)
        everything += wrong_types + wrong_values
        error: type[CkiError] = InvalidArgumentError
        if unreadable or wrong_types:
            error = InvalidTypeError
        elif device_problems and not read_only:
            error = DeviceError
        raise error(f"{spec.name}: unusable tensors", everything, hint)
    if wanted.kind == "sim":
        return wanted, views
    return cuda_device(next(iter(views.values())).device.index), views


def _device_problems(wanted: DeviceInfo, views: Mapping[str, TensorView]) -> tuple[list[str], str]:
    problems, hint = [], ""
    places = {view.device for view in views.values()}
    if len(places) > 1:
        listed = ", ".join(f"{name} is on {view.device}" for name, view in views.items())
        problems.append(f"tensors on different devices: {listed}")
        hint = "all tensors on one device"
    needed = "cpu" if wanted.kind == "sim" else "cuda"
    wrong = [name for name, view in views.items() if view.device.kind != needed]
    if wrong and len(places) == 1:
        names, verb = ", ".join(wrong), "lie" if len(wrong) > 1 else "lies"
        place = next(iter(places))
        problems.append(
            f"{names} {verb} in memory of device {place}, but the current device is {wanted.kind}"
        )
        if needed == "cuda":
            hint = (
                "move the tensors to a GPU, or run on the simulated device: "
                '`with cki.device("sim"):` or CKI_DEVICE=sim'
            )
        else:
            hint = 'the simulated device takes CPU tensors; `with cki.device("cuda"):` runs on the GPU'
    return problems, hint


def attribute_values(spec: OpSpec, attributes: Sequence[Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Attributes by name in their declared type, and the wrong types and values of others (which get their default)."""
    values: dict[str, Any] = {}
    wrong_types: list[str] = []
    wrong_values: list[str] = []
    for attribute, given in zip(spec.attributes, attributes):
        name, kind = attribute.name, attribute.type
        value = _of_type(attribute, given)
        if value is None and (given is not None or attribute.default is not None):
            value = attribute.default
            wrong_types.append(
                f"{name} is {_shown(given)} of type {type(given).__name__}, not {kind.__name__}"
            )
        elif kind is int and value is not None and not -(2**63) <= value < 2**63:
            value = attribute.default
            wrong_values.append(f"{name} is {_shown(given)}, not an integer of 64 bits")
        elif kind is float and value is not None and not -LARGEST_F32 <= value <= LARGEST_F32:
            value = attribute.default
            wrong_values.append(f"{name} is {_shown(given)}, not a finite number of fp32")
        elif kind is float and value and abs(value) < SMALLEST_F32:
            value = attribute.default
            wrong_values.append(
                f"{name} is {_shown(given)}, which fp32 does not hold; 0, or {SMALLEST_F32:.3g} or more"
            )
        values[name] = value
    return values, wrong_types, wrong_values


def _of_type(attribute: Attribute, given: Any) -> Any:
    """The value in the attribute's type, None when it is of another."""
    kind = attribute.type
    if isinstance(given, (bool, np.bool_)):
        return bool(given) if kind is bool else None
    if kind is float and isinstance(given, (int, float, np.floating, np.integer)):
        # An int beyond fp64 stays one: it is refused as beyond fp32, and has no float.
        return float(given) if -LARGEST_F32 <= given <= LARGEST_F32 else given
    if kind is int and isinstance(given, (int, np.integer)):
        return int(given)
    if kind is tuple and isinstance(given, (tuple, list)):
        return tuple(int(item) if isinstance(item, np.integer) else item for item in given)
    return given if kind is str and isinstance(given, str) else None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_alignment(problem: Problem) -> None:
    """Note inputs that lie at no multiple of their element's size: a GPU cannot read them."""
    for name, operand in problem.operands.items():
        if operand is not None and operand.size and operand.alignment % operand.dtype.itemsize:
            size = operand.dtype.itemsize
            problem.reject(
                f"{name} lies at no multiple of its element size {size}", f"{name} aligned to {size} bytes"
            )


def _check_outs(
    spec: OpSpec, problem: Problem, outputs: Mapping[str, OutputSpec], given: Mapping[str, TensorView]
) -> None:
    arguments = dict(zip(spec.outputs, out_arguments(spec)))
    for name, view in given.items():
        argument = arguments[name]
        wanted = outputs.get(name)
        if wanted is None:
            problem.reject(f"{argument} is given, but this call has no output {name!r}", f"no {argument}")
            continue
        if view.shape != tuple(wanted.shape):
            problem.reject(f"{argument} has shape {view.shape}", f"{argument} of shape {tuple(wanted.shape)}")
        if view.dtype != wanted.dtype:
            problem.reject_type(f"{argument} is {view.dtype}", f"{argument} of dtype {wanted.dtype}")
        if view.readonly:
            problem.reject(f"{argument} is read-only", f"a writable {argument}")
        if view.ptr % view.dtype.itemsize:
            problem.reject(
                f"{argument} lies at address {view.ptr:#x}, no multiple of its element size {view.dtype.itemsize}",
                f"{argument} aligned to {view.dtype.itemsize} bytes",
            )
        if not _is_injective(view):
            problem.reject(
                f"{argument} overlaps itself (shape {view.shape}, strides {view.strides})",
                f"{argument} with one element for each address",
            )


def _check_written(spec: OpSpec, problem: Problem, views: Mapping[str, TensorView]) -> None:
    """Note inputs that the operation writes into and cannot."""
    for item in spec.inputs:
        view = views.get(item.name)
        if view is None or not item.is_written(view.ndim):
            continue
        if view.readonly:
            problem.reject(
                f"{item.name} is read-only, and {spec.name} writes into it",
                f"a writable {item.name} (of JAX or TensorFlow: no stream=, and the new values are returned)",
            )
        if not _is_injective(view):
            problem.reject(
                f"{item.name} overlaps itself (shape {view.shape}, strides {view.strides})",
                f"{item.name} with one element for each address",
            )


def _is_injective(view: TensorView) -> bool:
    """Whether no two indices share an address: each stride passes over all that the smaller ones span."""
    span = 0
    for stride, extent in sorted((abs(s), e) for s, e in zip(view.strides, view.shape) if e > 1):
        if stride <= span:
            return False
        span += stride * (extent - 1)
    return True
