"""How CKI meets a framework: the protocol that every adapter fills, and the choice of the right one.

An adapter reads a framework's tensors (address, shape, strides), allocates outputs with the framework's own
allocator and knows the stream that the caller is on.  It is chosen by the tensor's type and remembered in
a dict, so a steady-state call pays one lookup.  Frameworks are imported only by their own adapter module,
and that only when one of their tensors arrives here.

Two kinds of adapter:

* direct (NumPy, CuPy, torch): a tensor's address can be read in well under a microsecond and the framework
  says which stream it is on.  A call is `signature` for each input, then a cached plan.
* indirect (TensorFlow, JAX, anything that only speaks DLPack or `__cuda_array_interface__`): `begin` first
  turns the tensors into `TensorView`s, waiting for the producer as its protocol demands, and `finish` turns
  what `empty` allocated into the caller's type.

The order of a call:

    adapter = common_adapter(names, tensors)
    if not adapter.direct: adapter.own_call(...), the whole call, or tensors = adapter.begin(names, tensors, stream)
    pointer, key = adapter.signature(t)             for each input (and each `out=` tensor)
    -- on a plan-cache miss: require_valid(adapter, names, tensors), then adapter.view(t) for each --
    outputs = adapter.empty(shape, dtype, like, stream);  adapter.pointer(output)
    launch on `stream`, or on adapter.stream(device_index) when the caller named none
    if not adapter.direct: outputs = adapter.finish(outputs, tensors, stream, device)
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from cki.dtypes import DType
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.generated import Expression
from cki.tensor import DeviceId, TensorView, contiguous_strides

if TYPE_CHECKING:
    from cki.ops.match import Guard, Likeness
    from cki.ops.spec import OpSpec

#: Bytes (at most 16) that divide an address, by its low four bits.
ALIGNMENT = (16, 1, 2, 1, 4, 1, 2, 1, 8, 1, 2, 1, 4, 1, 2, 1)


class Adapter(ABC):
    """One framework.  Adapters hold no per-call state and may be used from several threads at once."""

    #: The framework's name, as errors and CKI_LOG print it.
    name: str
    #: Whether tensors are used as they are (no `begin` and `finish`).
    direct: bool = True

    @abstractmethod
    def signature(self, tensor: Any) -> tuple[int, Hashable]:
        """Address of the first element, and a key of everything else that a plan depends on.

        Two tensors of equal key are interchangeable for a plan: shape, strides, element type, device, writability
        and the alignment of the address (`ALIGNMENT`) are in it.  So is whatever `check` refuses: a tensor that
        `check` refuses never has the key of one that it accepts, hence cached plans need no second check.
        The key differs between frameworks: plans are cached a framework (or key on `adapter.name` as well).
        """

    def guard(self, tensor: Any, trusted: bool = False) -> Guard | None:
        """How to recognise tensors of this one's signature in straight-line code (`cki.ops.match`), or None where only
        the signature tells.  trusted: leave out what only decides whether a tensor is refused."""
        return None

    def likeness(self, examples: Sequence[Any]) -> Likeness | None:
        """A faster test of what the guards of these tensors test but for the addresses, if the framework has one."""
        return None

    @abstractmethod
    def check(self, tensor: Any, name: str = "tensor", output: bool = False) -> list[str]:
        """Every reason why this tensor cannot be used, each a sentence that names the argument `name`.

        `output=True` checks an `out=` tensor, which must be writable too.  Never touches device memory.
        """

    @abstractmethod
    def view(self, tensor: Any) -> TensorView:
        """The tensor as CKI sees it; its `owner` keeps the memory alive.  Only for tensors that `check` accepts."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any, stream: int | None = None) -> Any:
        """An uninitialised row-major output on the device of `like` (an input, or its view), made by the framework.

        stream: the handle that the kernel will run on, where that is not the framework's current stream; the
        memory is then safe to use on it.  Aligned to 64 bytes on the CPU and 256 on a GPU.
        """

    def allocation(self, shape: tuple[int, ...], dtype: DType, device: DeviceId) -> Expression:
        """`empty` for one kind of output on the current stream; `{like}` is an input, which is on that device."""
        return Expression(
            "{empty}({shape}, {dtype}, {like})", {"empty": self.empty, "shape": shape, "dtype": dtype}
        )

    @abstractmethod
    def pointer(self, output: Any) -> int:
        """The address of what `empty` returned."""

    def address(self) -> Expression:
        """`pointer` of the output `{t}`."""
        return Expression("{pointer}({t})", {"pointer": self.pointer})

    def written_marker(self) -> Callable[[Sequence[Any]], object] | None:
        """What tells the framework that the caller's tensors were written, if it wants to know (autograd does)."""
        return None

    @abstractmethod
    def stream(self, device_index: int) -> int:
        """Handle of the caller's current stream on a GPU (0: the legacy default stream; also 0 on the CPU)."""

    def current_stream(self, device_index: int) -> Expression:
        """`stream` of one device; -1 for the CPU."""
        if device_index < 0:
            return Expression("0", {})
        return Expression("{stream}({index})", {"stream": self.stream, "index": device_index})

    def stream_reader(self, device_index: int) -> Callable[[], int]:
        """`stream` of one device, as a function that may be kept.  device_index: -1 for the CPU."""
        return (lambda: 0) if device_index < 0 else functools.partial(self.stream, device_index)

    def own_call(
        self,
        spec: OpSpec,
        inputs: tuple[Any, ...],
        attributes: tuple[Any, ...],
        outs: tuple[Any, ...],
        stream: Any,
    ) -> Any:
        """Indirect adapters: the whole call where it becomes part of a program of the framework's, else NotImplemented.

        Arguments and result are those of `cki.ops.call.call`.
        """
        return NotImplemented

    def here(self) -> Adapter:
        """The adapter that serves this one's tensors where the caller is: inside a trace, which must see calls of
        tensors with data too, another one."""
        return self

    def is_symbolic(self, tensor: Any) -> bool:
        """Whether a tensor stands for one of a program that is being traced, and has no values yet."""
        return False

    def require_callable(self, operation: str) -> None:  # noqa: B027
        """Raise UnsupportedError where a call would go unseen by the trace around it.  Asked by every call that is not
        recognised (`cki.ops.match`)."""

    def begin(self, names: Sequence[str], tensors: Sequence[Any], stream: int | None = None) -> list[Any]:
        """Indirect adapters: check the tensors and make views of them, in stream order before the launch.

        None stays None.  Raises `InvalidTypeError` with every violation.
        """
        return list(tensors)

    def finish(
        self, outputs: Sequence[Any], inputs: Sequence[Any], stream: int, device: DeviceId
    ) -> list[Any]:
        """Indirect adapters: what the caller gets for outputs that `empty` made, after the launch on `stream`.

        inputs: what `begin` returned; kept alive until the work is done.  Where the framework cannot wait for our
        stream this blocks until then.
        """
        return list(outputs)


