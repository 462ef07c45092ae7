"""PyTorch tensors on the CPU (the simulated device's): in place, gradients, odd tensors, round trips."""

from __future__ import annotations

import functools
import gc
import timeit
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cki  # noqa: E402
from cki import dtypes  # noqa: E402
from cki.adapter import BY_TYPE, adapter_of, require_valid  # noqa: E402
from cki.adapters.torch import _FROM_TORCH  # noqa: E402
from cki.dlpack import DLPackExport  # noqa: E402
from cki.errors import InvalidTypeError, UnsupportedError  # noqa: E402
from cki.tensor import DeviceId  # noqa: E402

pytestmark = pytest.mark.torch
ADAPTER = adapter_of(torch.zeros(1))
CPU = DeviceId("cpu", 0)


def test_every_dtype_of_cki_has_one_of_torch():
    assert {dtype.name for dtype in _FROM_TORCH.values()} == {dtype.name for dtype in dtypes.ALL}


@pytest.mark.parametrize(("torch_dtype", "dtype"), _FROM_TORCH.items(), ids=str)
def test_every_dtype_is_viewed_in_place(torch_dtype, dtype):
    tensor = torch.zeros((2, 3, 4), dtype=torch_dtype)
    assert ADAPTER.check(tensor) == []
    view = ADAPTER.view(tensor)
    assert (view.ptr, view.shape, view.strides) == (tensor.data_ptr(), (2, 3, 4), (12, 4, 1))
    assert (view.dtype, view.device, view.readonly) == (dtype, CPU, False)
    assert view.dtype.itemsize == tensor.element_size()


@pytest.mark.parametrize(
    ("cut", "strides"),
    [
        (lambda t: t.transpose(0, 1), (1, 6)),
        (lambda t: t[1:, ::2], (6, 2)),
        (lambda t: t[:, 2:3], (6, 1)),
        (lambda t: t[0].expand(5, 6), (0, 1)),
    ],
)
def test_strides_and_storage_offsets(cut, strides):
    tensor = cut(torch.arange(24.0).reshape(4, 6))
    view = ADAPTER.view(tensor)
    assert (view.ptr, view.shape, view.strides) == (tensor.data_ptr(), tuple(tensor.shape), strides)


