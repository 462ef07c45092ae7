"""Encoder layers whose norms are in the weights behind them: `cki.prepare`, and what it saves in launches."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import cki
import cki.sim
from cki import dtypes
from cki.device import sim_device
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.heuristics.linear_hopper import HopperTile
from cki.operand import dense
from cki.ops import linear_hopper
from cki.ops.encoder import ENCODER_LAYER
from cki.ops.encoder_stack import ENCODER_LAYERS
from cki.ops.spec import Problem
from tests.compare import assert_close
from tests.ops.encoder_cases import Layer, input_of, launches, on, plain_layer
from tests.ops.inputs import BF16, F16

__all__ = ["launches"]  # a fixture


@pytest.fixture
def small_tiles(device, monkeypatch):
    """Hopper's kernel also for the few tokens of these tests."""
    if device.info.arch != "sm_90a":
        pytest.skip("the kernel is sm_90a's")
    tile = HopperTile(64, 64, 2, True)
    monkeypatch.setattr(linear_hopper, "preferred_hopper_tile", lambda *shape, **options: tile)
    return device


def prepared(device, layer):
    return on(device, cki.prepare({**layer.weights, **layer.vectors}))


def check(device, layer, x, **options):
    """A layer on prepared weights, against the reference on those as they were."""
    y = device.numpy(
        cki.encoder_layer(device.array(x), **prepared(device, layer), **layer.options, **options)
    )
    weights, options = list(layer.weights.values()), {**layer.vectors, **layer.options, **options}
    assert_close(y, cki.reference.encoder_layer(x, *weights, **options), plain_layer(x, *weights, **options))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_folded_layer_by_every_kernel(device, launches, dtype):
    """Where no product normalises rows, a norm without weights does."""
    check(device, Layer(dtype), input_of(dtype, seq=11))
    assert len(launches) == 7


def test_a_layer_in_six_launches(small_tiles, launches):
    """The second norm is no launch; and x may have any mean, and mean nothing beside it."""
    layer = Layer(F16, hidden=72, heads=4, inner=136)
    x = input_of(F16, seq=13, hidden=72)
    x[0, 3] += 40
    check(small_tiles, layer, x, activation="gelu_tanh")
    assert len(launches) == 6


def test_a_captured_stack_is_five_launches_a_layer(small_tiles):
    device, layers = small_tiles, [Layer(F16, hidden=72, heads=4, inner=136) for _ in range(3)]
    for number, layer in enumerate(layers):  # each has weights of its own
        layer.vectors = {name: np.roll(value, number) for name, value in layer.vectors.items()}
    x, ready = input_of(F16, seq=13, hidden=72), [cki.prepare({**o.weights, **o.vectors}) for o in layers]
    stacked = {
        n: np.stack([one[n] for one in ready]) for n in ready[0] if isinstance(ready[0][n], np.ndarray)
    }
    options = {**layers[0].options, "folded": True, "wk": None, "wv": None}
    graph = cki.capture(cki.encoder_layers, device.array(x), **on(device, stacked), **options)
    assert graph.num_kernels == 6 + 5 + 5
    truth, plain = x, x
    for layer in layers:
        weights, vectors = list(layer.weights.values()), {**layer.vectors, **layer.options}
        truth = cki.reference.encoder_layer(truth, *weights, **vectors)
        plain = plain_layer(plain, *weights, **vectors)
    graph.replay()
    assert_close(device.numpy(graph.outputs), truth, plain)


def test_the_same_bits_in_every_order(small_tiles):
    device, layer = small_tiles, Layer(F16, hidden=72, heads=4, inner=136)
    x, ready = device.array(input_of(F16, seq=13, hidden=72)), prepared(device, layer)
    results = []
    for seed in range(2):
        checks = cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed)
        with checks if device.kind == "sim" else contextlib.nullcontext():
            results.append(device.numpy(cki.encoder_layer(x, **ready, **layer.options)))
    assert np.array_equal(*results)


def bert_large(spec, batch, seq, layers=None):
    """The plan of BERT-large's layer or layers on an H200, prepared."""
    hidden, inner = 1024, 4096
    shapes = {
        "wq": (3 * hidden, hidden), "wo": (hidden, hidden), "w1": (inner, hidden), "w2": (hidden, inner),
        "bq": (3 * hidden,), "bo": (hidden,), "b1": (inner,), "b2": (hidden,),
    }  # fmt: skip
    front = () if layers is None else (layers,)
    operands = {
        name: dense(name, front + shape, dtypes.f32 if name in ("bq", "b1") else dtypes.f16)
        for name, shape in shapes.items()
    }
    x = (batch, seq, hidden)
    attributes = {attribute.name: attribute.default for attribute in spec.attributes} | {
        "num_heads": 16, "head_dim": 64, "activation": "gelu", "weight_layout": "out_in", "folded": True,
    }  # fmt: skip
    problem = Problem({"x": dense("x", x, dtypes.f16), **operands}, attributes)
    spec.check(problem)
    assert not problem.violations
    return spec.plan(problem, {"out": dense("out", x, dtypes.f16)}, sim_device("sm_90a"))


@pytest.mark.parametrize("seq", [128, 512, 1024, 2048, 4096])
def test_bert_large_takes_at_most_six_launches_a_layer(seq):
    steps = bert_large(ENCODER_LAYER, 4, seq).steps
    assert len(steps) <= 6, [step.kernel.entry for step in steps]
    stack = bert_large(ENCODER_LAYERS, 4, seq, layers=3).steps
    assert len(stack) - len(steps) == 2 * 5
    products = [step for step in stack if step.kernel.entry == "linear_hopper"]
    assert len(products) == 3 * 4
    assert all(step.programmatic for step in products)
    assert [step.kernel.constant("kRowNorm") for step in products] == [0, 0, 1, 0] + [1, 0, 1, 0] * 2
    assert [step.kernel.constant("kStatistics") for step in products] == [0, 1, 0, 1] * 2 + [0, 1, 0, 0]


def test_what_cannot_be_prepared():
    layer = Layer(F16)
    given = {**layer.weights, **layer.vectors}
    with pytest.raises(InvalidArgumentError, match="(?s)w1 is missing.*w3 is unknown"):
        cki.prepare({**given, "w1": None, "w3": given["w1"]})
    with pytest.raises(InvalidTypeError, match="neither a mapping nor an encoder"):
        cki.prepare([given["wq"]])
    with pytest.raises(
        InvalidArgumentError, match="weight_layout is 'x'\n  hint: weight_layout \"in_out\" or"
    ):
        cki.prepare(given, weight_layout="x")
    del given["bk"]
    with pytest.raises(InvalidArgumentError, match="a bias and no bias"):
        cki.prepare(given)
    given = {**layer.weights, **layer.vectors}
    given["attention_gamma"] = given["attention_gamma"] * 0 + F16.type(60000)
    with pytest.raises(InvalidArgumentError, match="beyond float16"):
        cki.prepare(given)


def test_arguments_that_contradict_a_folded_layer(device):
    layer = Layer(F16)
    ready = prepared(device, layer) | layer.options
    x, gamma = device.array(input_of(F16)), device.array(layer.vectors["attention_gamma"])
    with pytest.raises(InvalidArgumentError, match="(?s)pre_ln False.*attention_gamma is given"):
        cki.encoder_layer(x, **{**ready, "pre_ln": False, "attention_gamma": gamma})
