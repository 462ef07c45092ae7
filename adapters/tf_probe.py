"""Is TensorFlow's C interface what this package was written for?  One operation of our own is run on known tensors.

Its kernel reads what it is given through every function that the others use, and compares: types, ranks, extents,
bytes and contents; outputs and temporary memory must be writable and aligned.  So another layout or meaning shows
before any result depends on it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import tensorflow as tf

from cki.adapters import tf_c_api
from cki.adapters.once import once
from cki.adapters.tf_c_api import AllocatorAttributes, Compute, Create
from cki.adapters.tf_types import FROM_CODE, TO_CODE
from cki.errors import CkiError, UnsupportedError

_NAME = "CkiProbe"
_TEXT = b'{"probe": "\xc3\xa9"}'
_MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
#: (type, extents) of the tensors that the operation is given, and the bytes of the first.
_GIVEN = (("f32", (2, 3)), ("i64", (0, 4)), ("bf16", ()))
_held: list[Any] = []


@once  # type: ignore[untyped-decorator]
def verify() -> None:
    """Run the operation; UnsupportedError says what is not as expected."""
    problems: list[str] = []
    _register(problems)
    with tf.init_scope(), tf.device("CPU:0"):
        given = [tf.constant(_MATRIX), tf.zeros((0, 4), tf.int64), tf.constant(1.5, tf.bfloat16)]
        try:
            result = _execute(given)
        except Exception as error:
            raise _refusal([str(error)]) from error
        if not problems and not np.array_equal(result.numpy(), 2 * _MATRIX):
            problems.append(f"the result is {result.numpy().tolist()}")
    if problems:
        raise _refusal(problems)


def _refusal(problems: list[str]) -> UnsupportedError:
    return UnsupportedError(
        f"TensorFlow {tf.__version__} does not do what its C interface did in the versions that CKI knows",
        problems,
        "TensorFlow 2.20 or 2.21",
    )


def _execute(tensors: list[Any]) -> Any:
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import context

    session = context.context()
    session.ensure_initialized()
    types = [TO_CODE["f32"]]
    (result,) = pywrap_tfe.TFE_Py_FastPathExecute(session, _NAME, None, tensors, "Tout", types, "call", _TEXT)
    return result


def _register(problems: list[str]) -> None:
    api = tf_c_api.load()

    def create(construction: int) -> int:
        status = api.TF_NewStatus()
        size, total = ctypes.c_int32(), ctypes.c_int32()
        api.TF_OpKernelConstruction_GetAttrSize(construction, b"call", size, total, status)
        text = ctypes.create_string_buffer(len(_TEXT) + 1)
        if total.value == len(_TEXT):
            api.TF_OpKernelConstruction_GetAttrString(construction, b"call", text, total.value, status)
        if text.value != _TEXT:
            problems.append(f"a text of {total.value} bytes is read as {text.value!r}")
        api.TF_OpKernelConstruction_GetAttrSize(construction, b"T", size, total, status)
        codes = (ctypes.c_int * len(_GIVEN))()
        if size.value == len(_GIVEN):
            api.TF_OpKernelConstruction_GetAttrTypeList(construction, b"T", codes, size.value, status)
        if list(codes) != [TO_CODE[name] for name, _ in _GIVEN]:
            problems.append(f"a list of {size.value} types is read as {list(codes)}")
        api.TF_DeleteStatus(status)
        return 1

    def compute(number: int, context: int) -> None:
        status = api.TF_NewStatus()
        try:
            if not problems:
                _compute(api, number, context, status)
        except Exception as error:
            problems.append(str(error))
        if problems:
            api.TF_SetStatus(status, tf_c_api.INTERNAL, "; ".join(problems).encode())
            api.TF_OpKernelContext_Failure(context, status)
        api.TF_DeleteStatus(status)

    _held.extend([Create(create), Compute(compute)])
    for callback in _held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
    api.define_op(
        _NAME, "tensors: T", "outputs: Tout", ("T: list(type) >= 1", "Tout: list(type) >= 0", "call: string")
    )
    api.define_kernel(_NAME, "CPU", *_held)


def _compute(api: Any, number: int, context: int, status: int) -> None:
    _same("the kernel's number", number, 1)
    _same("the number of inputs", api.TF_NumInputs(context), len(_GIVEN))
    held, addresses = [], []
    for position, (element, shape) in enumerate(_GIVEN):
        handle = ctypes.c_void_p()
        api.TF_GetInput(context, position, ctypes.byref(handle), status)
        api.require(status, f"input {position}")
        tensor: Any = handle.value
        held.append(tensor)
        _same(f"the type of input {position}", api.TF_TensorType(tensor), TO_CODE[element])
        extents = tuple(api.TF_Dim(tensor, axis) for axis in range(api.TF_NumDims(tensor)))
        _same(f"the shape of input {position}", extents, shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * FROM_CODE[TO_CODE[element]].itemsize
        _same(f"the bytes of input {position}", api.TF_TensorByteSize(tensor), nbytes)
        addresses.append(api.TF_TensorData(tensor))
    content = ctypes.string_at(addresses[0], _MATRIX.nbytes)
    _same("the content of input 0", content, _MATRIX.tobytes())
    dims = (ctypes.c_int64 * 2)(2, 3)
    output = api.TF_AllocateOutput(context, 0, TO_CODE["f32"], dims, 2, _MATRIX.nbytes, status)
    api.require(status, "an output")
    attributes = AllocatorAttributes.on_device()
    size = (ctypes.c_int64 * 1)(1000)
    temporary = api.TF_AllocateTemp(context, TO_CODE["u8"], size, 1, ctypes.byref(attributes), status)
    api.require(status, "temporary memory")
    for what, tensor in (("an output", output), ("temporary memory", temporary)):
        _same(f"{what} modulo 16", api.TF_TensorData(tensor) % 16, 0)
    _same("the bytes of temporary memory", api.TF_TensorByteSize(temporary), 1000)
    ctypes.memset(api.TF_TensorData(temporary), 255, 1000)
    ctypes.memmove(api.TF_TensorData(output), (2 * _MATRIX).tobytes(), _MATRIX.nbytes)
    for tensor in [*held, output, temporary]:
        api.TF_DeleteTensor(tensor)


def _same(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise CkiError(f"{what} is {found!r}, not {wanted!r}")
