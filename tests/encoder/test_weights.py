"""Names, shapes and configurations of state dicts: what makes an encoder, and what is said of what does not.

No kernel runs here.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import cki
from cki.encoder.names import canonical
from cki.errors import InvalidArgumentError, InvalidTypeError

H, HEADS, INNER, WORDS, POSITIONS = 8, 2, 12, 11, 7
LINEAR = {
    "attention.self.query": (H, H), "attention.self.key": (H, H), "attention.self.value": (H, H),
    "attention.output.dense": (H, H), "intermediate.dense": (INNER, H), "output.dense": (H, INNER),
}  # fmt: skip
NORMS = {
    "bert": ("attention.output.LayerNorm", "output.LayerNorm"),
    "preln": ("attention.LayerNorm", "intermediate.LayerNorm"),
    "megatron": ("attention.ln", "ln"),
}
CONFIG = {
    "model_type": "bert", "hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": INNER, "vocab_size": WORDS, "max_position_embeddings": POSITIONS,
}  # fmt: skip


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def state(prefix="", style="bert", layers=2, dtype=np.float32):
    """A state dict of zeros, in PyTorch's names and layout."""
    weights = {
        "embeddings.word_embeddings.weight": zeros(WORDS, H, dtype=dtype),
        "embeddings.position_embeddings.weight": zeros(POSITIONS, H, dtype=dtype),
        "embeddings.token_type_embeddings.weight": zeros(2, H, dtype=dtype),
    }
    vectors = {}
    if style != "megatron":
        vectors |= {f"embeddings.LayerNorm.{leaf}": H for leaf in ("weight", "bias")}
    final = {"preln": "LayerNorm", "megatron": "encoder.ln"}.get(style)
    if final:
        vectors |= {f"{final}.{leaf}": H for leaf in ("weight", "bias")}
    for number in range(layers):
        start = f"encoder.layer.{number}."
        for stem, shape in LINEAR.items():
            weights[f"{start}{stem}.weight"] = zeros(*shape, dtype=dtype)
            vectors[f"{start}{stem}.bias"] = shape[0]
        for stem in NORMS[style]:
            vectors |= {f"{start}{stem}.{leaf}": H for leaf in ("weight", "bias")}
    weights |= {name: zeros(extent, dtype=dtype) for name, extent in vectors.items()}
    return {prefix + name: value for name, value in weights.items()}


def tensorflow_state():
    """The same as Hugging Face's TensorFlow classes name and lay it."""
    result = {}
    for name, value in state().items():
        stem, _, leaf = name.rpartition(".")
        is_kernel = stem.endswith(("query", "key", "value", "dense"))
        if leaf == "weight" and is_kernel:
            leaf, value = "kernel", np.ascontiguousarray(value.T)
        elif "LayerNorm" in stem:
            leaf = {"weight": "gamma", "bias": "beta"}[leaf]
        elif leaf == "weight" and "word" not in stem:
            leaf = "embeddings"
        path = (
            f"{stem}.{leaf}".replace("layer.0", "layer_._0").replace("layer.1", "layer_._1").replace(".", "/")
        )
        result[f"tf_bert_model/bert/{path.replace('layer_/_', 'layer_._')}:0"] = value
    return result


def problems_of(weights, config=CONFIG, **options):
    with pytest.raises(InvalidArgumentError) as caught:
        cki.Encoder.from_weights(weights, config, **options)
    return caught.value


# --- what makes an encoder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "bert.", "roberta.", "model.", "0.auto_model.", "model.bert."])
def test_any_prefix(prefix):
    weights = state(prefix)
    if prefix:
        weights["classifier.weight"] = weights["dense.weight"] = zeros(3, H)
    encoder = cki.Encoder.from_weights(weights, num_heads=HEADS)
    c = encoder.config
    assert (c.layers, c.hidden, c.inner, c.num_heads, c.head_dim, c.vocabulary) == (2, H, INNER, 2, 4, WORDS)
    assert c.padding_id == (1 if prefix == "roberta." else None)
    assert c.max_tokens == (POSITIONS - 2 if prefix == "roberta." else POSITIONS)
    assert (c.pre_ln, c.activation, c.epsilon, c.weight_layout) == (False, "gelu", 1e-12, "out_in")
    assert repr(encoder) == "Encoder(2 layers, hidden 8, 2 heads, post-LN, f32)"


