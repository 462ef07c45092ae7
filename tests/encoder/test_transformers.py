"""`cki.Encoder` against transformers' own models, where that package is installed (no dependency of the tests)."""

from __future__ import annotations

import numpy as np
import pytest

import cki

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 80, "vocab_size": 97,
    "max_position_embeddings": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["Bert", "Roberta", "XLMRoberta", "Camembert", "RobertaPreLayerNorm", "MegatronBert"]
)
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_last_hidden_state(name, activation):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, hidden_act=activation, initializer_range=0.2)
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = np.random.default_rng(1).integers(3, 97, (3, 9))
    mask = (np.arange(9) < np.array([9, 4, 1])[:, None]).astype(np.int64)
    ids[mask == 0] = config.pad_token_id
    with torch.inference_mode():
        inputs = torch.from_numpy(ids), torch.from_numpy(mask)
        expected = model(*inputs).last_hidden_state.numpy()
        with cki.device("sim"):
            encoder = cki.Encoder.from_weights(model.state_dict(), model.config)
            got = encoder(*inputs).numpy()
    kept = mask > 0
    assert np.abs(got[kept] - expected[kept]).max() < 2e-5 * np.abs(expected[kept]).max()


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForSequenceClassification"])
def test_the_encoder_of_a_larger_model(name):
    kind = name.partition("For")[0]
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = getattr(transformers, name)(config).eval()
    encoder = cki.Encoder.from_weights(model.state_dict(), model.config)
    assert (encoder.config.layers, encoder.config.padding_id) == (2, 1 if kind == "Roberta" else None)
    by_prefix = cki.Encoder.from_weights(model.state_dict(), num_heads=3)
    assert by_prefix.config.padding_id == encoder.config.padding_id
