"""CKI inside TensorFlow's XLA: calls in functions with `jit_compile=True`, and TensorFlow's stream learned from a call.

TensorFlow's own XLA takes handlers of the foreign function interface (`cki.adapters.xla_ffi`), and its operation
`XlaCallModule` puts a StableHLO program into a graph: one custom call, whose text says all (`cki.adapters.xla_calls`).
XLA compiles it together with what is around it; memory, workspace included, and stream are XLA's.  Where sizes are not
known while a function is traced the text says no shapes: the handler reads them at each call, and takes workspace then.

A kernel of our own (`cki.adapters.tf_kernels`) is not told TensorFlow's compute stream: `TF_GetStream` answers for
plugged-in devices only.  An XLA call on the same device is, and TensorFlow has one compute stream a device.
"""

from __future__ import annotations

import ctypes
import functools
import json
import operator
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cki import dtypes
from cki.adapters import tf_c_api, xla_calls, xla_ffi
from cki.adapters.once import once
from cki.adapters.tf_kernels import Place
from cki.adapters.tf_node import Node, NodeCall
from cki.adapters.tf_types import TO_CODE, TO_TF
from cki.adapters.xla_calls import XlaCall
from cki.adapters.xla_ffi import Invocation, OpenInvocation
from cki.errors import CkiError, DeviceError, UnsupportedError

_TARGET, _OPEN_TARGET, _STREAM_TARGET = "cki", "cki_open", "cki_stream"
#: Where the function table is asked for: XLA's C function, and the C++ function behind it, which takes nothing too.
_GETTERS = ("XLA_FFI_GetApi", "_ZN3xla3ffi12GetXlaFfiApiEv")
#: A dimension: its size; or (position, axis) of the argument whose dimension it is; or, of an argument, None.
Extent = int | tuple[int, int] | None
#: (element type by CKI's name, dimensions).
Tensor = tuple[str, Sequence[Extent]]
#: Of XlaCallModule: text modules, no serialised arguments.
_MODULE_VERSION = 9

# Held for good: XLA may call a handler for as long as the process lives.
_handlers: list[Any] = []
_places: dict[int, Place] = {}
_learning = threading.Lock()
_learned: dict[bytes, Place] = {}


@once  # type: ignore[untyped-decorator]
def register() -> None:
    """Make the handlers known to TensorFlow's XLA.  UnsupportedError says what this TensorFlow lacks."""
    address = 0
    for name in _GETTERS:
        getter = tf_c_api.find_symbol(name)
        if getter is not None:
            getter.restype, getter.argtypes = ctypes.c_void_p, []
            address = getter() or 0
            break
    if not address:
        raise UnsupportedError(
            f"TensorFlow {tf.__version__} does not show XLA's foreign function interface",
            [f"{name} is not in its libraries" for name in _GETTERS],
            "TensorFlow 2.20 or 2.21",
        )
    version = xla_ffi.api_version(address)
    for target, function, platform, is_gpu in (
        (_TARGET, xla_calls.run, "Host", False),
        (_TARGET, xla_calls.run, "CUDA", True),
        (_OPEN_TARGET, functools.partial(_run_open, False), "Host", False),
        (_OPEN_TARGET, functools.partial(_run_open, True), "CUDA", True),
        (_STREAM_TARGET, _learn, "CUDA", True),
    ):
        handler = xla_ffi.make_handler(function, version, has_stream=is_gpu, is_open=target == _OPEN_TARGET)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
        xla_ffi.register(address, target, platform, handler)
        _handlers.append(handler)


def is_compiling() -> bool:
    """Whether the graph that is being built is for XLA: in a function with jit_compile=True, or called by one."""
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def call(call: XlaCall, tensors: Sequence[Any]) -> list[Any]:
    """The operation as part of the graph for XLA.  Returns outputs, then the new values of what it writes."""
    register()
    is_sim = call.device.startswith("sim:")
    indices = [0] if is_sim else [place(number).ordinal for number in range(_require_gpus(call.spec.name))]
    whole = xla_calls.prepare_call(call.checked(), indices)
    results: list[Tensor] = [(output.dtype.name, tuple(output.shape)) for _, output in whole.outputs()]
    num_outputs = len(results)
    written = whole.written()
    results += [whole.tensors[index][1:] for index in written]
    num_results = len(results)
    if whole.workspace:
        results.append((dtypes.u8.name, (whole.workspace,)))
    aliases = [(num_outputs + n, index) for n, index in enumerate(written)]
    text = _program(_TARGET, [(e, s) for _, e, s in whole.tensors], results, aliases, whole.text())
    return _run_module(text, tensors, results, "CPU" if is_sim else "CUDA")[:num_results]


