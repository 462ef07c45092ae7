"""NumPy arrays: in place, any non-negative strides, refusals with their text."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cki import dtypes
from cki.adapter import adapter_of
from cki.adapters.numpy import aligned_empty
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId

ADAPTER = adapter_of(np.zeros(1))


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=repr)
def test_every_dtype_is_viewed_in_place(dtype):
    array = np.zeros((2, 3, 4), dtype.numpy)
    assert ADAPTER.check(array) == []
    view = ADAPTER.view(array)
    assert (view.ptr, view.shape, view.strides) == (address(array), (2, 3, 4), (12, 4, 1))
    assert (view.dtype, view.device, view.readonly) == (dtype, DeviceId("cpu", 0), False)
    assert view.owner is array


@pytest.mark.parametrize(
    "cut", [lambda a: a[1:, ::2], lambda a: a.T, lambda a: a[:, 1:2], lambda a: np.broadcast_to(a[0], (5, 6))]
)
def test_strides_are_honoured(cut):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = cut(base)
    view = ADAPTER.view(array)
    assert view.ptr == address(array)
    walked = [(e, s) for e, s in zip(view.shape, view.strides) if e > 1]
    assert walked == [(e, s // 4) for e, s in zip(array.shape, array.strides) if e > 1]


def test_read_only_arrays_are_inputs_but_no_outputs():
    array = np.zeros(4, np.float32)
    writable = ADAPTER.signature(array)[1]
    array.flags.writeable = False
    assert ADAPTER.check(array, "x") == []
    assert ADAPTER.view(array).readonly is True
    assert ADAPTER.check(array, "out", output=True) == ["out is read-only; an output needs a writable array"]
    assert ADAPTER.signature(array)[1] != writable


def test_empty_arrays():
    for array in (np.zeros((0, 4), np.float32), np.zeros((3, 0), np.float32)[::-1]):
        assert ADAPTER.check(array) == []
        view = ADAPTER.view(array)
        assert (view.ptr, view.size) == (0, 0)


def test_negative_strides():
    (problem,) = ADAPTER.check(np.zeros((4, 2), np.float32)[::-1], "x")
    assert problem == "x has negative strides (-8, 4); numpy.ascontiguousarray(x) has none"
    assert ADAPTER.check(np.zeros((1, 2), np.float32)[::-1], "x") == []  # an axis of extent 1 is not walked


def test_strides_that_cut_elements():
    fields = np.zeros(4, np.dtype([("a", "i1"), ("b", "f4")]))
    (problem,) = ADAPTER.check(fields["b"], "x")
    assert problem.startswith("x has strides (5,) that are not multiples of its 4-byte elements")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros(3, ">f4"), "x is of dtype >f4, foreign byte order; x.astype('float32') is native"),
        (
            np.zeros(3, np.complex64),
            "x is of dtype complex64, which has no kernels; numbers are f32, f16 or bf16, ",
        ),
        (np.array([object()]), "x is of dtype object, which has no kernels"),
        (np.array(["a"]), "x is of dtype <U1, which has no kernels"),
        (np.zeros(3, np.longdouble), "x is of dtype float128, which has no kernels"),
        (np.zeros(3, ml_dtypes.float8_e4m3), "x is of dtype float8_e4m3, which has no kernels"),
    ],
)
def test_refused_dtypes(array, said):
    (problem,) = ADAPTER.check(array, "x")
    assert problem.startswith(said)


def test_masked_arrays_and_scalars_are_refused_by_name():
    with pytest.raises(InvalidTypeError, match=r"q is a masked array\n  hint: q\.filled\(value\)"):
        adapter_of(np.ma.zeros(3), "q")
    with pytest.raises(
        InvalidTypeError, match=r"q is a numpy\.float32, not an array\n  hint: numpy\.asarray\(q\)"
    ):
        adapter_of(np.float32(3), "q")


def test_signature_tells_apart_what_a_plan_depends_on():
    base = np.zeros((8, 8), np.float32)
    flat = np.zeros(65, np.float32)
    start = -(address(flat) // 4) % 4  # so that flat[start:] lies on 16 bytes
    variants = [
        base,
        base[:4],
        base[:, :4],
        base.T[:4].T[:, :4].T,
        base.view(np.int32),
        flat[start:][:32].reshape(4, 8),
        flat[start + 1 :][:32].reshape(4, 8),
        flat[start + 2 :][:32].reshape(4, 8),
    ]
    keys = [ADAPTER.signature(array)[1] for array in variants]
    assert ADAPTER.signature(base[:4])[1] == ADAPTER.signature(base[4:])[1] == keys[1]
    assert keys[5] == keys[1]
    assert len(set(keys)) == len(variants) - 1
    assert ADAPTER.signature(base[4:])[0] == address(base) + 4 * 32


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=repr)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5, 7)])
def test_outputs_are_aligned_and_row_major(shape, dtype):
    output = ADAPTER.empty(shape, dtype, np.zeros(1))
    assert (type(output), output.shape, output.dtype) == (np.ndarray, shape, dtype.numpy)
    assert output.flags.c_contiguous
    assert output.flags.writeable
    assert ADAPTER.pointer(output) == address(output)
    assert ADAPTER.pointer(output) % 64 == 0 or not output.size


def test_outputs_do_not_share_memory():
    first, second = aligned_empty((64,), dtypes.f32), aligned_empty((64,), dtypes.f32)
    first[:], second[:] = 1, 2
    assert (first == 1).all()
    assert not np.shares_memory(first, second)