def test_heads_poolers_and_buffers_are_left_out():
    weights = state()
    weights["embeddings.position_ids"] = np.arange(POSITIONS)
    for name in ("pooler.dense.weight", "cls.predictions.bias", "lm_head.dense.weight", "qa_outputs.bias"):
        weights[name] = zeros(H)
    assert cki.Encoder.from_weights(weights, CONFIG).config.layers == 2


def test_tensorflow_names_and_layout():
    encoder = cki.Encoder.from_weights(tensorflow_state(), CONFIG)
    assert encoder.config.weight_layout == "in_out"
    assert encoder.config.inner == INNER


def test_names_of_other_writers():
    layer = "encoder.layer.11.attention.self.query"
    for name in (
        "bert/encoder/layer_11/attention/self/query/kernel",
        "encoder/layer/11/attention/self/query/kernel",
        "tf_bert_model/bert/encoder/layer_._11/attention/self/query/kernel:0",
    ):
        weight = canonical(name)
        assert weight.name.endswith(f"{layer}.weight")
        assert weight.is_kernel
    assert canonical("bert/embeddings/word_embeddings").name == "bert.embeddings.word_embeddings.weight"
    assert (
        canonical("bert/encoder/layer_0/output/LayerNorm/beta").name
        == "bert.encoder.layer.0.output.LayerNorm.bias"
    )
    assert canonical("embeddings.LayerNorm.gamma").name == "embeddings.LayerNorm.weight"


@pytest.mark.parametrize("style", ["preln", "megatron"])
def test_pre_ln_is_told_by_the_names(style):
    encoder = cki.Encoder.from_weights(state(style=style), num_heads=HEADS)
    assert encoder.config.pre_ln
    assert {"final_gamma", "final_beta"} <= encoder._views.keys()
    assert ("embedding_gamma" in encoder._views) == (style == "preln")


def test_pre_ln_with_the_names_of_bert_is_said():
    encoder = cki.Encoder.from_weights(state(), num_heads=HEADS, pre_ln=True)
    assert encoder.config.pre_ln
    assert "final_gamma" not in encoder._views


def test_configuration_as_an_object_and_what_wins():
    config = SimpleNamespace(
        **{
            **CONFIG,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "model_type": "xlm-roberta",
            "pad_token_id": 3,
        }
    )
    c = cki.Encoder.from_weights(state(), config).config
    assert (c.activation, c.epsilon, c.padding_id, c.max_tokens) == ("gelu_tanh", 1e-5, 3, 3)
    c = cki.Encoder.from_weights(
        state(), config, num_heads=4, activation="relu", epsilon=0, padding_id=0
    ).config
    assert (c.num_heads, c.activation, c.epsilon, c.padding_id) == (4, "relu", 0.0, 0)


def test_no_token_types_and_ignored_names():
    weights = state()
    del weights["embeddings.token_type_embeddings.weight"]
    weights["adapter.weight"] = zeros(2)
    encoder = cki.Encoder.from_weights(weights, CONFIG, ignore=("adapter.",))
    with cki.device("sim"), pytest.raises(InvalidArgumentError, match="the model has no token types"):
        encoder(np.zeros((1, 2), np.int64), token_type_ids=np.zeros((1, 2), np.int64))


