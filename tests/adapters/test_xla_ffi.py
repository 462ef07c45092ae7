"""The FFI handler on call frames made by hand: what is read, what is refused, and how errors get back."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cki.adapters import xla_ffi, xla_ffi_structs
from cki.errors import CkiError, InvalidArgumentError


class Runtime:
    """XLA's side: a function table, and frames with chosen sizes."""

    def __init__(self, major: int = 0, api_size: int | None = None) -> None:
        self.errors: list[tuple[int, str]] = []
        self.destroyed: list[int] = []
        self.stream_error: int | None = None
        self._kept: list[Any] = []
        api = xla_ffi_structs.Api()
        api.struct_size = ctypes.sizeof(api) if api_size is None else api_size
        api.version.major = major
        api.error_create = self._function(xla_ffi_structs.ErrorCreate, self._error)
        api.error_destroy = self._function(xla_ffi_structs.ErrorDestroy, self._destroy)
        api.stream_get = self._function(xla_ffi_structs.StreamGet, self._stream)
        api.device_ordinal_get = self._function(xla_ffi_structs.OrdinalGet, self._ordinal)
        self.api = api

    def _function(self, kind: Any, python: Any) -> int:
        self._kept.append(kind(python))
        return ctypes.cast(self._kept[-1], ctypes.c_void_p).value or 0

    def _error(self, arguments: Any) -> int:
        self.errors.append((arguments.contents.code, arguments.contents.message.decode()))
        return 4321

    def _stream(self, arguments: Any) -> int | None:
        arguments.contents.stream = 0x57
        return self.stream_error

    def _destroy(self, arguments: Any) -> None:
        self.destroyed.append(arguments.contents.error)

    def _ordinal(self, arguments: Any) -> int | None:
        arguments.contents.ordinal = 1
        return None

    def frame(
        self, text: bytes = b"call", addresses: tuple[int, ...] = (64, 128), results: tuple[int, ...] = (256,)
    ) -> Any:
        frame = xla_ffi_structs.CallFrame()
        frame.runtime = self  # keeps what the frame points to
        frame.struct_size = ctypes.sizeof(frame)
        frame.api = ctypes.pointer(self.api)
        self._fill(frame.arguments, addresses)
        self._fill(frame.results, results)
        span = xla_ffi_structs.ByteSpan(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p), len(text))
        types, values = (ctypes.c_int * 1)(4), (ctypes.c_void_p * 1)(ctypes.addressof(span))
        frame.attributes.struct_size, frame.attributes.size = ctypes.sizeof(frame.attributes), 1
        frame.attributes.types, frame.attributes.values = types, values
        self._kept += [text, span, types, values]
        return frame

    def _fill(self, buffers: Any, addresses: tuple[int, ...]) -> None:
        kind = ctypes.POINTER(xla_ffi_structs.Buffer)
        made = [
            xla_ffi_structs.Buffer(ctypes.sizeof(xla_ffi_structs.Buffer), None, 11, address, 0, None)
            for address in addresses
        ]
        pointers = (kind * len(made))(*map(ctypes.pointer, made))
        buffers.struct_size, buffers.size, buffers.buffers = ctypes.sizeof(buffers), len(made), pointers
        self._kept += [made, pointers]


def handler_of(function: Any, has_stream: bool = False) -> Any:
    return xla_ffi.make_handler(function, (0, 3), has_stream=has_stream)


def test_what_a_call_is_told():
    seen: list[Any] = []
    assert handler_of(seen.append)(Runtime().frame()) is None
    assert seen == [(b"call", [64, 128], [256], 0, 0)]
    handler_of(seen.append, has_stream=True)(Runtime().frame(b"", (), ()))
    assert seen[1] == (b"", [], [], 0x57, 1)


def test_a_runtime_that_tells_no_device():
    """Its function table ends before XLA_FFI_DeviceOrdinal_Get."""
    seen: list[Any] = []
    handler_of(seen.append, has_stream=True)(
        Runtime(api_size=xla_ffi_structs.Api.device_ordinal_get.offset).frame()
    )
    assert seen[0].ordinal == -1


def test_a_runtime_without_a_stream():
    """Its own error is destroyed; the call ends in ours."""
    runtime = Runtime()
    runtime.stream_error = 99
    assert handler_of(lambda _: pytest.fail("called"), has_stream=True)(runtime.frame()) == 4321
    assert runtime.destroyed == [99]
    assert runtime.errors == [(13, "XLA has no CUDA stream for this call")]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InvalidArgumentError("x is bad", ["rule"], "hint"), 3, "x is bad\n  - rule\n  hint: hint"),
        (CkiError("no device"), 13, "no device"),
        (MemoryError("full"), 8, "MemoryError: full"),
        (KeyboardInterrupt(), 13, "KeyboardInterrupt"),
        (RuntimeError("a\0b"), 13, "RuntimeError: a b"),
    ],
)
def test_every_exception_becomes_an_error_of_xla(error, code, said):
    def function(_):
        raise error

    runtime = Runtime()
    assert handler_of(function)(runtime.frame()) == 4321
    ((found, text),) = runtime.errors
    assert found == code and said in text


def test_long_texts_are_cut_in_the_middle():
    def function(_):
        raise CkiError("begin" + "x" * 10_000 + "end")

    runtime = Runtime()
    handler_of(function)(runtime.frame())
    text = runtime.errors[0][1]
    assert text.startswith("begin") and text.endswith("end") and len(text) <= 4000


