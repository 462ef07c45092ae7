"""TensorFlow's tensors; `cki.adapters.tensorflow.layer_norm` and so on: every public operation for TensorFlow.

A public operation on TensorFlow's tensors is an operation of TensorFlow's own (`cki.adapters.tf_ops`): in eager mode,
in a tf.function, in a saved model.  It runs on TensorFlow's compute stream and memory, and the host never waits.
Inside a function with jit_compile=True it is a call of XLA's (`cki.adapters.tf_xla`).

What remains (TensorFlow versions that export too little, `stream=`, `cki.capture`, a user's kernel called as it is)
reads eager tensors by DLPack: `to_dlpack` blocks until TensorFlow's private stream is idle, and `finish` blocks until
our kernels are done, so every order is right and nothing is copied.  Outputs are TensorFlow's own memory, made by its
`Empty` op: nothing of ours has to outlive the call.

The functions here, unlike those of `cki`, take NumPy arrays beside tensors, and `recompute_gradient=True`.  Both return
the new values of what an operation writes (`append_kv`: the caches) behind its outputs.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import cki
from cki import capture_state, dtypes
from cki.adapter import Adapter, IndirectAdapter, adapter_of, type_name
from cki.adapters import gradient_tensorflow, tf_eager, tf_graph, tf_ops
from cki.adapters.gradient import require_bool
from cki.adapters.immutable import framework_tensors, immutable_output, refuse_in_program
from cki.adapters.tf_types import DLPACK_TYPES, FROM_TF, TO_TF, EagerTensor, as_tensor_or_variable
from cki.dlpack import from_capsule
from cki.dtypes import DType
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.ops.call import Planned, PlanRequest, call, common_adapter_of
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs
from cki.tensor import DeviceId, TensorView

_IN_GRAPH = (
    "CKI was called inside a tf.function or a Keras functional graph",
    "only CKI's operations become part of a graph, and a kernel of your own as cki.load(...).operation(rule)",
)


class TensorFlowAdapter(IndirectAdapter):
    """Tensors, tf.Variable and Keras variables.  They are immutable here: no `out=`."""

    name = "tensorflow"

    def check(self, tensor: Any, name: str = "tensor", output: bool = False) -> list[str]:
        if output:
            return [immutable_output(name, "TensorFlow tensor")]
        if not tf.executing_eagerly() or not tf_ops.is_eager(as_tensor_or_variable(tensor)):
            return [f"{name}: {_IN_GRAPH[0]}; {_IN_GRAPH[1]}"]
        problems = []
        # Before anything else touches the tensor: to_dlpack of a string tensor aborts the process.
        dtype = tf.as_dtype(tensor.dtype)
        if dtype not in FROM_TF:
            return [f"{name} is of dtype {dtype.name}, which has no kernels; {dtypes.usual_names()}"]
        if dtype not in DLPACK_TYPES:
            where = ""
            if not tf_ops.missing():
                where = f"; it lies on {_concrete(tensor).device}, and passes beside a tensor on a GPU, without stream="
            return [
                f"{name} is of dtype {dtype.name}, which cannot pass; one of "
                f"{', '.join(known.name for known in DLPACK_TYPES)} (float8: tf.bitcast({name}, tf.uint8)){where}"
            ]
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

    def is_symbolic(self, tensor: Any) -> bool:
        return not tf_ops.is_eager(as_tensor_or_variable(tensor))

    def view(self, tensor: Any) -> TensorView:
        if type(tensor) is TensorView:
            return tensor
        if tf.as_dtype(tensor.dtype) not in DLPACK_TYPES:
            raise InvalidTypeError(f"TensorFlow dtype {tf.as_dtype(tensor.dtype).name} cannot pass")
        if self.is_symbolic(tensor):
            raise InvalidTypeError("values were asked for of a symbolic tensor", self.check(tensor))
        concrete = _concrete(tensor)
        view = from_capsule(tf.experimental.dlpack.to_dlpack(concrete), concrete)
        view.readonly = True
        return view

    def own_call(
        self,
        spec: OpSpec,
        inputs: tuple[Any, ...],
        attributes: tuple[Any, ...],
        outs: tuple[Any, ...],
        stream: Any,
    ) -> Any:
        return _call(spec, inputs, attributes, outs, stream, recompute_gradient=False)

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any, stream: int | None = None) -> Any:
        owner: Any = like.owner if type(like) is TensorView else (None, like)
        source = _concrete(owner[1])
        tf_dtype = TO_TF.get(dtype.name)
        if tf_dtype not in DLPACK_TYPES:
            raise InvalidTypeError(
                f"TensorFlow tensors of {dtype} cannot pass",
                hint=f"one of {', '.join(known.name for known in DLPACK_TYPES.values())}",
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
    tensor = as_tensor_or_variable(tensor)
    return tensor if isinstance(tensor, EagerTensor) else tensor.value()


_DENSE = {
    tf.SparseTensor: "tf.sparse.to_dense({name})",
    tf.RaggedTensor: "{name}.to_tensor(), or its .values and .row_splits",
    tf.IndexedSlices: "tf.convert_to_tensor({name})",
}


def adapter_for(cls: type, name: str) -> Adapter:
    """The adapter for tensors and variables; ragged and sparse tensors are refused."""
    is_variable = issubclass(cls, tf.Variable) or cls.__module__.startswith("keras.")
    if not issubclass(cls, tf.Tensor) and not is_variable:
        raise InvalidTypeError(
            f"{name} is a {type_name(cls)}, not a dense tensor",
            hint=next(
                (hint.format(name=name) for kind, hint in _DENSE.items() if issubclass(cls, kind)),
                "a tf.Tensor, a tf.Variable or a Keras variable",
            ),
        )
    return _ADAPTER


_ADAPTER = TensorFlowAdapter()


# ---------------------------------------------------------------------------------------------------------------------
# which way a call goes


def _call(
    spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any], outs: Sequence[Any], stream: Any,
    recompute_gradient: bool,
) -> Any:  # fmt: skip
    """The call as an operation of TensorFlow's, or NotImplemented where it goes by DLPack."""
    if not tf.executing_eagerly():
        refuse_in_program(
            f"{spec.name} inside a tf.function",
            outs,
            stream,
            "TensorFlow",
            "TensorFlow has immutable tensors",
        )
        if reason := tf_ops.missing():
            raise UnsupportedError(
                f"{spec.name} cannot be part of a tf.function here", [reason], "eager mode"
            )
        return _one_or_all(tf_graph.add_node(spec, inputs, attributes, recompute_gradient))
    if stream is None and not capture_state.active and all(out is None for out in outs):
        if not (reason := tf_ops.missing()):
            results = tf_eager.run(spec, inputs, tuple(attributes), recompute_gradient)
            if results is not NotImplemented:
                return _one_or_all(results)
        else:
            _warn(reason)
    return _recorded(spec, inputs, attributes, outs, stream, recompute_gradient)


