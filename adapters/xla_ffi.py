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
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from cki.adapters import xla_ffi_structs as ffi
from cki.errors import CkiError, UnsupportedError

_API_MAJOR = 0
#: The newest minor version whose structures were compared with those below.
_KNOWN_MINOR = 4
_EXTENSION_METADATA = 1
_ATTRIBUTE_STRING = 4
_CODE_INVALID_ARGUMENT, _CODE_RESOURCE_EXHAUSTED, _CODE_INTERNAL = 3, 8, 13
#: Longer texts are cut: XLA logs them whole.
_LONGEST_MESSAGE = 4000


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


class OpenInvocation(NamedTuple):
    """A call whose text says no shapes.

    shapes: of the arguments.  allocate: temporary memory of so many bytes, until the handler returns.
    """

    call: Invocation
    shapes: tuple[tuple[int, ...], ...]
    allocate: Callable[[int], int]


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
    function: Callable[[Any], None],
    version: tuple[int, int],
    *,
    has_stream: bool,
    is_open: bool = False,
) -> Any:
    """A C function for XLA's execute stage that calls `function`.

    version: the runtime's API version (`header_version`), which the handler says it was made for; at most the newest
    known.  has_stream: ask XLA for its CUDA stream and device.  is_open: `function` takes an OpenInvocation.
    The result owns the C function: keep it as long as XLA
    may call it.  An exception of `function` becomes the XLA error of its text.
    """
    answered = (version[0], min(version[1], _KNOWN_MINOR))

    def handler(frame_pointer: Any) -> int | None:
        frame = frame_pointer.contents
        activity.enter()
        try:
            if frame.extension and _answer_metadata(frame.extension, answered):
                return None
            if is_open:
                _call_open(function, frame, has_stream)
            else:
                function(_read(frame, has_stream))
        except BaseException as error:
            # Whatever happened must not pass as success: ctypes would print it and return 0.
            return _xla_error(frame.api, error)
        finally:
            activity.leave()
        return None

    return ffi.Handler(handler)


def api_version(address: int) -> tuple[int, int]:
    """The version of the function table at an address; UnsupportedError where it is none that is known here."""
    api = ffi.Api.from_address(address)
    version = api.version.major, api.version.minor
    needed = ffi.Api.stream_get.offset + ffi.Api.stream_get.size
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
    api = ffi.Api.from_address(address)
    target, place = name.encode(), platform.encode()
    arguments = ffi.RegisterArguments(
        ffi.RegisterArguments.traits.offset + 4, None, _span(target), _span(place), None, None, None,
        ctypes.cast(handler, ffi.Pointer), 0,
    )  # fmt: skip
    error = ffi.Register(api.handler_register)(ctypes.byref(arguments))
    if not error:
        return
    message = ffi.MessageArguments(ctypes.sizeof(ffi.MessageArguments), None, error, None)
    ffi.ErrorMessage(api.error_get_message)(ctypes.byref(message))
    text = (message.message or b"").decode("utf-8", "replace")
    _failed(api, error)
    raise UnsupportedError(f"XLA does not take a handler for {platform}: {text}")


def _span(text: bytes) -> ffi.ByteSpan:
    return ffi.ByteSpan(ctypes.cast(ctypes.c_char_p(text), ffi.Pointer), len(text))


def _answer_metadata(extension: int, version: tuple[int, int]) -> bool:
    """At registration XLA asks which API a handler is made for.  No traits: a call may not be replayed without us."""
    found = ffi.MetadataExtension.from_address(extension)
    if found.base.type != _EXTENSION_METADATA:
        return False
    metadata = found.metadata.contents
    metadata.version.major, metadata.version.minor = version
    metadata.traits = 0
    return True


def _read(frame: ffi.CallFrame, has_stream: bool) -> Invocation:
    api = frame.api.contents
    _check_layout(frame, api)
    stream, ordinal = _stream_and_ordinal(frame, api) if has_stream else (0, 0)
    return Invocation(
        _text(frame.attributes), _addresses(frame.arguments), _addresses(frame.results), stream, ordinal
    )


def _call_open(function: Callable[[OpenInvocation], None], frame: ffi.CallFrame, has_stream: bool) -> None:
    call, scratch = _read(frame, has_stream), _Scratch(frame, has_stream)
    try:
        function(OpenInvocation(call, _shapes(frame.arguments), scratch.allocate))
    finally:
        scratch.free()


class _Scratch:
    """Temporary memory of one call: XLA's on a GPU, in the order of its stream; else the process's."""

    def __init__(self, frame: ffi.CallFrame, has_stream: bool) -> None:
        self._frame, self._has_stream = frame, has_stream
        self._taken: list[tuple[int, int]] = []
        self._buffers: list[Any] = []

    def allocate(self, nbytes: int) -> int:
        if not self._has_stream:
            self._buffers.append(ctypes.create_string_buffer(nbytes))
            return ctypes.addressof(self._buffers[-1])
        api = self._frame.api.contents
        asked = ffi.AllocateArguments(
            ctypes.sizeof(ffi.AllocateArguments), None, self._frame.context, nbytes, 1, None
        )
        if _failed(api, ffi.Allocate(api.memory_allocate)(ctypes.byref(asked))) or not asked.data:
            raise MemoryError(f"XLA has no {nbytes} bytes of temporary memory")
        self._taken.append((nbytes, asked.data))
        return int(asked.data)

    def free(self) -> None:
        api = self._frame.api.contents
        for nbytes, data in self._taken:
            freed = ffi.FreeArguments(
                ctypes.sizeof(ffi.FreeArguments), None, self._frame.context, nbytes, data
            )
            _failed(api, ffi.Free(api.memory_free)(ctypes.byref(freed)))


