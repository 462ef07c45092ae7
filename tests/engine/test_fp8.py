"""Weights as e4m3 codes: few tokens by W8A16, more by W8A8, against the definition on what the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cki import dtypes
from cki.device import sim_device
from cki.engine import LLM
from cki.engine.device_weights import DeviceWeights, source_names, weight_shapes
from cki.engine.model import DecoderModel, ModelLimits, StepRow
from cki.engine.quantized import dequantize_blocks, quantize_blocks
from cki.engine.step_plan import CacheGeometry, DecoderPlanner, StepShape
from cki.errors import InvalidArgumentError
from cki.reference import quantize_fp8
from tests.engine.decoder_definition import decoder
from tests.engine.tiny import MODELS, random_weights

LIMITS = ModelLimits(max_sequences=20, max_step_tokens=64, max_length=100)


def dequantised(config, weights):
    """What the codes of a model's matrices stand for, under Hugging Face's names."""
    found = dict(weights)
    for role in weight_shapes(config):
        names = source_names(role)
        if role.rpartition(".")[2] in ("wqkv", "wo", "wgu", "wd"):
            whole = dequantize_blocks(quantize_blocks(np.concatenate([weights[name] for name in names])))
            ends = np.cumsum([len(weights[name]) for name in names])[:-1]
            found |= dict(zip(names, np.split(whole, ends)))
    return found


def logits_of(config, weights, device, *, fp8):
    """Of a prefill of 30 tokens in three sequences, and of a decode step after it, [6, vocabulary]."""
    placed = DeviceWeights(config, weights, dtypes.f16, device, LIMITS.max_length, fp8=fp8)
    model = DecoderModel(config, placed, device=device, block_size=4, limits=LIMITS)
    sequences = [model.cache.allocate_sequence() for _ in PROMPTS]
    model.prefill([StepRow(*row) for row in zip(sequences, PROMPTS)]).wait()
    found = [model.logits().numpy()[:3].astype(np.float64)]
    model.decode([StepRow(sequence, [7]) for sequence in sequences]).wait()
    return np.concatenate([*found, model.logits().numpy()[:3].astype(np.float64)])


PROMPTS = [[5, 9, 77, 3, 50, *range(10, 20)], [8, *range(30, 42)], [1, 2]]


def with_rounded_activations(monkeypatch, config):
    """Lets the definition's matrices of layers multiply rows that went through e4m3 by blocks of 128."""
    import tests.engine.decoder_definition as module

    def rounding(product):
        def call(x, w, *arguments, **options):
            if w.shape[0] != config.vocab_size:
                codes, scales = quantize_fp8(x, granularity="block128")
                x = codes.astype(np.float64) * np.repeat(scales, 128, axis=-1)[..., : x.shape[-1]]
            return product(x, w, *arguments, **options)

        return call

    monkeypatch.setattr(module, "linear", rounding(module.linear))
    monkeypatch.setattr(module, "gated_linear", rounding(module.gated_linear))


def test_logits_are_those_of_what_the_codes_stand_for(device, monkeypatch):
    """A prefill, and the step that reads its keys, are as near to them as the definition with rounded activations."""
    config = replace(MODELS["full"], dtype="f16")
    weights = random_weights(config)
    stands_for = dequantised(config, weights)

    def by_definition():
        return np.array([
            decoder(stands_for, config, np.array(prompt + more))[-1] for more in ([], [7]) for prompt in PROMPTS
        ])  # fmt: skip

    truth = by_definition()
    found = logits_of(config, weights, device.info, fp8=True)
    with_rounded_activations(monkeypatch, config)
    rounded = by_definition()

    def distance(logits):
        return np.sqrt(np.mean((logits - truth) ** 2)) / truth.std()

    assert 0.01 < distance(rounded) < 0.2
    assert distance(found) < 1.3 * distance(rounded)


def test_a_few_tokens_are_as_exact_as_without_codes(device):
    config = replace(MODELS["full"], dtype="f16")
    weights = random_weights(config)
    stands_for = dequantised(config, weights)
    ids = [5, 9, 77, 3, 50, 11]
    truth = decoder(stands_for, config, np.array(ids))
    errors = []
    for given, fp8 in ((stands_for, False), (weights, True)):
        placed = DeviceWeights(config, given, dtypes.f16, device.info, LIMITS.max_length, fp8=fp8)
        model = DecoderModel(config, placed, device=device.info, block_size=4, limits=LIMITS)
        sequence = model.cache.allocate_sequence()
        found = []
        for part in (ids[:4], ids[4:5], ids[5:]):
            (model.prefill if len(part) > 1 else model.decode)([StepRow(sequence, part)]).wait()
            found.append(model.logits().numpy()[0].astype(np.float64))
        errors.append(np.sqrt(np.mean((np.array(found) - truth[3:]) ** 2)))
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize(
    ("arch", "tokens", "kernels"),
    [
        ("sm_90a", 8, {"linear_decode"}),
        ("sm_90a", 17, {"linear_fp8", "rms_norm_quantize", "quantize_fp8"}),
        ("sm_89", 40, {"linear_decode"}),
    ],
)
def test_which_kernels_multiply(arch, tokens, kernels):
    """Of heads that are no whole blocks of 128; others: tests/engine/test_launches.py."""
    config = replace(MODELS["llama"], intermediate_size=128)
    planner = DecoderPlanner(config, dtypes.bf16, CacheGeometry(64, 16, 8), 128, 96, fp8=True)
    plan = planner.plan(StepShape(tokens, tokens, True), sim_device(arch))
    names = {step.kernel.entry for step in plan.steps}
    several = ("linear_decode", "linear_fp8")
    assert {name for name in names if name in several} == {name for name in kernels if name in several}
    assert ("gated_activation" in names) == ("linear_fp8" in kernels)


def test_what_cannot_be_quantised_is_refused():
    config = MODELS["llama"]
    weights = random_weights(config)
    with pytest.raises(InvalidArgumentError, match="with activations of f32"):
        LLM.from_weights(config, weights, device="sim", quantize="fp8")
    with pytest.raises(InvalidArgumentError, match="quantize is 'int4'"):
        LLM.from_weights(config, weights, device="sim", quantize="int4")
