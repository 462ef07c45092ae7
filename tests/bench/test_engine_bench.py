"""bench/engine.py and engine_load.py as far as they go without a GPU: their gates tell right steps from wrong ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cki import dtypes
from cki.device import sim_device
from cki.engine import ModelConfig
from cki.engine.device_weights import DeviceWeights
from cki.engine.model import DecoderModel, ModelLimits
from tests.engine.tiny import LLAMA, random_weights


def test_the_gate_of_the_load_tells_wrong_steps(script, monkeypatch):
    load = script("engine_load")
    weights = DeviceWeights(LLAMA, random_weights(LLAMA), dtypes.f32, sim_device(), 64)
    model = DecoderModel(LLAMA, weights, device=sim_device(), block_size=4, limits=ModelLimits(8, 16, 64))
    prompt = np.random.default_rng(0).integers(0, 128, 21)
    assert load.gate(model, prompt, [5, 9, 7]) < 1e-4
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda rows: decode([row._replace(tokens=[3]) for row in rows]))
    assert load.gate(model, prompt, [5, 9, 7]) > 0.2
    assert model.cache.blocks_used == 0


def test_texts_may_differ_by_near_ties_alone(script):
    texts = script("engine_texts")
    assert len(set(texts.PROMPTS)) == 16
    logits = np.array([[40.0, 39.8, 39.7, -50.0], [8.0, 1.0, 7.9, -50.0]])
    assert texts.first_difference([0, 0], [0, 0], logits) is None
    near, later = (texts.first_difference(tokens, [0, 0], logits) for tokens in ([1, 0], [0, 2]))
    assert (near.place, later.place) == (0, 1)
    assert abs(near.gap - 0.2) < 1e-9
    assert abs(later.gap - 0.1) < 1e-9
    off = np.array([0.125, -0.0625, 0.0, 0.0])
    assert texts.allowed_gap(logits[0], logits[0] + off) == 0.25
    # What an unlikely token's logit is off says nothing.
    many = np.concatenate([logits[0, :1], np.full(30, 1.0), [-50.0]])
    assert texts.allowed_gap(many, many + np.eye(32)[31]) == 0
    assert "(0.0000 allowed)" in texts.describe(near)


@pytest.mark.parametrize(("qk_norm", "fp8"), [(False, False), (True, True)])
def test_the_gates_of_a_step(script, monkeypatch, qk_norm, fp8):
    pytest.importorskip("torch")
    models, gates = script("engine_models"), script("engine_gates")
    config = replace(LLAMA, qk_norm=qk_norm, tie_word_embeddings=not qk_norm)
    model = models.make_model(
        config, sim_device(), context=70, sequences=2, dtype=dtypes.f16, fp8=fp8, kv_codes=fp8
    )
    sequences = models.sequences_of(model, 2, 37)
    ours, theirs = gates.distance_from_torch(model, sequences)
    assert 0 < ours <= 2 * theirs
    assert gates.replay_equals_launches(model, sequences)
    # Neither may miss what is wrong: another token in the step, and another weight when the launches run.
    decode, relaunch = model.decode, model.relaunch
    monkeypatch.setattr(model, "decode", lambda rows: decode([row._replace(tokens=[3]) for row in rows]))
    assert gates.distance_from_torch(model, sequences)[0] > 10 * theirs
    monkeypatch.undo()
    weight = models.as_torch(dict(model.weights.items())["layers.1.wd.scales" if fp8 else "layers.1.wd"])

    def broken(rows):
        weight[0] += 1
        return relaunch(rows)

    monkeypatch.setattr(model, "relaunch", broken)
    assert not gates.replay_equals_launches(model, sequences)


def test_the_shapes_are_those_of_the_real_models(script):
    models = script("engine_models")
    large, small = (models.config_of(name) for name in ("qwen3-8b", "smollm2"))
    assert isinstance(large, ModelConfig)
    assert large.qk_norm
    assert (large.num_layers, large.hidden_size, large.head_dim) == (36, 4096, 128)
    assert (small.num_heads, small.num_kv_heads, small.tie_word_embeddings) == (9, 3, True)


def test_a_row_is_left_out_when_time_is_short(script):
    clock = script("engine").Clock(0.5)
    assert clock.allows(0.1)
    assert not clock.allows(0.6)
    assert script("engine").Clock(None).allows(1e9)


@pytest.mark.parametrize("variant", [{}, {"way": "decode", "merge_inside": True}])
def test_kernels_alone_are_those_of_the_step(script, monkeypatch, variant):
    pytest.importorskip("torch")
    models, engine, kernels = script("engine_models"), script("engine"), script("engine_kernels")
    model = models.make_model(LLAMA, sim_device(), context=70, sequences=2, dtype=dtypes.f16, **variant)
    launched = []

    def replay_time(model, launch, replays):
        launch()
        launched.append(launch)
        return script("common").Timing(8.0, 7.0, 9.0)

    monkeypatch.setattr(engine, "replay_time", replay_time)
    plan = model.plan(model.decode_shape(2))
    rows = list(kernels.kernel_rows("tiny", "default", model, 2, 37, engine.Clock(None)))
    *singles, total = rows
    assert len(launched) == len(rows)
    assert sum(row["launches"] for row in singles) == len(plan.steps) == total["launches"]
    assert total["median_us"] == 8.0 * len(singles)
    assert total["sum_over_step"] == len(singles)
    assert {"advance", "sample"} <= {row["problem"].split()[-1] for row in singles}
    # Every weight is counted once; the embedding because the head is tied to it.
    read = sum(kernels.read_bytes(step, 0, model) for step in plan.steps)
    assert read == sum(tensor.view.size * 2 for _, tensor in model.weights.items())


def test_a_long_sequence_is_checked(script, monkeypatch):
    pytest.importorskip("torch")
    long = script("engine_long")
    monkeypatch.setattr(long, "_PART", 64)
    monkeypatch.setattr(long, "_QUERIES", 32)
    small = {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
        "vocab_size": 128,
    }  # fmt: skip
    monkeypatch.setattr(long, "TINY", {**long.TINY, **small})
    prefill, decode = long.long_rows(150, sim_device())
    assert (prefill["op"], decode["op"]) == ("long_prefill", "long_decode")
    assert 0 < decode["distance"] <= 2 * decode["distance_of_torch"]
    plain = long.plain_logits
    monkeypatch.setattr(long, "plain_logits", lambda model, tokens, dtype: plain(model, tokens[1:], dtype))
    with pytest.raises(AssertionError, match="logits are"):
        long.long_rows(150, sim_device())


def test_products_of_few_tokens_are_checked(script, monkeypatch):
    pytest.importorskip("torch")
    tokens = script("gemm_tokens")
    monkeypatch.setattr(tokens, "_replayed", lambda program: script("common").Timing(1.0, 1.0, 1.0))
    operands = tokens.Operands(
        tokens.Shape(256, 64, norm=True, gated=True), dtypes.e4m3, sim_device("sm_90a")
    )
    rows = list(operands.rows("gate_up", 16, 4000.0))
    assert [row["implementation"] for row in rows] == ["linear_decode"]
    monkeypatch.setattr(operands, "_expected", lambda count: 1.1 * type(operands)._expected(operands, count))
    with pytest.raises(AssertionError, match="error"):
        list(operands.rows("gate_up", 4, 4000.0))
