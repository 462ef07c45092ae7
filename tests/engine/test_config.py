"""`ModelConfig.from_hf`: against transformers' own configurations, and every value that is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cki.engine import rope
from cki.engine.config import ModelConfig
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.engine.model_files import ARCHITECTURES, hf_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_given": YARN | {"attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_deepseek": YARN | {"mscale": 0.9, "mscale_all_dim": 0.5},
    "yarn_no_factor": {"rope_type": "yarn", "original_max_position_embeddings": 64, "factor": None},
}


def transformers_config(architecture: str, **values):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(architecture, **values)


@pytest.mark.transformers
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 4}]
)
def test_equals_transformers(architecture, changes, tmp_path):
    values = hf_config(architecture, attention_bias=True, mlp_bias=architecture == "llama", **changes)
    del values["model_type"]
    theirs = transformers_config(architecture, **values)
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert ours == ModelConfig.from_hf(theirs)
    for name, same in {
        "hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads", "intermediate_size": "intermediate_size", "vocab_size": "vocab_size",
        "rms_norm_eps": "rms_norm_eps", "max_position": "max_position_embeddings", "bos_id": "bos_token_id",
        "tie_word_embeddings": "tie_word_embeddings", "head_dim": "head_dim", "architecture": "model_type",
    }.items():  # fmt: skip
        if hasattr(theirs, same):  # Qwen2's has no head_dim
            assert getattr(ours, name) == getattr(theirs, same), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.eos_ids, ours.dtype, ours.activation) == ((2,), "f32", "silu")


@pytest.mark.torch
@pytest.mark.transformers
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bias", [False, True])
def test_names_and_shapes_are_those_of_the_model(architecture, bias):
    """The state dict of transformers' model has exactly the weights that `expected_weights` lists."""
    transformers = pytest.importorskip("transformers")
    from cki.engine.names import expected_weights

    values = hf_config(architecture, attention_bias=bias, mlp_bias=bias and architecture == "llama")
    del values["model_type"]
    config = transformers_config(architecture, **values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert expected_weights(ModelConfig.from_hf(config)) == theirs


@pytest.mark.transformers
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_equal_transformers(name):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = hf_config(rope_theta=500000.0, max_position_embeddings=256, rope_scaling=SCALINGS[name])
    ours = ModelConfig.from_hf(values)
    del values["model_type"]
    parameters = {"rope_theta": values.pop("rope_theta"), **values.pop("rope_scaling")}
    theirs = transformers_config("llama", **values, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, "cpu")
    np.testing.assert_allclose(rope.inverse_frequencies(ours), frequencies.numpy(), rtol=3e-6)
    assert rope.magnitude(ours) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_style_of_rope_are_one(name):
    scaling = dict(SCALINGS[name])
    old = hf_config(rope_theta=12345.0, rope_scaling={"type": scaling.pop("rope_type"), **scaling})
    new = hf_config(rope_parameters={"rope_theta": 12345.0, **SCALINGS[name]})
    del new["rope_theta"]
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


def test_longest_sequence_grows_with_the_scaling():
    def longest(scaling):
        return ModelConfig.from_hf(hf_config(rope_scaling=scaling)).max_position

    assert longest(None) == 128
    assert longest({"rope_type": "default"}) == 128
    assert longest(SCALINGS["linear"]) == 320
    assert longest(LLAMA3) == 128  # already what scaling led to
    assert longest(YARN) == 256
    assert longest(YARN | {"factor": 1e300}) == longest({"type": "linear", "factor": 1e300}) == 2**31 - 1


def test_what_is_left_out_is_as_in_transformers():
    sizes = (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    )
    required = {name: hf_config()[name] for name in (*sizes, "max_position_embeddings")}
    config = ModelConfig.from_hf(required)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.activation) == (1e-6, 10000.0, "silu")
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.bos_id, config.eos_ids, config.pad_id) == (1, (2,), None)
    assert ModelConfig.from_hf(required | {"model_type": "qwen3"}).head_dim == 128
    assert ModelConfig.from_hf(required | {"model_type": "qwen2"}).eos_ids == ()


@pytest.mark.parametrize(
    ("architecture", "changes", "window", "layers"),
    [
        ("llama", {"sliding_window": 32}, None, (False, False)),
        ("mistral", {"sliding_window": 32}, 32, (True, True)),
        ("mistral", {"sliding_window": None}, None, (False, False)),
        ("mistral", {}, 4096, (True, True)),
        ("qwen2", {"sliding_window": 32}, None, (False, False)),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True}, 32, (False, False)),  # from layer 28 on
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, 32, (False, True)),
        ("qwen3", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, 32, (True, True)),
        (
            "qwen3",
            {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            9,
            (True, False),
        ),
    ],
)  # fmt: skip
def test_windows(architecture, changes, window, layers):
    config = ModelConfig.from_hf(hf_config(architecture, **changes))
    assert (config.sliding_window, config.window_layers) == (window, layers)


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [
        ("llama", (True, True, True)),
        ("mistral", (False, False, False)),
        ("qwen2", (True, False, False)),
        ("qwen3", (True, True, False)),
    ],
)
def test_biases(architecture, biases):
    config = ModelConfig.from_hf(hf_config(architecture, attention_bias=True, mlp_bias=True))
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == biases
    assert config.qk_norm == (architecture == "qwen3")


def test_special_tokens():
    config = ModelConfig.from_hf(hf_config(eos_token_id=[5, 3, 5], bos_token_id=None, pad_token_id=-1))
    assert (config.bos_id, config.eos_ids, config.pad_id) == (None, (5, 3), None)
    # A tokenizer of more words than the embedding has rows names ids that cannot occur.
    assert ModelConfig.from_hf(hf_config(eos_token_id=[2, 160])).eos_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a whole number of 1 to 10000"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824, not a whole number of 1 to 10000"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"intermediate_size": 96.0}, "intermediate_size is 96.0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size 66 is no multiple of num_attention_heads 4"),
        ({"head_dim": 33}, "head_dim is 33: RoPE rotates pairs"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": 1}, "rope_theta is 1.0, not above 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "RoPE scaling of type linear has no factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0 is not below high_freq_factor 4.0"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', not an id or several"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types is"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
    ],
)  # fmt: skip
def test_wrong_values(changes, said):
    with pytest.raises(InvalidArgumentError) as caught:
        ModelConfig.from_hf(hf_config(**changes))
    assert said in str(caught.value)


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(InvalidArgumentError) as caught:
        ModelConfig.from_hf({"model_type": "llama", "rms_norm_eps": -1, "tie_word_embeddings": 3})
    missing = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    for words in (
        *(f"{name} is missing" for name in missing),
        "rms_norm_eps is -1",
        "tie_word_embeddings is 3",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
        ({"model_type": None}, "no model_type is given"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"hidden_act": 3}, "hidden_act is 3"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
    ],
)
def test_unsupported_models(changes, said):
    with pytest.raises(UnsupportedError) as caught:
        ModelConfig.from_hf(hf_config(**changes))
    assert said in str(caught.value)


@pytest.mark.parametrize("config", [None, 3, "config.json", object()])
def test_what_is_no_configuration(config):
    with pytest.raises(InvalidTypeError, match="not a mapping or a configuration"):
        ModelConfig.from_hf(config)
