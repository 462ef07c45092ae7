"""Options that came later than their operation, in each framework's compiled programs: the bits of the device's own.

On the simulated device those are NumPy's, on a GPU torch's where there are 8-bit floats, else CuPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from tests.adapters.examples import E4M3, VARIANTS
from tests.conftest import DeviceUnderTest


def called(name: str, tensors: dict[str, Any]) -> Any:
    operation, _, attributes = VARIANTS[name]
    return getattr(cki, operation)(**tensors, **attributes)


def mapped(function: Any, arrays: Any) -> Any:
    """A function of each array, also of those in a tuple."""
    if isinstance(arrays, dict):
        return {key: mapped(function, value) for key, value in arrays.items()}
    return tuple(map(function, arrays)) if isinstance(arrays, tuple) else function(arrays)


def expected(device: DeviceUnderTest, name: str) -> np.ndarray:
    _, arrays, _ = VARIANTS[name]
    there = device.holding(
        *(a.dtype for a in arrays.values() if isinstance(a, np.ndarray) and a.dtype == E4M3)
    )
    return there.numpy(called(name, mapped(there.array, arrays)))


def same(found: Any, wanted: np.ndarray) -> None:
    found = np.asarray(found)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.torch
@pytest.mark.parametrize("name", VARIANTS)
def test_under_torch_compile(device, name):
    torch = pytest.importorskip("torch")
    if device.kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    there = DeviceUnderTest(device.kind, device.info, "torch")
    tensors = mapped(there.array, VARIANTS[name][1])
    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(lambda tensors: called(name, tensors), fullgraph=True, backend="aot_eager")
        found = compiled(tensors)
        same(found.cpu(), expected(device, name))
        with torch._subclasses.FakeTensorMode() as mode:
            fake = called(name, mapped(mode.from_tensor, tensors))
    assert (fake.shape, fake.dtype, fake.device) == (found.shape, found.dtype, found.device)


@pytest.mark.jax
@pytest.mark.parametrize("name", VARIANTS)
def test_inside_jax_jit(device, name):
    jax = pytest.importorskip("jax")
    platform = "cpu" if device.kind == "sim" else "gpu"
    if platform == "gpu" and jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend=platform)[0]):  # seeds of 64 bits
        found = jax.jit(lambda arrays: called(name, arrays))(mapped(jax.numpy.asarray, VARIANTS[name][1]))
        same(found, expected(device, name))


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", VARIANTS)
def test_in_tensorflow_s_eager_mode_functions_and_xla(device, name):
    tf = pytest.importorskip("tensorflow")
    if device.kind == "cuda" and not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no CUDA")
    wanted = expected(device, name)

    def body(tensors: dict[str, Any]) -> Any:
        return called(name, tensors)

    def open_spec(array: np.ndarray) -> Any:
        return tf.TensorSpec([None] * array.ndim, tf.as_dtype(array.dtype))

    with tf.device("GPU:0" if device.kind == "cuda" else "CPU:0"):
        tensors = mapped(tf.convert_to_tensor, VARIANTS[name][1])
        same(body(tensors), wanted)
        same(tf.function(body).get_concrete_function(mapped(open_spec, VARIANTS[name][1]))(tensors), wanted)
        same(tf.function(body, jit_compile=True)(tensors), wanted)