def _one_or_all(results: Sequence[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _recorded(
    spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any], outs: Sequence[Any], stream: Any,
    recompute_gradient: bool,
) -> Any:  # fmt: skip
    """NotImplemented; under a gradient tape, which does not see kernels, the call with a gradient of ours."""
    from tensorflow.python.eager import record

    if not record.could_possibly_record():
        return NotImplemented
    for item, tensor in zip(spec.inputs, inputs):
        if tensor is not None and adapter_of(tensor, item.name) is not _ADAPTER:
            return NotImplemented  # refused there
    tensors = [None if tensor is None else as_tensor_or_variable(tensor) for tensor in inputs]
    run = functools.partial(_by_dlpack, spec, tuple(attributes), tuple(outs), stream)
    return gradient_tensorflow.with_gradient(spec, tensors, attributes, run, recomputes=recompute_gradient)


def _by_dlpack(spec: OpSpec, attributes: Any, outs: Any, stream: Any, *inputs: Any) -> Any:
    from tensorflow.python.eager import record

    with record.stop_recording():
        return call(spec, inputs, attributes, outs, stream)


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        "CKI runs on TensorFlow's tensors by DLPack: each call waits for TensorFlow's stream and for the kernel. "
        f"Calls inside tf.function are not possible. {reason}",
        RuntimeWarning,
        stacklevel=5,
    )


