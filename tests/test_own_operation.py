"""A kernel of `cki.load` as an operation: values in NumPy and torch, every refusal, rules that cannot hold."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
"""
SPLIT = """
#include "common/types.cuh"
extern "C" __global__ void split(const Element* x, const int* shift, Element* low, int* sign, long long n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  low[i] = x[i];
  sign[i] = (x[i].bits >> 15) + *shift;
}
"""


def rule(x, *, factor):
    n = x.size
    return cki.LaunchRule(outputs={"y": (x.shape, x.dtype)}, grid=-(-n // 256), block=256, numbers={"n": n})


@pytest.fixture(scope="module")
def scale():
    return cki.load(SCALE).operation(rule)


def test_values_and_signature(device, scale):
    x = np.arange(600, dtype=np.float32).reshape(3, 200)
    y = scale(device.array(x), factor=0.5)
    np.testing.assert_array_equal(device.numpy(y), x / 2)
    np.testing.assert_array_equal(device.numpy(scale(x=device.array(x), factor=2)), x * 2)
    assert repr(scale).endswith("(x, *, factor=None, n=None)>")


def test_two_outputs_of_other_types_and_constants(device):
    split = cki.load(SPLIT, constants={"Element": cki.dtypes.f16}).operation(
        lambda x, shift: cki.LaunchRule(
            {"low": (x.shape, x.dtype), "sign": (x.shape, "i32")}, -(-x.size // 64), 64, {"n": x.size}
        )
    )
    x = np.linspace(-2, 3, 100).astype(np.float16)
    low, sign = split(device.array(x), device.array(np.array([5], np.int32)))
    np.testing.assert_array_equal(device.numpy(low), x)
    np.testing.assert_array_equal(device.numpy(sign), np.signbit(x) + 5)


@pytest.mark.torch
def test_torch_tensors_give_torch_tensors(scale):
    torch = pytest.importorskip("torch")
    with cki.device("sim"):
        assert torch.equal(scale(torch.arange(5.0), factor=3.0), 3 * torch.arange(5.0))


@pytest.mark.torch
def test_inside_torch_compile_with_dynamic_sizes(scale):
    torch = pytest.importorskip("torch")
    compiled = torch.compile(
        lambda x: scale(x + 1, factor=2.0) - 1, fullgraph=True, dynamic=True, backend="eager"
    )
    late = cki.load(SCALE).operation(rule)  # made after the operators were
    assert late.__name__ != scale.__name__
    with torch.inference_mode(), cki.device("sim"):
        for rows in (3, 5):
            x = torch.arange(4.0 * rows).reshape(rows, 4)
            assert torch.equal(compiled(x), 2 * x + 1)
        again = torch.compile(lambda x: late(x, factor=3.0), fullgraph=True, backend="eager")
        assert torch.equal(again(x), 3 * x)
        with pytest.raises(Exception, match="its rule fails for x of shape"):
            torch.compile(lambda x: scale(x), fullgraph=True, backend="eager")(x)


@pytest.mark.jax
def test_inside_jit_and_vmap(scale):
    jax = pytest.importorskip("jax")
    cpu = jax.local_devices(backend="cpu")[0]
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    with cki.device("sim"), jax.default_device(cpu):
        compiled = jax.jit(lambda x: scale(x + 1, factor=2.0) - 1)
        np.testing.assert_array_equal(compiled(x), 2 * x + 1)
        np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: scale(x, factor=2.0)))(x), 2 * x)
        np.testing.assert_array_equal(scale(jax.numpy.asarray(x), factor=2.0), 2 * x)
        with pytest.raises(InvalidArgumentError, match="scale.*: invalid arguments\n  - its rule fails"):
            jax.jit(scale)(x)
        with pytest.raises(UnsupportedError, match="scale.* has no gradient"):
            jax.grad(lambda x: scale(x, factor=2.0).sum())(x)


def test_a_call_that_does_not_fit_says_everything(scale):
    x = np.zeros(4, np.float32)
    with cki.device("sim"):
        with pytest.raises(
            InvalidTypeError,
            match=r"scale.*: invalid arguments\n  - x is a f64 tensor, the kernel takes f32\*",
        ):
            scale(x.astype(np.float64), factor=1.0)
        with pytest.raises(InvalidArgumentError, match="its rule fails for x of shape .*factor"):
            scale(x)
        with pytest.raises(InvalidTypeError, match="operation scale.* takes no argument power"):
            scale(x, power=1)
        with pytest.raises(InvalidTypeError, match="takes 1 tensors, not 2"):
            scale(x, x)
        with pytest.raises(InvalidTypeError, match="scale.*: missing tensors\n  - x is None"):
            scale(factor=1.0)
        with pytest.raises(InvalidTypeError, match="factor is 'a' of type str, not float"):
            scale(x, factor="a")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x, factor: None, "its rule returns None"),
        (lambda x, factor: cki.LaunchRule({"z": (x.shape, x.dtype)}, 1, 32), "its rule gives outputs z"),
        (
            lambda x, factor: cki.LaunchRule({"y": (x.shape, "f16")}, 1, 32, {"n": 4}),
            r"gives y as f16, .* writes f32\*",
        ),
        (lambda x, factor: cki.LaunchRule({"y": (x.shape, x.dtype)}, 1, 32), "n is not given"),
        (
            lambda x, factor: cki.LaunchRule({"y": (x.shape, x.dtype)}, 1, 32, {"n": 2**40}),
            "n is .*, out of range of int",
        ),
        (
            lambda x, factor: cki.LaunchRule({"y": (x.shape, x.dtype)}, 1, 32, {"n": 4, "m": 1}),
            "its rule gives m",
        ),
        (lambda x, factor: 1 / 0, "its rule fails for x of shape .*ZeroDivisionError"),
        (lambda x, factor: cki.LaunchRule([(x.shape, x.dtype)], 1, 32), "its rule gives outputs as "),
        (
            lambda x, factor: cki.LaunchRule({"y": (x.shape, x.dtype)}, 1, 32, [4]),
            "its rule gives numbers as ",
        ),
        *(
            (
                lambda x, factor, sizes=sizes: cki.LaunchRule(
                    {"y": (x.shape, x.dtype)}, numbers={"n": 4}, **{"grid": 1, "block": 32, **sizes}
                ),
                said,
            )
            for sizes, said in (
                ({"grid": 1.5}, "grid is 1.5, not one to three integers"),
                ({"grid": (1.5, 1)}, r"grid is \(1.5, 1\), not"),
                ({"block": (1, 1, 1, 32)}, r"block is \(1, 1, 1, 32\), not"),
                ({"cluster": True}, "cluster is True, not"),
                ({"smem": 1.5}, "smem is 1.5, not an integer"),
            )
        ),
    ],
)
def test_rules_that_do_not_fit_the_kernel(wrong, said):
    operation = cki.load(SCALE).operation(wrong)
    with cki.device("sim"), pytest.raises((InvalidArgumentError, InvalidTypeError), match=said):
        operation(np.zeros(4, np.float32), factor=1.0)


