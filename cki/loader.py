"""`cki.load`: compile a kernel of your own and launch it on tensors of any framework, on the GPU or simulated.

    kernel = cki.load("scale.cu", constants={"kBlock": 256})
    kernel((n + 255) // 256, 256, x, y, 0.5, n)

Tensors are passed by address, without a copy, on their framework's current stream; Python numbers become exactly the
type that the kernel declares, or an error.  The same call runs on the simulated device for CPU tensors.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from cki import capture_state, source
from cki.adapter import Adapter, adapter_of, common_adapter, common_device, stream_handle, type_name
from cki.arguments import LETTER_MEANING, NUMBERS
from cki.constants import checked_constants
from cki.device import DeviceInfo, cuda_device, current
from cki.dtypes import u64
from cki.errors import DeviceError, InvalidArgumentError, InvalidTypeError
from cki.kernel import ARCHITECTURES, ConstantValue, KernelSpec
from cki.launch import Executable, check_geometry, prepare
from cki.operand import Operand
from cki.ops.overlap import byte_range
from cki.plan import Plan, Step, TensorMapArg
from cki.signature import Parameter, find_entry, parameters_from_letters, parse_parameters
from cki.tensor import TensorView

_EXECUTABLE_LIMIT = 256


@dataclass(frozen=True)
class TensorMap:
    """An argument for a `const __grid_constant__ TensorMap` parameter: a tiled TMA descriptor over a tensor.

    box: extents of the tile that one copy moves, in the order of the tensor's axes, in elements (1 to 256 each).
    swizzle: 0, 32, 64 or 128 bytes.
    """

    tensor: Any
    box: tuple[int, ...]
    swizzle: int = 128


class Kernel:
    """A user's kernel, compiled at its first launch on each architecture.  Made by `cki.load`."""

    def __init__(self, spec: KernelSpec, parameters: tuple[Parameter, ...]) -> None:
        self.spec = spec
        self.parameters = parameters
        self._executables: dict[tuple[Any, ...], Executable] = {}

    def __repr__(self) -> str:
        listed = ", ".join(f"{LETTER_MEANING[p.letter]} {p.name}" for p in self.parameters)
        return f"<cki kernel {self.spec.entry}({listed}) of {self.spec.source}>"

    def __call__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        smem: int = 0,
        stream: Any = None,
        cluster: int | Sequence[int] = 1,
        cooperative: bool = False,
    ) -> None:
        """Launch it; does not wait (on the GPU).

        grid, cluster: blocks, and block: threads, as an int or up to three (x, y, z).  args: one for each parameter:
        a tensor (None: a null pointer), a Python or NumPy number, a `cki.TensorMap`.  smem: dynamic shared memory
        in bytes.  stream: default, the framework's current one.

        Raises InvalidTypeError, InvalidArgumentError or DeviceError with everything that is wrong, before any launch.
        """
        if len(args) != len(self.parameters):
            raise InvalidTypeError(
                f"{self!r} was given {len(args)} arguments, it takes {len(self.parameters)}"
            )
        named = None if stream is None else stream_handle(stream)
        adapter, views = self._views(args, named)
        device = _device_of(adapter, views)
        pointers, maps = self._words(args, views)
        key = (
            _triple("grid", grid), _triple("block", block), _shared_bytes(smem), _triple("cluster", cluster),
            bool(cooperative), device, maps, _extents(device, views),
        )  # fmt: skip
        executable = self._executables.get(key) or self._prepare(*key, key=key)
        handle = named
        if handle is None:
            handle = adapter.stream(device.index) if adapter is not None and device.kind == "cuda" else 0
        if capture_state.active:
            capture_state.launch(executable, pointers, handle, args)
        else:
            executable.launch(pointers, handle)
        if adapter is not None and not adapter.direct:
            present = [view for view in views if view is not None]
            adapter.finish([], present, handle, present[0].device)

    def _views(
        self, args: Sequence[Any], stream: int | None
    ) -> tuple[Adapter | None, list[TensorView | None]]:
        """The view of each tensor among the arguments, None for others."""
        names = [parameter.name for parameter in self.parameters]
        tensors = [
            (arg.tensor if isinstance(arg, TensorMap) else arg) if parameter.letter in "PT" else None
            for parameter, arg in zip(self.parameters, args)
        ]
        if all(tensor is None for tensor in tensors):
            return None, [None] * len(args)
        for name, tensor in zip(names, tensors):
            if tensor is not None:
                adapter_of(tensor, name)
        adapter = common_adapter(names, tensors)
        problems = [
            problem
            for parameter, tensor in zip(self.parameters, tensors)
            if tensor is not None
            for problem in adapter.check(
                tensor, parameter.name, parameter.letter == "P" and not parameter.is_const
            )
        ]
        if problems:
            raise InvalidTypeError(f"{self.spec.entry}: unusable tensors", problems)
        if not adapter.direct:
            return adapter, list(adapter.begin(names, tensors, stream))
        return adapter, [None if tensor is None else adapter.view(tensor) for tensor in tensors]

    def _words(
        self, args: Sequence[Any], views: Sequence[TensorView | None]
    ) -> tuple[list[int], tuple[tuple[int, TensorMapArg], ...]]:
        """The 64-bit word of each argument, and the tensor maps (position, geometry)."""
        words, maps, problems = [], [], []
        for position, (parameter, arg, view) in enumerate(zip(self.parameters, args, views)):
            word, problem = 0, ""
            if parameter.letter == "P":
                problem = _pointer_problem(parameter, arg, view)
            elif parameter.letter == "T":
                if isinstance(arg, TensorMap) and view is not None:
                    maps.append((position, _map_argument(f"argument{position}", arg, view)))
                else:
                    problem = f"{parameter.name} is {type_name(type(arg))}, not a cki.TensorMap"
            else:
                word, problem = _number(parameter, arg)
            words.append(view.ptr if view is not None else word)
            problems += [problem] if problem else []
        if problems:
            raise InvalidArgumentError(f"{self.spec.entry}: invalid arguments", problems)
        return words, tuple(maps)

    def _prepare(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], smem: int, cluster: tuple[int, int, int],
        cooperative: bool, device: DeviceInfo, maps: tuple[tuple[int, TensorMapArg], ...], extents: tuple[int, ...], *,
        key: tuple[Any, ...],
    ) -> Executable:  # fmt: skip
        # Numbers travel like addresses, as a word that each call writes: the kernel reads its low bytes.
        slots = [f"argument{position}" for position in range(len(self.parameters))]
        map_of = dict(maps)
        args = tuple(map_of.get(i) or Operand(slot, (1,), (1,), u64) for i, slot in enumerate(slots))
        letters = "".join("T" if i in map_of else "P" for i in range(len(slots)))
        spec = KernelSpec(self.spec.source, self.spec.entry, self.spec.constants, letters, self.spec.archs)
        step = Step(spec, grid, block, args, smem, cluster, cooperative, reason="launched by the user")
        problems = check_geometry(step, device)
        if problems:
            raise InvalidArgumentError(f"{self.spec.entry} cannot be launched so on {device}", problems)
        executable = prepare(Plan((step,)), device, slots, extents)
        if len(self._executables) >= _EXECUTABLE_LIMIT:
            self._executables.clear()
        self._executables[key] = executable
        return executable


