"""Calls from NumPy, torch, JAX and protocol objects on the simulated device: the same bits, in the caller's type.

TensorFlow's are in `test_tensorflow.py`, which alone pays for importing it.
"""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError
from tests.adapters import calls


def pointer(array):
    return array.__array_interface__["data"][0]


class Foreign:
    """An array of a library that shows only DLPack, of unsigned integers for the types that NumPy cannot export."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        from cki.adapter import adapter_of
        from cki.dlpack import DLPackExport

        return DLPackExport(adapter_of(self.array).view(self.array)).__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize("dtype", calls.FLOATS, ids=str)
def test_numpy_results_are_right(dtype):
    x, weight, bias, residual = calls.norm_inputs(dtype)
    y, total = calls.expected(dtype)
    np.testing.assert_array_equal(total, (x.astype(np.float64) + residual.astype(np.float64)).astype(dtype))
    wanted = calls.plain_layer_norm(total, weight, bias)
    tolerance = 2e-6 if dtype == np.float32 else 2e-2
    np.testing.assert_allclose(y.astype(np.float64), wanted, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", calls.FLOATS, ids=str)
def test_protocol_objects_give_numpy_arrays(dtype):
    results = calls.assert_same_bits(Foreign, np.asarray, dtype)
    assert all(type(result) is np.ndarray for result in results)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", calls.FLOATS, ids=str)
def test_torch_gives_torch_tensors(dtype):
    torch = pytest.importorskip("torch")
    torch_dtype = getattr(torch, dtype.name)

    def make(array):
        return torch.from_numpy(array.view(np.uint8)).view(torch_dtype)

    def read(tensor):
        return tensor.view(torch.uint8).numpy().view(dtype)

    results = calls.assert_same_bits(make, read, dtype)
    assert all(type(result) is torch.Tensor and result.dtype == torch_dtype for result in results)


@pytest.mark.jax
@pytest.mark.parametrize("dtype", calls.FLOATS, ids=str)
def test_jax_gives_jax_arrays(dtype):
    jax = pytest.importorskip("jax")
    cpu = jax.local_devices(backend="cpu")[0]
    results = calls.assert_same_bits(lambda array: jax.device_put(array, cpu), np.asarray, dtype)
    assert all(isinstance(result, jax.Array) and result.devices() == {cpu} for result in results)


@pytest.mark.jax
def test_jax_tells_attributes_apart_by_type():
    jax = pytest.importorskip("jax")
    cpu = jax.local_devices(backend="cpu")[0]
    calls.assert_attributes_are_told_apart_by_type(jax.device_put(np.ones((1, 3, 1, 8), np.float32), cpu))


# ---------------------------------------------------------------- out=


@pytest.mark.torch
def test_out_is_written_in_place_and_returned():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(calls.norm_inputs(np.dtype(np.float32))[0])
    out = torch.full((5, 2 * 96), float("nan"))[:, ::2]
    with cki.device("sim"):
        assert cki.layer_norm(x, out=out) is out
    np.testing.assert_allclose(out, calls.plain_layer_norm(x.numpy()), atol=1e-5)


def test_out_of_a_protocol_object_is_written_in_place_and_returned():
    x = calls.norm_inputs(np.dtype(np.float32))[0]
    out = Foreign(np.full((5, 96), np.nan, np.float32))
    with cki.device("sim"):
        assert cki.layer_norm(Foreign(x), out=out) is out
        np.testing.assert_array_equal(out.array, cki.layer_norm(x))


def test_out_that_is_read_only():
    x = calls.norm_inputs(np.dtype(np.float32))[0]
    out = np.zeros_like(x)
    out.flags.writeable = False
    with cki.device("sim"), pytest.raises(ValueError, match="out is read-only"):
        cki.layer_norm(x, out=out)
    assert not out.any()


@pytest.mark.jax
def test_out_of_jax_is_refused():
    jax = pytest.importorskip("jax")
    x = jax.device_put(np.ones((2, 8), np.float32), jax.local_devices(backend="cpu")[0])
    with cki.device("sim"), pytest.raises(CkiError, match="out is a JAX array, which is immutable"):
        cki.layer_norm(x, out=x)


# ---------------------------------------------------------------- inputs of odd kinds


@pytest.mark.torch
def test_transposed_tensors_are_read_by_their_strides():
    """Interop case jax_layout_from_strided, torch's half."""
    torch = pytest.importorskip("torch")
    array = calls.norm_inputs(np.dtype(np.float32))[0]
    with cki.device("sim"):
        got = cki.layer_norm(torch.from_numpy(array).t()).numpy()
    np.testing.assert_allclose(got, calls.plain_layer_norm(array.T), atol=1e-5)