class IndirectAdapter(Adapter):
    """Base of the adapters whose tensors are first turned into views: the signature is that of the view."""

    direct = False

    def signature(self, tensor: Any) -> tuple[int, Hashable]:
        view = tensor if type(tensor) is TensorView else self.view(tensor)
        return view.ptr, (
            view.shape, view.strides, view.dtype.name, view.device, view.readonly, ALIGNMENT[view.ptr & 15],
        )  # fmt: skip

    def begin(self, names: Sequence[str], tensors: Sequence[Any], stream: int | None = None) -> list[Any]:
        require_valid(self, names, tensors)
        return [None if tensor is None else self.view(tensor) for tensor in tensors]


# Modules whose types have an adapter of their own: first part of the module's name -> module below cki.adapters.
_FRAMEWORKS = {
    "numpy": "numpy", "cupy": "cupy", "torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "jaxlib": "jax",
}  # fmt: skip

#: Adapters by tensor type, filled as types turn up.  Read it directly where a lookup must cost nothing else.
BY_TYPE: dict[type, Adapter] = {}


def adapter_of(tensor: Any, name: str = "tensor") -> Adapter:
    """The adapter for a tensor, by its type.  Raises `InvalidTypeError` for what is no tensor (lists, numbers, ...)."""
    found = BY_TYPE.get(type(tensor))
    return found if found is not None else _resolve(tensor, name)


