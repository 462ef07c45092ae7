"""The structures and function types of XLA's foreign function interface: `xla/ffi/api/c_api.h`, API 0.1 to 0.4.

Only fields that all these versions have at the same place are described; later ones append.  Each starts with its
size, which `cki.adapters.xla_ffi` compares at run time.
"""

from __future__ import annotations

import ctypes

Pointer = ctypes.c_void_p
Size = ctypes.c_size_t


class Extensible(ctypes.Structure):
    """What most of them begin with."""

    _fields_ = [("struct_size", Size), ("extension", Pointer)]


class Version(Extensible):
    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class Api(Extensible):
    """Function table.  Later versions only append to it."""

    _fields_ = [
        ("version", Version), ("internal", Pointer),
        *((name, Pointer) for name in (
            "error_create", "error_get_message", "error_destroy", "handler_register", "stream_get", "type_register",
            "context_get", "state_set", "state_get", "memory_allocate", "memory_free", "pool_schedule",
            "pool_num_threads", "future_create", "future_set_available", "future_set_error", "run_id_get",
            "device_ordinal_get",
        )),
    ]  # fmt: skip


class ByteSpan(ctypes.Structure):
    _fields_ = [("data", Pointer), ("length", Size)]


class Buffer(Extensible):
    _fields_ = [("dtype", ctypes.c_int), ("data", Pointer), ("rank", ctypes.c_int64), ("dims", Pointer)]


class Buffers(Extensible):
    """Arguments, or results: pointers to `size` buffers."""

    _fields_ = [
        ("size", ctypes.c_int64), ("types", Pointer), ("buffers", ctypes.POINTER(ctypes.POINTER(Buffer))),
    ]  # fmt: skip


class Attributes(Extensible):
    _fields_ = [
        ("size", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)), ("names", Pointer),
        ("values", ctypes.POINTER(Pointer)),
    ]  # fmt: skip


class CallFrame(Extensible):
    _fields_ = [
        ("api", ctypes.POINTER(Api)), ("context", Pointer),
        ("stage", ctypes.c_int), ("arguments", Buffers), ("results", Buffers), ("attributes", Attributes),
    ]  # fmt: skip


class ExtensionBase(ctypes.Structure):
    _fields_ = [("struct_size", Size), ("type", ctypes.c_int), ("next", Pointer)]


class Metadata(ctypes.Structure):
    _fields_ = [("struct_size", Size), ("version", Version), ("traits", ctypes.c_uint32)]


class MetadataExtension(ctypes.Structure):
    _fields_ = [("base", ExtensionBase), ("metadata", ctypes.POINTER(Metadata))]


class StreamArguments(Extensible):
    _fields_ = [("context", Pointer), ("stream", Pointer)]


class OrdinalArguments(Extensible):
    _fields_ = [
        ("context", Pointer),
        ("ordinal", ctypes.c_int32),
    ]


class AllocateArguments(Extensible):
    _fields_ = [
        ("context", Pointer), ("size", Size), ("alignment", Size),
        ("data", Pointer),
    ]  # fmt: skip


class FreeArguments(Extensible):
    _fields_ = [("context", Pointer), ("size", Size), ("data", Pointer)]


class ErrorArguments(Extensible):
    _fields_ = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class DestroyArguments(Extensible):
    _fields_ = [("error", Pointer)]


class MessageArguments(Extensible):
    _fields_ = [("error", Pointer), ("message", ctypes.c_char_p)]


class RegisterArguments(Extensible):
    """Only the last of the four stages is ours."""

    _fields_ = [
        ("name", ByteSpan), ("platform", ByteSpan),
        ("instantiate", Pointer), ("prepare", Pointer), ("initialize", Pointer), ("execute", Pointer),
        ("traits", ctypes.c_uint32),
    ]  # fmt: skip


Handler = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(CallFrame))
ErrorCreate = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(ErrorArguments))
ErrorDestroy = ctypes.CFUNCTYPE(None, ctypes.POINTER(DestroyArguments))
ErrorMessage = ctypes.CFUNCTYPE(None, ctypes.POINTER(MessageArguments))
Register = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(RegisterArguments))
Allocate = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(AllocateArguments))
Free = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(FreeArguments))
StreamGet = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(StreamArguments))
OrdinalGet = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(OrdinalArguments))
