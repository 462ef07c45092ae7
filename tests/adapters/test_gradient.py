"""The differentiable expressions of operations: their values, and their derivatives by finite differences in float64.

PyTorch runs them here; `test_gradient_jax` and `test_gradient_tensorflow` compare the other frameworks' with its.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cki  # noqa: E402
from cki.adapters import gradient  # noqa: E402
from cki.adapters import torch as adapter  # noqa: E402
from cki.adapters.gradient_torch import ARRAYS, OPERATORS  # noqa: E402
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError  # noqa: E402
from cki.ops.table import public_specs  # noqa: E402
from tests.adapters.gradient_cases import CASES, REFERENCES, arrays_of, attributes_of, first_cases  # noqa: E402

pytestmark = pytest.mark.torch


def tensors_of(case, dtype):
    """Inputs by name; those that are floats have a gradient."""
    found = {}
    for name, array in arrays_of(case).items():
        tensor = None if array is None else torch.from_numpy(array.copy())
        is_float = array is not None and array.dtype.kind == "f"
        found[name] = tensor.to(dtype).requires_grad_() if is_float else tensor
    return found


def differentiable(tensors):
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}


def scalar(outputs):
    """A number in which every element of every output counts differently."""
    total = 0.0
    for output in outputs:
        weights = torch.linspace(0.3, 1.7, output.numel(), dtype=torch.float64).reshape(output.shape)
        total = total + (torch.where(torch.isfinite(output), output, 0.0).double().sin() * weights).sum()
    return total


def test_every_expression_has_a_case():
    assert {case.operation for case in CASES.values()} == gradient.names() == set(OPERATORS)


@pytest.mark.parametrize("name", CASES)
def test_the_expression_has_the_reference_s_values(name):
    case = CASES[name]
    outputs = gradient.expression(case.operation)(
        ARRAYS, tensors_of(case, torch.float64), attributes_of(case)
    )
    expected = REFERENCES[case.operation](**arrays_of(case), **case.attributes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected):
        np.testing.assert_allclose(output.detach().numpy(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_expression_are_those_of_finite_differences(name):
    """In float64, along a random direction of all inputs."""
    case = CASES[name]
    tensors = tensors_of(case, torch.float64)
    expression, attributes = gradient.expression(case.operation), attributes_of(case)
    variables = differentiable(tensors)
    found = torch.autograd.grad(scalar(expression(ARRAYS, tensors, attributes)), list(variables.values()))
    generator = torch.Generator().manual_seed(1)
    for (changed, tensor), slope in zip(variables.items(), found):
        finite = torch.isfinite(tensor)
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * finite
        step, values = 1e-5, []
        for sign in (1, -1):
            moved = {**tensors, changed: tensor.detach() + sign * step * direction}
            values.append(float(scalar(expression(ARRAYS, moved, attributes)).detach()))
        wanted = (values[0] - values[1]) / (2 * step)
        assert float((slope * direction).sum()) == pytest.approx(wanted, rel=1e-5, abs=1e-7), changed


@pytest.mark.parametrize("name", [*first_cases(), "fused_attention-packed"])
def test_autograd_of_the_kernel_s_call(name):
    """The values are the kernel's, bit for bit; the gradients those of the expression."""
    case = CASES[name]
    tensors = tensors_of(case, torch.float32)
    function = getattr(adapter, case.operation)
    with cki.device("sim"):
        outputs = function(**tensors, **case.attributes, recompute_gradient=True)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        with torch.no_grad():
            plain = getattr(cki, case.operation)(**tensors, **case.attributes)
        for output, wanted in zip(outputs, plain if isinstance(plain, tuple) else (plain,)):
            assert torch.equal(output, wanted)
        variables = list(differentiable(tensors).values())
        found = torch.autograd.grad(scalar(outputs), variables)
    expression = gradient.expression(case.operation)(ARRAYS, tensors, attributes_of(case))
    for gradient_found, wanted in zip(found, torch.autograd.grad(scalar(expression), variables)):
        torch.testing.assert_close(gradient_found, wanted, rtol=2e-4, atol=2e-5)


