"""`recompute_gradient=True` in JAX: the derivatives are PyTorch's, inside `jax.jit` and `jax.vmap` too."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402

import cki  # noqa: E402
from cki.adapters import gradient  # noqa: E402
from cki.adapters import jax as adapter  # noqa: E402
from cki.adapters.gradient_jax import ARRAYS  # noqa: E402
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError  # noqa: E402
from tests.adapters.gradient_cases import CASES, arrays_of, attributes_of, torch_gradients  # noqa: E402

pytestmark = [pytest.mark.jax, pytest.mark.torch]


def total(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0.0)).sum() for y in outputs)


def split(case):
    """Floats, and the other inputs."""
    arrays = arrays_of(case)
    floats = {n: jnp.asarray(a) for n, a in arrays.items() if a is not None and a.dtype.kind == "f"}
    return floats, {n: a if a is None else jnp.asarray(a) for n, a in arrays.items() if n not in floats}


def test_gradients_of_expressions_are_torch_s():
    """In one compiled program, whose compilation takes most of the time."""
    cases = {
        name: CASES[name]
        for name in ("rms_norm", "gated_linear", "attention-masks", "fused_attention-packed")
    }
    splits = {name: split(case) for name, case in cases.items()}

    def loss(variables):
        return sum(
            total(
                gradient.expression(case.operation)(
                    ARRAYS, {**variables[name], **splits[name][1]}, attributes_of(case)
                )
            )
            for name, case in cases.items()
        )

    found = jax.jit(jax.grad(loss))({name: floats for name, (floats, _) in splits.items()})
    for name, case in cases.items():
        for argument, wanted in torch_gradients(case).items():
            np.testing.assert_allclose(
                found[name][argument], wanted, rtol=2e-4, atol=2e-5, err_msg=f"{name}: {argument}"
            )


@pytest.mark.parametrize("name", ["attention-window", "apply_rope-table"])
def test_jax_grad_of_the_kernel_s_call(name):
    case = CASES[name]
    floats, others = split(case)

    def loss(floats, **asked):
        return total(getattr(adapter, case.operation)(**floats, **others, **case.attributes, **asked))

    with cki.device("sim"):
        value, found = jax.jit(jax.value_and_grad(lambda f: loss(f, recompute_gradient=True)))(floats)
        assert float(value) == pytest.approx(float(loss(floats)), rel=1e-6)
    for argument, wanted in torch_gradients(case).items():
        np.testing.assert_allclose(found[argument], wanted, rtol=2e-4, atol=2e-5, err_msg=argument)


def test_finite_differences_of_the_kernel_itself():
    """Not of the expression: the kernel's own values change as the gradient says."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64)), jnp.float32)
    direction = jnp.asarray(np.random.default_rng(1).standard_normal((2, 64)), jnp.float32)

    def loss(x, **asked):
        return jnp.sin(2 * adapter.softmax(x, scale=2.0, **asked)).sum()

    with cki.device("sim"):
        found = jax.grad(lambda x: loss(x, recompute_gradient=True))(x)
        step = 3e-3
        wanted = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    assert float((found * direction).sum()) == pytest.approx(float(wanted), rel=2e-2, abs=1e-3)


def test_vmap_and_second_derivatives():
    x = jnp.linspace(-1, 1, 48).reshape(3, 2, 8)

    def loss(x):
        return jnp.sin(adapter.softmax(x, recompute_gradient=True)).sum()

    def plain(x):
        return jnp.sin(jax.nn.softmax(x)).sum()

    def second(function):
        return jax.jit(jax.vmap(jax.grad(lambda x: (jax.grad(function)(x) ** 2).sum())))(x)

    with cki.device("sim"):
        found = second(loss)
    np.testing.assert_allclose(found, second(plain), atol=1e-6)


def test_refusals_name_the_operation():
    x = jnp.ones((2, 8))
    with cki.device("sim"):
        with pytest.raises(
            UnsupportedError, match="layer_norm has no gradient(.|\n)*recompute_gradient=True"
        ):
            jax.grad(lambda x: adapter.layer_norm(x).sum())(x)
        for value in ("y", 1, None):
            with pytest.raises(
                InvalidTypeError, match=f"layer_norm: recompute_gradient is {value!r}\n.*True or False"
            ):
                adapter.layer_norm(x, recompute_gradient=value)
        with pytest.raises(UnsupportedError, match="mean_pool: recompute_gradient=True, but it has no"):
            adapter.mean_pool(x[None], jnp.ones((1, 2), jnp.int32), recompute_gradient=True)
        with pytest.raises(InvalidArgumentError, match="weight has shape"):
            adapter.layer_norm(x, x, recompute_gradient=True)
