"""DLPack and `__cuda_array_interface__` <-> TensorView, without a copy and without a third library.

Why our own reader: CuPy's refuses fp8, ignores the read-only flag and needs ml_dtypes imported first for bf16;
and TensorFlow, JAX and small producers each support another part of the protocol.  Layouts are those of
dlpack.h 1.1 (https://dmlc.github.io/dlpack/latest/c_api.html); `__cuda_array_interface__` is version 2 and 3 of
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.

Import borrows.  A capsule that we read keeps its name, so its own destructor calls the producer's deleter,
once, when the view that holds the capsule goes away.  A view must therefore live until the work that uses it
is enqueued (or done, where the producer frees its memory without looking at our stream).
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from numbers import Integral
from typing import Any

from cki import dtypes
from cki.adapter import canonical_strides, type_name
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId, TensorView, contiguous_strides

#: The newest DLPack that we read and write.
VERSION = (1, 1)
_READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags

# Device codes.  Page-locked host memory counts as the CPU's: kernels on the simulated device read it.
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_DEVICE_KINDS = {_CPU: "cpu", _CUDA: "cuda", _CUDA_HOST: "cpu", _CUDA_MANAGED: "cuda"}


class _Device(ctypes.Structure):
    _fields_ = (("type", c_int32), ("id", c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor, in capsules named "dltensor"."""

    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p))


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned, in capsules named "dltensor_versioned"."""

    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


_OLD_NAME, _NEW_NAME = b"dltensor", b"dltensor_versioned"

# Declared on a private handle, so that other users of ctypes.pythonapi see their own argument types.
_python = ctypes.PyDLL(None)
_get_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", _python))
_is_valid = ctypes.PYFUNCTYPE(c_int, ctypes.py_object, c_char_p)(("PyCapsule_IsValid", _python))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", _python))


# ---------------------------------------------------------------- import


def from_capsule(capsule: Any, owner: object = None) -> TensorView:
    """The tensor in a DLPack capsule, old or versioned.

    owner: kept by the view together with the capsule.  Raises `InvalidTypeError` for a consumed capsule, an
    element type or a kind of device that CKI does not know, or a newer major version.  An old capsule cannot
    say whether its memory is read-only; it counts as writable.
    """
    readonly = False
    if _is_valid(capsule, _NEW_NAME):
        versioned = _ManagedVersioned.from_address(_get_pointer(capsule, _NEW_NAME))
        if versioned.major > VERSION[0]:
            raise InvalidTypeError(
                f"DLPack capsule of version {versioned.major}.{versioned.minor}; CKI reads versions 0 and 1"
            )
        tensor, readonly = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif _is_valid(capsule, _OLD_NAME):
        tensor = _Managed.from_address(_get_pointer(capsule, _OLD_NAME)).tensor
    else:
        raise InvalidTypeError(
            f"{capsule!r} is no DLPack capsule, or another consumer has taken it",
            hint="export the tensor again",
        )
    kind = _DEVICE_KINDS.get(tensor.device.type)
    if kind is None:
        raise InvalidTypeError(
            f"DLPack device type {tensor.device.type} is neither a CUDA device nor the CPU",
            hint="memory of types 1 (CPU), 2 (CUDA), 3 (CUDA host) or 13 (CUDA managed)",
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if not tensor.data and 0 not in shape:
        raise InvalidTypeError(f"DLPack capsule of shape {shape} whose address is null")
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape)
    return TensorView(
        ptr=0 if 0 in shape else (tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=canonical_strides(shape, strides),
        dtype=dtypes.from_dlpack(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes),
        device=DeviceId(kind, tensor.device.id if kind == "cuda" else 0),
        readonly=readonly,
        owner=(capsule, owner),
    )


def from_dlpack(tensor: Any, stream: int | None = None) -> TensorView:
    """The view of any object with `__dlpack__`.

    stream: handle of the CUDA stream on which the memory will be read, which the producer makes wait for its own
    pending work; -1 asks for no synchronisation; None for CPU memory.  The legacy default stream, whose handle
    is 0, is passed on as 1, for the protocol gives 0 no meaning.
    """
    options: dict[str, Any] = {} if stream is None else {"stream": 1 if stream == 0 else stream}
    error: Exception | None = None
    # Older producers know no `max_version`, some no `stream` either (then they synchronise themselves).
    for arguments in ({**options, "max_version": VERSION}, options, {}):
        try:
            return from_capsule(tensor.__dlpack__(**arguments), tensor)
        except InvalidTypeError:
            raise
        except TypeError as refusal:
            error = error or refusal
        except (BufferError, RuntimeError, ValueError, AttributeError) as refusal:
            error = refusal
            break
    raise InvalidTypeError(f"{type_name(type(tensor))} does not export its memory: {error}") from error


# ---------------------------------------------------------------- __cuda_array_interface__


def from_cuda_array_interface(
    interface: Mapping[str, Any], device_index_of: Callable[[int], int], owner: object = None
) -> TensorView:
    """The view that a `__cuda_array_interface__` dict describes.

    device_index_of: the GPU on which an address lies (the dict does not say).  Raises `InvalidTypeError` with all
    that is wrong: a mask, an element type without kernels, a foreign byte order, strides that cut elements, entries
    that are missing or of other types.
    """
    try:
        typestr, shape = str(interface["typestr"]), tuple(int(extent) for extent in interface["shape"])
        given = interface.get("strides")
        byte_strides = None if given is None else tuple(int(stride) for stride in given)
        address, readonly = interface["data"]
        pointer = int(address or 0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"__cuda_array_interface__ that CKI cannot read: {type(error).__name__}: {error}",
            hint="a dict of shape, typestr, data = (address, read-only) and strides in bytes, or None",
        ) from error
    problems = []
    if interface.get("mask") is not None:
        problems.append("it has a mask; CKI takes no masked arrays")
    dtype = None
    if typestr[:1] == ">":
        problems.append(f"element type {typestr} is big-endian; the GPU is little-endian")
    elif typestr[1:2] == "V":
        problems.append(f"element type {typestr} is untyped; bfloat16 and float8 need __dlpack__")
    else:
        try:
            dtype = dtypes.from_numpy(typestr)
        except (InvalidTypeError, TypeError):
            problems.append(f"element type {typestr} has no kernels; {dtypes.usual_names()}")
    if any(extent < 0 for extent in shape):
        problems.append(f"shape {shape} has a negative extent")
    strides = contiguous_strides(shape)
    if byte_strides is not None and len(byte_strides) != len(shape):
        problems.append(f"strides {byte_strides} are not one for each of {len(shape)} axes")
    elif byte_strides is not None and dtype is not None:
        if any(stride % dtype.itemsize for stride in byte_strides):
            problems.append(
                f"strides {byte_strides} are not multiples of the {dtype.itemsize} bytes of an element"
            )
        strides = tuple(stride // dtype.itemsize for stride in byte_strides)
    if not pointer and 0 not in shape:
        problems.append("its address is null")
    if problems or dtype is None:
        raise InvalidTypeError("__cuda_array_interface__ that CKI cannot use", problems)
    pointer = 0 if 0 in shape else pointer
    return TensorView(
        ptr=pointer,
        shape=shape,
        strides=canonical_strides(shape, strides),
        dtype=dtype,
        device=DeviceId("cuda", device_index_of(pointer)),
        readonly=bool(readonly),
        owner=owner,
    )


def interface_stream(interface: Mapping[str, Any]) -> int | None:
    """The stream whose pending work a reader of the dict must wait for (version 3), or None."""
    stream = interface.get("stream")
    if stream is None:
        return None
    if not isinstance(stream, Integral) or isinstance(stream, bool) or stream < 1:
        forbidden = ", which the protocol forbids" if stream == 0 else ""
        raise InvalidTypeError(
            f"__cuda_array_interface__ names stream {stream!r}{forbidden}",
            hint="1 for the legacy default stream, 2 for the per-thread one, or a stream handle",
        )
    return int(stream)


# ---------------------------------------------------------------- export

# Exported tensors that a consumer still holds, by the address of the managed struct: everything it points to.
_live: dict[int, tuple[ctypes.Structure, Any, object]] = {}


# Capsules handed out, until a later export finds that nobody else holds them.  A capsule has no destructor: Python code
# cannot run in one, because a consumer that refuses a tensor drops the capsule with its error pending.
_handed_out: list[Any] = []
_handed_out_lock = threading.Lock()


def _release_function() -> Callable[[int], None]:
    # A closure, not a global: a consumer may let go while the interpreter clears this module.
    live = _live

    def release(address: int) -> None:
        live.pop(address, None)

    return release


def collect_unconsumed() -> None:
    """Let go of tensors whose capsules were dropped unread (a reader renames the capsule it takes).

    Every export and every new KV cache does so first; a program that needs the memory at once may call it.
    """
    with _handed_out_lock:
        for index in range(len(_handed_out) - 1, -1, -1):
            if sys.getrefcount(_handed_out[index]) > 2:  # the list's reference and the argument's
                continue
            capsule = _handed_out.pop(index)
            for name in (_OLD_NAME, _NEW_NAME):
                if _is_valid(capsule, name):
                    _live.pop(_get_pointer(capsule, name), None)


_deleter = ctypes.CFUNCTYPE(None, c_void_p)(_release_function())


def _detach_deleters() -> None:
    # Consumers in C++ may drop their tensors after the interpreter is gone, when a Python callback would crash.
    # Memory no longer matters then: point their deleters at a C function that does nothing with its argument.
    nothing = ctypes.cast(ctypes.CDLL(None).abs, c_void_p).value
    for managed, _, _ in list(_live.values()):
        managed.deleter = nothing


atexit.register(_detach_deleters)
# The callback's machine code must outlive the module.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_deleter))


class DLPackExport:
    """Hands a view's memory to another library: `torch.from_dlpack(DLPackExport(view))`, the same for JAX, CuPy, NumPy.

    The view's owner is kept until the consumer lets go of the memory.

    ready: called with the consumer's stream handle before the memory is handed over; makes that stream wait for
        pending writes.  Left out, the memory is ready now.
    """

    def __init__(self, view: TensorView, ready: Callable[[int], None] | None = None) -> None:
        self._view = view
        self._ready = ready

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self._view.device
        return (_CUDA, device.index) if device.kind == "cuda" else (_CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule: versioned when the consumer reads version 1 or newer, else the old kind.

        stream: as the array API standard says (None: the legacy default stream; -1: no synchronisation).  Raises
        BufferError, as the protocol asks, for another device, a copy, stream 0, or read-only memory for a consumer
        that cannot be told so.
        """
        view = self._view
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"the memory is on device {self.__dlpack_device__()}, not on {tuple(dl_device)}"
            )
        if copy:
            raise BufferError("CKI exports its memory without a copy; copy the imported tensor")
        versioned = max_version is not None and max_version[0] >= 1
        if view.readonly and not versioned:
            raise BufferError("read-only memory needs a consumer of DLPack 1.0 or newer (max_version=(1, 0))")
        if view.device.kind == "cuda":
            if stream == 0:
                raise BufferError(
                    "stream 0 is ambiguous: pass 1 (legacy default), 2 (per thread) or a handle"
                )
            if stream != -1 and self._ready is not None:
                self._ready(1 if stream is None else stream)
        return _capsule_of(view, versioned)

    def __repr__(self) -> str:
        view = self._view
        return f"DLPackExport({view.dtype}{list(view.shape)} on {view.device})"


def _capsule_of(view: TensorView, versioned: bool) -> Any:
    rank = len(view.shape)
    extents = (c_int64 * (2 * rank))(*view.shape, *view.strides)
    tensor = _Tensor(
        data=view.ptr,
        device=_Device(_CUDA if view.device.kind == "cuda" else _CPU, view.device.index),
        ndim=rank,
        dtype=_DataType(*view.dtype.dlpack, 1),
        shape=ctypes.cast(extents, POINTER(c_int64)),
        strides=ctypes.cast(ctypes.byref(extents, 8 * rank), POINTER(c_int64)),
        byte_offset=0,
    )
    deleter = ctypes.cast(_deleter, c_void_p)
    managed: ctypes.Structure
    if versioned:
        flags = _READ_ONLY if view.readonly else 0
        managed = _ManagedVersioned(*VERSION, None, deleter, flags, tensor)
    else:
        managed = _Managed(tensor, None, deleter)
    address = ctypes.addressof(managed)
    _live[address] = (managed, extents, view.owner)
    name = _NEW_NAME if versioned else _OLD_NAME
    collect_unconsumed()
    capsule = _new_capsule(address, name, None)
    _handed_out.append(capsule)
    return capsule
