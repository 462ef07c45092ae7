"""XLA's foreign function interface spoken from Python: a handler that XLA calls is made from a Python function.

XLA hands a handler a call frame: buffers that are ready in stream order, room for the results, and the stream.  The
structures are those of `xla/ffi/api/c_api.h` (API 0.1 to 0.4), of which only fields that all these versions have at the
same place are read.  Each call checks the major version and the sizes that the runtime states in its structures; where
they do not fit, the call ends in an XLA error, never in a wrong read.  Nothing here imports a framework.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from cki.errors import CkiError, UnsupportedError

_API_MAJOR = 0
#: The newest minor version whose structures were compared with those below.
_KNOWN_MINOR = 4
_EXTENSION_METADATA = 1
_ATTRIBUTE_STRING = 4
_CODE_INVALID_ARGUMENT, _CODE_RESOURCE_EXHAUSTED, _CODE_INTERNAL = 3, 8, 13
#: Longer texts are cut: XLA logs them whole.
_LONGEST_MESSAGE = 4000

_Pointer = ctypes.c_void_p
_Size = ctypes.c_size_t


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size),
        ("extension", _Pointer),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Api(ctypes.Structure):
    """Function table.  Later versions only append to it."""

    _fields_ = [
        ("struct_size", _Size), ("extension", _Pointer), ("version", _Version), ("internal", _Pointer),
        *((name, _Pointer) for name in (
            "error_create", "error_get_message", "error_destroy", "handler_register", "stream_get", "type_register",
            "context_get", "state_set", "state_get", "memory_allocate", "memory_free", "pool_schedule",
            "pool_num_threads", "future_create", "future_set_available", "future_set_error", "run_id_get",
            "device_ordinal_get",
        )),
    ]  # fmt: skip


class _ByteSpan(ctypes.Structure):
    _fields_ = [("data", _Pointer), ("length", _Size)]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size), ("extension", _Pointer), ("dtype", ctypes.c_int), ("data", _Pointer),
        ("rank", ctypes.c_int64), ("dims", _Pointer),
    ]  # fmt: skip


class _Buffers(ctypes.Structure):
    """Arguments, or results: pointers to `size` buffers."""

    _fields_ = [
        ("struct_size", _Size), ("extension", _Pointer), ("size", ctypes.c_int64), ("types", _Pointer),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]  # fmt: skip


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size), ("extension", _Pointer), ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)), ("names", _Pointer), ("values", ctypes.POINTER(_Pointer)),
    ]  # fmt: skip


class _CallFrame(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size), ("extension", _Pointer), ("api", ctypes.POINTER(_Api)), ("context", _Pointer),
        ("stage", ctypes.c_int), ("arguments", _Buffers), ("results", _Buffers), ("attributes", _Attributes),
    ]  # fmt: skip


class _ExtensionBase(ctypes.Structure):
    _fields_ = [("struct_size", _Size), ("type", ctypes.c_int), ("next", _Pointer)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", _Size), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _ExtensionBase), ("metadata", ctypes.POINTER(_Metadata))]


class _StreamArguments(ctypes.Structure):
    _fields_ = [("struct_size", _Size), ("extension", _Pointer), ("context", _Pointer), ("stream", _Pointer)]


class _OrdinalArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size),
        ("extension", _Pointer),
        ("context", _Pointer),
        ("ordinal", ctypes.c_int32),
    ]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size), ("extension", _Pointer), ("message", ctypes.c_char_p), ("code", ctypes.c_int),
    ]  # fmt: skip


class _DestroyArguments(ctypes.Structure):
    _fields_ = [("struct_size", _Size), ("extension", _Pointer), ("error", _Pointer)]


class _MessageArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size), ("extension", _Pointer), ("error", _Pointer), ("message", ctypes.c_char_p),
    ]  # fmt: skip


class _RegisterArguments(ctypes.Structure):
    """Only the last of the four stages is ours."""

    _fields_ = [
        ("struct_size", _Size), ("extension", _Pointer), ("name", _ByteSpan), ("platform", _ByteSpan),
        ("instantiate", _Pointer), ("prepare", _Pointer), ("initialize", _Pointer), ("execute", _Pointer),
        ("traits", ctypes.c_uint32),
    ]  # fmt: skip


_Handler = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(_CallFrame))
_ErrorCreate = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(_ErrorArguments))
_ErrorDestroy = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DestroyArguments))
_ErrorMessage = ctypes.CFUNCTYPE(None, ctypes.POINTER(_MessageArguments))
_Register = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(_RegisterArguments))
_StreamGet = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(_StreamArguments))
_OrdinalGet = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(_OrdinalArguments))


class Invocation(NamedTuple):
    """One call by XLA.

    text: the call's one attribute.  arguments, results: addresses.  stream: CUDA stream handle, 0 on the CPU.
    ordinal: number of the device in this process; 0 on the CPU, -1 where this XLA does not tell.
    """

    text: bytes
    arguments: list[int]
    results: list[int]
    stream: int
    ordinal: int


def header_version(include_dir: str) -> tuple[int, int]:
    """API version that a framework states in its C header (under include_dir); (0, 2) where it ships none."""
    path = os.path.join(include_dir, "xla", "ffi", "api", "c_api.h")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return 0, 2
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(match[1]) if match else -1 for match in found)
    return (major, minor) if major >= 0 and minor >= 0 else (0, 2)


def make_handler(
    function: Callable[[Invocation], None], version: tuple[int, int], *, has_stream: bool
) -> Any:
    """A C function for XLA's execute stage that calls `function`.

    version: the runtime's API version (`header_version`), which the handler says it was made for; at most the newest
    known.  has_stream: ask XLA for its CUDA stream and device.  The result owns the C function: keep it as long as XLA
    may call it.  An exception of `function` becomes the XLA error of its text.
    """
    answered = (version[0], min(version[1], _KNOWN_MINOR))

    def handler(frame_pointer: Any) -> int | None:
        frame = frame_pointer.contents
        activity.enter()
        try:
            if frame.extension and _answer_metadata(frame.extension, answered):
                return None
            function(_read(frame, has_stream))
        except BaseException as error:
            # Whatever happened must not pass as success: ctypes would print it and return 0.
            return _xla_error(frame.api, error)
        finally:
            activity.leave()
        return None

    return _Handler(handler)


def api_version(address: int) -> tuple[int, int]:
    """The version of the function table at an address; UnsupportedError where it is none that is known here."""
    api = _Api.from_address(address)
    version = api.version.major, api.version.minor
    needed = _Api.stream_get.offset + _Api.stream_get.size
    if version[0] != _API_MAJOR or not 1 <= version[1] <= _KNOWN_MINOR or api.struct_size < needed:
        raise UnsupportedError(
            f"this XLA speaks FFI {version[0]}.{version[1]} with a table of {api.struct_size} bytes; CKI knows "
            f"{_API_MAJOR}.1 to {_API_MAJOR}.{_KNOWN_MINOR}, of at least {needed} bytes"
        )
    return version


def register(address: int, name: str, platform: str, handler: Any) -> None:
    """Make a handler known to the XLA whose function table lies at an address.

    platform: "Host" or "CUDA".  UnsupportedError with XLA's words where it refuses.
    """
    api = _Api.from_address(address)
    target, place = name.encode(), platform.encode()
    arguments = _RegisterArguments(
        _RegisterArguments.traits.offset + 4, None, _span(target), _span(place), None, None, None,
        ctypes.cast(handler, _Pointer), 0,
    )  # fmt: skip
    error = _Register(api.handler_register)(ctypes.byref(arguments))
    if not error:
        return
    message = _MessageArguments(ctypes.sizeof(_MessageArguments), None, error, None)
    _ErrorMessage(api.error_get_message)(ctypes.byref(message))
    text = (message.message or b"").decode("utf-8", "replace")
    _failed(api, error)
    raise UnsupportedError(f"XLA does not take a handler for {platform}: {text}")


def _span(text: bytes) -> _ByteSpan:
    return _ByteSpan(ctypes.cast(ctypes.c_char_p(text), _Pointer), len(text))


class Activity:
    """How many handlers run, in all threads of XLA's, and when the last one ended."""

    def __init__(self) -> None:
        self._running: list[None] = []  # append and pop are atomic
        self._ended = 0.0

    def enter(self) -> None:
        self._running.append(None)

    def leave(self) -> None:
        self._running.pop()
        self._ended = time.monotonic()

    def wait_quiet(self, seconds: float, patience: float) -> None:
        """Wait until no handler has run for so long, from now on; `patience` seconds at most."""
        begin = time.monotonic()
        while (now := time.monotonic()) < begin + patience:
            if not self._running and now - max(begin, self._ended) >= seconds:
                break
            time.sleep(seconds / 10)


