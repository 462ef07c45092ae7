"""TensorFlow's C interface for operations and kernels, spoken from Python.

`libtensorflow_framework` exports what a compiled operation library would call: builders of operations and kernels
(`tensorflow/c/ops.h`, `kernels.h`), and a kernel's access to its inputs, outputs and temporary memory (`tf_tensor.h`).
Nothing is compiled.  `load` looks for every function that is used and says which are missing; `cki.adapters.tf_kernels`
then runs one operation of its own before anything else is trusted.

Functions that may wait (allocations) let go of Python's lock, the others keep it: a kernel calls dozens of them, and
each change of hands costs more than the call.  Those that a kernel calls for each tensor are there a second time, as
functions that convert no arguments (`BareFunctions`), which halves what they cost.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, NamedTuple

from cki.errors import UnsupportedError

#: Codes of TF_Code, which are those of absl::StatusCode.
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, INTERNAL = 3, 8, 9, 13


class AllocatorAttributes(ctypes.Structure):
    """TF_AllocatorAttributes.  TensorFlow takes the size up to the end of `on_host`, without padding."""

    _fields_ = (("struct_size", c_size_t), ("on_host", ctypes.c_ubyte))

    @classmethod
    def on_device(cls) -> AllocatorAttributes:
        """Memory of the device that the kernel runs on."""
        return cls(cls.on_host.offset + cls.on_host.size, 0)


class Pointer(c_void_p):
    """A pointer that ctypes hands over as an object, not as an int.  False when it is null."""


#: Called when a kernel is made for a node: (construction) -> what `Compute` gets; and for each run of it, with that
#: number and the context as a `Pointer`.
Create = ctypes.CFUNCTYPE(c_void_p, c_void_p)
Compute = ctypes.CFUNCTYPE(None, c_void_p, Pointer)
Delete = ctypes.CFUNCTYPE(None, c_void_p)


class BareFunctions(NamedTuple):
    """Functions that are called for every tensor of every run, and convert no arguments.

    Pointers are passed as ctypes objects, C ints as Python's, sizes as c_size_t.
    """

    TF_GetInput: Any
    TF_TensorData: Any
    TF_NumDims: Any
    TF_Dim: Any
    TF_DeleteTensor: Any
    TF_GetDeviceId: Any
    TF_AllocateOutput: Any
    TF_AllocateTemp: Any


_P, _I, _S = c_void_p, c_int, c_char_p
_DIMS = POINTER(c_int64)

# name -> (result, arguments)
_QUICK: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "TF_NewStatus": (_P, ()),
    "TF_DeleteStatus": (None, (_P,)),
    "TF_GetCode": (_I, (_P,)),
    "TF_Message": (_S, (_P,)),
    "TF_SetStatus": (None, (_P, _I, _S)),
    "TF_NewOpDefinitionBuilder": (_P, (_S,)),
    "TF_OpDefinitionBuilderAddInput": (None, (_P, _S)),
    "TF_OpDefinitionBuilderAddOutput": (None, (_P, _S)),
    "TF_OpDefinitionBuilderAddAttr": (None, (_P, _S)),
    "TF_OpDefinitionBuilderSetShapeInferenceFunction": (None, (_P, _P)),
    "TF_RegisterOpDefinition": (None, (_P, _P)),
    "TF_NewKernelBuilder": (_P, (_S, _S, Create, Compute, Delete)),
    "TF_RegisterKernelBuilder": (None, (_S, _P, _P)),
    "TF_OpKernelConstruction_GetAttrSize": (None, (_P, _S, POINTER(c_int32), POINTER(c_int32), _P)),
    "TF_OpKernelConstruction_GetAttrString": (None, (_P, _S, _P, c_size_t, _P)),
    "TF_OpKernelConstruction_GetAttrTypeList": (None, (_P, _S, POINTER(c_int), _I, _P)),
    "TF_OpKernelConstruction_Failure": (None, (_P, _P)),
    "TF_OpKernelContext_Failure": (None, (_P, _P)),
    "TF_NumInputs": (_I, (_P,)),
    "TF_GetInput": (None, (_P, _I, POINTER(_P), _P)),
    "TF_GetDeviceId": (_I, (_P,)),
    "TF_TensorData": (_P, (_P,)),
    "TF_TensorByteSize": (c_size_t, (_P,)),
    "TF_TensorType": (_I, (_P,)),
    "TF_NumDims": (_I, (_P,)),
    "TF_Dim": (c_int64, (_P, _I)),
    "TF_DeleteTensor": (None, (_P,)),
}
_WAITING: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "TF_AllocateOutput": (_P, (_P, _I, _I, _DIMS, _I, c_size_t, _P)),
    "TF_ForwardInputOrAllocateOutput": (_P, (_P, POINTER(_I), _I, _I, _DIMS, _I, POINTER(_I), _P)),
    "TF_AllocateTemp": (_P, (_P, _I, _DIMS, _I, POINTER(AllocatorAttributes), _P)),
}
#: A C function of the type of a shape function: every output is of unknown shape.
_UNKNOWN_SHAPES = "TF_ShapeInferenceContextSetUnknownShape"


class TensorFlowApi:
    """The functions by their C names, and what is made of them.

    bare: some of them as functions that convert no arguments.
    """

    def __init__(self, functions: dict[str, Any], bare: BareFunctions, unknown_shapes: int) -> None:
        self.__dict__.update(functions)
        self.bare = bare
        self._unknown_shapes = unknown_shapes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    def require(self, status: int, what: str) -> None:
        """Raise RuntimeError with TensorFlow's words when a status is not OK."""
        if self.TF_GetCode(status):
            raise RuntimeError(
                f"TensorFlow refused {what}: {self.TF_Message(status).decode(errors='replace')}"
            )

    def define_op(self, name: str, inputs: str, outputs: str, attributes: tuple[str, ...]) -> None:
        """Register an operation.  inputs, outputs, attributes: as TensorFlow's REGISTER_OP spells them.

        Its C shape function leaves shapes open: it can read no attributes, on which shapes depend.  Who builds a graph
        sets the shapes (`cki.adapters.tf_graph`), and a saved graph holds them.
        """
        builder, status = self.TF_NewOpDefinitionBuilder(name.encode()), self.TF_NewStatus()
        for attribute in attributes:
            self.TF_OpDefinitionBuilderAddAttr(builder, attribute.encode())
        self.TF_OpDefinitionBuilderAddInput(builder, inputs.encode())
        self.TF_OpDefinitionBuilderAddOutput(builder, outputs.encode())
        self.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, self._unknown_shapes)
        self.TF_RegisterOpDefinition(builder, status)  # takes the builder
        self.require(status, f"operation {name}")
        self.TF_DeleteStatus(status)

    def define_kernel(self, name: str, device: str, create: Any, compute: Any) -> None:
        """Register the kernel of an operation on "CPU" or "GPU".  create, compute: `Create`, `Compute`, kept for good.

        There is no delete function: TensorFlow destroys kernels after the interpreter has gone.
        """
        builder = self.TF_NewKernelBuilder(name.encode(), device.encode(), create, compute, Delete())
        status = self.TF_NewStatus()
        self.TF_RegisterKernelBuilder(f"{name}{device}".encode(), builder, status)  # takes the builder
        self.require(status, f"the {device} kernel of {name}")
        self.TF_DeleteStatus(status)


