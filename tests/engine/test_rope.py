"""Rotary frequencies: those of transformers, and what the scalings promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cki.engine.config import RopeScaling
from cki.engine.rope import cos_sin_table, inverse_frequencies, magnitude
from tests.engine.tiny import LLAMA

LONG = replace(LLAMA, head_dim=128, rope_theta=500000.0)
SCALINGS = {
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, original_max_position=8192),
    "yarn": RopeScaling("yarn", 4.0, original_max_position=32768),
    "yarn_untruncated": RopeScaling("yarn", 32.0, original_max_position=4096, truncate=False, beta_fast=16.0),
}


def scaled(scaling):
    return replace(LONG, rope_scaling=scaling)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_magnitude_of_transformers(name):
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    scaling = SCALINGS[name]
    parameters = {"rope_type": scaling.kind, "rope_theta": LONG.rope_theta, "factor": scaling.factor}
    if scaling.kind != "linear":
        parameters["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        parameters |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    frequencies, factor = rope.ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu")
    assert np.allclose(inverse_frequencies(scaled(scaling)), frequencies.double().numpy(), rtol=1e-5)
    assert magnitude(scaled(scaling)) == pytest.approx(factor)


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_stretch_low_frequencies_and_keep_high_ones(name):
    scaling = SCALINGS[name]
    ratio = inverse_frequencies(LONG) / inverse_frequencies(scaled(scaling))
    assert ratio[-1] == pytest.approx(scaling.factor)
    assert ratio[0] == pytest.approx(scaling.factor if name == "linear" else 1.0)
    assert np.all(np.diff(ratio) >= -1e-9)


def test_factors_divide_each_frequency():
    factors = tuple(float(n) for n in range(1, 65))
    ratio = inverse_frequencies(LONG) / inverse_frequencies(
        scaled(RopeScaling("factors", 1.0, frequency_factors=factors))
    )
    assert np.allclose(ratio, factors)


def test_the_table_holds_cosines_and_sines():
    assert cos_sin_table(LONG, 10) is None
    plain = cos_sin_table(LONG, 10, always=True)
    assert plain is not None
    assert plain[9, 64] == pytest.approx(np.sin(9.0), abs=1e-6)
    config = scaled(SCALINGS["yarn"])
    table = cos_sin_table(config, 1000)
    assert table is not None
    assert table.shape == (1000, 128)
    angle = 999 * inverse_frequencies(config)[3]
    assert table[999, [3, 67]] == pytest.approx(
        np.array([np.cos(angle), np.sin(angle)]) * magnitude(config), abs=1e-6
    )