def test_matrices_in_another_layout_than_their_names_say():
    weights = {
        n: np.ascontiguousarray(v.T) if (v.ndim == 2 and "dense" in n) or "self" in n else v
        for n, v in state().items()
    }
    encoder = cki.Encoder.from_weights(weights, CONFIG, weight_layout="in_out")
    assert encoder.config.inner == INNER
    views = {n: v.T if (v.ndim == 2 and "dense" in n) or "self" in n else v for n, v in weights.items()}
    assert cki.Encoder.from_weights(views, CONFIG).config.weight_layout == "out_in"


# --- what does not ----------------------------------------------------------------------------------------------------


def test_missing_unexpected_and_wrong_shapes_are_all_named_in_one_error():
    weights = state("bert.")
    del weights["bert.encoder.layer.1.output.dense.bias"]
    del weights["bert.embeddings.LayerNorm.weight"]
    weights["bert.encoder.layer.0.crossattention.self.query.weight"] = zeros(H, H)
    weights["bert.encoder.layer.0.intermediate.dense.weight"] = zeros(H, INNER)
    weights["bert.encoder.layer.1.attention.self.key.weight"] = zeros(H, H + 1)
    weights["bert.encoder.layer.1.attention.self.key.bias"] = zeros(H, dtype=np.float16)
    error = problems_of(weights)
    assert set(error.problems) == {
        "bert.encoder.layer.0.crossattention.self.query.weight is unexpected",
        "bert.embeddings.LayerNorm.weight is missing",
        "bert.encoder.layer.1.output.dense.bias is missing",
        "the configuration says intermediate_size 12, the weights have 8",
        "bert.encoder.layer.0.intermediate.dense.weight has shape (8, 12), not (8, 8)",
        "bert.encoder.layer.0.intermediate.dense.bias has shape (12,), not (8,)",
        "bert.encoder.layer.0.output.dense.weight has shape (8, 12), not (8, 8)",
        "bert.encoder.layer.1.intermediate.dense.weight has shape (12, 8), not (8, 8)",
        "bert.encoder.layer.1.intermediate.dense.bias has shape (12,), not (8,)",
        "bert.encoder.layer.1.output.dense.weight has shape (8, 12), not (8, 8)",
        "bert.encoder.layer.1.attention.self.key.weight has shape (8, 9), not (8, 8)",
        "bert.encoder.layer.1.attention.self.key.bias is f16, bert.embeddings.word_embeddings.weight is f32",
    }
    assert "ignore=(...)" in error.hint
    assert "dtype=" in error.hint


def test_a_layer_in_between_is_missed():
    weights = {n: v for n, v in state(layers=3).items() if "layer.1." not in n}
    problems = problems_of(weights, {**CONFIG, "num_hidden_layers": 3}).problems
    assert len(problems) == 16
    assert all(p.startswith("encoder.layer.1.") and p.endswith(" is missing") for p in problems)


def test_nothing_of_an_encoder():
    problems = problems_of({"transformer.h.0.attn.c_attn.weight": zeros(2, 2)}, None).problems
    assert "num_heads is not given" in problems
    assert "transformer.h.0.attn.c_attn.weight is unexpected" in problems
    assert "embeddings.word_embeddings.weight is missing" in problems
    assert "encoder.layer.0.attention.self.query.weight is missing" in problems


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_heads": 3}, "num_heads is 3, encoder.layer.0.attention.self.query.weight has 8 outputs"),
        ({"num_heads": 0}, "num_heads is 0, not a number of 1 or more"),
        ({"epsilon": -1.0}, "epsilon is -1.0, not a number of 0 or more"),
        ({"activation": "mish"}, "activation is 'mish'"),
        ({"padding_id": -1}, "padding_id is -1, not an id of 0 or more"),
        ({"padding_id": 9}, "embeddings.position_embeddings.weight has 7 rows, none of them for a token"),
    ],
)
def test_bad_numbers(options, problem):
    assert problem in problems_of(state(), **options).problems


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("position_embedding_type", "relative_key", "position_embedding_type is 'relative_key'"),
        ("is_decoder", True, "is_decoder is set in the configuration"),
        ("num_hidden_layers", 12, "the configuration says num_hidden_layers 12, the weights have 2"),
        ("hidden_act", "mish", "activation is 'mish'"),
    ],
)
def test_configurations_of_other_models(key, value, problem):
    assert problems_of(state(), {**CONFIG, key: value}).problems == (problem,)


