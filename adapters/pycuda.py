"""Arrays that only show their memory by a protocol: PyCUDA, numba, cupynumeric and any other `__dlpack__` or
`__cuda_array_interface__`.

Such libraries have no allocator that could be called by a common name, so new outputs are CuPy arrays on the GPU
and NumPy arrays on the simulated device; `out=` takes the library's own arrays.  Kernels run on CuPy's current
stream (the legacy default stream unless changed, which is PyCUDA's and numba's default too) or on `stream=`,
after the producer's pending work where the protocol lets it say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cki.adapter import Adapter, IndirectAdapter
from cki.dlpack import from_cuda_array_interface, from_dlpack, interface_stream
from cki.dtypes import DType
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId, TensorView

if TYPE_CHECKING:
    from cki.adapters.cupy import KeepAlive

_CPU_DEVICES = (1, 3)  # DLPack codes of plain and of page-locked host memory


class InterfaceAdapter(IndirectAdapter):
    """Reads both protocols; DLPack first where an object has both, for it also carries bfloat16 and float8."""

    name = "array interface"

    def __init__(self) -> None:
        self._keep_alive: KeepAlive | None = None  # made with the first GPU call: it needs CuPy

    def check(self, tensor: Any, name: str = "tensor", output: bool = False) -> list[str]:
        try:
            view = self.view(tensor)
        except InvalidTypeError as error:
            return [f"{name}: {error}"]
        return _output_problems(view, name) if output else []

    def view(self, tensor: Any) -> TensorView:
        return self._view_on(tensor, None)

    def _view_on(self, tensor: Any, stream: int | None) -> TensorView:
        """The view, readable on `stream` (None: CuPy's current one)."""
        if type(tensor) is TensorView:
            return tensor
        if hasattr(tensor, "__dlpack__"):
            kind, index = _dlpack_device(tensor)
            if kind in _CPU_DEVICES:
                return _walkable(from_dlpack(tensor))
            from cki.adapters import cupy

            consumer = self.stream(index) if stream is None else stream
            return _walkable(from_dlpack(tensor, -1 if cupy.is_capturing(consumer) else consumer))
        from cki.adapters import cupy

        try:
            interface = tensor.__cuda_array_interface__
        except (AttributeError, RuntimeError, ValueError) as error:
            raise InvalidTypeError(f"it does not show its memory: {error}") from error
        view = from_cuda_array_interface(interface, cupy.device_of_pointer, tensor)
        producer = interface_stream(interface)
        if producer is not None:
            consumer = self.stream(view.device.index) if stream is None else stream
            cupy.order_after(consumer, producer, view.device.index)
        return _walkable(view)

    def begin(self, names: Sequence[str], tensors: Sequence[Any], stream: int | None = None) -> list[Any]:
        views: list[TensorView | None] = []
        problems = []
        for name, tensor in zip(names, tensors):
            try:
                views.append(None if tensor is None else self._view_on(tensor, stream))
            except InvalidTypeError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise InvalidTypeError("tensors that CKI cannot use", problems)
        return views

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any, stream: int | None = None) -> Any:
        device = (like if type(like) is TensorView else self.view(like)).device
        if device.kind == "cpu":
            from cki.adapters.numpy import aligned_empty

            return aligned_empty(shape, dtype)
        from cki.adapters.cupy import device_empty

        return device_empty(shape, dtype, device.index, stream)

    def pointer(self, output: Any) -> int:
        if isinstance(output, np.ndarray):
            return int(output.__array_interface__["data"][0])
        return int(output.data.ptr)

    def stream(self, device_index: int) -> int:
        from cki.adapters import cupy

        return int(cupy.get_current_stream(device_index).ptr)

    def finish(
        self, outputs: Sequence[Any], inputs: Sequence[Any], stream: int, device: DeviceId
    ) -> list[Any]:
        if device.kind == "cuda":
            if self._keep_alive is None:
                from cki.adapters.cupy import KeepAlive

                self._keep_alive = KeepAlive()
            self._keep_alive.hold(list(inputs), stream, device.index)
        return list(outputs)


def _dlpack_device(tensor: Any) -> tuple[int, int]:
    try:
        kind, index = tensor.__dlpack_device__()
        return int(kind), int(index)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InvalidTypeError(
            f"__dlpack_device__ does not say where it lies: {error}", hint="(device type, index)"
        ) from error


def _walkable(view: TensorView) -> TensorView:
    if any(stride < 0 for stride in view.strides):
        raise InvalidTypeError(f"strides {view.strides} (in elements) are negative", hint="a contiguous copy")
    return view


def _output_problems(view: TensorView, name: str) -> list[str]:
    return [f"{name} is read-only; an output needs writable memory"] if view.readonly else []


def adapter_for(cls: type, name: str) -> Adapter:
    """The one adapter of all such types."""
    return _ADAPTER


_ADAPTER = InterfaceAdapter()