def call_open(
    own: NodeCall,
    arguments: Sequence[Tensor],
    results: Sequence[Tensor],
    written: Sequence[int],
    tensors: Sequence[Any],
) -> list[Any]:
    """`call` where sizes are open.  results: outputs, then the new values of the arguments at `written`."""
    register()
    is_sim = own.device.startswith("sim:")
    if not is_sim:
        _require_gpus(own.spec.name)
    num_outputs = len(results) - len(written)
    aliases = [(num_outputs + n, index) for n, index in enumerate(written)]
    content = json.dumps([own.text().decode(), [element for element, _ in arguments]])
    text = _program(_OPEN_TARGET, arguments, results, aliases, content)
    return _run_module(text, tensors, results, "CPU" if is_sim else "CUDA")


def _require_gpus(operation: str) -> int:
    count = num_gpus()
    if not count:
        raise DeviceError(
            f"{operation}: TensorFlow sees no GPU, and the current device is cuda",
            hint='the simulated device: `with cki.device("sim"):` around the tracing, or CKI_DEVICE=sim',
        )
    return count


@functools.lru_cache(maxsize=4096)
def _open_node(text: bytes) -> Node:
    own, types = json.loads(text)
    return Node(own.encode(), [TO_CODE[name] for name in types])


def _run_open(is_gpu: bool, invocation: OpenInvocation) -> None:
    """What XLA's handlers do for a call whose sizes were open."""
    call = invocation.call
    index = xla_calls.device_index(call)
    bits = functools.reduce(operator.or_, call.arguments, 0)
    launch = _open_node(call.text).launch_for(is_gpu, index, invocation.shapes, call.arguments, bits)
    results = list(call.results)
    alignment = 256 if is_gpu else 64
    if any(address % alignment for address in results):
        raise CkiError(f"XLA placed a result at no multiple of {alignment} bytes")
    if launch.workspace is not None:
        results.append(invocation.allocate(launch.workspace[0]))
    launch.prepared.launch(call._replace(results=results))


def _run_module(text: str, tensors: Sequence[Any], results: Sequence[Tensor], platform: str) -> list[Any]:
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    found = gen_xla_ops.xla_call_module(
        list(tensors), version=_MODULE_VERSION, module=text.encode(), Sout=[_known(shape) for _, shape in results],
        Tout=[TO_TF[element] for element, _ in results], platforms=[platform],
    )  # fmt: skip
    return list(found)


def _known(shape: Sequence[Extent]) -> Any:
    return tf.TensorShape([extent if isinstance(extent, int) else None for extent in shape])


# ---------------------------------------------------------------------------------------------------------------------
# TensorFlow's stream


def num_gpus() -> int:
    """How many GPUs TensorFlow computes on."""
    return len(tf.config.list_logical_devices("GPU"))


def place(number: int) -> Place:
    """The compute stream of TensorFlow's GPU of that number, and the CUDA device that it is."""
    found = _places.get(number)
    return found if found is not None else _find_place(number)


def _find_place(number: int) -> Place:
    register()
    with _learning:
        if number not in _places:
            text = _program(_STREAM_TARGET, [("f32", (1,))], [("f32", (1,))], [], str(number))
            with tf.init_scope(), tf.device(f"GPU:{number}"):
                (result,) = _run_module(text, [tf.zeros(1)], [("f32", (1,))], "CUDA")
                result.numpy()
            try:
                _places[number] = _learned[str(number).encode()]
            except KeyError:
                raise DeviceError(
                    f"TensorFlow's GPU:{number} did not say on which stream it computes"
                ) from None
    return _places[number]


def _learn(invocation: Invocation) -> None:
    from cki.adapters.cupy import device_of_pointer

    ordinal = device_of_pointer(invocation.arguments[0])
    _learned[invocation.text] = Place(invocation.stream, ordinal)


# ---------------------------------------------------------------------------------------------------------------------
# StableHLO programs of one custom call, as text, for XlaCallModule.  Sizes may be open: a dimension of an argument that
# is not known is `?`, and a dimension of a result may be that of an argument.  XLA compiles for known sizes all the
# same: TensorFlow fills in those of each call and derives the others from the operands of the custom call that hold
# the results' shapes.

_ELEMENTS = {
    "f64": "f64", "f32": "f32", "f16": "f16", "bf16": "bf16", "e4m3": "f8E4M3FN", "e5m2": "f8E5M2", "i64": "i64",
    "i32": "i32", "i16": "i16", "i8": "i8", "u64": "ui64", "u32": "ui32", "u16": "ui16", "u8": "ui8", "bool": "i1",
}  # fmt: skip