@pytest.mark.jax
def test_column_major_jax_arrays_are_read_by_their_strides():
    """Interop case jax_layout_from_strided: right values, never the transposed contents."""
    jax = pytest.importorskip("jax")
    from jax.experimental.layout import Format, Layout

    array = calls.norm_inputs(np.dtype(np.float32))[0]
    plain = jax.device_put(array, jax.local_devices(backend="cpu")[0])
    turned = jax.device_put(plain, Format(Layout(major_to_minor=(1, 0)), plain.sharding))
    with cki.device("sim"):
        got = np.asarray(cki.layer_norm(turned))
    np.testing.assert_allclose(got, calls.plain_layer_norm(array), atol=1e-5)


@pytest.mark.parametrize("kind", ["numpy", "foreign"])
def test_empty_batches_give_empty_results(kind):
    """Interop case dlpack_empty_tensor: shape (0, 4, 8) gives an empty result and no error."""
    empty = np.zeros((0, 4, 8), np.float16)
    with cki.device("sim"):
        result = cki.layer_norm(empty if kind == "numpy" else Foreign(empty))
    assert (result.shape, result.dtype) == ((0, 4, 8), np.float16)


def test_boolean_masks_of_either_type_give_the_same():
    """Interop case bool_mask_dtype: bool and uint8 masks are both taken."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 9, 2, 16)).astype(np.float16) for _ in range(3))
    mask = rng.random((1, 1, 9, 9)) < 0.7
    mask[..., 0] = True
    with cki.device("sim"):
        results = [
            cki.attention(q, k, v, mask=m) for m in (mask, mask.view(np.uint8), 3 * mask.view(np.uint8))
        ]
        np.testing.assert_array_equal(results[0].view(np.uint16), results[1].view(np.uint16))
        np.testing.assert_array_equal(results[0].view(np.uint16), results[2].view(np.uint16))
        assert (results[0] != cki.attention(q, k, v)).any()


@pytest.mark.torch
def test_parameters_under_no_grad_and_inference_mode():
    """Interop case dlpack_requires_grad: works in the first two contexts, names detach() in the third."""
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 8)
    weight = torch.nn.Parameter(torch.arange(8.0))
    with cki.device("sim"):
        results = []
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                results.append(cki.layer_norm(x, weight))
        assert torch.equal(*results)
        assert not any(result.requires_grad for result in results)
        with pytest.raises(InvalidTypeError, match=r"weight requires grad .* pass weight\.detach\(\)"):
            cki.layer_norm(x, weight)


# ---------------------------------------------------------------- errors


@pytest.mark.torch
def test_mixed_frameworks_are_refused():
    torch = pytest.importorskip("torch")
    with cki.device("sim"), pytest.raises(InvalidTypeError, match="x is of numpy, weight is of torch"):
        cki.layer_norm(np.ones((2, 8), np.float32), torch.ones(8))


def test_cpu_tensors_on_the_cuda_device_are_refused():
    """Interop case mixed_devices: a CPU tensor is an error that names argument and device, never a silent fallback."""
    x = np.ones((2, 8), np.float32)
    with cki.device("cuda"), pytest.raises(CkiError, match="x lies in memory of device cpu") as caught:
        cki.layer_norm(x)
    assert 'with cki.device("sim")' in str(caught.value)
    with cki.device("sim"):
        assert cki.layer_norm(x).shape == (2, 8)  # the process stays usable


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ([1.0, 2.0], "x is of type list, which is no tensor that CKI can read"),
        (np.ones((2, 8), complex), "x is of dtype complex128, which has no kernels"),
        (np.array([["a"]]), "x is of dtype <U1, which has no kernels"),
        (np.ones((2, 8), ">f4"), "x is of dtype >f4, foreign byte order"),
        (
            np.ones((2, 8), np.float32)[::-1],
            "x has negative strides (-32, 4); numpy.ascontiguousarray(x) has none",
        ),
        (np.ma.ones((2, 8)), "x is a masked array"),
    ],
)
def test_unusable_inputs_say_why(x, said):
    with cki.device("sim"), pytest.raises((InvalidTypeError, InvalidArgumentError)) as caught:
        cki.layer_norm(x)
    assert said in str(caught.value)


def test_all_unusable_tensors_are_named_together():
    with cki.device("sim"), pytest.raises(CkiError) as caught:
        cki.layer_norm(np.ones((2, 8), complex), np.ones(8, ">f4"), out=np.ones((2, 8), "S1"))
    said = str(caught.value)
    assert all(f"{name} is of dtype" in said for name in ("x", "weight", "out"))