def test_half_a_norm_two_encoders_and_mixed_names():
    weights = state(style="preln")
    del weights["LayerNorm.bias"]
    assert problems_of(weights).problems == ("LayerNorm.bias is missing",)
    both = {**state("question_encoder."), **state("context_encoder.")}
    assert "there are several encoders, with the prefixes" in problems_of(both).problems[0]
    weights = state()
    weights["encoder.layer.0.output.dense.kernel"] = weights.pop("encoder.layer.0.output.dense.weight")
    error = problems_of(weights)
    assert "by its name encoder.layer.0.output.dense.kernel is stored [in, out]" in error.problems[0]
    weights["encoder.layer.0.output.dense.weight"] = zeros(H, INNER)
    assert any("are the same weight" in problem for problem in problems_of(weights).problems)
    assert problems_of(state(style="preln"), pre_ln=False).problems == (
        "pre_ln is False, but norms have the names of a pre-LN model",
    )


def test_tables_with_gaps_and_things_that_are_no_tensors():
    weights = state()
    weights["embeddings.word_embeddings.weight"] = zeros(WORDS, 2 * H)[:, ::2]
    weights["encoder.layer.0.output.dense.bias"] = [0.0] * H
    problems = problems_of(weights).problems
    assert "embeddings.word_embeddings.weight has strides (16, 2): rows with gaps" in problems
    assert any(p.startswith("encoder.layer.0.output.dense.bias is of type list") for p in problems)


def test_wrong_types_of_numbers_are_named_together():
    wrong = {"num_heads": "2", "pre_ln": 1, "epsilon": True, "activation": 3, "padding_id": 1.0}
    with pytest.raises(InvalidTypeError) as caught:
        cki.Encoder.from_weights(state(), CONFIG, **wrong)
    assert caught.value.problems == (
        "pre_ln is 1, not a bool",
        "num_heads is '2' of type str, not int",
        "epsilon is True of type bool, not float",
        "activation is 3 of type int, not str",
        "padding_id is 1.0 of type float, not int",
    )
    with pytest.raises(InvalidTypeError, match="num_heads is 2.0 of type float"):
        cki.Encoder.from_weights(state(), {**CONFIG, "num_attention_heads": 2.0})


def test_wrong_types_of_arguments():
    with pytest.raises(InvalidTypeError, match="weights is a list, not a mapping"):
        cki.Encoder.from_weights([zeros(2)], CONFIG)
    with pytest.raises(InvalidTypeError, match="pre_ln is 1, not a bool"):
        cki.Encoder.from_weights(state(), CONFIG, pre_ln=1)
    with pytest.raises(InvalidTypeError, match="weight_layout is 'io'"):
        cki.Encoder.from_weights(state(), CONFIG, weight_layout="io")
    with pytest.raises(InvalidTypeError, match="f12"):
        cki.Encoder.from_weights(state(), CONFIG, dtype="f12")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # One text would be taken letter by letter, and leave out every name that begins with one of them.
        ({"ignore": "cls."}, r"ignore is 'cls\.', not a sequence of str\n  hint: ignore="),
        ({"ignore": None}, "ignore is None, not a sequence of str"),
        ({"ignore": (1,)}, r"ignore is \(1,\), not a sequence of str"),
        ({"dtype": ["f16"]}, r"unknown element type \['f16'\]\n  hint: one of f64, f32"),
        ({"weight_layout": np.array([1, 2])}, r"weight_layout is array\(\[1, 2\]\), not 'in_out'"),
    ],
)
def test_arguments_of_a_wrong_type(arguments, message):
    with pytest.raises(InvalidTypeError, match=message):
        cki.Encoder.from_weights({}, CONFIG, **arguments)
