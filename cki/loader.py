"""`cki.load`: compile a kernel of your own and launch it on tensors of any framework, on the GPU or simulated.

    kernel = cki.load("scale.cu", constants={"kBlock": 256})
    kernel((n + 255) // 256, 256, x, y, 0.5, n)

Tensors are passed by address, without a copy, on their framework's current stream; Python numbers become exactly the
type that the kernel declares, or an error.  The same call runs on the simulated device for CPU tensors.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from cki import capture_state, source
from cki.adapter import Adapter, adapter_of, common_adapter, common_device, stream_handle, type_name
from cki.arguments import LETTER_MEANING
from cki.device import DeviceInfo, _current, cuda_device, current
from cki.dtypes import u64
from cki.errors import DeviceError, InvalidArgumentError, InvalidTypeError
from cki.kernel import ARCHITECTURES, ConstantValue, KernelSpec
from cki.launch import Executable, check_geometry, prepare
from cki.load_arguments import (
    Reader,
    check_pointer,
    checked_constants,
    map_argument,
    number_word,
    reader,
    signature,
)
from cki.load_arguments import TensorMap as TensorMap
from cki.operand import Operand
from cki.ops.overlap import byte_range
from cki.ops.spec import Problem
from cki.plan import Plan, Step, TensorMapArg
from cki.signature import Parameter, find_entry, parameters_from_letters, parse_parameters
from cki.tensor import TensorView

if TYPE_CHECKING:
    from cki.own_operation import OwnOperation, Rule

#: Of one kernel; at the limit all go.
_EXECUTABLE_LIMIT = 256
_KIND_LIMIT = 256
#: Kinds of arguments that are tried before their signatures are read.
_RECENT_LIMIT = 8

#: (position, geometry) of each tensor map.
_Maps = tuple[tuple[int, TensorMapArg], ...]
#: grid, block, dynamic shared memory, cluster, cooperative.  Sizes are ints, or all three are triples.
_Geometry = tuple[Any, Any, int, Any, bool]


class _Kind:
    """Arguments of one kind (`cki.load_arguments`): what was found out when they were checked, and their launches."""

    __slots__ = (
        "adapter", "current_stream", "device", "executables", "extents", "is_recurring", "maps", "read",
    )  # fmt: skip

    def __init__(
        self, adapter: Adapter | None, device: DeviceInfo, maps: _Maps, views: Sequence[TensorView | None]
    ) -> None:
        is_sim = device.kind == "sim"
        self.adapter, self.device, self.maps = adapter, device, maps
        #: Bytes that each tensor spans, for the simulated device's bounds check; 0 for what is no tensor.
        self.extents = tuple(0 if view is None else byte_range(view)[1] for view in views) if is_sim else ()
        self.current_stream: Callable[[], int] = (
            (lambda: 0) if adapter is None else adapter.stream_reader(-1 if is_sim else device.index)
        )
        #: By launch geometry as callers give it.
        self.executables: dict[_Geometry, Executable] = {}
        #: Whether such arguments came a second time, and what recognises them since.
        self.is_recurring = False
        self.read: Reader | None = None


class Kernel:
    """A user's kernel, compiled at its first launch on each architecture.  Made by `cki.load`."""

    def __init__(self, spec: KernelSpec, parameters: tuple[Parameter, ...]) -> None:
        self.spec = spec
        self.parameters = parameters
        self._executables: dict[Hashable, Executable] = {}
        self._kinds: dict[Hashable, _Kind] = {}
        # Of the last few recurring kinds: device choice, recogniser, kind.  The tuple is replaced, never changed.
        self._recent: tuple[tuple[DeviceInfo | None, Reader, _Kind], ...] = ()

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
        if not (grid.__class__ is block.__class__ is smem.__class__ is cluster.__class__ is int):
            grid, block, cluster = triple("grid", grid), triple("block", block), triple("cluster", cluster)
            smem = shared_bytes(smem)
        if cooperative.__class__ is not bool:
            raise InvalidTypeError(f"cooperative is {cooperative!r}, not a bool")
        geometry = grid, block, smem, cluster, cooperative
        handle = None if stream is None else stream_handle(stream)
        choice = _current.get()
        finish = None
        for known_choice, read, known in self._recent:
            if known_choice is choice:
                words = read(args)
                if words is not None:
                    kind = known
                    break
        else:
            kind, words, finish = self._examine(args, choice, handle)
        executable = kind.executables.get(geometry) or self._executable(kind, geometry)
        if handle is None:
            handle = kind.current_stream()
        if capture_state.active:
            capture_state.launch(executable, words, handle, args)
        else:
            executable.launch(words, handle)
        if finish is not None:
            finish(handle)

    def operation(self, rule: Rule, *, importable_as: str | None = None) -> OwnOperation:
        """The kernel as an operation that allocates its outputs, and is part of programs that frameworks trace.

        rule: function of the inputs' shapes that returns a `cki.LaunchRule` (`cki.own_operation`).
        importable_as: "package.module:name", where another process finds this operation: saved programs that call it
            (a SavedModel, an XLA compilation cache) then run there.  None: they run in this process alone.
        """
        from cki.own_operation import OwnOperation

        return OwnOperation(self.spec, self.parameters, rule, importable_as)

    def _examine(
        self, args: Sequence[Any], choice: DeviceInfo | None, stream: int | None
    ) -> tuple[_Kind, list[int], Callable[[int], object] | None]:
        """The kind of arguments that were not recognised, their words, and what the framework does after the launch."""
        if len(args) != len(self.parameters):
            raise InvalidTypeError(
                f"{self!r} was given {len(args)} arguments, it takes {len(self.parameters)}"
            )
        found = signature(self.parameters, args)
        if found is not None:
            known = self._kinds.get((choice, found[0]))
            if known is not None:
                self._remember(known, choice, args)
                return known, found[1], None
        adapter, views = self._views(args, stream)
        device = _device_of(adapter, views)
        words, maps = self._words(args, views)
        kind = _Kind(adapter, device, maps, views)
        present = [view for view in views if view is not None]
        # An empty tensor is passed as a null pointer, whatever address it has: it is looked at each time.
        if found is not None and all(view.ptr for view in present):
            if len(self._kinds) >= _KIND_LIMIT:
                self._kinds.clear()
            self._kinds[choice, found[0]] = kind
        if adapter is None or adapter.direct:
            return kind, words, None
        return kind, words, lambda handle: adapter.finish([], present, handle, present[0].device)

    def _remember(self, kind: _Kind, choice: DeviceInfo | None, args: Sequence[Any]) -> None:
        """Try this kind first from now on, if its tensors can be recognised."""
        if not kind.is_recurring:
            assert kind.adapter is not None
            kind.read = reader(kind.adapter, self.parameters, args)
            kind.is_recurring = True
        if kind.read is not None:
            others = [known for known in self._recent if known[2] is not kind]
            self._recent = ((choice, kind.read, kind), *others)[:_RECENT_LIMIT]

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
        unreadable: list[str] = []
        read_only: list[str] = []
        for parameter, tensor in zip(self.parameters, tensors):
            if tensor is None:
                continue
            found = adapter.check(tensor, parameter.name)
            unreadable += found
            if parameter.letter == "P" and not parameter.is_const:
                written = adapter.check(tensor, parameter.name, True)
                read_only += [problem for problem in written if problem not in found]
        if unreadable or read_only:
            error = InvalidTypeError if unreadable else InvalidArgumentError
            raise error(f"{self.spec.entry}: unusable tensors", unreadable + read_only)
        if not adapter.direct:
            return adapter, list(adapter.begin(names, tensors, stream))
        return adapter, [None if tensor is None else adapter.view(tensor) for tensor in tensors]

    def _words(self, args: Sequence[Any], views: Sequence[TensorView | None]) -> tuple[list[int], _Maps]:
        """The 64-bit word of each argument, and the tensor maps (position, geometry)."""
        words, maps, problem = [], [], Problem({}, {})
        for position, (parameter, arg, view) in enumerate(zip(self.parameters, args, views)):
            word = 0
            if parameter.letter == "P":
                check_pointer(parameter, arg, view, problem)
            elif parameter.letter == "T":
                if isinstance(arg, TensorMap) and view is not None:
                    maps.append((position, map_argument(f"argument{position}", arg, view)))
                else:
                    problem.reject_type(f"{parameter.name} is {type_name(type(arg))}, not a cki.TensorMap")
            else:
                word = number_word(parameter, arg, problem)
            words.append(view.ptr if view is not None else word)
        if problem.violations:
            raise problem.refusal(f"{self.spec.entry}: invalid arguments")
        return words, tuple(maps)

    def _executable(self, kind: _Kind, given: _Geometry) -> Executable:
        """The launch of this geometry on arguments of this kind; kinds share it where it does not depend on tensors."""
        grid, block, cluster = (
            triple("grid", given[0]),
            triple("block", given[1]),
            triple("cluster", given[3]),
        )
        key = grid, block, given[2], cluster, given[4], kind.device, kind.maps, kind.extents
        executable = self._executables.get(key)
        if executable is None:
            # Numbers travel like addresses, as a word that each call writes: the kernel reads its low bytes.
            slots = [f"argument{position}" for position in range(len(self.parameters))]
            map_of = dict(kind.maps)
            args = tuple(map_of.get(i) or Operand(slot, (1,), (1,), u64) for i, slot in enumerate(slots))
            letters = "".join("T" if i in map_of else "P" for i in range(len(slots)))
            spec = KernelSpec(
                self.spec.source, self.spec.entry, self.spec.constants, letters, self.spec.archs
            )
            step = Step(spec, grid, block, args, given[2], cluster, given[4], reason="launched by the user")
            problems = check_geometry(step, kind.device)
            if problems:
                raise InvalidArgumentError(
                    f"{self.spec.entry} cannot be launched so on {kind.device}", problems
                )
            executable = prepare(Plan((step,)), kind.device, slots, kind.extents)
            if len(self._executables) >= _EXECUTABLE_LIMIT:
                self._executables.clear()
            self._executables[key] = executable
        if len(kind.executables) >= _EXECUTABLE_LIMIT:
            kind.executables.clear()
        kind.executables[given] = executable
        return executable


