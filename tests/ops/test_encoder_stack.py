"""cki.encoder_layers: the bits of one encoder_layer after the other, in one call."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from tests.compare import assert_close
from tests.ops.encoder_cases import ORDERS, Layer, input_of, launches, on, plain_layer
from tests.ops.inputs import F16, F32, normal
from tests.ops.norm_cases import plain as plain_norm

__all__ = ["launches"]  # a fixture

LAYERS = 3


def stack(layer):
    """Weights and vectors of LAYERS layers like this one, and of each layer alone."""
    single = [
        {
            name: (value.astype(np.float32) * (1 + 0.1 * number)).astype(value.dtype)
            for name, value in {**layer.weights, **layer.vectors}.items()
        }
        for number in range(LAYERS)
    ]
    return {name: np.stack([one[name] for one in single]) for name in single[0]}, single


@ORDERS
def test_the_bits_of_layer_after_layer(device, launches, pre_ln):
    layer, x = Layer(F16), input_of(F16)
    stacked, single = stack(layer)
    mask = np.arange(7) < np.array([[7], [4]])
    options = {**layer.options, "pre_ln": pre_ln, "causal": True}
    y = cki.encoder_layers(device.array(x), **on(device, stacked), mask=device.array(mask), **options)
    assert len(launches) == 7 * LAYERS
    wanted = device.array(x)
    for one in single:
        wanted = cki.encoder_layer(wanted, **on(device, one), mask=device.array(mask), **options)
    assert np.array_equal(device.numpy(y).view(np.uint16), device.numpy(wanted).view(np.uint16))


def test_a_last_norm_one_weight_for_q_k_and_v_and_out(device):
    layer, x = Layer(F32, heads=2, head_dim=8, kv_heads=1), input_of(F32)
    stacked, single = stack(layer)
    gamma, beta = normal((48,), F32, 30), normal((48,), F32, 31)
    packed = dict(stacked)
    for letter in "wb":
        packed[f"{letter}q"] = np.concatenate([packed.pop(f"{letter}{part}") for part in "qkv"], axis=-1)
    out = device.empty(x.shape, F32)
    y = cki.encoder_layers(
        device.array(x), wk=None, wv=None, **on(device, packed), final_gamma=device.array(gamma),
        final_beta=device.array(beta), out=out, **layer.options,
    )  # fmt: skip
    assert y is out
    plain = x
    for one in single:
        plain = plain_layer(plain, **one, **layer.options)
    truth = cki.reference.encoder_layers(x, **stacked, final_gamma=gamma, final_beta=beta, **layer.options)
    assert_close(device.numpy(y), truth, plain_norm("layer_norm", plain, gamma, beta, eps=1e-5))


def test_packed_sequences_and_torch_s_weights(device):
    layer, x = Layer(F16), input_of(F16)[:, :7].reshape(14, 48)
    stacked, single = stack(layer)
    matrices = ("wq", "wk", "wv", "wo", "w1", "w2")
    turned = {n: np.ascontiguousarray(v.swapaxes(1, 2)) if n in matrices else v for n, v in stacked.items()}
    offsets = device.array(np.array([0, 9, 14], np.int32))
    y = cki.encoder_layers(
        device.array(x), **on(device, turned), cu_seqlens=offsets, weight_layout="out_in", **layer.options
    )
    wanted = device.array(x)
    for one in single:
        wanted = cki.encoder_layer(wanted, **on(device, one), cu_seqlens=offsets, **layer.options)
    np.testing.assert_allclose(
        device.numpy(y).astype(np.float32), device.numpy(wanted).astype(np.float32), atol=0.02
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wo": (2, 48, 48)}, "wo has shape (2, 48, 48): 2 layers, wq has 3"),
        ({"b1": np.zeros((), np.float32)}, "b1 has no axis of layers"),
        ({"w1": (3, 40, 80)}, "of a layer: w1 has shape (40, 80)"),
        ({"wq": (0, 48, 48)}, "0 layers"),
        ({"final_gamma": (3, 48)}, "final_gamma has shape (3, 48)"),
        ({"x": (7, 48)}, "x has shape (7, 48)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_shapes(changes, said):
    layer, x = Layer(F32), input_of(F32)
    arrays = {
        "x": x,
        **stack(layer)[0],
        **{n: normal(s, F32, 1) if isinstance(s, tuple) else s for n, s in changes.items()},
    }
    with cki.device("sim"), pytest.raises(InvalidArgumentError) as caught:
        cki.encoder_layers(**arrays, **layer.options)
    assert said in str(caught.value)


def test_a_wrong_type():
    layer, x = Layer(F32), input_of(F32)
    arrays = {**stack(layer)[0], "w2": stack(layer)[0]["w2"].astype(np.float16)}
    with cki.device("sim"), pytest.raises(InvalidTypeError, match="w2 is f16"):
        cki.encoder_layers(x, **arrays, **layer.options)


def test_inside_a_framework_s_program_its_launches_may_become_a_graph(monkeypatch):
    """TensorFlow's operation and XLA's call ask for a launcher that repeats; one layer launches directly."""
    from cki.adapters.xla_calls import Prepared, XlaCall
    from cki.launch import SimExecutable
    from cki.ops.table import public_specs

    asked = []
    launcher = SimExecutable.launcher

    def recorded(self, repeated=False):
        if repeated:
            asked.append(len(self.plan.steps))
        return launcher(self, repeated)

    monkeypatch.setattr(SimExecutable, "launcher", recorded)
    defaults = {
        attribute.name: attribute.default for attribute in public_specs()["encoder_layers"].attributes
    }
    attributes = tuple({**defaults, "num_heads": 2, "head_dim": 8}.values())
    for layers in (1, 3):
        shapes = {"x": (1, 4, 16), "wq": (layers, 16, 48), "wo": (layers, 16, 16), "w1": (layers, 16, 32)}
        tensors = tuple((name, "f32", shape) for name, shape in {**shapes, "w2": (layers, 32, 16)}.items())
        Prepared(XlaCall("encoder_layers", tensors, attributes, "sim:sm_90a"), 0)
    assert asked == [21]
