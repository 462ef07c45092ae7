"""TensorFlow tensors in eager mode: DLPack and a host synchronisation.

TensorFlow computes on a private stream.  `to_dlpack` blocks until that stream is idle, and `finish` blocks until
our kernels are done, so every order is right and nothing is copied.  Outputs are TensorFlow's own memory, made by
its `Empty` op: nothing of ours has to outlive the call.  Inside `tf.function` tensors are symbolic: refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cki import dtypes
from cki.adapter import Adapter, IndirectAdapter, type_name
from cki.dlpack import from_capsule
from cki.dtypes import DType
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId, TensorView

_FROM_TF = {
    tf.float64: dtypes.f64, tf.float32: dtypes.f32, tf.float16: dtypes.f16, tf.bfloat16: dtypes.bf16,
    tf.int64: dtypes.i64, tf.int32: dtypes.i32, tf.int16: dtypes.i16, tf.int8: dtypes.i8,
    tf.uint64: dtypes.u64, tf.uint32: dtypes.u32, tf.uint16: dtypes.u16, tf.uint8: dtypes.u8, tf.bool: dtypes.bool_,
}  # fmt: skip
_TO_TF = {dtype.name: tf_dtype for tf_dtype, dtype in _FROM_TF.items()}
_EagerTensor = type(tf.constant(0))
_IN_GRAPH = (
    "CKI was called inside a tf.function or a Keras functional graph",
    "call it in eager mode; calls inside tf.function need CKI's registered TensorFlow op, which is not part of this "
    "version (tf.py_function would copy to the CPU)",
)


class TensorFlowAdapter(IndirectAdapter):
    """Eager tensors, tf.Variable and Keras variables.  They are immutable here: no `out=`."""

    name = "tensorflow"

    def check(self, tensor: Any, name: str = "tensor", output: bool = False) -> list[str]:
        if output:
            return [
                f"{name} is a TensorFlow tensor, which is immutable; leave {name}= out and use the returned tensor"
            ]
        if not tf.executing_eagerly():
            return [f"{name}: {_IN_GRAPH[0]}; {_IN_GRAPH[1]}"]
        problems = []
        # Before anything else touches the tensor: to_dlpack of a string tensor aborts the process.
        if tf.as_dtype(tensor.dtype) not in _FROM_TF:
            problems.append(
                f"{name} is of dtype {tf.as_dtype(tensor.dtype).name}, which cannot pass; one of "
                f"{', '.join(known.name for known in _FROM_TF)} (float8: tf.bitcast({name}, tf.uint8))"
            )
            return problems
        concrete = _concrete(tensor)
        if "GPU" in concrete.device and "GPU" not in concrete.backing_device:
            problems.append(
                f"{name} is of dtype {concrete.dtype.name} and TensorFlow keeps it in host memory although its device "
                f"is {concrete.device}; tf.cast({name}, tf.int64) lies on the GPU"
            )
        elif not any(kind in concrete.backing_device for kind in ("GPU", "CPU")):
            problems.append(
                f"{name} is on device {concrete.backing_device}; a GPU, or the CPU for the simulated device"
            )
        return problems

    def view(self, tensor: Any) -> TensorView:
        if type(tensor) is TensorView:
            return tensor
        if tf.as_dtype(tensor.dtype) not in _FROM_TF:
            raise InvalidTypeError(f"TensorFlow dtype {tf.as_dtype(tensor.dtype).name} cannot pass")
        concrete = _concrete(tensor)
        view = from_capsule(tf.experimental.dlpack.to_dlpack(concrete), concrete)
        view.readonly = True
        return view

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any, stream: int | None = None) -> Any:
        owner: Any = like.owner if type(like) is TensorView else (None, like)
        source = _concrete(owner[1])
        tf_dtype = _TO_TF.get(dtype.name)
        if tf_dtype is None:
            raise InvalidTypeError(
                f"TensorFlow tensors of {dtype} cannot pass", hint=f"one of {', '.join(_TO_TF)}"
            )
        # The op takes its shape from host memory; making that tensor here takes a third of the time of passing a tuple.
        with tf.device("CPU:0"):
            extents = tf.constant(shape, tf.int32, (len(shape),))
        with tf.device(source.backing_device):
            return tf.raw_ops.Empty(shape=extents, dtype=tf_dtype, init=False)

    def pointer(self, output: Any) -> int:
        # Also waits for whatever TensorFlow had still queued on memory that it reused for this output.
        return from_capsule(tf.experimental.dlpack.to_dlpack(output)).ptr

    def stream(self, device_index: int) -> int:
        from cki.adapters.cupy import get_current_stream

        return int(get_current_stream(device_index).ptr)

    def finish(
        self, outputs: Sequence[Any], inputs: Sequence[Any], stream: int, device: DeviceId
    ) -> list[Any]:
        if device.kind == "cuda":
            from cki.adapters.cupy import synchronize

            synchronize(stream, device.index)
        return list(outputs)


def _concrete(tensor: Any) -> Any:
    """The eager tensor of a tensor, a tf.Variable or a Keras variable; all share memory."""
    while not isinstance(tensor, _EagerTensor):
        value = tensor.value
        tensor = value() if callable(value) else value
    return tensor


def adapter_for(cls: type, name: str) -> Adapter:
    """The adapter for eager tensors and variables; symbolic, ragged and sparse tensors are refused."""
    is_eager = issubclass(cls, _EagerTensor)
    if issubclass(cls, tf.Tensor) and not is_eager:
        raise InvalidTypeError(f"{name} is symbolic ({type_name(cls)}): {_IN_GRAPH[0]}", hint=_IN_GRAPH[1])
    is_variable = issubclass(cls, tf.Variable) or cls.__module__.startswith("keras.")
    if not is_eager and not is_variable:
        raise InvalidTypeError(
            f"{name} is a {type_name(cls)}, not a dense tensor",
            hint=f"tf.sparse.to_dense({name}) of a sparse tensor; {name}.to_tensor(), or its .values and "
            ".row_splits, of a ragged one",
        )
    return _ADAPTER


_ADAPTER = TensorFlowAdapter()