def libraries() -> list[str]:
    """Paths of TensorFlow's shared libraries, those that exist."""
    import tensorflow as tf

    home = os.path.dirname(tf.__file__)
    names = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
    return [path for path in (os.path.join(home, name) for name in names) if os.path.exists(path)]


def find_symbol(name: str) -> Any:
    """A function of TensorFlow's libraries that waits for nothing, or None.  Its types are the caller's to set."""
    for path in libraries():
        found = getattr(ctypes.PyDLL(path), name, None)
        if found is not None:
            return found
    return None


@functools.cache
def load() -> TensorFlowApi:
    """The functions of the TensorFlow that is imported.  UnsupportedError names those that it does not export."""
    import tensorflow as tf

    paths = libraries()
    functions: dict[str, Any] = {}
    bare: dict[str, Any] = {}
    missing = []
    for table, kind in ((_QUICK, ctypes.PyDLL), (_WAITING, ctypes.CDLL)):
        opened = [kind(path) for path in paths]
        for name, (result, arguments) in table.items():
            library = next((lib for lib in opened if hasattr(lib, name)), None)
            if library is None:
                missing.append(name)
                continue
            found = functions[name] = getattr(library, name)
            found.restype, found.argtypes = result, list(arguments)
            if name in BareFunctions._fields:
                bare[name] = library[name]  # another object for the same function
                bare[name].restype = Pointer if kind is ctypes.CDLL else result
    unknown_shapes = find_symbol(_UNKNOWN_SHAPES)
    if unknown_shapes is None:
        missing.append(_UNKNOWN_SHAPES)
    if missing:
        where = ", ".join(os.path.basename(path) for path in paths) or "no library of TensorFlow's"
        raise UnsupportedError(
            f"TensorFlow {tf.__version__} exports too little of its C interface for operations of CKI's own",
            [f"{name} is not in {where}" for name in missing],
            "TensorFlow 2.20 or 2.21",
        )
    return TensorFlowApi(functions, BareFunctions(**bare), ctypes.cast(unknown_shapes, c_void_p).value or 0)