def test_structures_that_are_too_small_are_refused():
    for part in ("", "arguments", "results", "attributes"):
        runtime = Runtime()
        frame = runtime.frame()
        structure = getattr(frame, part) if part else frame
        structure.struct_size -= 8
        assert handler_of(lambda _: pytest.fail("called"))(frame) == 4321
        assert "CKI reads FFI 0.1 to 0.4" in runtime.errors[0][1]
    runtime = Runtime(major=1)
    handler_of(lambda _: pytest.fail("called"))(runtime.frame())
    assert "this XLA speaks FFI 1.0" in runtime.errors[0][1]


def test_attributes_of_another_kind_are_refused():
    runtime = Runtime()
    frame = runtime.frame()
    frame.attributes.size = 0
    handler_of(lambda _: pytest.fail("called"))(frame)
    assert "a call with 0 attributes" in runtime.errors[0][1]


@pytest.mark.parametrize(("version", "answered"), [((0, 2), (0, 2)), ((0, 4), (0, 4)), ((0, 9), (0, 4))])
def test_registration_asks_for_the_version(version, answered):
    """The frame of that question has neither function table nor context."""
    metadata = xla_ffi_structs.Metadata(traits=7)
    extension = xla_ffi_structs.MetadataExtension()
    extension.base.type, extension.metadata = 1, ctypes.pointer(metadata)
    frame = xla_ffi_structs.CallFrame(extension=ctypes.addressof(extension))
    assert xla_ffi.make_handler(lambda _: pytest.fail("called"), version, has_stream=True)(frame) is None
    assert (metadata.version.major, metadata.version.minor, metadata.traits) == (*answered, 0)


def test_version_of_the_header(tmp_path):
    assert xla_ffi.header_version(str(tmp_path)) == (0, 2)
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n\n#define XLA_FFI_API_MINOR 4\n")
    assert xla_ffi.header_version(str(tmp_path)) == (0, 4)
    header.write_text("nothing")
    assert xla_ffi.header_version(str(tmp_path)) == (0, 2)


@pytest.mark.parametrize("package", [pytest.param("jaxlib", marks=pytest.mark.jax),
                                     pytest.param("tensorflow", marks=pytest.mark.tensorflow)])  # fmt: skip
def test_layouts_are_those_of_the_header_that_a_framework_ships(tmp_path, package):
    """Offsets and sizes as a C++ compiler sees them."""
    from cki.sim import toolchain

    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    include = Path(found.submodule_search_locations[0]) / "include"
    if not (include / "xla" / "ffi" / "api" / "c_api.h").exists():
        pytest.skip(f"this {package} ships no FFI header")
    offsets = {
        ("XLA_FFI_CallFrame", "args"): xla_ffi_structs.CallFrame.arguments,
        ("XLA_FFI_CallFrame", "rets"): xla_ffi_structs.CallFrame.results,
        ("XLA_FFI_CallFrame", "attrs"): xla_ffi_structs.CallFrame.attributes,
        ("XLA_FFI_Api", "XLA_FFI_Error_Create"): xla_ffi_structs.Api.error_create,
        ("XLA_FFI_Api", "XLA_FFI_Stream_Get"): xla_ffi_structs.Api.stream_get,
        ("XLA_FFI_Api", "XLA_FFI_DeviceOrdinal_Get"): xla_ffi_structs.Api.device_ordinal_get,
        ("XLA_FFI_Buffer", "data"): xla_ffi_structs.Buffer.data,
        ("XLA_FFI_Metadata", "traits"): xla_ffi_structs.Metadata.traits,
        ("XLA_FFI_Metadata_Extension", "metadata"): xla_ffi_structs.MetadataExtension.metadata,
        ("XLA_FFI_Stream_Get_Args", "stream"): xla_ffi_structs.StreamArguments.stream,
        ("XLA_FFI_DeviceOrdinal_Get_Args", "device_ordinal"): xla_ffi_structs.OrdinalArguments.ordinal,
        ("XLA_FFI_Error_Create_Args", "errc"): xla_ffi_structs.ErrorArguments.code,
        ("XLA_FFI_Error_GetMessage_Args", "message"): xla_ffi_structs.MessageArguments.message,
        ("XLA_FFI_Handler_Register_Args", "platform"): xla_ffi_structs.RegisterArguments.platform,
        ("XLA_FFI_Handler_Register_Args", "traits"): xla_ffi_structs.RegisterArguments.traits,
        ("XLA_FFI_DeviceMemory_Allocate_Args", "data"): xla_ffi_structs.AllocateArguments.data,
        ("XLA_FFI_DeviceMemory_Free_Args", "data"): xla_ffi_structs.FreeArguments.data,
    }
    sizes = {
        "XLA_FFI_Buffer": xla_ffi_structs.Buffer, "XLA_FFI_Args": xla_ffi_structs.Buffers,
        "XLA_FFI_Attrs": xla_ffi_structs.Attributes,
    }  # fmt: skip
    printed = [f"offsetof({structure}, {field})" for structure, field in offsets]
    printed += [f"sizeof({structure})" for structure in sizes]
    source = tmp_path / "layout.cpp"
    body = "".join(f'printf("%zu\\n", {expression});\n' for expression in printed)
    source.write_text(f'#include <cstdio>\n#include "xla/ffi/api/c_api.h"\nint main() {{\n{body}}}\n')
    program = tmp_path / "layout"
    command = [toolchain.find_compiler().command, "-I", str(include), str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    found = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    wanted = [field.offset for field in offsets.values()] + [ctypes.sizeof(kind) for kind in sizes.values()]
    assert list(map(int, found.split())) == wanted