activity = Activity()


def _answer_metadata(extension: int, version: tuple[int, int]) -> bool:
    """At registration XLA asks which API a handler is made for.  No traits: a call may not be replayed without us."""
    found = _MetadataExtension.from_address(extension)
    if found.base.type != _EXTENSION_METADATA:
        return False
    metadata = found.metadata.contents
    metadata.version.major, metadata.version.minor = version
    metadata.traits = 0
    return True


def _read(frame: _CallFrame, has_stream: bool) -> Invocation:
    api = frame.api.contents
    _check_layout(frame, api)
    stream, ordinal = _stream_and_ordinal(frame, api) if has_stream else (0, 0)
    return Invocation(
        _text(frame.attributes), _addresses(frame.arguments), _addresses(frame.results), stream, ordinal
    )


def _check_layout(frame: _CallFrame, api: _Api) -> None:
    """Raise CkiError unless the runtime's structures hold at least the fields that are read here."""
    wanted = (
        (frame, _CallFrame), (frame.arguments, _Buffers), (frame.results, _Buffers), (frame.attributes, _Attributes),
    )  # fmt: skip
    if api.version.major == _API_MAJOR and all(
        part.struct_size >= ctypes.sizeof(kind) for part, kind in wanted
    ):
        return
    found = ", ".join(f"{kind.__name__[1:]} of {part.struct_size} bytes" for part, kind in wanted)
    needed = ", ".join(str(ctypes.sizeof(kind)) for _, kind in wanted)
    raise CkiError(
        f"this XLA speaks FFI {api.version.major}.{api.version.minor} ({found}); CKI reads FFI {_API_MAJOR}.1 to "
        f"{_API_MAJOR}.{_KNOWN_MINOR} (at least {needed} bytes)"
    )


