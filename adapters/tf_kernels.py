"""What TensorFlow's executor calls: kernels of CKI's operations, on the executor's inputs, memory and stream.

A kernel reads addresses and shapes, finds the launch that was prepared for such shapes (`cki.adapters.tf_node`), lets
TensorFlow allocate outputs and temporary memory, and launches on TensorFlow's compute stream.  It waits for nothing.
On the CPU it runs the simulated device.

Tensors are immutable: what an operation writes into (a cache) becomes an output behind the others.  Where nobody else
holds the input TensorFlow hands its memory on, otherwise it is copied in stream order.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from cki.adapters import tf_c_api
from cki.adapters.tf_c_api import AllocatorAttributes, Compute, Create, Pointer, TensorFlowApi
from cki.adapters.tf_node import ALIGNED, Launch, Node, Result
from cki.adapters.tf_types import TO_CODE
from cki.adapters.xla_ffi import Activity
from cki.errors import CkiError, DeviceError, LaunchError

#: Longer texts are cut: TensorFlow logs them whole.
_LONGEST_MESSAGE = 4000
#: TF_UINT8
_BYTES = TO_CODE["u8"]


class Place(NamedTuple):
    """A GPU of TensorFlow's: its compute stream and the CUDA device under it."""

    stream: int
    ordinal: int


class EagerCall:
    """An eager call that its thread is making: what the kernel, which runs in the same thread, need not find out.

    node, launch: those of the last call, for memory that is aligned as usual.  None before the first.
    steady: recognises the next call like this one (`cki.adapters.tf_eager`).
    """

    __slots__ = ("launch", "node", "shapes", "steady", "text")

    def __init__(self, text: bytes, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.text, self.shapes = text, shapes
        self.node: Node | None = None
        self.launch: Launch | None = None
        self.steady: Any = None


class _Thread(threading.local):
    """call: the eager call that this thread is making.  error: what a kernel raised last in it."""

    call: EagerCall | None = None
    error: BaseException | None = None


class _Frame:
    """Memory that one run of a kernel at a time passes to TensorFlow."""

    __slots__ = ("handle", "reference", "status")

    def __init__(self, status: int) -> None:
        self.status = ctypes.c_void_p(status)
        self.handle = Pointer()
        self.reference = ctypes.byref(self.handle)


class Kernels:
    """The callbacks, held for good: TensorFlow may call them as long as the process lives.

    place: the stream and CUDA device of a GPU by TensorFlow's number and an address on it.
    """

    def __init__(self, api: TensorFlowApi, place: Callable[[int], Place]) -> None:
        self._api = api
        self._place = place
        self._nodes: list[Node] = []
        self._known: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self._lock = threading.Lock()
        self._frames: list[_Frame] = []  # free ones; append and pop are atomic
        self.thread = _Thread()
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
                    self._nodes.append(Node(text, codes))
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

    def _compute_with(self, is_gpu: bool) -> Callable[[int, Pointer], None]:
        api, nodes, frames, thread = self._api, self._nodes, self._frames, self.thread
        get_input, data, num_dims, dim, delete, device_id, allocate, allocate_temporary = api.bare
        enter, leave = self._activity.enter, self._activity.leave
        attributes = AllocatorAttributes.on_device()
        on_device = ctypes.byref(attributes)
        place = self._place

        # Straight-line code and few calls: in TensorFlow's threads each line costs twice what it does in the main one.
        def compute(number: int, context: Pointer) -> None:
            enter()
            try:
                frame = frames.pop()
            except IndexError:
                frame = _Frame(api.TF_NewStatus())
            status, handle, reference = frame.status, frame.handle, frame.reference
            temporary = None
            try:
                if self._is_ending:
                    raise CkiError("the Python interpreter is ending")
                node = nodes[number - 1]
                call = thread.call
                launch = shapes = None
                if call is not None and (call.node is node or call.text == node.text):
                    launch, shapes = call.launch, call.shapes
                pointers: list[int] = []
                read: list[tuple[int, ...]] = []
                bits = 0
                for position in node.positions:
                    get_input(context, position, reference, status)
                    if not handle:
                        api.require(status, f"input {position}")
                    address = data(handle) or 0
                    bits |= address
                    pointers.append(address)
                    if shapes is None:
                        read.append(tuple([dim(handle, axis) for axis in range(num_dims(handle))]))
                    delete(handle)  # the context holds the tensor
                    handle.value = None
                stream = index = 0
                if is_gpu:
                    stream, index = place(device_id(context))
                if launch is None or bits % ALIGNED:
                    launch = node.launch_for(is_gpu, index, shapes or tuple(read), pointers, bits)
                    if call is not None and shapes is not None and not bits % ALIGNED:
                        call.node, call.launch = node, launch
                for position, code, dims, rank, nbytes in launch.outputs:
                    tensor = allocate(context, position, code, dims, rank, nbytes, status)
                    if not tensor:
                        api.require(status, f"memory of output {position}")
                    pointers.append(data(tensor) or 0)
                    delete(tensor)  # the context holds the output
                for source, result in launch.written:
                    address = self._hand_on(context, source, result, status)
                    if pointers[source] != address:
                        _copy(is_gpu, index, stream, address, pointers[source], result.nbytes.value)
                        pointers[source] = address
                workspace = 0
                if launch.workspace is not None:
                    temporary = allocate_temporary(context, _BYTES, launch.workspace, 1, on_device, status)
                    if not temporary:
                        api.require(status, "temporary memory")
                    workspace = data(temporary)
                launch.prepared.launch_at(stream, pointers, workspace)
            except BaseException as error:
                thread.error = error
                self._describe(error, status)
                api.TF_OpKernelContext_Failure(context, status)
                api.TF_SetStatus(status, 0, b"")
                if handle:
                    delete(handle)
                    handle.value = None
            finally:
                if temporary:
                    delete(temporary)
                frames.append(frame)
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

    def _hand_on(self, context: Pointer, source: int, result: Result, status: Any) -> int:
        """Address of an output in the memory of an input, where TensorFlow can give it away, else in new memory."""
        api = self._api
        candidate, taken = (ctypes.c_int * 1)(source), ctypes.c_int(-1)
        tensor = api.TF_ForwardInputOrAllocateOutput(
            context, candidate, 1, result.position, result.dims, result.rank, ctypes.byref(taken), status
        )
        if tensor is None:
            api.require(status, f"memory of output {result.position}")
        address: int = api.TF_TensorData(tensor) or 0
        api.TF_DeleteTensor(tensor)
        return address

    def _describe(self, error: BaseException, status: Any) -> None:
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
