"""CKI inside TensorFlow's XLA: calls in functions with `jit_compile=True`, and TensorFlow's stream learned from a call.

TensorFlow's own XLA takes handlers of the foreign function interface (`cki.adapters.xla_ffi`), and its operation
`XlaCallModule` puts a StableHLO program into a graph: one custom call, whose text says all (`cki.adapters.xla_calls`).
XLA compiles it together with what is around it; memory, workspace included, and stream are XLA's.

A kernel of our own (`cki.adapters.tf_kernels`) is not told TensorFlow's compute stream: `TF_GetStream` answers for
plugged-in devices only.  An XLA call on the same device is, and TensorFlow has one compute stream a device.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cki import dtypes
from cki.adapters import tf_c_api, xla_calls, xla_ffi
from cki.adapters.tf_kernels import Place
from cki.adapters.tf_types import TO_TF
from cki.adapters.xla_calls import XlaCall
from cki.adapters.xla_ffi import Invocation
from cki.errors import DeviceError, UnsupportedError

_TARGET, _STREAM_TARGET = "cki", "cki_stream"
#: Where the function table is asked for: XLA's C function, and the C++ function behind it, which takes nothing too.
_GETTERS = ("XLA_FFI_GetApi", "_ZN3xla3ffi12GetXlaFfiApiEv")
#: Of XlaCallModule: text modules, no serialised arguments.
_MODULE_VERSION = 9

_ELEMENTS = {
    "f64": "f64", "f32": "f32", "f16": "f16", "bf16": "bf16", "e4m3": "f8E4M3FN", "e5m2": "f8E5M2", "i64": "i64",
    "i32": "i32", "i16": "i16", "i8": "i8", "u64": "ui64", "u32": "ui32", "u16": "ui16", "u8": "ui8", "bool": "i1",
}  # fmt: skip

# Held for good: XLA may call a handler for as long as the process lives.
_handlers: list[Any] = []
_places: dict[int, Place] = {}
_learning = threading.Lock()
_learned: dict[bytes, Place] = {}


@functools.cache
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
    for target, function, platform, has_stream in (
        (_TARGET, xla_calls.run, "Host", False),
        (_TARGET, xla_calls.run, "CUDA", True),
        (_STREAM_TARGET, _learn, "CUDA", True),
    ):
        handler = xla_ffi.make_handler(function, version, has_stream=has_stream)
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
    indices = [0] if is_sim else [place(number).ordinal for number in range(num_gpus())]
    if not indices:
        raise DeviceError(
            f"{call.operation}: TensorFlow sees no GPU, and the current device is cuda",
            hint='the simulated device: `with cki.device("sim"):` around the tracing, or CKI_DEVICE=sim',
        )
    whole = xla_calls.prepare_call(call.checked(), indices)
    results = [(output.dtype.name, tuple(output.shape)) for _, output in whole.outputs()]
    num_outputs = len(results)
    written = whole.written()
    results += [whole.tensors[index][1:] for index in written]
    num_results = len(results)
    if whole.workspace:
        results.append((dtypes.u8.name, (whole.workspace,)))
    aliases = [(num_outputs + n, index) for n, index in enumerate(written)]
    text = _module(_TARGET, [(e, s) for _, e, s in whole.tensors], results, aliases, whole.text())
    return _run_module(text, tensors, results, "CPU" if is_sim else "CUDA")[:num_results]


def _run_module(
    text: str, tensors: Sequence[Any], results: Sequence[tuple[str, tuple[int, ...]]], platform: str
) -> list[Any]:
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    found = gen_xla_ops.xla_call_module(
        list(tensors), version=_MODULE_VERSION, module=text.encode(), Sout=[shape for _, shape in results],
        Tout=[TO_TF[element] for element, _ in results], platforms=[platform],
    )  # fmt: skip
    return list(found)


def _type(element: str, shape: Sequence[int]) -> str:
    return f"tensor<{''.join(f'{extent}x' for extent in shape)}{_ELEMENTS[element]}>"


def _layout(shape: Sequence[int]) -> str:
    """Row-major, whatever XLA would choose."""
    if not shape:
        return "dense<> : tensor<0xindex>"
    return f"dense<[{', '.join(str(axis) for axis in reversed(range(len(shape))))}]> : tensor<{len(shape)}xindex>"


def _module(
    target: str, arguments: Sequence[tuple[str, Sequence[int]]], results: Sequence[tuple[str, Sequence[int]]],
    aliases: Sequence[tuple[int, int]], text: str,
) -> str:  # fmt: skip
    """A StableHLO module of one custom call.  aliases: (result, argument) pairs that share memory."""
    taken = [_type(*argument) for argument in arguments]
    given = [_type(*result) for result in results]
    names = [f"%arg{index}" for index in range(len(arguments))]
    signature = ", ".join(f"{name}: {kind}" for name, kind in zip(names, taken))
    escaped = text.replace("\\", "\\5C").replace('"', "\\22")
    options = [
        "api_version = 4 : i32",
        f'backend_config = {{call = "{escaped}"}}',
        f"operand_layouts = [{', '.join(_layout(shape) for _, shape in arguments)}]",
        f"result_layouts = [{', '.join(_layout(shape) for _, shape in results)}]",
    ]
    if aliases:
        listed = ", ".join(
            f"#stablehlo.output_operand_alias<output_tuple_indices = [{result if len(results) > 1 else ''}], "
            f"operand_index = {argument}, operand_tuple_indices = []>"
            for result, argument in aliases
        )
        options.append(f"output_operand_aliases = [{listed}]")
    many = len(results) > 1
    returned = ", ".join(f"%0#{index}" for index in range(len(results))) if many else "%0"
    kinds = ", ".join(given)
    return (
        f"module @cki {{\n  func.func public @main({signature}) -> ({kinds}) {{\n"
        f"    %0{f':{len(results)}' if many else ''} = stablehlo.custom_call @{target}({', '.join(names)}) "
        f"{{{', '.join(options)}}} : ({', '.join(taken)}) -> {f'({kinds})' if many else kinds}\n"
        f"    return {returned} : {kinds}\n  }}\n}}\n"
    )


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
            text = _module(_STREAM_TARGET, [("f32", (1,))], [("f32", (1,))], [], str(number))
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
