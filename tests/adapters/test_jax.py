"""JAX arrays in eager mode on the CPU: in place, layouts, tracers, outputs adopted without a copy."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from cki import dtypes  # noqa: E402
from cki.adapter import adapter_of  # noqa: E402
from cki.dlpack import DLPackExport  # noqa: E402
from cki.errors import InvalidTypeError  # noqa: E402
from cki.tensor import DeviceId  # noqa: E402

pytestmark = pytest.mark.jax
CPU = DeviceId("cpu", 0)
# JAX keeps 64-bit types only in its x64 mode.
NARROW = [dtype for dtype in dtypes.ALL if dtype.bits < 64]


def on_cpu(array):
    """On a machine with a GPU too, these tests use JAX's CPU."""
    return jax.device_put(jnp.asarray(array), jax.local_devices(backend="cpu")[0])


ADAPTER = adapter_of(on_cpu(np.zeros(1, np.float32)))


def finished(output, like):
    return ADAPTER.finish([output], [ADAPTER.view(like)], 0, CPU)[0]


@pytest.mark.parametrize("dtype", NARROW, ids=repr)
def test_every_dtype_is_viewed_in_place_and_read_only(dtype):
    array = on_cpu(np.zeros((2, 3, 4), dtype.numpy))
    assert ADAPTER.check(array, "x") == []
    view = ADAPTER.view(array)
    assert (view.ptr, view.shape, view.strides) == (array.unsafe_buffer_pointer(), (2, 3, 4), (12, 4, 1))
    assert (view.dtype, view.device, view.readonly) == (dtype, CPU, True)


def test_view_waits_for_the_value():
    """JAX dispatches asynchronously: the view of a result must hold it, not what was there before."""
    x = on_cpu(np.ones((700, 700), np.float32))
    y = jnp.dot(jnp.dot(x, x), x)
    view = ADAPTER.view(y)
    import ctypes

    assert ctypes.c_float.from_address(view.ptr + 4 * (y.size - 1)).value == 700.0**2


@pytest.mark.parametrize("major_to_minor", [(0, 1), (1, 0)])
def test_layouts_other_than_row_major_have_their_strides(major_to_minor):
    """Interop case jax_layout_from_strided: never the transposed contents."""
    from jax.experimental.layout import Format, Layout

    plain = on_cpu(np.arange(12, dtype=np.float32).reshape(3, 4))
    array = jax.device_put(plain, Format(Layout(major_to_minor=major_to_minor), plain.sharding))
    view = ADAPTER.view(array)
    assert view.strides == ((4, 1) if major_to_minor == (0, 1) else (1, 3))
    read = np.from_dlpack(DLPackExport(view))
    np.testing.assert_array_equal(read, np.arange(12).reshape(3, 4))


def test_transposed_torch_tensor_through_jax():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12.0).reshape(3, 4).t()
    view = ADAPTER.view(jax.dlpack.from_dlpack(tensor))
    np.testing.assert_array_equal(np.from_dlpack(DLPackExport(view)), tensor.numpy())


def test_empty_arrays_and_scalars():
    assert ADAPTER.view(on_cpu(np.zeros((0, 4), np.float32))).strides == (4, 1)
    scalar = ADAPTER.view(on_cpu(np.float32(2.5)))
    assert (scalar.shape, scalar.strides) == ((), ())


def test_signature_is_that_of_the_view():
    array = on_cpu(np.zeros((3, 4), np.float32))
    (view,) = ADAPTER.begin(["x"], [array])
    assert ADAPTER.signature(view) == ADAPTER.signature(array)
    assert ADAPTER.signature(view)[0] == array.unsafe_buffer_pointer()
    assert ADAPTER.begin(["x", "w"], [array, None])[1] is None


# ---------------------------------------------------------------- refusals


def test_tracers_have_no_memory_to_read():
    """Public operations never read one (`test_jax_jit.py`); everything else says why it cannot."""

    def call(x):
        adapter = adapter_of(x, "q")
        assert adapter is ADAPTER
        adapter.begin(["q"], [x])
        return x

    for transformed in (jax.jit(call), jax.vmap(call), jax.grad(lambda x: call(x).sum())):
        with pytest.raises(InvalidTypeError) as caught:
            transformed(jnp.ones(3))
        said = str(caught.value)
        assert "q is a JAX tracer (jax." in said
        assert "inside jax.jit, jax.vmap and the like only CKI's public operations can be called" in said


def test_random_keys_are_refused():
    with pytest.raises(InvalidTypeError, match=r"of a PRNG key, jax.random.key_data"):
        adapter_of(jax.random.key(0), "x")


