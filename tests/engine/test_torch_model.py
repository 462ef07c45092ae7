"""LLM.from_torch: transformers' greedy texts, on the weights that transformers has."""

from __future__ import annotations

import pytest

from cki.engine import LLM, SamplingParams
from cki.errors import InvalidArgumentError, InvalidTypeError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
OPTIONS = {"max_length": 64, "max_sequences": 2, "max_step_tokens": 32, "block_size": 4}
PROMPT = [5, 9, 77, 3, 15, 60]


def made(name, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def theirs(model, count):
    ids = torch.tensor([PROMPT], device=model.device)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        tokens = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tokens[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                       "original_max_position_embeddings": 64}}),
        ("Qwen3", {}),
    ],
)  # fmt: skip
def test_greedy_text_is_that_of_transformers(device, name, changes):
    model = made(name, **changes).to("cuda" if device.kind == "cuda" else "cpu")
    expected = theirs(model, 10)
    llm = LLM.from_torch(model, **OPTIONS)
    assert str(llm.model.dtype) == "f32"
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    assert list(llm.generate(PROMPT, params)[0].token_ids) == expected
    assert theirs(model, 10) == expected  # the model itself still computes what it did


def test_weights_are_shared():
    model = made("Llama", tie_word_embeddings=True)
    llm = LLM.from_torch(model, **OPTIONS)
    lent = dict(llm.model.weights.items())
    layer = model.model.layers[1]
    assert lent["layers.1.wqkv"].view.ptr == layer.self_attn.q_proj.weight.data_ptr()
    width = layer.self_attn.q_proj.weight.numel() * 4
    assert layer.self_attn.k_proj.weight.data_ptr() == layer.self_attn.q_proj.weight.data_ptr() + width
    assert lent["embed"].view.ptr == model.model.embed_tokens.weight.data_ptr()
    assert "head" not in lent
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    before = llm.generate(PROMPT, params)[0].token_ids
    with torch.no_grad():
        layer.self_attn.v_proj.weight.mul_(-3)
        layer.mlp.up_proj.weight.mul_(2)
    changed = LLM.from_torch(model, **OPTIONS).generate(PROMPT, params)[0].token_ids
    # What was cached belongs to the old weights, so the prompt is another.
    other = [7, *PROMPT]
    assert before != changed
    assert (
        llm.generate(other, params)[0].token_ids
        == LLM.from_torch(model, **OPTIONS).generate(other, params)[0].token_ids
    )


def test_what_is_refused():
    with pytest.raises(InvalidTypeError, match="config is a NoneType"):
        LLM.from_torch(torch.nn.Linear(2, 2))
    model = made("Llama")
    del model.model.layers[0].self_attn.k_proj
    model.model.norm.to(torch.float16)
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)k_proj.weight is missing.*float16 on cpu: not all alike"
    ):
        LLM.from_torch(model, **OPTIONS)
    with pytest.raises(InvalidTypeError, match="float64"):
        LLM.from_torch(made("Llama").double(), **OPTIONS)
    for name, value in (("dtype", "f16"), ("device", "sim"), ("quantize", "fp8")):
        with pytest.raises(InvalidArgumentError, match=f"{name} with weights that torch shares"):
            LLM.from_torch(made("Llama"), **{**OPTIONS, name: value})
