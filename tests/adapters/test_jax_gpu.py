"""CKI's operations in JAX on a GPU: XLA's stream and memory, order, no wait, donation, addresses, several GPUs."""

from __future__ import annotations

import gc
import time

import ml_dtypes
import numpy as np
import pytest

import cki
from cki import dtypes
from cki.adapter import adapter_of
from cki.dlpack import DLPackExport
from cki.tensor import DeviceId
from tests.adapters import calls

pytestmark = [pytest.mark.gpu, pytest.mark.jax]
jax = pytest.importorskip("jax")
cupy = pytest.importorskip("cupy")

import jax.numpy as jnp  # noqa: E402

import cki.adapters.jax as cki_jax  # noqa: E402
from cki.errors import DeviceError  # noqa: E402

ROWS, WIDTH = 2048, 1024


@pytest.fixture(autouse=True)
def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no CUDA")
    with cki.device("cuda"):
        yield


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", calls.FLOATS, ids=str)
def test_the_same_bits_inside_jit_outside_and_from_cupy(dtype):
    arrays = [jnp.asarray(array) for array in calls.norm_inputs(dtype)]
    inside = jax.jit(calls.layer_norm)(arrays)
    outside = calls.layer_norm(arrays)
    through_dlpack = calls.layer_norm([cupy.from_dlpack(array) for array in arrays])
    for one, other, third in zip(inside, outside, through_dlpack):
        assert one.dtype == dtype and one.devices() == arrays[0].devices()
        wanted = cupy.asnumpy(third.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), wanted)
        np.testing.assert_array_equal(np.asarray(other).view(np.uint8), wanted)


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
def test_order_with_jax_s_own_work(is_jitted):
    source, heavy = jnp.asarray(normal(ROWS, WIDTH)), jnp.eye(4096, dtype=jnp.float32)
    wanted = np.asarray(cki.layer_norm(source)) + 1

    def work(source, heavy):
        product = jnp.dot(jnp.dot(heavy, heavy), heavy)[:ROWS, :WIDTH] * 0
        return cki.layer_norm(source + product) + 1

    work = jax.jit(work) if is_jitted else work
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(work(source, heavy)), wanted)


def test_nobody_waits_for_the_device():
    """Behind a long queue a call returns long before it is done, eager and jitted."""
    x, heavy = jnp.asarray(normal(ROWS, WIDTH)), jnp.ones((8192, 8192), jnp.float32) / 8192
    compiled = jax.jit(lambda x: cki.rms_norm(x))
    busy = jax.jit(lambda a: jax.lax.fori_loop(0, 80, lambda _, b: b @ a, a))
    for function in (compiled, cki.rms_norm):
        function(x + busy(heavy)[0, 0] * 0).block_until_ready()  # compiles all that is timed
        begin = time.perf_counter()
        queue = busy(heavy)
        y = function(x + queue[0, 0] * 0)
        returned = time.perf_counter() - begin
        y.block_until_ready()
        done = time.perf_counter() - begin
        assert returned < done / 2, (returned, done)


def test_memory_is_xla_s():
    """Outputs and workspace: CuPy's pool stays as it is."""
    x, weights = jnp.asarray(normal(2, 256, 512, dtype=np.float16)), [
        jnp.asarray(normal(512, 512, dtype=np.float16, seed=seed) / 23) for seed in range(4)
    ]  # fmt: skip
    compiled = jax.jit(lambda x, *w: cki.fused_attention(x, *w, num_heads=8, head_dim=64))
    wanted = np.asarray(compiled(x, *weights))
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes()
    for function in (compiled, lambda x, *w: cki.fused_attention(x, *w, num_heads=8, head_dim=64)):
        np.testing.assert_array_equal(np.asarray(function(x, *weights)), wanted)
    assert pool.total_bytes() == before


def test_a_donated_cache_is_written_in_place():
    k = jnp.asarray(normal(5, 8, 128, dtype=ml_dtypes.bfloat16))
    cache = tuple(jnp.zeros((32, 16, 8, 128), jnp.bfloat16) for _ in range(2))
    slots = jnp.array([3, 100, 31, 17, 511])
    step = jax.jit(lambda k, cache, slots: cki.append_kv(k, k, cache, slots), donate_argnums=1)
    addresses = [array.unsafe_buffer_pointer() for array in cache]
    for _ in range(3):
        cache = step(k, cache, slots)
    assert [array.unsafe_buffer_pointer() for array in cache] == addresses
    np.testing.assert_array_equal(np.asarray(cache[1]).reshape(512, 8, 128)[np.asarray(slots)], np.asarray(k))
    assert np.count_nonzero(np.asarray(cache[0]).astype(np.float32).any((-1, -2))) == 5


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"local_window_size": (100, 0)}], ids=str)
def test_dot_product_attention(arguments):
    q, k = jnp.asarray(normal(2, 512, 8, 64)), jnp.asarray(normal(2, 512, 2, 64, seed=1))
    half = [array.astype(jnp.bfloat16) for array in (q, k, k)]
    found = jax.jit(lambda q, k, v: cki_jax.dot_product_attention(q, k, v, **arguments))(*half)
    with jax.default_matmul_precision("highest"):
        wanted = jax.nn.dot_product_attention(*(array.astype(jnp.float32) for array in half), **arguments)
    theirs = jax.nn.dot_product_attention(*half, **arguments)
    error, bound = (np.abs(np.asarray(a, np.float64) - np.asarray(wanted)).max() for a in (found, theirs))
    assert error <= 2 * bound + 1e-5 * np.abs(np.asarray(wanted)).max()