def _addresses(buffers: _Buffers) -> list[int]:
    pointers = buffers.buffers
    return [pointers[index].contents.data or 0 for index in range(buffers.size)]


def _text(attributes: _Attributes) -> bytes:
    if attributes.size != 1 or attributes.types[0] != _ATTRIBUTE_STRING:
        raise CkiError(f"a call with {attributes.size} attributes where one text is expected")
    span = _ByteSpan.from_address(attributes.values[0])
    return ctypes.string_at(span.data, span.length)


def _stream_and_ordinal(frame: _CallFrame, api: _Api) -> tuple[int, int]:
    asked = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame.context, None)
    if _failed(api, _StreamGet(api.stream_get)(ctypes.byref(asked))):
        raise CkiError("XLA has no CUDA stream for this call")
    if (
        api.struct_size < _Api.device_ordinal_get.offset + ctypes.sizeof(_Pointer)
        or not api.device_ordinal_get
    ):
        return asked.stream or 0, -1
    place = _OrdinalArguments(_OrdinalArguments.ordinal.offset + 4, None, frame.context, -1)
    failed = _failed(api, _OrdinalGet(api.device_ordinal_get)(ctypes.byref(place)))
    return asked.stream or 0, -1 if failed else place.ordinal


def _failed(api: _Api, error: int | None) -> bool:
    """Whether a function of the API returned an error, which is ours to destroy."""
    if error:
        _ErrorDestroy(api.error_destroy)(
            ctypes.byref(_DestroyArguments(ctypes.sizeof(_DestroyArguments), None, error))
        )
    return bool(error)


def _xla_error(api: Any, error: BaseException) -> int | None:
    if not api:
        return None
    if isinstance(error, CkiError):
        message = str(error)
    else:
        message = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    code = _CODE_INTERNAL
    if isinstance(error, (ValueError, TypeError)):
        code = _CODE_INVALID_ARGUMENT
    elif isinstance(error, MemoryError):
        code = _CODE_RESOURCE_EXHAUSTED
    encoded = message.encode("utf-8", "replace").replace(b"\0", b" ")
    if len(encoded) > _LONGEST_MESSAGE:
        encoded = encoded[:1000] + b"\n...\n" + encoded[-_LONGEST_MESSAGE + 1005 :]
    arguments = _ErrorArguments(_ErrorArguments.code.offset + 4, None, encoded, code)
    created: int | None = _ErrorCreate(api.contents.error_create)(ctypes.byref(arguments))
    return created
