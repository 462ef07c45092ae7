"""bench/engine.py as far as it goes without a GPU: its gate tells right steps from wrong ones."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from cki import dtypes
from cki.device import sim_device
from cki.engine import ModelConfig
from cki.engine.device_weights import DeviceWeights
from cki.engine.model import DecoderModel, ModelLimits
from tests.engine.tiny import LLAMA, random_weights

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import engine

    yield engine
    for name in ("common", "engine"):
        sys.modules.pop(name)


def test_the_gate_tells_wrong_steps(bench, monkeypatch):
    weights = DeviceWeights(LLAMA, random_weights(LLAMA), dtypes.f32, sim_device(), 64)
    model = DecoderModel(LLAMA, weights, device=sim_device(), block_size=4, limits=ModelLimits(8, 16, 64))
    prompt = np.random.default_rng(0).integers(0, 128, 21)
    assert bench.gate(model, prompt, [5, 9, 7]) < 1e-4
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda rows: decode([row._replace(tokens=[3]) for row in rows]))
    assert bench.gate(model, prompt, [5, 9, 7]) > 0.2
    assert model.cache.blocks_used == 0


def test_the_large_shapes_are_those_of_qwen3_8b(bench):
    config = ModelConfig.from_hf(bench.QWEN3_8B)
    assert config.qk_norm
    assert (config.num_layers, config.hidden_size, config.head_dim) == (36, 4096, 128)
    assert len(set(bench.PROMPTS)) == 16