def _shapes(buffers: ffi.Buffers) -> tuple[tuple[int, ...], ...]:
    found = [buffers.buffers[index].contents for index in range(buffers.size)]
    return tuple(tuple((ctypes.c_int64 * b.rank).from_address(b.dims)) if b.rank else () for b in found)


def _check_layout(frame: ffi.CallFrame, api: ffi.Api) -> None:
    """Raise CkiError unless the runtime's structures hold at least the fields that are read here."""
    wanted = (
        (frame, ffi.CallFrame), (frame.arguments, ffi.Buffers), (frame.results, ffi.Buffers),
        (frame.attributes, ffi.Attributes),
    )  # fmt: skip
    if api.version.major == _API_MAJOR and all(
        part.struct_size >= ctypes.sizeof(kind) for part, kind in wanted
    ):
        return
    found = ", ".join(f"{kind.__name__} of {part.struct_size} bytes" for part, kind in wanted)
    needed = ", ".join(str(ctypes.sizeof(kind)) for _, kind in wanted)
    raise CkiError(
        f"this XLA speaks FFI {api.version.major}.{api.version.minor} ({found}); CKI reads FFI {_API_MAJOR}.1 to "
        f"{_API_MAJOR}.{_KNOWN_MINOR} (at least {needed} bytes)"
    )


def _addresses(buffers: ffi.Buffers) -> list[int]:
    pointers = buffers.buffers
    return [pointers[index].contents.data or 0 for index in range(buffers.size)]


def _text(attributes: ffi.Attributes) -> bytes:
    if attributes.size != 1 or attributes.types[0] != _ATTRIBUTE_STRING:
        raise CkiError(f"a call with {attributes.size} attributes where one text is expected")
    span = ffi.ByteSpan.from_address(attributes.values[0])
    return ctypes.string_at(span.data, span.length)


def _stream_and_ordinal(frame: ffi.CallFrame, api: ffi.Api) -> tuple[int, int]:
    asked = ffi.StreamArguments(ctypes.sizeof(ffi.StreamArguments), None, frame.context, None)
    if _failed(api, ffi.StreamGet(api.stream_get)(ctypes.byref(asked))):
        raise CkiError("XLA has no CUDA stream for this call")
    if (
        api.struct_size < ffi.Api.device_ordinal_get.offset + ctypes.sizeof(ffi.Pointer)
        or not api.device_ordinal_get
    ):
        return asked.stream or 0, -1
    place = ffi.OrdinalArguments(ffi.OrdinalArguments.ordinal.offset + 4, None, frame.context, -1)
    failed = _failed(api, ffi.OrdinalGet(api.device_ordinal_get)(ctypes.byref(place)))
    return asked.stream or 0, -1 if failed else place.ordinal


def _failed(api: ffi.Api, error: int | None) -> bool:
    """Whether a function of the API returned an error, which is ours to destroy."""
    if error:
        ffi.ErrorDestroy(api.error_destroy)(
            ctypes.byref(ffi.DestroyArguments(ctypes.sizeof(ffi.DestroyArguments), None, error))
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
    arguments = ffi.ErrorArguments(ffi.ErrorArguments.code.offset + 4, None, encoded, code)
    created: int | None = ffi.ErrorCreate(api.contents.error_create)(ctypes.byref(arguments))
    return created


# ---------------------------------------------------------------------------------------------------------------------
# What holds for every callback from a framework's runtime: its thread, and whether the process may end.  Frameworks
# call handlers and kernels from threads of their own.  For such a thread Python makes a state when a callback begins
# and destroys it when it ends, `threading.local` data included, which takes tens of microseconds; so it is kept.

#: Threads whose states are kept.  Those of threads that have ended are kept too, about 20 kB each.
_MOST_THREADS = 256
_kept: list[int] = []


class Activity:
    """How many callbacks run, in all threads, and when the last one ended."""

    def __init__(self) -> None:
        self._running: list[None] = []  # append and pop are atomic
        self._ended = 0.0
        self._thread = threading.local()

    def enter(self) -> None:
        self._running.append(None)
        try:
            self._thread.is_known  # noqa: B018
        except AttributeError:
            self._thread.is_known = True
            _keep_thread_state()

    def leave(self) -> None:
        self._running.pop()
        self._ended = time.monotonic()

    @property
    def was_used(self) -> bool:
        """Whether any has run."""
        return bool(self._running) or self._ended > 0

    def wait_quiet(self, seconds: float, patience: float) -> None:
        """Wait until no callback has run for so long, from now on; `patience` seconds at most."""
        begin = time.monotonic()
        while (now := time.monotonic()) < begin + patience:
            if not self._running and now - max(begin, self._ended) >= seconds:
                break
            time.sleep(seconds / 10)


def _keep_thread_state() -> None:
    """Let Python's state of the calling thread outlive the callback, unless Python made the thread."""
    ident = threading.get_ident()
    if len(_kept) >= _MOST_THREADS or any(thread.ident == ident for thread in threading.enumerate()):
        return
    _kept.append(ident)
    ctypes.pythonapi.PyGILState_Ensure()  # never released: the state is destroyed when nobody holds it


activity = Activity()