def test_view_keeps_the_tensor_alive():
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor)
    view = ADAPTER.view(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_signature_tells_apart_what_a_plan_depends_on():
    base = torch.zeros(8, 8)
    bfloat, wide = base.to(torch.bfloat16), torch.zeros(65)
    variants = [
        base,
        base[:4],
        base.T,
        base[:, :4],
        bfloat,
        wide[1:33].reshape(4, 8),
        wide[2:34].reshape(4, 8),
        base[:0],
    ]
    keys = [ADAPTER.signature(tensor)[1] for tensor in variants]
    assert len(set(keys)) == len(keys)
    assert ADAPTER.signature(base[4:])[1] == keys[1]
    assert ADAPTER.signature(base[4:])[0] == base.data_ptr() + 4 * 8 * 4


def test_signature_is_cheap():
    """The budget is 1 us on the GPU machine; the bound here leaves room for a slow and busy test machine."""
    tensor, signature = torch.zeros(16, 64), ADAPTER.signature
    best = min(timeit.repeat(lambda: signature(tensor), number=2000, repeat=20)) / 2000
    assert best < 5e-6


# ---------------------------------------------------------------- gradients


def test_requires_grad_outside_no_grad_is_refused():
    """Interop case dlpack_requires_grad: parameters pass under no_grad and inference mode, else 'detach' is named."""
    weight = torch.nn.Parameter(torch.ones(4))
    (problem,) = ADAPTER.check(weight, "weight")
    assert problem == (
        "weight requires grad and gradients are being recorded, which CKI cannot do; call under torch.no_grad() or "
        "torch.inference_mode(), pass weight.detach(), or call CKI's function of that name in "
        "cki.adapters.torch with recompute_gradient=True"
    )
    with pytest.raises(InvalidTypeError, match="detach") as caught:
        require_valid(ADAPTER, ["x", "weight"], [torch.ones(4), weight])
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_requires_grad_passes_in_inference(context):
    weight = torch.nn.Parameter(torch.ones(4))
    assert adapter_of(weight) is ADAPTER
    with context():
        assert ADAPTER.check(weight) == []
        assert ADAPTER.view(weight).ptr == weight.data_ptr()
    assert ADAPTER.check(weight.detach()) == []


def test_signature_knows_whether_gradients_are_recorded():
    """A plan cached under no_grad must not serve a call that records gradients."""
    weight = torch.ones(4, requires_grad=True)
    recording = ADAPTER.signature(weight)[1]
    with torch.no_grad():
        silent = ADAPTER.signature(weight)[1]
    assert recording != silent
    assert silent == ADAPTER.signature(torch.ones(4))[1]


# ---------------------------------------------------------------- refusals


def refused_tensors():
    indices = torch.tensor([[0, 1], [1, 0]])
    return {
        "complex": (
            torch.zeros(3, dtype=torch.complex64),
            "x is of dtype torch.complex64, which has no kernels",
        ),
        "sparse": (
            torch.sparse_coo_tensor(indices, torch.ones(2)),
            "x has layout torch.sparse_coo; x.to_dense() is",
        ),
        "csr": (torch.eye(3).to_sparse_csr(), "x has layout torch.sparse_csr; x.to_dense() is strided"),
        "meta": (
            torch.zeros(3, device="meta"),
            "x is on device meta; CUDA tensors, or CPU tensors for the simulated",
        ),
        "negation": (
            torch.zeros(3, dtype=torch.complex64).conj().imag,
            "x is a lazy negation; x.resolve_neg() is",
        ),
        "quantised": (
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "x is quantised; x.dequantize()",
        ),
        "fnuz": (
            torch.zeros(3).to(torch.float8_e4m3fnuz),
            "x is of dtype torch.float8_e4m3fnuz, which has no kernels",
        ),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own words on sparse and quantised tensors
@pytest.mark.parametrize("kind", ["complex", "sparse", "csr", "meta", "negation", "quantised", "fnuz"])
def test_refused_tensors(kind):
    tensor, said = refused_tensors()[kind]
    problems = ADAPTER.check(tensor, "x")
    assert any(problem.startswith(said) for problem in problems), problems
    # No plan made for an accepted tensor may match a refused one.
    plain = torch.zeros(tuple(tensor.shape), dtype=torch.float32)
    assert ADAPTER.signature(tensor)[1] != ADAPTER.signature(plain)[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])
    with pytest.raises(InvalidTypeError, match="x is a nested tensor"), cki.device("sim"):
        cki.layer_norm(nested)


def test_nested_tensors_are_refused_in_place_of_others_that_are_known():
    x = torch.ones(4, 8)
    nested = torch.nested.nested_tensor([x, x])
    with cki.device("sim"):
        for _ in range(3):
            cki.layer_norm(x)
        held = cki.hold(cki.layer_norm, x)
        with pytest.raises(InvalidTypeError, match="x is a nested tensor"):
            cki.layer_norm(nested)
        with pytest.raises(cki.errors.InvalidArgumentError, match="x is not usable"):
            held(nested)


def test_freed_storage_is_refused():
    x = torch.zeros(2, 3)
    x.untyped_storage().resize_(0)
    (problem,) = ADAPTER.check(x, "x")
    assert problem.startswith("x has no memory: its storage was given back")


def test_tensors_inside_torch_func_transforms_are_refused():
    found = []

    def inner(x):
        found.extend(ADAPTER.check(x, "x"))
        return x

    torch.func.vmap(inner)(torch.zeros(2, 3))
    assert any("x has no memory: " in problem for problem in found), found
    x = torch.randn(2, 3, 32)
    with cki.device("sim"):
        with pytest.raises(
            InvalidTypeError, match="layer_norm: (.|\n)*recompute_gradient=True runs under torch.vmap"
        ):
            torch.vmap(cki.layer_norm)(x)
        passes = functools.partial(cki.adapters.torch.layer_norm, recompute_gradient=True)
        assert torch.equal(torch.vmap(passes)(x), cki.layer_norm(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_call_that_torch_jit_trace_would_not_see_is_refused():
    from cki.adapters import torch_ops

    x = torch.randn(5, 40)
    with cki.device("sim"):
        with pytest.raises(
            UnsupportedError, match=r"layer_norm inside torch.jit.trace(.|\n)*torch.ops.cki.layer_norm"
        ):
            torch.jit.trace(lambda x: cki.layer_norm(x), x)
        for _ in range(4):  # a problem that has a function of its own by now
            cki.layer_norm(x)
        with pytest.raises(UnsupportedError, match=r"layer_norm inside torch.jit.trace"):
            torch.jit.trace(lambda x: cki.layer_norm(x) + x, x)
        traced = torch.jit.trace(lambda x: torch_ops.OPERATORS["layer_norm"](x)[0], x)
        assert torch.equal(traced(2 * x + x * x), cki.layer_norm(2 * x + x * x))


def test_parameters_without_a_shape_are_refused_until_they_have_one():
    module = torch.nn.LazyLinear(4)
    with cki.device("sim"), torch.no_grad():
        with pytest.raises(InvalidTypeError, match="w is a .*UninitializedParameter, which has no shape yet"):
            cki.linear(torch.ones(2, 3), module.weight)
        module(torch.ones(2, 3))
        assert cki.linear(torch.ones(2, 3), module.weight, weight_layout="out_in").shape == (2, 4)


def test_wrapper_subclasses_are_refused_by_name():
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.zeros(3), torch.zeros(3))
    with pytest.raises(InvalidTypeError, match=r"^x is a torch\..*TwoTensor, a wrapper whose data lies"):
        adapter_of(pair, "x")
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    with pytest.raises(InvalidTypeError, match="nested tensors: values\\(\\) with offsets"):
        adapter_of(nested, "x")
    assert type(pair) not in BY_TYPE


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize(("torch_dtype", "dtype"), _FROM_TORCH.items(), ids=str)
def test_outputs_come_from_torch(torch_dtype, dtype):
    like = torch.zeros(2)
    for shape in [(), (0, 3), (3, 5)]:
        output = ADAPTER.empty(shape, dtype, like)
        assert (type(output), tuple(output.shape), output.dtype) == (torch.Tensor, shape, torch_dtype)
        assert output.is_contiguous()
        assert not output.requires_grad
        assert ADAPTER.pointer(output) == output.data_ptr()
        assert output.data_ptr() % 64 == 0
    assert ADAPTER.empty((2,), dtype, ADAPTER.view(like)).device == like.device


def test_outputs_ignore_the_default_device_and_dtype():
    like = torch.zeros(2)
    with torch.device("meta"):
        assert ADAPTER.empty((4,), dtypes.f16, like).device.type == "cpu"


def test_cpu_has_no_stream():
    assert ADAPTER.stream(-1) == 0


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    "torch_dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16]
)
def test_torch_to_cki_to_torch_is_one_memory(torch_dtype):
    tensor = torch.arange(12).reshape(3, 4).to(torch_dtype)[:, 1:]
    back = torch.from_dlpack(DLPackExport(ADAPTER.view(tensor)))
    assert (back.data_ptr(), back.stride(), back.dtype) == (tensor.data_ptr(), tensor.stride(), torch_dtype)
    back[0, 0] = 0
    assert torch.equal(back, tensor)


def test_numpy_to_torch_through_cki():
    array = np.arange(6, dtype=np.float32)
    view = adapter_of(array).view(array)
    tensor = torch.from_dlpack(DLPackExport(view))
    assert tensor.data_ptr() == ADAPTER.view(tensor).ptr == view.ptr
    tensor += 1
    np.testing.assert_array_equal(array, np.arange(1, 7))


def test_torch_frees_what_it_imported():
    array = np.zeros(1000, np.float32)
    alive = weakref.ref(array)
    tensor = torch.from_dlpack(DLPackExport(adapter_of(array).view(array)))
    del array
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None


def test_outputs_for_a_parameter_are_plain_tensors():
    weight = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        output = ADAPTER.empty((2, 3), dtypes.bf16, weight)
    assert type(output) is torch.Tensor
    assert not output.requires_grad
    assert output.dtype == torch.bfloat16
