"""The definition of a decoder (`decoder_definition`) against transformers' models, from the files these write.

What runs on the kernels is compared with the definition elsewhere; here is what the definition is compared with.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from cki.engine.files import open_model
from tests.engine.decoder_definition import decoder
from tests.engine.model_files import hf_config

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.transformers]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": ("llama", {"rope_theta": 500.0}),
    "llama_biased_tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_wide_heads": ("llama", {"head_dim": 48, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "llama_llama3": ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}}),
    "llama_linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama_gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3_yarn": (
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "qwen3_biased": ("qwen3", {"attention_bias": True, "head_dim": 24}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    architecture, changes = MODELS[name]
    values = hf_config(architecture, **changes)
    del values["model_type"], values["torch_dtype"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(architecture, **values, initializer_range=0.15),
        attn_implementation="eager",
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("norm.weight", ".bias")):  # else ones and zeros, which hide what is left out
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(1).integers(0, 160, 24)
    files = open_model(tmp_path)
    ours = decoder(dict(files.weights), files.config, tokens)
    with torch.no_grad():
        theirs = model.double()(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == files.config.architecture
    assert np.abs(theirs).max() > 1
    # transformers keeps RoPE's frequencies and tables in fp32 in any model.
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
