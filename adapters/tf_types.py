"""TensorFlow's element types and CKI's, and the dense tensor inside a variable."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from cki import dtypes
from cki.dtypes import DType

#: Types that pass by DLPack.
DLPACK_TYPES = {
    tf.float64: dtypes.f64, tf.float32: dtypes.f32, tf.float16: dtypes.f16, tf.bfloat16: dtypes.bf16,
    tf.int64: dtypes.i64, tf.int32: dtypes.i32, tf.int16: dtypes.i16, tf.int8: dtypes.i8,
    tf.uint64: dtypes.u64, tf.uint32: dtypes.u32, tf.uint16: dtypes.u16, tf.uint8: dtypes.u8, tf.bool: dtypes.bool_,
}  # fmt: skip


def _with_float8() -> dict[Any, DType]:
    found = dict(DLPACK_TYPES)
    for name, dtype in (("float8_e4m3fn", dtypes.e4m3), ("float8_e5m2", dtypes.e5m2)):
        try:
            found[tf.as_dtype(name)] = dtype
        except TypeError:  # a TensorFlow without them
            continue
    return found


#: Types that an operation of CKI's own takes: 8-bit floats too.
FROM_TF = _with_float8()
TO_TF = {dtype.name: tf_dtype for tf_dtype, dtype in FROM_TF.items()}
#: TF_DataType -> element type, and name -> TF_DataType.
FROM_CODE = {tf_dtype.as_datatype_enum: dtype for tf_dtype, dtype in FROM_TF.items()}
TO_CODE = {name: int(tf_dtype.as_datatype_enum) for name, tf_dtype in TO_TF.items()}
#: TF_DataTypes of which TensorFlow keeps what comes from NumPy in host memory, also where a GPU is asked for.
HOST_KEPT = {TO_CODE[name] for name in ("e4m3", "e5m2") if name in TO_CODE}

#: Not the type of a tensor made here: that would initialise TensorFlow's devices before the program configures them.
EagerTensor = ops.EagerTensor


def as_tensor_or_variable(value: Any) -> Any:
    """The tf.Tensor or tf.Variable of a tensor, a tf.Variable or a Keras variable; all share memory."""
    while not isinstance(value, (tf.Tensor, tf.Variable)):
        inner = value.value
        value = inner() if callable(inner) else inner
    return value
