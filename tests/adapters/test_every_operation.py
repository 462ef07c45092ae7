"""Every operation that `cki.__all__` names, with all its arguments, in every framework's own table."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import cki
import cki.ops
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs

#: Public names that are no operations, and what they are.
OTHERS = {
    "CkiError": "the errors' base", "device": "a setting", "Graph": "what capture returns",
    "capture": "takes functions", "load": "makes operations of a user's kernels", "TensorMap": "an argument of such",
    "LaunchRule": "an argument of such", "hold": "binds a call's arguments; the result is no part of a program",
    "Encoder": "a model: its operation is made for its weights; encoder_layers is the operation of the table",
    "prepare": "rounds weights once, on the host", "selftest": "a command", "reference": "a module", "sim": "a module",
    "adapters": "a module", "choices": "a list of what was chosen",
}  # fmt: skip
#: Operations of the table's kind that are not public, and why.
INTERNAL = {"sample_tokens": "the engine's, on memory that the engine keeps"}
#: What the frameworks decide themselves, or what an operation's function takes apart: (cache) is four inputs.
NO_PART_OF_PROGRAMS = {"stream", "cache"}

OPERATIONS = sorted(set(cki.__all__) - set(OTHERS))


def test_what_is_public_is_in_the_table_or_no_operation():
    assert set(OPERATIONS) == set(public_specs())
    assert set(OTHERS) <= set(cki.__all__)


def test_what_the_package_describes_is_public_or_has_a_reason():
    found = {
        value.name
        for module in pkgutil.iter_modules(cki.ops.__path__)
        for value in vars(importlib.import_module(f"cki.ops.{module.name}")).values()
        if isinstance(value, OpSpec)
    }
    assert found - set(public_specs()) == set(INTERNAL)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_argument_is_in_the_description(name):
    """From which frameworks register: one that is not there would be lost in their programs."""
    spec = public_specs()[name]
    described = {item.name for item in spec.inputs} | {attribute.name for attribute in spec.attributes}
    outs = {"out", *(output if output.endswith("out") else f"{output}_out" for output in spec.outputs)}
    parameters = set(inspect.signature(getattr(cki, name)).parameters)
    assert parameters - described - outs - NO_PART_OF_PROGRAMS == set()
    assert described - parameters in (set(), {"k_cache", "v_cache", "k_scale", "v_scale"})


@pytest.mark.torch
@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_has_an_operator_with_every_implementation(name):
    torch = pytest.importorskip("torch")
    import cki.adapters.torch as adapter
    from cki.adapters.torch_ops import OPERATORS

    operator = OPERATORS[name]
    assert operator is getattr(torch.ops.cki, name).default
    spec, arguments = public_specs()[name], [argument.name for argument in operator._schema.arguments]
    assert arguments == [item.name for item in (*spec.inputs, *spec.attributes)]
    for key in ("CPU", "CUDA", "Autograd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"cki::{name}", key), key
    assert torch._library.simple_registry.singleton.find(f"cki::{name}").fake_impl.kernel is not None
    assert callable(getattr(adapter, name))


@pytest.mark.jax
@pytest.mark.parametrize("name", OPERATIONS)
def test_jax_has_a_function(name):
    pytest.importorskip("jax")
    import cki.adapters.jax as adapter

    assert next(iter(inspect.signature(getattr(adapter, name)).parameters)) in {
        item.name for item in public_specs()[name].inputs
    }


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", OPERATIONS)
def test_tensorflow_has_an_operation_with_kernels_and_a_gradient_function(name):
    pytest.importorskip("tensorflow")
    from tensorflow.python.framework import kernels, op_def_registry, ops

    import cki.adapters.tensorflow as adapter
    from cki.adapters import tf_ops

    registered = tf_ops.op_name(public_specs()[name])
    definition = op_def_registry.get(registered)
    assert definition is not None and definition.name == registered
    devices = {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(registered).kernel}
    assert devices == {"CPU", "GPU"}
    assert ops.gradient_registry.lookup(registered) is tf_ops._gradient
    assert callable(getattr(adapter, name))


NAMES = {
    "tensorflow": ["fused_attention", "FusedAttentionLayer", "FusedEncoderLayer", "FusedEncoder"],
    "jax": ["dot_product_attention", "append_kv"],
    "torch": ["scaled_dot_product_attention"],
    "transformers": ["register"],
    "keras": ["FusedAttentionLayer", "FusedEncoderLayer", "FusedEncoder"],
}


@pytest.mark.tensorflow
@pytest.mark.jax
@pytest.mark.torch
@pytest.mark.transformers
@pytest.mark.parametrize("framework", NAMES)
def test_names_that_are_promised(framework):
    pytest.importorskip(framework)
    module = importlib.import_module(f"cki.adapters.{framework}")
    for name in NAMES[framework]:
        assert callable(getattr(module, name))


@pytest.mark.tensorflow
def test_tensorflow_s_fused_attention_has_the_promised_arguments():
    pytest.importorskip("tensorflow")
    from cki.adapters.tensorflow import fused_attention

    parameters = inspect.signature(fused_attention).parameters
    named = list(parameters)[:12]
    assert named == [
        "x", "wq", "wk", "wv", "wo", "gamma", "beta", "num_heads", "head_dim", "causal", "pre_ln", "epsilon",
    ]  # fmt: skip
    assert [parameters[name].default for name in named[7:]] == [16, 64, False, True, 1e-5]
