"""PyTorch tensors, on the GPU and (for the simulated device) on the CPU; `cki.adapters.torch.attention` and so on.

Tensors are read by attributes (under 1 us), outputs come from torch's allocator, kernels run on torch's current
stream.  So PyTorch's own rules for stream order, memory reuse and graph capture hold unchanged.

The public operations as functions of this module are those of `cki`, and take `recompute_gradient=True`: then autograd
records the call, and differentiates the plain expression (`cki.adapters.gradient_torch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

import cki
from cki import dtypes
from cki.adapter import ALIGNMENT, Adapter, canonical_strides, type_name
from cki.adapters.gradient import require_bool
from cki.adapters.torch_attention import scaled_dot_product_attention as scaled_dot_product_attention
from cki.dtypes import DType
from cki.errors import InvalidTypeError, UnsupportedError
from cki.generated import Expression
from cki.ops.match import Guard, Likeness
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs
from cki.tensor import DeviceId, TensorView, contiguous_strides

_NAMES = {
    "float64": dtypes.f64, "float32": dtypes.f32, "float16": dtypes.f16, "bfloat16": dtypes.bf16,
    "float8_e4m3fn": dtypes.e4m3, "float8_e5m2": dtypes.e5m2,
    "int64": dtypes.i64, "int32": dtypes.i32, "int16": dtypes.i16, "int8": dtypes.i8,
    "uint64": dtypes.u64, "uint32": dtypes.u32, "uint16": dtypes.u16, "uint8": dtypes.u8, "bool": dtypes.bool_,
}  # fmt: skip
_FROM_TORCH = {getattr(torch, name): dtype for name, dtype in _NAMES.items() if hasattr(torch, name)}
_TO_TORCH = {dtype.name: torch_dtype for torch_dtype, dtype in _FROM_TORCH.items()}
_CPU = torch.device("cpu")
#: The modules of FakeTensor and FunctionalTensor.
_TRACING = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")

# Absent in CPU builds.  torch.cuda.current_stream() makes a Stream object, which takes 40 times as long.
_current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_grad_enabled = torch.is_grad_enabled
#: None outside torch.jit.trace.  torch.jit.is_tracing asks it, and takes twice the time.
_tracing_state = torch._C._get_tracing_state
# Zero but inside modes that see every operator: what traces, counts, or stands in for tensors without data.
_num_modes = torch._C._len_torch_dispatch_stack
_MODE_KEYS = torch._C._TorchDispatchModeKey
_TRACING_MODES = (_MODE_KEYS.FAKE, _MODE_KEYS.PROXY, _MODE_KEYS.FUNCTIONAL)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows a tensor."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _version_counter() -> Callable[[Sequence[torch.Tensor]], object]:
    """What counts a write of each tensor, by which a backward pass that needs what was there is refused."""
    count = getattr(torch._C, "_increment_version", None)  # half the time of the public function
    probe = torch.empty(1)
    try:
        if count is not None:
            count((probe,))
            if probe._version == 1:
                return count  # type: ignore[no-any-return]
    except (TypeError, RuntimeError):
        pass

    def mark(tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)

    return mark


mark_written = _version_counter()


class TorchAdapter(Adapter):
    """Strided tensors of every dtype that has kernels; `torch.nn.Parameter` under no_grad or inference mode."""

    name = "torch"

    def signature(self, tensor: torch.Tensor) -> tuple[int, Hashable]:
        try:
            pointer = tensor.data_ptr()
            return pointer, (
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor.get_device(),
                # A null address is an empty tensor's, or that of a tensor without memory (meta, functorch).
                ALIGNMENT[pointer & 15] if pointer else -tensor.numel(),
                (tensor.requires_grad and _is_grad_enabled()) or tensor.is_neg() or has_tangent(tensor),
            )
        except RuntimeError:  # sparse and other layouts without an address
            return 0, (tensor.layout, tensor.dtype, tensor.get_device())

    def guard(self, tensor: torch.Tensor, trusted: bool = False) -> Guard | None:
        if tensor.layout != torch.strided or not tensor.numel() or tensor.data_ptr() & 15:
            return None
        conditions = [
            "{t}.shape == {shape}",
            "{t}.dtype is {dtype}",
            "{t}.get_device() == {device}",
        ]
        # Half the time of comparing strides, and the same for tensors without empty axes.
        conditions.append("{t}.is_contiguous()" if tensor.is_contiguous() else "{t}.stride() == {strides}")
        if not trusted:
            conditions += [
                "{t}.__class__ is {cls}",
                "not {t}.is_neg()",
                "not ({t}.requires_grad and {records}())",
            ]
        constants = {
            "shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.get_device(), "strides": tensor.stride(),
            "cls": type(tensor), "records": _is_grad_enabled, "forward": forward_ad, "tracing": _tracing_state,
            "modes": _num_modes,
        }  # fmt: skip
        # Sparse tensors and those of torch.func have no address and raise RuntimeError.
        errors = (AttributeError, RuntimeError)
        # Inside a level of forward-mode differentiation the key tells which tensors carry a tangent; a trace would not
        # see the call (`require_callable`).
        everywhere = (
            "" if trusted else "{forward}._current_level < 0 and {tracing}() is None and not {modes}()"
        )
        return Guard("{t}.data_ptr()", tuple(conditions), constants, errors, everywhere)

    def likeness(self, examples: Sequence[torch.Tensor]) -> Likeness | None:
        # One call into torch for all tensors: class, dispatch keys (which tell layouts, lazy views and wrappers),
        # dtype, device, shape, strides, requires_grad.  0.4 us for 4 tensors, whose attributes take 2 us.  It is
        # what torch.compile guards its own code with; no public interface, so it is used only if it answers as
        # expected.
        try:
            guards = torch._C._dynamo.guards.TensorGuards(
                *examples,
                dynamic_dims_sizes=[list(example.shape) for example in examples],
                dynamic_dims_strides=[list(example.stride()) for example in examples],
            )
            check: Callable[..., bool] = guards.check
            other = [example.new_empty(0) for example in examples]
            if check(*examples) is not True or check(*other) is not False:
                return None
        except (AttributeError, TypeError, RuntimeError, SystemError):
            return None
        # Asked about a nested tensor, which has no strides, it ends the process.
        unless = _is_grad_enabled if any(t.requires_grad for t in examples) else None
        return Likeness(check, unless, "not {t}.is_nested")

    def check(self, tensor: torch.Tensor, name: str = "tensor", output: bool = False) -> list[str]:
        if tensor.is_nested:
            return [
                f"{name} is a nested tensor; {name}.values() with offsets, or {name}.to_padded_tensor(0.0)"
            ]
        problems = []
        if tensor.requires_grad and _is_grad_enabled():
            problems.append(
                f"{name} requires grad and gradients are being recorded, which CKI cannot do; call under "
                f"torch.no_grad() or torch.inference_mode(), pass {name}.detach(), or call CKI's function "
                "of that name in cki.adapters.torch with recompute_gradient=True"
            )
        if has_tangent(tensor):
            problems.append(
                f"{name} carries a tangent of forward-mode differentiation, which CKI cannot propagate; "
                f"torch.autograd.forward_ad.unpack_dual({name}).primal carries none"
            )
        if tensor.dtype not in _FROM_TORCH:
            problems.append(
                f"{name} is of dtype {tensor.dtype}, which has no kernels; {dtypes.usual_names()}"
            )
        if tensor.layout != torch.strided:
            problems.append(f"{name} has layout {tensor.layout}; {name}.to_dense() is strided")
        elif tensor.is_quantized:
            problems.append(f"{name} is quantised; {name}.dequantize(), or {name}.int_repr() and its scale")
        if tensor.is_conj():
            problems.append(f"{name} is a lazy conjugate; {name}.resolve_conj() is a plain tensor")
        if tensor.is_neg():
            problems.append(f"{name} is a lazy negation; {name}.resolve_neg() is a plain tensor")
        if tensor.device.type not in ("cuda", "cpu"):
            problems.append(
                f"{name} is on device {tensor.device}; CUDA tensors, or CPU tensors for the simulated device"
            )
        elif tensor.layout == torch.strided and tensor.numel() and not _has_memory(tensor):
            problems.append(
                f"{name} has no memory: its storage was given back, as sharding does between uses, or it belongs to a "
                "torch.func transform or a trace; the function of cki.adapters.torch with recompute_gradient=True runs "
                "under torch.vmap and torch.func.grad"
            )
        return problems

    def here(self) -> Adapter:
        return _TRACED if _num_modes() and _tracing_mode() else self

    def require_callable(self, operation: str) -> None:
        _require_eager(operation, operation if operation in public_specs() else "layer_norm")

    def view(self, tensor: torch.Tensor) -> TensorView:
        shape = tuple(tensor.shape)
        device = tensor.device
        return TensorView(
            ptr=tensor.data_ptr() if tensor.numel() else 0,
            shape=shape,
            strides=canonical_strides(shape, tensor.stride()),
            dtype=_FROM_TORCH[tensor.dtype],
            device=DeviceId("cuda", device.index) if device.type == "cuda" else DeviceId("cpu", 0),
            owner=tensor,
        )

    def empty(
        self, shape: tuple[int, ...], dtype: DType, like: Any, stream: int | None = None
    ) -> torch.Tensor:
        if (
            _num_modes() or _tracing_state() is not None
        ):  # of calls that are no operators: encoders, held plans
            _require_eager("an encoder or a held plan", "layer_norm")
        torch_dtype = _to_torch(dtype)
        if stream is None and type(like) is not TensorView:
            # Of like's device.  empty_like takes a third of the time of torch.empty, new_empty two thirds.
            if like.shape == shape and like.dtype is torch_dtype and like.is_contiguous():
                return torch.empty_like(like)
            return like.new_empty(shape, dtype=torch_dtype)
        device = like.device
        if type(device) is DeviceId:
            device = torch.device("cuda", device.index) if device.kind == "cuda" else _CPU
        if stream is None or device.type != "cuda":
            return torch.empty(shape, dtype=torch_dtype, device=device)
        # The caching allocator hands out memory that is free in the order of its current stream: make that ours.
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            return torch.empty(shape, dtype=torch_dtype, device=device)

    def allocation(self, shape: tuple[int, ...], dtype: DType, device: DeviceId) -> Expression:
        torch_dtype, strides = _to_torch(dtype), contiguous_strides(shape)
        constants = {"shape": shape, "strides": strides, "dtype": torch_dtype}
        direct = _direct_empty(device, shape, strides, torch_dtype)
        if direct is not None:
            return Expression("{empty}({shape}, {strides}, {dtype})", {"empty": direct, **constants})
        # A third of the time of torch.empty, which reads its arguments by name.
        text = "{empty}({shape}, {strides}, dtype={dtype}, device={like}.device)"
        return Expression(text, {"empty": torch.empty_strided, **constants})

    def pointer(self, output: torch.Tensor) -> int:
        return output.data_ptr()  # type: ignore[no-any-return]

    def address(self) -> Expression:
        return Expression("{t}.data_ptr()", {})

    def written_marker(self) -> Callable[[Sequence[Any]], object] | None:
        return mark_written

    def stream(self, device_index: int) -> int:
        return self.stream_reader(device_index)()

    def current_stream(self, device_index: int) -> Expression:
        if _current_raw_stream is None or device_index < 0:
            return Expression("0", {})
        return Expression("{stream}({index})", {"stream": _current_raw_stream, "index": device_index})

    def stream_reader(self, device_index: int) -> Callable[[], int]:
        if _current_raw_stream is None or device_index < 0:
            return lambda: 0
        return functools.partial(_current_raw_stream, device_index)


class TracedAdapter(TorchAdapter):
    """Tensors without data, by which torch.export traces: calls become operators (`cki.adapters.torch_ops`)."""

    direct = False

    def here(self) -> Adapter:
        return self

    def is_symbolic(self, tensor: torch.Tensor) -> bool:
        return True

    def own_call(
        self,
        spec: OpSpec,
        inputs: tuple[Any, ...],
        attributes: tuple[Any, ...],
        outs: tuple[Any, ...],
        stream: Any,
    ) -> Any:
        from cki.adapters.torch_ops import traced_call

        return traced_call(spec, inputs, attributes, outs, stream)


def _direct_empty(
    device: DeviceId, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Callable[..., torch.Tensor] | None:
    """The allocation of compiled torch code, which passes by the dispatcher: 0.5 us instead of 1.2.

    No public interface, so it is used only if it answers as expected; and it allocates on the current GPU, so only
    where there is no other.
    """
    try:
        if device.kind == "cuda":
            if torch.cuda.device_count() != 1:
                return None
            allocate = torch._C._dynamo.guards._empty_strided_cuda
        else:
            allocate = torch._C._dynamo.guards._empty_strided_cpu
        made = allocate(shape, strides, dtype)
        expected = torch.Tensor, torch.Size(shape), strides, dtype, device.kind
        if (type(made), made.shape, made.stride(), made.dtype, made.device.type) == expected:
            return allocate  # type: ignore[no-any-return]
    except (AttributeError, TypeError, RuntimeError):
        pass
    return None


def _to_torch(dtype: DType) -> torch.dtype:
    try:
        return _TO_TORCH[dtype.name]
    except KeyError:
        raise InvalidTypeError(f"PyTorch {torch.__version__} has no dtype for {dtype}") from None


def _tracing_mode() -> str:
    """The mode around us that would not see a call, or gives outputs without data; empty for none."""
    modes = (torch._C._get_dispatch_mode(key) for key in _TRACING_MODES)
    return next((type(mode).__name__ for mode in modes if mode is not None), "")


def _require_eager(what: str, operator: str) -> None:
    """Refuse a call that a trace around it would not see.  operator: the name of one that it would."""
    around = "torch.jit.trace" if _tracing_state() is not None else _num_modes() and _tracing_mode()
    if around:
        raise UnsupportedError(
            f"{what} inside {around}, which would not see the call",
            hint="torch.export or torch.compile, which follow calls of operations; or the operator "
            f"torch.ops.cki.{operator} of cki.adapters.torch_ops, which any trace records",
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:
        return False


def adapter_for(cls: type, name: str) -> Adapter:
    """The adapter for `torch.Tensor` and plain subclasses.

    A subclass with a `__torch_dispatch__` of its own (DTensor, nested and quantised wrappers) keeps its data elsewhere
    and is refused, but for those that torch itself traces with.
    """
    if not issubclass(cls, torch.Tensor):
        raise InvalidTypeError(f"{name} is a {type_name(cls)}, not a tensor", hint="a torch.Tensor")
    if issubclass(cls, torch.nn.parameter.UninitializedTensorMixin):
        raise InvalidTypeError(
            f"{name} is a {type_name(cls)}, which has no shape yet", hint="run the lazy module once before"
        )
    if cls.__module__ in _TRACING:
        return _TRACED
    if getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
        raise InvalidTypeError(
            f"{name} is a {type_name(cls)}, a wrapper whose data lies elsewhere",
            hint="the plain torch.Tensor inside (DTensor: to_local(); nested tensors: values() with offsets)",
        )
    return _ADAPTER


_ADAPTER = TorchAdapter()
_TRACED = TracedAdapter()


# ---------------------------------------------------------------------------------------------------------------------
# the public operations, with gradients where they are asked for


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    public = getattr(cki, name)

    @functools.wraps(public)
    def function(*args: Any, recompute_gradient: bool = False, **kwargs: Any) -> Any:
        if recompute_gradient is not False:
            require_bool(name, recompute_gradient)
        if not recompute_gradient:
            return public(*args, **kwargs)
        from cki.adapters.gradient_torch import call_recomputed

        return call_recomputed(name, public, args, kwargs)

    return function


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in public_specs():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _function(name))  # type: ignore[no-any-return]


def __dir__() -> list[str]:
    return sorted({*globals(), *public_specs()})
