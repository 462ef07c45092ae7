"""bench/gated_mlp.py as far as it goes without a GPU: all ways compute the same layer, in the launches that it says."""

from __future__ import annotations

import pytest

import cki
from cki import dtypes
from cki.device import sim_device
from cki.operand import dense
from cki.ops.gated_linear import plan_gated_linear

pytestmark = pytest.mark.torch


@pytest.fixture
def mlp(script):
    return script("gated_mlp")


def test_all_compute_the_same_layer(mlp):
    import torch

    weights = mlp.make_weights(24, 40, "cpu", torch.float16)
    x = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(1)).half()
    functions = {
        "torch eager": mlp.eager(weights),
        "cki, unfused": mlp.unfused(weights),
        "cki": mlp.fused(weights),
    }
    with cki.device("sim"):
        errors = mlp.check(functions, weights, x)
        assert 0 < errors["cki"] <= 2 * errors["torch eager"] + 1e-5
        with pytest.raises(SystemExit, match="cki: largest error"):
            mlp.check({**functions, "cki": lambda x: functions["cki"](x) + 0.1}, weights, x)
        with pytest.raises(SystemExit, match="cki: error .*, eager torch's"):
            mlp.check({**functions, "cki": lambda x: functions["cki"](x) * 1.009}, weights, x)


def test_fusing_saves_launches(mlp):
    """What `measure` writes beside the times; on sm_90a the gates of many tokens are no launch of their own."""
    import torch

    weights = mlp.make_weights(32, 64, "cpu", torch.float16)
    x = torch.randn(1, 16, 32).half()
    with cki.device("sim"):
        assert [cki.capture(make(weights), x).num_kernels for make in (mlp.unfused, mlp.fused)] == [4, 3]
    x, w, y = (
        dense(name, shape, dtypes.f16)
        for name, shape in (("x", (1, 128, 1024)), ("w", (8192, 1024)), ("y", (1, 128, 4096)))
    )
    assert len(plan_gated_linear(x, w, None, y, sim_device("sm_90a"), weight_layout="out_in").steps) == 1


def test_times_are_of_many_calls(mlp):
    called = []
    calls = {name: lambda name=name: called.append(name) for name in ("a", "b")}
    times = mlp.in_turn(calls, 3, lambda: None)
    assert set(times) == {"a", "b"} and all(timing.median_us > 0 for timing in times.values())
    assert called.count("a") > 1000  # as many as fill a span, at most 500 a time


def test_bad_arguments(mlp):
    for bad in (["--tokens", "0"], ["--iters", "0"], ["--without", "tf"]):
        with pytest.raises(SystemExit):
            mlp.main(bad)
