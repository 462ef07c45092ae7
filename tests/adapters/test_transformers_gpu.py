"""Attention implementation "cki" of transformers on a GPU: the small models, and SmolLM2-135M with its own weights.

fp32, in which two right implementations choose the same tokens.  CKI's log of launches shows whose kernels ran.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from cki import log  # noqa: E402
from cki.adapters.transformers import register  # noqa: E402
from cki.engine.files import open_model  # noqa: E402
from tests.adapters.transformers_models import BATCHES, FAMILIES, ids, make  # noqa: E402
from tests.engine.model_files import smollm2_path  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.transformers]
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, a small robot")


@pytest.fixture(autouse=True)
def launches(caplog) -> Iterator[Callable[[], Counter[str]]]:
    """Launches of each kernel since the last call of this function."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    register()

    def counted() -> Counter[str]:
        lines = [record.getMessage().split() for record in caplog.records if record.name == log.logger.name]
        caplog.clear()
        return Counter(words[1].partition("<")[0] for words in lines if words[0] == "launch")

    with caplog.at_level(logging.INFO, logger=log.logger.name), torch.inference_mode():
        yield counted


def close(found, wanted):
    return (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_text(launches, family, batch):
    model, mask, tokens = make(family).cuda(), BATCHES[batch].cuda(), ids().cuda()
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    logits, text = {}, {}
    for implementation in ("eager", "cki"):
        model.set_attn_implementation(implementation)
        logits[implementation] = model(tokens, attention_mask=mask).logits[mask.bool()]
        if implementation == "cki":
            assert launches().total() == model.config.num_hidden_layers
        if batch != "right":  # generate continues a row where it ends
            text[implementation] = model.generate(tokens, **options)
        assert bool(launches()) == (implementation == "cki" and batch != "right")
    assert close(logits["cki"], logits["eager"])
    if text:
        assert torch.equal(text["cki"], text["eager"])


def test_generate_with_a_static_cache_compiles_decoding_by_itself():
    """As transformers does on a GPU, with CUDA graphs, unless it is told not to."""
    model, tokens = make("llama").cuda(), ids().cuda()
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 8, "do_sample": False}
    text = {}
    for implementation in ("eager", "cki"):
        model.set_attn_implementation(implementation)
        compiled = {"cache_implementation": "static"} if implementation == "cki" else {}
        text[implementation] = model.generate(tokens, **options, **compiled)
    assert torch.equal(text["cki"], text["eager"])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_smollm2_writes_the_same_text(launches, cache):
    """Its real weights: greedy text as with sdpa, every token's attention in CKI's kernels."""
    files, new = open_model(smollm2_path()), 40
    config = files.config
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position, tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, bos_token_id=config.bos_id,
        eos_token_id=None, pad_token_id=config.pad_id,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(settings)
    weights = {name: torch.tensor(values) for name, values in files.weights.items()}
    found = model.load_state_dict(weights, strict=False)
    assert found.missing_keys in ([], ["lm_head.weight"]) and not found.unexpected_keys
    model.tie_weights()
    model.cuda().eval()
    for prompt in PROMPTS:
        tokens = torch.tensor([files.tokenizer.encode(prompt)], device="cuda")
        text = {}
        for implementation in ("sdpa", "cki"):
            model.set_attn_implementation(implementation)
            text[implementation] = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False,
                cache_implementation=cache, disable_compile=True,
            )[0].tolist()  # fmt: skip
            assert launches().total() >= new * config.num_layers * (implementation == "cki")
        words = files.tokenizer.decode(text["cki"], skip_special=False)
        assert text["cki"] == text["sdpa"], words
        assert len(text["cki"]) == tokens.shape[1] + new
        if prompt == PROMPTS[0]:
            assert "Paris" in words