def _triple(name: str, sizes: int | Sequence[int]) -> tuple[int, int, int]:
    if type(sizes) is int:  # nearly always
        return sizes, 1, 1
    is_listed = isinstance(sizes, Sequence) or (isinstance(sizes, np.ndarray) and sizes.ndim == 1)
    given: tuple[Any, ...] = tuple(sizes) if is_listed else (sizes,)  # type: ignore[arg-type]
    if not all(_is_integer(size) for size in given):
        raise InvalidTypeError(f"{name} is {sizes!r}, not one to three integers")
    if not 1 <= len(given) <= 3:
        raise InvalidArgumentError(f"{name} is {sizes!r}, not one to three integers")
    x, y, z = (*(int(size) for size in given), 1, 1)[:3]
    return x, y, z


def _shared_bytes(smem: object) -> int:
    if not _is_integer(smem):
        raise InvalidTypeError(f"smem is {smem!r}, not an integer", hint="dynamic shared memory in bytes")
    return int(smem)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _device_of(adapter: Adapter | None, views: Sequence[TensorView | None]) -> DeviceInfo:
    wanted = current()
    if adapter is None:
        if wanted.kind == "sim":
            return wanted
        from cki import driver

        return cuda_device(max(driver.current_device(), 0))
    place = common_device([f"argument {position}" for position in range(len(views))], views)
    if wanted.kind == "sim" and place.kind == "cpu":
        return wanted
    if wanted.kind == "cuda" and place.kind == "cuda":
        return cuda_device(place.index)
    raise DeviceError(
        f"the tensors lie in memory of device {place}, but the current device is {wanted.kind}",
        hint='CPU tensors run on the simulated device: `with cki.device("sim"):` or CKI_DEVICE=sim',
    )


def _extents(device: DeviceInfo, views: Sequence[TensorView | None]) -> tuple[int, ...]:
    """Bytes that each tensor spans, for the simulated device's bounds check; 0 for what is no tensor."""
    if device.kind != "sim":
        return ()
    return tuple(0 if view is None else byte_range(view)[1] for view in views)


