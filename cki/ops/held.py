"""Held plans: `held = cki.hold(cki.layer_norm, x, weight, bias)`, then `held(x, weight, bias, out=y)`.

A held plan is one remembered problem without the look-up.  Each call checks that every tensor has the shape, strides,
dtype, device and alignment it was made for, and launches; other arguments are as they were when it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from cki.adapter import Adapter
from cki.errors import InvalidArgumentError
from cki.ops.call import Entry, Planned, PlanRequest, common_adapter_of, find_entry, tensor_names
from cki.ops.spec import OpSpec


class HeldPlan:
    """A checked, planned and compiled problem.  Made by `hold`; may be called from several threads."""

    def __init__(
        self, spec: OpSpec, adapter: Adapter, entry: Entry, keys: tuple[Hashable, ...], num_inputs: int
    ) -> None:
        self._spec = spec
        self._adapter = adapter
        self._entry = entry
        self._keys = keys
        self._num_inputs = num_inputs
        self._num_outs = len(keys) - num_inputs

    def __call__(self, *inputs: Any, out: Any = None, stream: Any = None) -> Any:
        """Run it.

        inputs: the tensors that `hold` was given, in order, those left out there left out here.  out: the output
        tensor, or a tuple of all of them, when `hold` was given `out=`; else outputs are allocated.

        Raises InvalidArgumentError when a tensor does not match.
        """
        outs = () if out is None else out if type(out) is tuple else (out,)
        if len(inputs) != self._num_inputs or len(outs) != self._num_outs:
            raise InvalidArgumentError(
                f"{self._spec.name}: a held plan of {self._num_inputs} inputs and {self._num_outs} outputs was given "
                f"{len(inputs)} and {len(outs)}"
            )
        pointers = []
        for tensor, key in zip(inputs + outs, self._keys):
            pointer, found = self._adapter.signature(tensor)
            if found != key:
                self._refuse(inputs + outs)
            pointers.append(pointer)
        return self._entry.run(pointers, inputs, outs, stream)

    def _refuse(self, tensors: tuple[Any, ...]) -> None:
        problems = []
        for position, (tensor, key) in enumerate(zip(tensors, self._keys)):
            found = self._adapter.signature(tensor)[1]
            if found != key:
                kind = "input" if position < self._num_inputs else "out"
                problems.append(f"{kind} {position % max(self._num_inputs, 1)}: {found}, planned for {key}")
        raise InvalidArgumentError(
            f"{self._spec.name}: tensors that this plan is not for", problems, "cki.hold again for this shape"
        )


def hold(function: Callable[..., Any], *args: Any, **kwargs: Any) -> HeldPlan:
    """Check, plan and compile a call once: `hold(cki.layer_norm, x, weight, bias, eps=1e-6)`.

    function: an operation of CKI.  args, kwargs: as for a call of it; tensors serve as examples and are not kept.
    Nothing is launched.  Only for frameworks whose tensors have an address (NumPy, CuPy, torch).
    """
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
    given_inputs = [t for t in inputs if t is not None]
    given = given_inputs + [t for t in outs if t is not None]
    assert len(tensor_names(spec)) >= len(given)
    return HeldPlan(spec, adapter, entry, tuple(adapter.signature(t)[1] for t in given), len(given_inputs))