def test_transforms_of_torch_func():
    """Reverse mode, of batches too, is autograd's; forward mode is refused by name."""

    def loss(x, weight):
        y, total = adapter.layer_norm(x, weight, residual=x, recompute_gradient=True)
        return (y.sin() * total).sum()

    x, weight = torch.randn(2, 3, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    plain, plain_weight = x.detach()[0], weight.detach()
    with cki.device("sim"):
        wanted = torch.autograd.grad(loss(x, weight), (x, weight))
        found = torch.func.grad(loss, argnums=(0, 1))(x.detach(), plain_weight)
        for ours, theirs in zip(found, wanted):
            torch.testing.assert_close(ours, theirs)
        batch = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(x.detach(), plain_weight)
        torch.testing.assert_close(batch, wanted[0])
        value, pull = torch.func.vjp(lambda x: loss(x, plain_weight), x.detach())
        torch.testing.assert_close(pull(torch.ones_like(value))[0], wanted[0])
        slope = torch.func.grad(lambda x: (torch.func.grad(loss)(x, plain_weight) * plain).sum())(plain)
        leaf = plain.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf, plain_weight), leaf, create_graph=True)
        torch.testing.assert_close(slope, torch.autograd.grad((first * plain).sum(), leaf)[0])
        with pytest.raises(UnsupportedError, match="layer_norm: forward-mode(.|\n)*hint: reverse mode"):
            torch.func.jvp(lambda x: loss(x, plain_weight), (plain,), (plain,))
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(UnsupportedError, match="layer_norm: forward-mode"),
        ):
            loss(torch.autograd.forward_ad.make_dual(plain, plain), plain_weight)


def test_only_what_is_asked_for_is_computed():
    x, weight = torch.randn(3, 32, requires_grad=True), torch.randn(32)
    with cki.device("sim"):
        _, total = adapter.layer_norm(x, weight, residual=torch.ones(3, 32), recompute_gradient=True)
        (found,) = torch.autograd.grad(total.sum(), x)  # the norm takes no part
    assert torch.equal(found, torch.ones(3, 32))
    assert weight.grad is None


def test_half_precision():
    """The gradient has its input's type, and torch's values within the type's rounding."""
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, dtype=torch.float32, requires_grad=True)  # fp32 beside 16-bit activations
    with cki.device("sim"):
        adapter.layer_norm(x, weight, recompute_gradient=True).float().sin().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    exact = x.detach().float().requires_grad_()
    torch.nn.functional.layer_norm(exact, (64,), weight.detach()).sin().sum().backward()
    torch.testing.assert_close(x.grad.float(), exact.grad, rtol=0.05, atol=0.05)


def test_gradients_of_gradients():
    def second(function):
        x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
        (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    with cki.device("sim"):
        found = second(lambda x: adapter.softmax(x, recompute_gradient=True))
    torch.testing.assert_close(found, second(lambda x: torch.softmax(x, -1)), rtol=1e-4, atol=1e-6)


def test_compiled_training_step():
    """torch.compile takes both passes into its graph."""
    square = torch.eye(32) + 0.1

    def loss(x, w):
        y = adapter.fused_attention(
            x, w, w, w, w, num_heads=2, head_dim=16, causal=True, recompute_gradient=True
        )
        return adapter.linear(2 * y, w, activation="silu", recompute_gradient=True).sin().sum()

    x = torch.randn(2, 5, 32, requires_grad=True)
    w = square.clone().requires_grad_()
    with cki.device("sim"):
        wanted = torch.autograd.grad(loss(x, w), (x, w))
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for found, expected in zip(torch.autograd.grad(compiled(x, w), (x, w)), wanted):
            torch.testing.assert_close(found, expected)


def test_refusals():
    x = torch.randn(3, 32, requires_grad=True)
    with cki.device("sim"):
        with pytest.raises(
            InvalidTypeError, match="layer_norm(.|\n)*x requires grad(.|\n)*recompute_gradient=True"
        ):
            adapter.layer_norm(x)
        for value in ("y", 1, None):
            with pytest.raises(
                InvalidTypeError, match=f"layer_norm: recompute_gradient is {value!r}\n.*True or False"
            ):
                adapter.layer_norm(x, recompute_gradient=value)
        with pytest.raises(UnsupportedError, match="mean_pool: recompute_gradient=True, but it has no"):
            adapter.mean_pool(x[None], torch.ones(1, 3, dtype=torch.int64), recompute_gradient=True)
        with pytest.raises(UnsupportedError, match="layer_norm: an output tensor is given"):
            adapter.layer_norm(x, out=torch.empty(3, 32), recompute_gradient=True)
        with pytest.raises(UnsupportedError, match="layer_norm: stream is given"):
            adapter.layer_norm(x, stream=5, recompute_gradient=True)
        with pytest.raises(InvalidArgumentError, match="weight has shape"):
            adapter.layer_norm(x, x, recompute_gradient=True)
        with pytest.raises(InvalidTypeError, match="different frameworks"):
            adapter.layer_norm(x, np.ones(32, np.float32), recompute_gradient=True)
    assert not hasattr(adapter, "no_such_operation")


def test_operators_pass_torch_s_own_checks():
    for name in ("attention", "encoder_layer"):
        case = next(case for case in CASES.values() if case.operation == name)
        spec, tensors = public_specs()[name], tensors_of(case, torch.float32)
        with cki.device("sim"):
            torch.library.opcheck(
                OPERATORS[name],
                tuple(tensors.get(item.name) for item in spec.inputs),
                attributes_of(case),
                test_utils=["test_schema", "test_faketensor", "test_autograd_registration"],
            )