def test_kernels_that_are_no_operations():
    inputs_only = 'extern "C" __global__ void f(const float* x) {}'
    outputs_only = 'extern "C" __global__ void f(float* y) {}'
    for source, said in ((inputs_only, "no other pointer"), (outputs_only, "no pointer to const")):
        with pytest.raises(InvalidArgumentError, match=f"f cannot be an operation\n  - it has {said}"):
            cki.load(source).operation(rule)
    with pytest.raises(InvalidArgumentError, match="argument 0 is no name for an argument"):
        cki.load(SCALE, params="PPfi").operation(rule)
    with pytest.raises(InvalidTypeError, match="scale: the rule is 3"):
        cki.load(SCALE).operation(3)


@pytest.mark.parametrize(
    "shape", [(-1,), (-3, 4), (1.5,), (True, 4), (None,), (2**31,), 4, "ab", None], ids=repr
)
def test_an_output_without_a_size_is_refused(shape):
    """The kernel would write beyond what was allocated for it."""
    made = cki.load(SCALE).operation(
        lambda x, *, factor: cki.LaunchRule({"y": (shape, x.dtype)}, 1, 256, {"n": x.size})
    )
    with cki.device("sim"), pytest.raises(InvalidArgumentError, match="its rule gives y as "):
        made(np.zeros(4, np.float32), factor=1.0)


def test_outputs_that_are_no_pairs_are_refused():
    made = cki.load(SCALE).operation(
        lambda x, *, factor: cki.LaunchRule({"y": x.shape}, 1, 256, {"n": x.size})
    )
    with cki.device("sim"), pytest.raises(InvalidArgumentError, match=r"its rule gives y as \(4,\)"):
        made(np.zeros(4, np.float32), factor=1.0)


def test_numpy_s_integers_are_sizes(scale):
    made = cki.load(SCALE).operation(
        lambda x, *, factor: cki.LaunchRule(
            {"y": (np.array([2, 3]), np.float32)}, np.int64(1), np.array([256]), {"n": np.int64(x.size)}
        )
    )
    with cki.device("sim"):
        assert made(np.ones((2, 3), np.float32), factor=2.0).tolist() == [[2.0] * 3] * 2


STRIDED = """
extern "C" __global__ void columns(const float* x, float* y, int rows, int width, int row_step, int step) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows * width) y[i] = x[i / width * row_step + i % width * step];
}
"""


def test_inputs_with_gaps_are_read_by_strides_or_refused(scale):
    """The kernel gets an address alone."""
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    words = "x has shape .* and strides .*, the kernel reads it row-major\n  hint: a contiguous copy, or LaunchRule"
    with cki.device("sim"):
        for strided in (x[:, ::2], x.T, x[:, :3], np.broadcast_to(x[:1], (4, 6))):
            with pytest.raises(InvalidArgumentError, match=words):
                scale(strided, factor=2.0)
        np.testing.assert_array_equal(scale(x[1:3], factor=2.0), 2 * x[1:3])
        np.testing.assert_array_equal(scale(x[:, :1].reshape(1, 4, 1)[:, :1], factor=2.0), [[[0.0]]])

        def by_strides(x):
            (rows, width), (row_step, step) = x.shape, x.strides
            numbers = {"rows": rows, "width": width, "row_step": row_step, "step": step}
            return cki.LaunchRule({"y": (x.shape, x.dtype)}, 1, 256, numbers, strided=True)

        columns = cki.load(STRIDED).operation(by_strides)
        for strided in (x[:, ::2], x.T, x):
            np.testing.assert_array_equal(columns(strided), strided)


@pytest.mark.torch
def test_a_transposed_tensor_of_torch_is_refused_eagerly_and_traced(scale):
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0).reshape(4, 6)
    with cki.device("sim"), torch.inference_mode():
        with pytest.raises(InvalidArgumentError, match="the kernel reads it row-major"):
            scale(x.T, factor=2.0)
        traced = torch.compile(lambda x: scale(x.T, factor=2.0), fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="the kernel reads it row-major"):
            traced(x)
        right = torch.compile(
            lambda x: scale(x.T.contiguous(), factor=2.0), fullgraph=True, dynamic=True, backend="aot_eager"
        )
        assert torch.equal(right(x), 2 * x.T)