def test_many_calls_keep_no_memory():
    x = jnp.asarray(normal(ROWS, WIDTH))
    compiled = jax.jit(lambda x: cki.softmax(x))
    compiled(x).block_until_ready()
    device = jax.local_devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    for _ in range(1000):
        y = compiled(x)
    y.block_until_ready()
    del y
    assert device.memory_stats()["bytes_in_use"] <= before


def test_arrays_on_a_gpu_and_the_simulated_device():
    with cki.device("sim"), pytest.raises(DeviceError, match="softmax: the arrays lie on a GPU"):
        jax.jit(lambda x: cki.softmax(x))(jnp.ones((4, 8)))


# ---------------------------------------------------------------------------------------------------------------------
# the adapter


@pytest.mark.parametrize("dtype", [d for d in dtypes.ALL if d.bits < 64], ids=repr)
def test_jax_arrays_are_viewed_in_place_and_outputs_adopted(dtype):
    array = jax.device_put(np.zeros((3, 4), dtype.numpy))
    adapter = adapter_of(array)
    assert adapter.check(array) == []
    (view,) = adapter.begin(["x"], [array])
    assert (view.ptr, view.strides, view.dtype) == (array.unsafe_buffer_pointer(), (4, 1), dtype)
    assert (view.device, view.readonly) == (DeviceId("cuda", 0), True)
    output = adapter.empty((3, 5), dtype, view)
    pointer = adapter.pointer(output)
    cupy.cuda.runtime.memset(pointer, 1, 15 * dtype.itemsize)
    (result,) = adapter.finish([output], [view], adapter.stream(0), view.device)
    assert isinstance(result, jax.Array)
    assert (result.unsafe_buffer_pointer(), result.dtype, result.shape) == (pointer, dtype.numpy, (3, 5))
    assert bytes(np.asarray(result).view(np.uint8).ravel()) == b"\x01" * 15 * dtype.itemsize


def test_memory_lent_to_jax_comes_back_with_the_next_call():
    adapter = adapter_of(jax.device_put(np.zeros(1, np.float32)))
    x = jax.device_put(normal(ROWS, WIDTH))
    y = cki.layer_norm(x, stream=cupy.cuda.get_current_stream())  # on XLA's own stream the memory is XLA's
    pool = cupy.get_default_memory_pool()
    used = pool.used_bytes()
    del y
    gc.collect()
    assert pool.used_bytes() == used  # kept: JAX's stream may still read it
    adapter.begin(["x"], [x])
    gc.collect()
    assert pool.used_bytes() <= used - ROWS * WIDTH * 4


@pytest.mark.torch
def test_torch_to_jax_to_cupy_is_one_memory():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    tensor = torch.arange(12.0, device="cuda").reshape(3, 4)
    torch.cuda.synchronize()
    array = jax.dlpack.from_dlpack(DLPackExport(adapter_of(tensor).view(tensor)))
    view = adapter_of(array).view(array)
    view.readonly = False  # CuPy takes old capsules, which cannot carry the flag
    back = cupy.from_dlpack(DLPackExport(view))
    assert tensor.data_ptr() == array.unsafe_buffer_pointer() == back.data.ptr
    np.testing.assert_array_equal(cupy.asnumpy(back), np.arange(12).reshape(3, 4))


# ---------------------------------------------------------------------------------------------------------------------
# several GPUs


@pytest.mark.multi_gpu
def test_two_gpus():
    if len(jax.local_devices()) < 2:
        pytest.skip("one GPU")
    from jax.sharding import NamedSharding, PartitionSpec

    x, w = jnp.asarray(normal(ROWS, WIDTH)), jnp.asarray(normal(WIDTH))
    wanted = np.asarray(cki.rms_norm(x, w))
    there = jax.device_put((x, w), jax.local_devices()[1])
    for function in (cki.rms_norm, jax.jit(cki.rms_norm)):
        y = function(*there)
        assert y.devices() == {jax.local_devices()[1]}
        np.testing.assert_array_equal(np.asarray(y), wanted)
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:2]), ("rows",))
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows")))
    everywhere = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
    shards = jax.shard_map(
        lambda x, w: cki.rms_norm(x, w), mesh=mesh, in_specs=(PartitionSpec("rows"), PartitionSpec()),
        out_specs=PartitionSpec("rows"),
    )  # fmt: skip
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(jax.jit(shards)(spread, everywhere)), wanted)