def _resolve(tensor: Any, name: str) -> Adapter:
    cls = type(tensor)
    packages = [base.__module__.partition(".")[0] for base in cls.__mro__]
    module = next((_FRAMEWORKS[package] for package in packages if package in _FRAMEWORKS), None)
    if module is None:
        try:
            shows_memory = (
                hasattr(cls, "__dlpack__") or getattr(tensor, "__cuda_array_interface__", None) is not None
            )
        except Exception as error:
            raise InvalidTypeError(f"{name} does not show its memory: {error}") from error
        if not shows_memory and cls is not TensorView:
            raise InvalidTypeError(
                f"{name} is of type {type_name(cls)}, which is no tensor that CKI can read",
                hint="an array of NumPy, CuPy, PyTorch, TensorFlow or JAX, or any object with __dlpack__ or "
                "__cuda_array_interface__",
            )
        module = "pycuda"
    adapter: Adapter = importlib.import_module(f"cki.adapters.{module}").adapter_for(cls, name)
    BY_TYPE[cls] = adapter
    return adapter


def type_name(cls: type) -> str:
    """A type's name as errors print it: `list`, `numpy.ma.MaskedArray`."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def common_adapter(names: Sequence[str], tensors: Sequence[Any]) -> Adapter:
    """The one adapter of all tensors (None is skipped).  Raises `InvalidTypeError` when frameworks are mixed.

    Beside tensors without data, by which a framework traces, those with data are constants of the trace.
    """
    found = [(name, adapter_of(t, name)) for name, t in zip(names, tensors) if t is not None]
    adapter = next((other for _, other in found if not other.direct), found[0][1])
    if any(other.name != adapter.name for _, other in found):
        listed = ", ".join(f"{name} is of {other.name}" for name, other in found)
        raise InvalidTypeError(
            f"tensors of different frameworks in one call: {listed}",
            hint="all tensors of one framework; from_dlpack of each of them imports another's tensor without a copy",
        )
    return adapter


def common_device(names: Sequence[str], views: Sequence[TensorView | None]) -> DeviceId:
    """The one device of all views (None is skipped).  Raises `InvalidArgumentError` when devices are mixed."""
    found = [(name, view.device) for name, view in zip(names, views) if view is not None]
    device = found[0][1]
    if any(other != device for _, other in found):
        listed = ", ".join(f"{name} is on {other}" for name, other in found)
        raise InvalidArgumentError(
            f"tensors on different devices: {listed}", hint="all tensors on one device"
        )
    return device


def require_valid(
    adapter: Adapter, names: Sequence[str], tensors: Sequence[Any], *, output: bool = False
) -> None:
    """Raise `InvalidTypeError` with every violation that the adapter's `check` finds (None is skipped)."""
    problems = [
        problem
        for name, tensor in zip(names, tensors)
        if tensor is not None and type(tensor) is not TensorView
        for problem in adapter.check(tensor, name, output)
    ]
    if problems:
        raise InvalidTypeError(f"{adapter.name} tensors that CKI cannot use", problems)


def canonical_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides (in elements) in which axes that cannot be walked have their row-major value.

    Frameworks put anything into the stride of an axis of extent 1 and into all strides of an empty tensor;
    kernels and TMA descriptors should see neither.
    """
    if 0 in shape:
        return contiguous_strides(shape)
    result = list(strides)
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            result[axis] = 1 if axis == len(shape) - 1 else result[axis + 1] * shape[axis + 1]
    return tuple(result)


def stride_problems(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, copy: str
) -> list[str]:
    """Why a kernel cannot walk an array of these strides (in bytes).  copy: the framework's function that repairs it.

    Strides of axes that are not walked (of extent 1, or of an empty array) may be anything.
    """
    walked = [] if 0 in shape else [stride for extent, stride in zip(shape, strides) if extent > 1]
    if any(stride < 0 for stride in walked):
        return [f"{name} has negative strides {strides}; {copy}({name}) has none"]
    if any(stride % itemsize for stride in walked):
        return [
            f"{name} has strides {strides} that are not multiples of its {itemsize}-byte elements; "
            f"{copy}({name}) has such"
        ]
    return []


def stream_handle(stream: Any) -> int:
    """The handle of a caller's `stream=`: an int, or a stream object of torch, CuPy, cuda.core, PyCUDA or numba."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        if 0 <= stream < 2**64:
            return stream
        raise InvalidArgumentError(
            f"stream is {stream}, which is no address", hint="a handle, 0 for the default stream"
        )
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(getattr(handle, "value", handle) or 0)
    raise InvalidTypeError(
        f"stream is of type {type_name(type(stream))}, which is no CUDA stream",
        hint="an integer handle, or a stream object of torch, CuPy, cuda.core, numba or PyCUDA",
    )