def test_complex_and_four_bit_dtypes_are_refused():
    for dtype in (np.complex64, ml_dtypes.int4):
        (problem,) = ADAPTER.check(on_cpu(np.zeros(2, dtype)), "x")
        assert problem.startswith(
            f"x is of dtype {np.dtype(dtype).name}, which has no kernels; numbers are f32, f16 or bf16"
        )


def test_deleted_arrays_are_refused():
    array = on_cpu(np.zeros(3, np.float32))
    array.delete()
    assert ADAPTER.check(array, "x") == [
        "x has been deleted or donated to a jitted function; it has no memory any more"
    ]


def test_out_is_refused_because_arrays_are_immutable():
    (problem,) = ADAPTER.check(on_cpu(np.zeros(3, np.float32)), "out", output=True)
    assert problem.startswith(
        "out is a JAX array, which is immutable; leave out= out and use what is returned"
    )


def test_begin_reports_every_tensor():
    bad = on_cpu(np.zeros(2, np.complex64))
    with pytest.raises(InvalidTypeError) as caught:
        ADAPTER.begin(["x", "y"], [bad, bad])
    assert [problem[0] for problem in caught.value.problems] == ["x", "y"]


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("dtype", NARROW, ids=repr)
def test_outputs_are_adopted_without_a_copy(dtype):
    like = on_cpu(np.zeros(3, np.float32))
    output = ADAPTER.empty((3, 5), dtype, ADAPTER.view(like))
    pointer = ADAPTER.pointer(output)
    output.view(np.uint8)[:] = 1
    result = finished(output, like)
    assert isinstance(result, jax.Array)
    assert (result.unsafe_buffer_pointer(), result.shape, result.dtype) == (pointer, (3, 5), dtype.numpy)
    assert result.devices() == like.devices()
    assert bytes(np.asarray(result).view(np.uint8).ravel()[:2]) == b"\x01\x01"


def test_outputs_live_as_long_as_the_array():
    like = on_cpu(np.zeros(3, np.float32))
    output = ADAPTER.empty((1000,), dtypes.f32, like)
    output[:] = 7
    alive = weakref.ref(output.base)
    result = finished(output, like)
    del output
    gc.collect()
    assert alive() is not None
    assert float((result + 1).sum()) == 8000.0
    del result
    gc.collect()
    jnp.zeros(1).block_until_ready()
    gc.collect()
    assert alive() is None


def test_empty_outputs():
    like = on_cpu(np.zeros(3, np.float32))
    assert finished(ADAPTER.empty((0, 4), dtypes.f16, like), like).shape == (0, 4)


def test_sixty_four_bit_outputs_follow_jax_s_own_rule():
    like = on_cpu(np.zeros(3, np.float32))
    output = ADAPTER.empty((3,), dtypes.i64, like)
    output[:] = [1, 2, 3]
    result = finished(output, like)
    assert result.dtype == (jnp.int64 if jax.config.jax_enable_x64 else jnp.int32)
    np.testing.assert_array_equal(result, [1, 2, 3])


def test_memory_lent_to_jax_is_held_until_a_synchronisation(monkeypatch):
    """What the GPU path rests on: deleting the JAX array only queues the memory; the next call waits, then frees it."""
    from cki.adapters import jax as adapter_module

    class Memory:
        pass

    memory, synchronised = Memory(), []
    alive = weakref.ref(memory)
    monkeypatch.setattr(
        adapter_module, "_synchronize_devices", lambda held: synchronised.extend(map(id, held))
    )
    lent = adapter_module._Loan(memory)
    expected = id(memory)
    del memory, lent
    gc.collect()
    assert alive() is not None
    ADAPTER.begin(["x"], [on_cpu(np.zeros(1, np.float32))])
    assert synchronised == [expected]
    assert alive() is None


# ---------------------------------------------------------------- round trips


def test_jax_to_torch_and_back_is_one_memory():
    torch = pytest.importorskip("torch")
    array = on_cpu(np.arange(6, dtype=np.float32).reshape(2, 3))
    tensor = torch.from_dlpack(DLPackExport(ADAPTER.view(array)))
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(tensor.numpy(), array)
    view = adapter_of(tensor).view(tensor)
    back = jax.dlpack.from_dlpack(DLPackExport(view))
    assert back.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()


def test_numpy_to_jax_through_cki():
    from cki.adapters.numpy import aligned_empty

    array = aligned_empty((8,), dtypes.bf16)
    array[:] = np.arange(8)
    imported = jax.dlpack.from_dlpack(DLPackExport(adapter_of(array).view(array)))
    assert ADAPTER.view(imported).ptr == array.__array_interface__["data"][0]
    np.testing.assert_array_equal(np.asarray(imported).astype(np.float32), np.arange(8))