# ---------------------------------------------------------------------------------------------------------------------
# the public operations as functions of TensorFlow


#: Classes of arguments in which there is nothing to convert.
_AS_THEY_ARE = frozenset({EagerTensor, type(None), bool, int, float, str})


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    public = getattr(cki, name)

    @functools.wraps(public)
    def function(*args: Any, recompute_gradient: bool = False, **kwargs: Any) -> Any:
        if recompute_gradient is not False:
            require_bool(name, recompute_gradient)
        arguments = [v if v.__class__ in _AS_THEY_ARE else _as_tensor(name, v) for v in args]
        named = {k: v if v.__class__ in _AS_THEY_ARE else _as_tensor(name, v) for k, v in kwargs.items()}
        for key, value in kwargs.items():
            if value is not None and (key in ("stream", "out") or key.endswith("_out")):
                why = "launches on its own stream" if key == "stream" else "has immutable tensors"
                raise InvalidArgumentError(f"{name}: {key} is given, but TensorFlow {why}", hint=f"no {key}=")
        first = next(iter(arguments or named.values()), None)
        if type(first).__name__ == "KerasTensor":
            raise InvalidTypeError(
                f"{name}: a {type_name(type(first))} is no tensor yet, it stands for one in a functional model",
                hint=f"{name} inside the `call` of a keras.layers.Layer; cki.adapters.keras has layers",
            )
        if first.__class__ is not EagerTensor and first is not None and adapter_of(first) is not _ADAPTER:
            raise InvalidTypeError(
                f"{name}: the first tensor is of type {type_name(type(first))}",
                hint="TensorFlow tensors or NumPy arrays",
            )
        if not recompute_gradient:
            return public(*arguments, **named)
        try:
            public(*arguments, **named, stream=PlanRequest())
        except Planned as planned:
            found = planned
        common_adapter_of(found.spec, found.inputs, ())
        result = _call(found.spec, found.inputs, found.attributes, (), None, True)
        return call(found.spec, found.inputs, found.attributes) if result is NotImplemented else result

    return function


def _as_tensor(operation: str, value: Any) -> Any:
    """NumPy arrays as TensorFlow's tensors, also inside a cache's tuple."""
    hint = "(k_cache, v_cache) of TensorFlow's tensors; their new values are returned"
    return framework_tensors(operation, value, tf.convert_to_tensor, "TensorFlow's tensors", hint)


def fused_attention(
    x: Any, wq: Any, wk: Any, wv: Any, wo: Any, gamma: Any = None, beta: Any = None, num_heads: int = 16,
    head_dim: int = 64, causal: bool = False, pre_ln: bool = True, epsilon: float = 1e-5, **others: Any,
) -> Any:  # fmt: skip
    """`cki.fused_attention` with the defaults of BERT-large's heads.

    x: [batch, seq, hidden], f32, f16 or bf16; in a tf.function batch and seq may be unknown.  others: what
    `cki.fused_attention` takes besides (mask, biases, num_kv_heads, ...), and recompute_gradient=True for training.
    """
    return _function("fused_attention")(
        x, wq, wk, wv, wo, gamma, beta, num_heads=num_heads, head_dim=head_dim, causal=causal, pre_ln=pre_ln,
        epsilon=epsilon, **others,
    )  # fmt: skip


#: Layers of Keras, which is imported when one is asked for.
_LAYERS = ("FusedAttentionLayer", "FusedEncoder", "FusedEncoderLayer")


def __getattr__(name: str) -> Callable[..., Any]:
    if name in _LAYERS:
        return getattr(importlib.import_module("cki.adapters.keras"), name)  # type: ignore[no-any-return]
    if name not in public_specs():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _function(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *public_specs(), *_LAYERS})