def _pointer_problem(parameter: Parameter, arg: Any, view: TensorView | None) -> str:
    if arg is None:
        return ""
    if isinstance(arg, TensorMap) or view is None:
        return f"{parameter.name} is {type_name(type(arg))}, the kernel takes a tensor (or None)"
    if parameter.element is not None and parameter.element != view.dtype:
        return f"{parameter.name} is a {view.dtype} tensor, the kernel takes {parameter.element}*"
    if view.ptr % view.dtype.itemsize:
        return f"{parameter.name} lies at no multiple of its element size {view.dtype.itemsize}"
    return ""


def _number(parameter: Parameter, arg: Any) -> tuple[int, str]:
    """A number as the 64-bit word that holds it in its exact type; or why it does not fit."""
    letter, meaning = parameter.letter, LETTER_MEANING[parameter.letter]
    if isinstance(arg, (bool, np.bool_)) or not isinstance(arg, (int, float, np.integer, np.floating)):
        return 0, f"{parameter.name} is {type_name(type(arg))}, the kernel takes {meaning}"
    if letter not in "fd":
        if not isinstance(arg, (int, np.integer)):
            return 0, f"{parameter.name} is {arg!r}, the kernel takes {meaning}: int() rounds it"
        value: int | float = int(arg)
    else:
        value = float(arg)
    try:
        packed = struct.pack(NUMBERS[letter], value)
    except (struct.error, OverflowError):
        return 0, f"{parameter.name} is {arg!r}, out of range of {meaning}"
    return int.from_bytes(packed, "little"), ""


def _map_argument(slot: str, arg: TensorMap, view: TensorView) -> TensorMapArg:
    itemsize = view.dtype.itemsize
    if len(arg.box) != view.ndim or (view.ndim and view.strides[-1] != 1):
        raise InvalidArgumentError(
            f"a tensor map over shape {view.shape}, strides {view.strides} with box {arg.box}",
            hint="one box size for each axis, and a last axis of stride 1",
        )
    operand = Operand(slot, view.shape, view.strides, view.dtype)
    strides = tuple(stride * itemsize for stride in view.strides[-2::-1])
    return TensorMapArg(operand, view.shape[::-1], strides, tuple(arg.box)[::-1], arg.swizzle)


def load(
    path_or_text: str | Path,
    *,
    entry: str | None = None,
    params: str | None = None,
    constants: Mapping[str, ConstantValue] | None = None,
) -> Kernel:
    """A kernel of your own from a `.cu` file or source text.

    path_or_text: a path, or the source itself (any text with a line break or a brace).
    entry: its `extern "C" __global__` function; may be left out when there is one only.
    params: one letter a parameter; default, read from the declaration.
    constants: put in front of the source: bool, int and float as `constexpr`, a `cki.dtypes` type as `using`.

    Includes: `"..."` beside the file or below cuda_src (`"ptx/mma.cuh"`); `<...>` CUDA's headers, on the GPU only.
    Raises InvalidTypeError or InvalidArgumentError when an argument is wrong or the kernel or its parameters cannot be
    found, CompileError at the first launch.
    """
    if not isinstance(path_or_text, (str, Path)):
        raise InvalidTypeError(
            f"path_or_text is {type_name(type(path_or_text))}",
            hint="a path, or the source text itself, as str",
        )
    path = _as_file(path_or_text)
    given = checked_constants(constants)
    name, parameter_list = find_entry(source.read(path), entry, str(path))
    parameters = (
        parse_parameters(parameter_list, given, name)
        if params is None
        else parameters_from_letters(params, parameter_list, name)
    )
    letters = "".join(parameter.letter for parameter in parameters)
    return Kernel(
        KernelSpec(str(path), name, tuple(sorted(given.items())), letters, ARCHITECTURES), parameters
    )


def _as_file(path_or_text: str | Path) -> Path:
    """The source as a file.  Text gets a name made of its content, so that compiled kernels are found again."""
    if isinstance(path_or_text, Path) or not ("\n" in path_or_text or "{" in path_or_text):
        if not str(path_or_text) or "\0" in str(path_or_text):
            raise InvalidArgumentError(
                f"{path_or_text!r} is no path", hint="a path, or the source text itself"
            )
        path = Path(path_or_text).expanduser().resolve()
        if not path.is_file():
            raise InvalidArgumentError(
                f"there is no kernel source {path}", hint="a path, or the source text itself"
            )
        return path
    directory = Path(tempfile.gettempdir()) / f"cki-sources-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise InvalidArgumentError(f"{directory} belongs to another user", hint="TMPDIR of your own")
    path = directory / f"{hashlib.sha256(path_or_text.encode()).hexdigest()[:16]}.cu"
    if not path.is_file() or path.read_text(encoding="utf-8") != path_or_text:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(path_or_text, encoding="utf-8")
        os.replace(temporary, path)
    return path
