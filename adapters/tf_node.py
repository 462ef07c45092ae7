"""What a node of CKI's in TensorFlow's graphs says, and the launches that are prepared for its runs.

A node (or an eager call) holds one text that says the operation, its tensors' names, its attributes and the device;
shapes come with each run.  A launch is prepared once for tensors of certain shapes on one device, from the same
description as XLA's calls (`cki.adapters.xla_calls`).
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cki import config
from cki.adapter import ALIGNMENT
from cki.adapters import known_operations
from cki.adapters.tf_types import FROM_CODE, TO_CODE
from cki.adapters.xla_calls import Prepared, XlaCall
from cki.device import sim_device
from cki.errors import CkiError, DeviceError, UnsupportedError
from cki.ops.spec import OpSpec, OutputSpec

#: Prepared launches of one node; at the limit the oldest half goes.
_LIMIT = 1024
#: Bytes that divide the address of any tensor of TensorFlow's that is no slice of another.
ALIGNED = 16


@dataclass(frozen=True)
class NodeCall:
    """What a node's text says.

    inputs: names of the tensors that are given, in the order of the spec.  attributes: in the spec's order.
    device: "cuda", or "sim:" and the architecture that the simulated device stands for.
    recompute_gradient: whether the call may be differentiated (`cki.adapters.gradient`).
    """

    operation: str
    inputs: tuple[str, ...]
    attributes: tuple[Any, ...]
    device: str
    recompute_gradient: bool = False

    def text(self) -> bytes:
        """One line of JSON.  Attributes go by name: a saved model outlives their order."""
        named = dict(zip((attribute.name for attribute in self.spec.attributes), self.attributes))
        content = {
            "operation": self.operation, "inputs": self.inputs, "attributes": named, "device": self.device,
            "recompute_gradient": self.recompute_gradient,
        }  # fmt: skip
        return json.dumps(content).encode()

    @classmethod
    def from_text(cls, text: bytes) -> NodeCall:
        """The call that `text` wrote; CkiError for anything else, UnsupportedError for a `refusal_text`."""
        try:
            content = json.loads(text)
            if "refusal" in content:
                raise UnsupportedError(content["refusal"])
            operation, named = content["operation"], dict(content["attributes"])
            spec = known_operations.find(operation)
            values = [named.pop(attribute.name, attribute.default) for attribute in spec.attributes]
            names = tuple(content["inputs"])
            call = cls(
                operation, names, tuple(tuple(v) if isinstance(v, list) else v for v in values), content["device"],
                bool(content.get("recompute_gradient")),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:
            raise CkiError(f"no call of CKI: {text[:200]!r}") from error
        unknown = [*named, *(name for name in names if name not in {item.name for item in spec.inputs})]
        if unknown:
            raise CkiError(f"{operation} has no {', '.join(unknown)}: the graph is of another version of CKI")
        return call

    @property
    def spec(self) -> OpSpec:
        """The operation's description."""
        found: OpSpec = known_operations.find(self.operation)
        return found

    def with_tensors(self, types: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> XlaCall:
        """The call on tensors of these element types and shapes."""
        return XlaCall(self.operation, tuple(zip(self.inputs, types, shapes)), self.attributes, self.device)


def refusal_text(why: str) -> bytes:
    """The text of a node that says why it cannot run."""
    return json.dumps({"refusal": why}).encode()


class Result(NamedTuple):
    """An output as TensorFlow allocates it."""

    position: int
    code: int
    dims: Any
    rank: int
    nbytes: ctypes.c_size_t


def _result(position: int, output: OutputSpec) -> Result:
    shape = output.shape
    dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    nbytes = ctypes.c_size_t(math.prod(shape) * output.dtype.itemsize)
    return Result(position, TO_CODE[output.dtype.name], dims, len(shape), nbytes)


class Launch:
    """A call prepared for tensors of certain shapes on one device.

    outputs: those that are allocated.  written: position of an input that is written, and the output of its new value.
    workspace: extents of the temporary memory; None without.
    """

    __slots__ = ("outputs", "prepared", "workspace", "written")

    def __init__(self, call: XlaCall, prepared: Prepared) -> None:
        self.prepared = prepared
        outputs = call.outputs()
        self.outputs = [_result(position, output) for position, (_, output) in enumerate(outputs)]
        self.written = [
            (index, _result(position, OutputSpec(call.tensors[index][2], _dtype(call.tensors[index][1]))))
            for position, index in enumerate(call.written(), len(outputs))
        ]
        self.workspace = (ctypes.c_int64 * 1)(prepared.workspace) if prepared.workspace else None


def _dtype(name: str) -> Any:
    return FROM_CODE[TO_CODE[name]]


class Node:
    """One text and the types of its tensors, and the launches that were prepared for its runs."""

    def __init__(self, text: bytes, codes: Sequence[int]) -> None:
        """codes: TF_DataType of each tensor."""
        self.text = text
        self.codes = tuple(codes)
        self.positions = range(len(codes))
        self.call = NodeCall.from_text(text)
        self._launches: dict[Any, Launch] = {}

    def launch_for(
        self,
        is_gpu: bool,
        index: int,
        shapes: tuple[tuple[int, ...], ...],
        addresses: Sequence[int],
        bits: int,
    ) -> Launch:
        """The prepared launch, made if this is the first run with such tensors.  bits: all addresses, or-ed."""
        odd: tuple[int, ...] = ()
        if bits % ALIGNED:  # a slice; the address of an empty tensor may be anything
            given = [a if math.prod(shape) else 0 for a, shape in zip(addresses, shapes)]
            if any(address % ALIGNED for address in given):
                odd = tuple(ALIGNMENT[address & 15] for address in given)
        key = (is_gpu, index, shapes, odd)
        found = self._launches.get(key)
        if found is None:
            found = self._prepare(is_gpu, index, shapes, odd)
            if len(self._launches) >= _LIMIT:
                for old in list(self._launches)[: _LIMIT // 2]:
                    self._launches.pop(old, None)
            self._launches[key] = found
        return found

    def _prepare(
        self, is_gpu: bool, index: int, shapes: Sequence[tuple[int, ...]], odd: Sequence[int]
    ) -> Launch:
        own = self.call
        if len(shapes) != len(own.inputs):
            raise CkiError(f"{own.operation} of {len(own.inputs)} tensors was given {len(shapes)}")
        device = "cuda" if is_gpu else _simulated(own)
        types = [FROM_CODE[code].name for code in self.codes]
        call = NodeCall(own.operation, own.inputs, own.attributes, device).with_tensors(types, shapes)
        return Launch(call, Prepared(call, index, odd))


def _simulated(call: NodeCall) -> str:
    """The simulated device for a node on the CPU: the one of the node's text, or else the process's own."""
    if call.device.startswith("sim:"):
        return call.device
    if config.text("CKI_DEVICE") == "sim":
        return f"sim:{sim_device().arch}"
    raise DeviceError(
        f"{call.operation}: TensorFlow runs it on the CPU, but the current device is cuda",
        hint="move the tensors to a GPU, or run on the simulated device: "
        '`with cki.device("sim"):` around the tracing, or CKI_DEVICE=sim',
    )