def triple(name: str, sizes: int | Sequence[int]) -> tuple[int, int, int]:
    """A grid, block or cluster as three extents.  InvalidTypeError or InvalidArgumentError for what is none."""
    if type(sizes) is int:
        return sizes, 1, 1
    if type(sizes) is tuple and 1 <= len(sizes) <= 3:
        x, y, z = (*sizes, 1, 1)[:3]
        if x.__class__ is y.__class__ is z.__class__ is int:
            return x, y, z
    is_listed = (isinstance(sizes, Sequence) and not isinstance(sizes, (str, bytes))) or (
        isinstance(sizes, np.ndarray) and sizes.ndim == 1
    )
    given: tuple[Any, ...] = tuple(sizes) if is_listed else (sizes,)  # type: ignore[arg-type]
    if not all(_is_integer(size) for size in given):
        raise InvalidTypeError(f"{name} is {sizes!r}, not one to three integers")
    if not 1 <= len(given) <= 3:
        raise InvalidArgumentError(f"{name} is {sizes!r}, not one to three integers")
    x, y, z = (*(int(size) for size in given), 1, 1)[:3]
    return x, y, z


def shared_bytes(smem: object) -> int:
    """Dynamic shared memory.  InvalidTypeError for what is no integer."""
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


def load(
    path_or_text: str | Path,
    entry: str | None = None,
    *,
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
        else parameters_from_letters(params, parameter_list, given, name)
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
    try:
        content = path_or_text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"the source text is no Unicode: {error.reason} at {error.start}"
        ) from None
    path = directory / f"{hashlib.sha256(content).hexdigest()[:16]}.cu"
    if not path.is_file() or path.read_text(encoding="utf-8") != path_or_text:
        temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        temporary.write_text(path_or_text, encoding="utf-8")
        os.replace(temporary, path)
    return path
