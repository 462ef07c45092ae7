"""What TensorFlow's executor calls: kernels of CKI's operations, on the executor's inputs, memory and stream.

A node of a graph (or an eager call) holds one text that says the operation, its tensors' names, its attributes and the
device; the shapes come with each run.  A kernel reads addresses and shapes, finds the launch that was prepared for such
shapes (`cki.adapters.xla_calls`), lets TensorFlow allocate outputs and temporary memory, and launches on TensorFlow's
compute stream.  It waits for nothing.  On the CPU it runs the simulated device.

Tensors are immutable: what an operation writes into (a cache) becomes an output behind the others.  Where nobody else
holds the input TensorFlow hands its memory on, otherwise it is copied in stream order.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cki import config
from cki.adapter import ALIGNMENT
from cki.adapters import known_operations, tf_c_api
from cki.adapters.tf_c_api import AllocatorAttributes, Compute, Create, TensorFlowApi
from cki.adapters.tf_types import FROM_CODE, TO_CODE
from cki.adapters.xla_activity import Activity
from cki.adapters.xla_calls import Prepared, XlaCall
from cki.adapters.xla_ffi import Invocation
from cki.device import sim_device
from cki.errors import CkiError, DeviceError, LaunchError
from cki.ops.spec import OpSpec, OutputSpec

#: Prepared launches of one node; at the limit the oldest half goes.
_LIMIT = 1024
#: Bytes that divide the address of any tensor of TensorFlow's that is no slice of another.
_ALIGNMENT = 16
#: Longer texts are cut: TensorFlow logs them whole.
_LONGEST_MESSAGE = 4000


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
        """The call that `text` wrote; CkiError for anything else."""
        try:
            content = json.loads(text)
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


class _Result(NamedTuple):
    """An output as TensorFlow allocates it."""

    code: int
    dims: Any
    rank: int
    nbytes: int


def _result(output: OutputSpec) -> _Result:
    shape = output.shape
    dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    return _Result(TO_CODE[output.dtype.name], dims, len(shape), math.prod(shape) * output.dtype.itemsize)


class _Launch:
    """A call prepared for tensors of certain shapes on one device."""

    __slots__ = ("outputs", "prepared", "workspace", "written")

    def __init__(self, call: XlaCall, prepared: Prepared) -> None:
        self.prepared = prepared
        self.outputs = [_result(output) for _, output in call.outputs()]
        self.written = [
            (index, _result(OutputSpec(shape, _dtype(name))))
            for index in call.written()
            for _, name, shape in [call.tensors[index]]
        ]
        self.workspace = (ctypes.c_int64 * 1)(prepared.workspace) if prepared.workspace else None


def _dtype(name: str) -> Any:
    return FROM_CODE[TO_CODE[name]]


class Place(NamedTuple):
    """A GPU of TensorFlow's: its compute stream and the CUDA device under it."""

    stream: int
    ordinal: int


