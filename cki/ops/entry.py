"""A problem that was checked, planned and compiled: what remains to be done on each call with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cki import capture_state, driver
from cki.adapter import Adapter, stream_handle
from cki.dtypes import DType, u8
from cki.errors import InvalidArgumentError
from cki.launch import Executable, prepare
from cki.ops.bind import Bound, out_arguments
from cki.ops.overlap import OverlapRule, byte_range, overlap_rule
from cki.ops.recent import SteadyCall
from cki.ops.spec import OpSpec
from cki.tensor import DeviceId

WORKSPACE_ALIGNMENT = 256
#: Tensors that an entry names: an encoder has hundreds.
_SHOWN = 8


class Entry:
    """Runs one problem on tensors of the signature that it was made for.

    executable: None when there is nothing to compute (an empty batch).
    new_outputs: shape and element type of each output that is allocated.
    order: where each result comes from: (True, position among the caller's outs) or (False, n-th new output).
    overlaps: pairs of tensors whose memory must not overlap.
    written: places of the tensors that are written, among those given.
    tensors: the first of those given in words, "x f16[4, 8]".
    steady: its function of `cki.ops.steady`, once there is one.  is_settled: whether it was decided if there can be.
    """

    __slots__ = (
        "_captured_workspaces", "_keeps_captured_workspaces", "_mark_written", "_read_stream", "adapter",
        "current_stream", "device_id", "executable", "is_settled", "new_outputs", "order", "overlaps", "spec", "steady",
        "tensors", "was_called", "workspace_nbytes", "workspace_offsets", "written",
    )  # fmt: skip

    def __init__(self, spec: OpSpec, adapter: Adapter, bound: Bound, given: Sequence[str]) -> None:
        """given: names of the tensors that the caller passes, in the order of a call's pointers."""
        self.spec = spec
        self.adapter = adapter
        shown = [(name, bound.views[name]) for name in given[:_SHOWN]]
        self.tensors = tuple(f"{name} {view.dtype}{list(view.shape)}" for name, view in shown)
        is_sim = bound.device.kind == "sim"
        self.device_id = DeviceId("cpu") if is_sim else DeviceId("cuda", bound.device.index)
        stream_index = -1 if is_sim else bound.device.index
        argument_of = dict(zip(spec.outputs, out_arguments(spec)))
        position = {name: index for index, name in enumerate(given)}
        order: list[tuple[bool, int]] = []
        new: list[tuple[tuple[int, ...], DType]] = []
        names = [
            *given
        ]  # of the pointers' memory, as the plan calls it: a caller's `out` is the first output
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
        self.order, self.new_outputs = tuple(order), tuple(new)
        inputs = {item.name: item for item in spec.inputs}
        self._mark_written = adapter.written_marker()
        self.written = tuple(
            place
            for place, name in enumerate(given)
            if name not in inputs or inputs[name].is_written(bound.views[name].ndim)
        )
        self.workspace_offsets: tuple[int, ...] = ()
        self.workspace_nbytes = 0
        self.executable: Executable | None = None
        if bound.plan is not None:
            names += [slot for slot, _ in bound.plan.workspace]
            sizes += [nbytes for _, nbytes in bound.plan.workspace]
            self._place_workspace([nbytes for _, nbytes in bound.plan.workspace])
            self.executable = prepare(bound.plan, bound.device, names, sizes)
        #: The framework's current stream on this problem's device.
        self.current_stream = adapter.current_stream(stream_index)
        self._read_stream = adapter.stream_reader(stream_index)
        self.overlaps = tuple(
            (rule.output, rule.other, *rule.output_bytes, *rule.other_bytes, rule)
            for rule in _overlap_rules(spec, bound, position, argument_of)
        )
        # torch keeps the memory of a captured call with its graph.  CuPy's pool would hand it out again, so where the
        # caller captures by other means than cki.capture, it is kept here for good.
        self._keeps_captured_workspaces = not is_sim and adapter.name != "torch"
        self._captured_workspaces: list[Any] = []
        self.steady: SteadyCall | None = None
        self.was_called = self.is_settled = False

    def _place_workspace(self, sizes: Sequence[int]) -> None:
        """One allocation holds all slots, each 256-byte aligned whatever the allocator's alignment."""
        total, offsets = 0, []
        for nbytes in sizes:
            offsets.append(total)
            total += -(-nbytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        self.workspace_offsets = tuple(offsets)
        self.workspace_nbytes = total + WORKSPACE_ALIGNMENT if sizes else 0

    @property
    def has_workspace(self) -> bool:
        """Whether each call allocates temporary memory."""
        return self.workspace_nbytes > 0

    @property
    def is_direct(self) -> bool:
        """Whether a call outside captures is allocations and a launch, nothing else."""
        keeps = self.has_workspace and self._keeps_captured_workspaces
        return self.adapter.direct and self.executable is not None and not keeps

    def mark_written(self, tensors: Sequence[Any]) -> None:
        """Tell the framework which of a call's tensors were written.  tensors: those given, in order."""
        if self._mark_written is not None and self.written and self.executable is not None:
            self._mark_written(tuple(tensors[place] for place in self.written))

    def check_overlap(self, pointers: list[int]) -> None:
        """Raise InvalidArgumentError when an output lies over another tensor of the call."""
        for output, other, low, high, other_low, other_high, rule in self.overlaps:
            first, second = pointers[output], pointers[other]
            if (
                first + low < second + other_high
                and second + other_low < first + high
                and rule.broken(pointers)
            ):
                self._refuse_overlap(pointers)

    def run(self, pointers: list[int], tensors: Sequence[Any], outs: Sequence[Any], stream: Any) -> Any:
        """Allocate what the caller did not give, launch, and return the outputs.

        pointers: addresses of the tensors given; extended here.  tensors: the call's (views, of indirect frameworks).
        """
        adapter = self.adapter
        if stream is None:
            named = None
            handle = self._read_stream()
        else:
            named = handle = stream_handle(stream)
        new = []
        for shape, dtype in self.new_outputs:
            output = adapter.empty(shape, dtype, tensors[0], named)
            pointers.append(adapter.pointer(output))
            new.append(output)
        executable = self.executable
        if executable is not None:
            memory = new
            if self.workspace_nbytes:
                memory = [*new, self._add_workspace(pointers, tensors[0], named, handle)]
            if capture_state.active:
                capture_state.launch(executable, pointers, handle, memory, (tensors, outs))
            else:
                executable.launch(pointers, handle)
        if not adapter.direct:
            new = adapter.finish(new, tensors, handle, self.device_id)
        order = self.order
        if len(order) == 1:
            is_given, index = order[0]
            return outs[index] if is_given else new[index]
        return tuple(outs[index] if is_given else new[index] for is_given, index in order)

    def _add_workspace(self, pointers: list[int], like: Any, named: int | None, handle: int) -> Any:
        workspace = self.adapter.empty((self.workspace_nbytes,), u8, like, named)
        base = -(-self.adapter.pointer(workspace) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        pointers += [base + offset for offset in self.workspace_offsets]
        if (
            self._keeps_captured_workspaces
            and driver.capturing_graph(handle) is not None
            and capture_state.current.get() is None
        ):
            self._captured_workspaces.append(workspace)
        return workspace

    def _refuse_overlap(self, pointers: list[int]) -> None:
        broken = [rule for *_, rule in self.overlaps if rule.broken(pointers)]
        allowed = sorted({rule.other_name for rule in broken if rule.may_coincide})
        written = {item.name for item in self.spec.inputs} & {rule.output_name for rule in broken}
        apart = f"{' and '.join(sorted(written))} apart from all others; " if written else ""
        raise InvalidArgumentError(
            f"{self.spec.name}: overlapping memory",
            [f"{rule.output_name} shares memory with {rule.other_name}" for rule in broken],
            f"{apart}outputs apart from the inputs"
            + (f", or the very same view as {' or '.join(allowed)}" if allowed else ""),
        )


def _overlap_rules(
    spec: OpSpec, bound: Bound, position: dict[str, int], argument_of: dict[str, str]
) -> list[OverlapRule]:
    """Each tensor that is written against those that are read, and against the written ones after it."""
    output_of = {argument: name for name, argument in argument_of.items()}
    arguments = [argument for argument in output_of if argument in bound.views]
    inputs = [item.name for item in spec.inputs if item.name in bound.views]
    written = [
        item.name
        for item in spec.inputs
        if item.name in bound.views and item.is_written(bound.views[item.name].ndim)
    ]
    read = [name for name in inputs if name not in written]
    rules = [
        overlap_rule(
            (name, other), (position[name], position[other]), (bound.views[name], bound.views[other]), False
        )
        for index, name in enumerate(written)
        for other in [*written[index + 1 :], *read]
    ]
    return rules + [
        overlap_rule(
            (argument, other), (position[argument], position[other]), (bound.views[argument], bound.views[other]),
            (output_of[argument], other) in spec.in_place,
        )
        for index, argument in enumerate(arguments)
        for other in [*inputs, *arguments[index + 1 :]]
    ]  # fmt: skip