def _program(
    target: str,
    arguments: Sequence[Tensor],
    results: Sequence[Tensor],
    aliases: Sequence[tuple[int, int]],
    text: str,
) -> str:
    """A module of one custom call of `target`, whose one attribute is `text`.

    aliases: (result, argument) pairs that share memory.
    """
    taken, given = (
        [_element_type(*argument) for argument in arguments],
        [_element_type(*result) for result in results],
    )
    names = [f"%arg{index}" for index in range(len(arguments))]
    signature = ", ".join(f"{name}: {kind}" for name, kind in zip(names, taken))
    is_open = any(not isinstance(extent, int) for _, shape in [*arguments, *results] for extent in shape)
    lines: list[str] = []
    operands, kinds = list(names), list(taken)
    layouts = [_layout(len(shape)) for _, shape in arguments]
    options = ["api_version = 4 : i32", f'backend_config = {{call = "{_escaped(text)}"}}']
    if is_open:
        positions = []
        for index, (_, shape) in enumerate(results):
            lines += _shape_of(f"%shape{index}", shape, taken)
            positions.append(str(len(operands)))
            operands.append(f"%shape{index}")
            kinds.append(f"tensor<{len(shape)}xi32>")
            layouts.append(_layout(1))
        listed = f"dense<[{', '.join(positions)}]> : tensor<{len(positions)}xi64>"
        options.append(f"indices_of_shape_operands = {listed}")
    options.append(f"operand_layouts = [{', '.join(layouts)}]")
    options.append(f"result_layouts = [{', '.join(_layout(len(shape)) for _, shape in results)}]")
    many = len(results) > 1
    if aliases:
        listed = ", ".join(
            f"#stablehlo.output_operand_alias<output_tuple_indices = [{result if many else ''}], "
            f"operand_index = {argument}, operand_tuple_indices = []>"
            for result, argument in aliases
        )
        options.append(f"output_operand_aliases = [{listed}]")
    returned = ", ".join(f"%0#{index}" for index in range(len(results))) if many else "%0"
    shown = ", ".join(given)
    lines.append(
        f"%0{f':{len(results)}' if many else ''} = stablehlo.custom_call @{target}({', '.join(operands)}) "
        f"{{{', '.join(options)}}} : ({', '.join(kinds)}) -> {f'({shown})' if many else shown}"
    )
    body = "".join(f"    {line}\n" for line in [*lines, f"return {returned} : {shown}"])
    mark = (
        "attributes {jax.uses_shape_polymorphism = true} " if is_open else ""
    )  # TensorFlow's sign for open sizes
    return f"module @cki {mark}{{\n  func.func public @main({signature}) -> ({shown}) {{\n{body}  }}\n}}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\5C").replace('"', "\\22")


def _element_type(element: str, shape: Sequence[Extent]) -> str:
    extents = "".join(f"{extent if isinstance(extent, int) else '?'}x" for extent in shape)
    return f"tensor<{extents}{_ELEMENTS[element]}>"


def _layout(rank: int) -> str:
    """Row-major, whatever XLA would choose."""
    if not rank:
        return "dense<> : tensor<0xindex>"
    return f"dense<[{', '.join(str(axis) for axis in reversed(range(rank)))}]> : tensor<{rank}xindex>"


def _shape_of(name: str, shape: Sequence[Extent], argument_types: Sequence[str]) -> list[str]:
    """Operations that compute a result's shape, a vector of i32."""
    lines, parts = [], []
    for axis, extent in enumerate(shape):
        part = f"{name}_{axis}"
        if isinstance(extent, tuple):
            argument, of_axis = extent
            lines.append(
                f"{part}_size = stablehlo.get_dimension_size %arg{argument}, dim = {of_axis} : "
                f"({argument_types[argument]}) -> tensor<i32>"
            )
            lines.append(f"{part} = stablehlo.reshape {part}_size : (tensor<i32>) -> tensor<1xi32>")
        else:
            lines.append(f"{part} = stablehlo.constant dense<{extent}> : tensor<1xi32>")
        parts.append(part)
    if not parts:
        return [f"{name} = stablehlo.constant dense<> : tensor<0xi32>"]
    kinds = ", ".join("tensor<1xi32>" for _ in parts)
    lines.append(
        f"{name} = stablehlo.concatenate {', '.join(parts)}, dim = 0 : ({kinds}) -> tensor<{len(parts)}xi32>"
    )
    return lines