class Node:
    """One text, and the launches that were prepared for its runs."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.call = NodeCall.from_text(text)
        self._launches: dict[Any, _Launch] = {}

    def launch_for(
        self, is_gpu: bool, index: int, codes: Sequence[int], shapes: tuple[tuple[int, ...], ...],
        addresses: Sequence[int],
    ) -> _Launch:  # fmt: skip
        """The prepared launch, made if this is the first run with such tensors."""
        bits = 0
        for address in addresses:
            bits |= address
        odd: tuple[int, ...] = ()
        if bits % _ALIGNMENT:  # a slice; the address of an empty tensor may be anything
            given = [a if math.prod(shape) else 0 for a, shape in zip(addresses, shapes)]
            if any(address % _ALIGNMENT for address in given):
                odd = tuple(ALIGNMENT[address & 15] for address in given)
        key = (is_gpu, index, shapes, odd, *codes)
        found = self._launches.get(key)
        if found is None:
            found = self._prepare(is_gpu, index, codes, shapes, odd)
            if len(self._launches) >= _LIMIT:
                for old in list(self._launches)[: _LIMIT // 2]:
                    self._launches.pop(old, None)
            self._launches[key] = found
        return found

    def _prepare(
        self, is_gpu: bool, index: int, codes: Sequence[int], shapes: Sequence[tuple[int, ...]], odd: Sequence[int]
    ) -> _Launch:  # fmt: skip
        own = self.call
        if len(shapes) != len(own.inputs):
            raise CkiError(f"{own.operation} of {len(own.inputs)} tensors was given {len(shapes)}")
        device = "cuda" if is_gpu else _simulated(own)
        types = [FROM_CODE[code].name for code in codes]
        call = NodeCall(own.operation, own.inputs, own.attributes, device).with_tensors(types, shapes)
        return _Launch(call, Prepared(call, index, odd))


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


class Kernels:
    """The callbacks, held for good: TensorFlow may call them as long as the process lives.

    place: the stream and CUDA device of a GPU by TensorFlow's number and an address on it.
    """

    def __init__(self, api: TensorFlowApi, place: Callable[[int], Place]) -> None:
        self._api = api
        self._place = place
        self._nodes: list[Node] = []
        self._codes: list[tuple[int, ...]] = []
        self._known: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self._lock = threading.Lock()
        self._statuses: list[int] = []  # free ones; append and pop are atomic
        #: What a kernel raised last in a thread: an eager call raises it as it was.
        self.failed = threading.local()
        #: (text, shapes) of the call that this thread is making: reading them here takes longer.
        self.expected = threading.local()
        self._activity = Activity()
        self._is_ending = False
        atexit.register(self._end)
        self.create = Create(self._create)
        self.compute = {"CPU": Compute(self._compute_with(False)), "GPU": Compute(self._compute_with(True))}
        for callback in (self.create, *self.compute.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))

    def _create(self, construction: int) -> int | None:
        """A kernel for a node: a number that `compute` finds the node by."""
        status = self._api.TF_NewStatus()
        try:
            text, codes = self._attributes(construction, status)
            with self._lock:
                number = self._known.get((text, codes))
                if number is None:
                    self._nodes.append(Node(text))
                    self._codes.append(codes)
                    number = self._known[text, codes] = len(self._nodes)
            return number
        except BaseException as error:
            self._describe(error, status)
            self._api.TF_OpKernelConstruction_Failure(construction, status)
            return None
        finally:
            self._api.TF_DeleteStatus(status)

    def _attributes(self, construction: int, status: int) -> tuple[bytes, tuple[int, ...]]:
        """The node's text and the types of its tensors."""
        api = self._api
        length, total = ctypes.c_int32(), ctypes.c_int32()
        api.TF_OpKernelConstruction_GetAttrSize(construction, b"call", length, total, status)
        api.require(status, "the attribute `call`")
        text = ctypes.create_string_buffer(total.value + 1)
        api.TF_OpKernelConstruction_GetAttrString(construction, b"call", text, total.value, status)
        api.require(status, "the attribute `call`")
        api.TF_OpKernelConstruction_GetAttrSize(construction, b"T", length, total, status)
        api.require(status, "the attribute `T`")
        codes = (ctypes.c_int * max(length.value, 1))()
        api.TF_OpKernelConstruction_GetAttrTypeList(construction, b"T", codes, length.value, status)
        api.require(status, "the attribute `T`")
        return text.value, tuple(codes[: length.value])

    def _compute_with(self, is_gpu: bool) -> Callable[[int, int], None]:
        api, nodes, all_codes, statuses = self._api, self._nodes, self._codes, self._statuses
        pointer, on_device = ctypes.c_void_p, AllocatorAttributes.on_device()
        get_input, data, delete = api.TF_GetInput, api.TF_TensorData, api.TF_DeleteTensor
        num_dims, dim = api.TF_NumDims, api.TF_Dim
        byref, expected = ctypes.byref, self.expected

        enter, leave = self._activity.enter, self._activity.leave

        def compute(number: int, context: int) -> None:
            enter()
            try:
                status = statuses.pop()
            except IndexError:
                status = api.TF_NewStatus()
            tensors: list[int] = []
            try:
                if self._is_ending:
                    raise CkiError("the Python interpreter is ending")
                node, codes = nodes[number - 1], all_codes[number - 1]
                arguments: list[int] = []
                handle = pointer()
                reference = byref(handle)
                for position in range(len(codes)):
                    get_input(context, position, reference, status)
                    tensor = handle.value
                    if tensor is None:
                        api.require(status, f"input {position}")
                    tensors.append(tensor)  # type: ignore[arg-type]
                    arguments.append(data(tensor) or 0)
                known = getattr(expected, "shapes", None)
                if known is not None and known[0] == node.text:
                    shapes = known[1]
                else:
                    shapes = tuple([tuple([dim(t, axis) for axis in range(num_dims(t))]) for t in tensors])
                stream, index = 0, 0
                if is_gpu:
                    stream, index = self._place(api.TF_GetDeviceId(context))
                launch = node.launch_for(is_gpu, index, codes, shapes, arguments)
                results: list[int] = []
                for position, (code, dims, rank, nbytes) in enumerate(launch.outputs):
                    tensor = api.TF_AllocateOutput(context, position, code, dims, rank, nbytes, status)
                    if tensor is None:
                        api.require(status, f"memory of output {position}")
                    tensors.append(tensor)
                    results.append(data(tensor) or 0)
                for source, result in launch.written:
                    delete(tensors[source])
                    tensors[source] = 0
                    tensor = self._hand_on(context, source, len(results), result, status)
                    tensors.append(tensor)
                    results.append(data(tensor) or 0)
                    if arguments[source] != results[-1]:
                        _copy(is_gpu, index, stream, results[-1], arguments[source], result.nbytes)
                        arguments[source] = results[-1]
                if launch.workspace is not None:
                    tensor = api.TF_AllocateTemp(
                        context, _BYTES, launch.workspace, 1, byref(on_device), status
                    )
                    if tensor is None:
                        api.require(status, "temporary memory")
                    tensors.append(tensor)
                    results.append(data(tensor) or 0)
                launch.prepared.launch(Invocation(b"", arguments, results, stream, index))
            except BaseException as error:
                self.failed.error = error
                self._describe(error, status)
                api.TF_OpKernelContext_Failure(context, status)
                api.TF_SetStatus(status, 0, b"")
            finally:
                for tensor in tensors:
                    if tensor:
                        delete(tensor)
                statuses.append(status)
                leave()

        return compute

    def _end(self) -> None:
        """Let TensorFlow's threads have done with Python before the interpreter goes.

        A pipeline of tf.data runs kernels ahead of its reader.  Destroying it waits for its threads, and one that
        enters a kernel then waits for Python for ever.  From here on kernels fail at once, until the pipeline is full.
        """
        self._is_ending = True
        if self._activity.was_used:
            self._activity.wait_quiet(0.1, patience=60.0)

    def _hand_on(self, context: int, source: int, position: int, result: _Result, status: int) -> int:
        """An output in the memory of an input, where TensorFlow can give it away, else in new memory."""
        candidate, taken = (ctypes.c_int * 1)(source), ctypes.c_int(-1)
        tensor = self._api.TF_ForwardInputOrAllocateOutput(
            context, candidate, 1, position, result.dims, result.rank, ctypes.byref(taken), status
        )
        if tensor is None:
            self._api.require(status, f"memory of output {position}")
        return tensor  # type: ignore[no-any-return]

    def _describe(self, error: BaseException, status: int) -> None:
        """Put what happened into a status: nothing may pass as success."""
        if isinstance(error, CkiError):
            message = str(error)
        else:
            message = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        code = tf_c_api.INTERNAL
        if isinstance(error, (ValueError, TypeError)):
            code = tf_c_api.INVALID_ARGUMENT
        elif isinstance(error, DeviceError):
            code = tf_c_api.FAILED_PRECONDITION
        elif isinstance(error, MemoryError):
            code = tf_c_api.RESOURCE_EXHAUSTED
        encoded = message.encode("utf-8", "replace").replace(b"\0", b" ")[:_LONGEST_MESSAGE]
        self._api.TF_SetStatus(status, code, encoded)


#: TF_UINT8
_BYTES = TO_CODE["u8"]


def _copy(is_gpu: bool, index: int, stream: int, target: int, source: int, nbytes: int) -> None:
    """Copy in stream order."""
    if not is_gpu:
        ctypes.memmove(target, source, nbytes)
        return
    from cki import driver

    with driver.on_device(index):
        (status,) = driver.api().cuMemcpyDtoDAsync(target, source, nbytes, stream)
    if int(status):
        raise LaunchError(f"a copy of {nbytes} bytes on cuda:{index}: {driver.error_text(status)}")
