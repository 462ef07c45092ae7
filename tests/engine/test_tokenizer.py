"""Tokenizers from tokenizer.json and from GGUF vocabularies, and text that comes token by token."""

from __future__ import annotations

import builtins
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cki.engine.config import ModelConfig
from cki.engine.files import open_model
from cki.engine.tokenizer import Tokenizer
from cki.errors import InvalidArgumentError, InvalidTypeError, MissingPackageError, UnsupportedError
from tests.engine.model_files import (
    gguf_keys,
    gguf_tensors,
    hf_config,
    smollm2_path,
    write_folder,
    write_gguf,
)
from tests.engine.tiny import random_weights
from tests.engine.vocabularies import byte_level, of, sentencepiece

tokenizers = pytest.importorskip("tokenizers")

TEXTS = (
    "The capital of France is", "  two  spaces\n\n\ttabs ", "12345 and 3.14", "naïve Ünïcödé – “quotes”",
    "你好,世界 🎉🏽 👨‍👩‍👧", "don't I'LL we're", "", "\x00\x7f\ufffd", "<|im_start|>user\nHi<|im_end|>",
)  # fmt: skip


@pytest.fixture(scope="module")
def smollm2():
    return open_model(smollm2_path()).tokenizer


# SmolLM2


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trip(smollm2, text):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special=False) == text
    stream = smollm2.stream(skip_special=False)
    assert "".join([*(stream.push(token) for token in ids), stream.end()]) == text


def test_smollm2s_tokens(smollm2):
    """As the model's own tokenizer.json numbers them: no BOS, each digit for itself."""
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    digits = smollm2.encode("2024")
    assert [smollm2.decode([token]) for token in digits] == ["2", "0", "2", "4"]
    assert smollm2.encode("<|im_start|>") == [1]
    assert smollm2.decode([1, 504, 2]) == "The"
    assert smollm2.decode([1, 504, 2], skip_special=False) == "<|im_start|>The<|im_end|>"
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.vocab_size) == (1, (2, 0), 49152)
    assert smollm2.has_chat


def test_encoding_from_several_threads(smollm2):
    expected = [smollm2.encode(text) for text in TEXTS * 20]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(smollm2.encode, TEXTS * 20)) == expected


# Vocabularies of GGUF files


def test_byte_level_vocabulary():
    tokenizer = of(byte_level(more=["<tool call>"]))
    words = [tokenizer._tokenizer.id_to_token(token) for token in tokenizer.encode("at the <tool call></s>é")]
    assert words == ["a", "t", "Ġthe", "Ġ", "<tool call>", "</s>", "Ã", "©"]
    assert tokenizer.decode(tokenizer.encode("at the <tool call></s>é")) == "at the <tool call>é"


@pytest.mark.parametrize(
    ("pre", "keys", "has_bos"),
    [
        ("smollm", {}, False), ("smollm", {"tokenizer.ggml.add_bos_token": True}, True), ("qwen2", {}, False),
        ("llama-bpe", {}, True), ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False), ("tekken", {}, True),
    ],
)  # fmt: skip
def test_beginning_of_text(pre, keys, has_bos):
    tokenizer = of(byte_level(pre, **keys))
    assert tokenizer.encode("")[:1] == ([0] if has_bos else [])
    assert tokenizer.encode("", special=False) == []


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["1234567", " !!!", "\n\n"]),
        ("smollm", ["1", "2", "3", "4", "5", "6", "7", " !!!", "\n\n"]),
        ("llama-bpe", ["123", "456", "7", " !!!\n\n"]),
        ("qwen2", ["1", "2", "3", "4", "5", "6", "7", " !!!\n\n"]),
        ("tekken", ["1", "2", "3", "4", "5", "6", "7", " !!!\n\n"]),
    ],
)
def test_cuts_between_words(pre, words):
    """Where the published patterns cut this text; merges never cross a cut."""
    text = "Don't stop   x1234567 !!!\n\n"
    found = of(byte_level(pre))._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    pieces = [text[begin:end] for _, (begin, end) in found]
    assert pieces == ["Don", "'t", " stop", "  ", " x", *words]


def test_cuts_of_tekken_follow_case():
    found = of(byte_level("tekken"))._tokenizer.pre_tokenizer.pre_tokenize_str("HelloWorld ABCdef a/b//")
    assert [text.replace("Ġ", " ") for text, _ in found] == ["Hello", "World", " ABCdef", " a", "/b", "//"]


def test_qwen2_composes_characters():
    tokenizer = of(byte_level("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_whole_words_need_no_merges():
    """Llama 3's vocabulary has words that its merges do not lead to."""
    tokenizer = of(byte_level("llama-bpe", merges=("a b", "b c", "ab c")) | {})
    metadata = byte_level("llama-bpe", merges=("b c",), more=["xyz"])
    metadata["tokenizer.ggml.token_type"][-1] = 1
    assert len(of(metadata).encode("xyz", special=False)) == 1
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(of(metadata).encode("xyz", special=False)) == 3
    assert len(tokenizer.encode("abc", special=False)) == 1


def test_sentencepiece_vocabulary():
    """Best score first: of "abc", bc (-4) is never made, since ab (-3) comes before it and then abc (-1)."""
    tokenizer = of(sentencepiece(), bos=1, eos=2)

    def pieces(text):
        return [tokenizer._tokenizer.id_to_token(token) for token in tokenizer.encode(text)]

    assert pieces("abc") == ["<s>", "▁", "abc"]
    assert pieces("ab") == ["<s>", "▁ab"]
    assert pieces("bc a") == ["<s>", "▁", "bc", "▁", "a"]
    assert pieces("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces("") == ["<s>"]
    assert tokenizer.decode(tokenizer.encode("abc  é a")) == "abc  é a"
    bare = of(
        sentencepiece(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}),
        1,
        2,
    )
    assert [bare._tokenizer.id_to_token(token) for token in bare.encode("abc")] == ["abc"]
    assert bare.decode(bare.encode(" ab")) == " ab"


@pytest.mark.parametrize(
    ("metadata", "error", "said"),
    [
        (byte_level("gpt-4o"), UnsupportedError, "tokenizer.ggml.pre is 'gpt-4o', not of gpt-2, smollm"),
        (byte_level() | {"tokenizer.ggml.model": "bert"}, UnsupportedError, "tokenizer.ggml.model is 'bert'"),
        (byte_level() | {"tokenizer.ggml.merges": ["a"]}, InvalidArgumentError, "tokenizer.ggml.merges[0] is 'a'"),
        (byte_level() | {"tokenizer.ggml.merges": ["a zz"]}, InvalidArgumentError, "merges[0] is 'a zz', of words"),
        (byte_level() | {"tokenizer.ggml.merges": None}, InvalidArgumentError, "tokenizer.ggml.merges is missing"),
        (byte_level() | {"tokenizer.ggml.tokens": []}, InvalidArgumentError, "tokens is no list of words"),
        (byte_level() | {"tokenizer.ggml.token_type": [1]}, InvalidArgumentError, "has 1 kinds for 261 words"),
        (sentencepiece() | {"tokenizer.ggml.scores": [1.0]}, InvalidArgumentError, "ggml.scores is list of 1"),
        (sentencepiece() | {"tokenizer.ggml.scores": None}, InvalidArgumentError, "tokenizer.ggml.scores is missing"),
    ],
)  # fmt: skip
def test_wrong_vocabularies(metadata, error, said):
    with pytest.raises(error) as caught:
        of(metadata)
    assert said in str(caught.value)
    assert "x.gguf" in str(caught.value)


def test_a_vocabulary_larger_than_the_embedding(tmp_path):
    config = ModelConfig.from_hf(hf_config())
    keys = gguf_keys(config) | byte_level()
    path = write_gguf(tmp_path / "x.gguf", "llama", keys, gguf_tensors(config, random_weights(config)))
    with pytest.raises(InvalidArgumentError, match="261 words for 160 rows of token_embd.weight"):
        open_model(path)


def test_a_file_with_its_vocabulary(tmp_path):
    """Words that end a text are found by name, and templates know the special words."""
    config = ModelConfig.from_hf(hf_config(vocab_size=300))
    metadata = byte_level(
        more=["<|im_end|>"], **{"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    )
    metadata["tokenizer.ggml.token_type"][-1] = 3
    keys = gguf_keys(config) | metadata | {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    path = write_gguf(tmp_path / "x.gguf", "llama", keys, gguf_tensors(config, random_weights(config)))
    model = open_model(path)
    assert model.config.eos_ids == model.tokenizer.eos_ids == (1, 261)
    assert model.tokenizer.chat([{"role": "user", "content": "the"}]) == "<s>the"
    assert len(model.tokenizer.encode("the")) == 2


# tokenizer.json


def json_tokenizer(bos=True):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}, merges=[("a", "b")])
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(3)
    return tokenizer


def folder(tmp_path, tokenizer, settings=None, **files):
    config = hf_config(bos_token_id=0, eos_token_id=1)
    write_folder(tmp_path, config, random_weights(ModelConfig.from_hf(config)))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return open_model(tmp_path).tokenizer


def test_tokenizer_json(tmp_path):
    """Padding and truncation that a file may ask for are no part of a prompt."""
    tokenizer = folder(tmp_path, json_tokenizer())
    assert tokenizer.encode("ababab") == [0, 4, 4, 4]
    assert tokenizer.encode("ab</s>", special=False) == [4, 1]
    assert tokenizer.decode([0, 4, 2]) == "aba"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, (1,), 5)
    assert not tokenizer.has_chat
    with pytest.raises(UnsupportedError, match="the model has no chat template"):
        tokenizer.chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(("in_file", "setting", "has_bos"), [
    (True, None, True), (True, False, False), (False, True, True), (False, None, False), (True, True, True),
])  # fmt: skip
def test_add_bos_token(in_file, setting, has_bos, tmp_path):
    settings_ = {"bos_token": {"content": "<s>"}, "add_bos_token": setting}
    tokenizer = folder(tmp_path, json_tokenizer(in_file), settings_)
    assert tokenizer.encode("ab") == ([0, 4] if has_bos else [4])


@pytest.mark.parametrize(
    ("settings_", "files", "text"),
    [
        ({"chat_template": "A{{ eos_token }}", "eos_token": "</s>"}, {}, "A</s>"),
        (
            {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]},
            {},
            "D",
        ),
        ({"chat_template": [{"name": []}, {"name": "default", "template": "D"}]}, {}, "D"),
        ({"chat_template": "A"}, {"chat_template__jinja": "B{{ messages | length }}"}, "B1"),
        ({}, {"chat_template__json": '{"chat_template": "C"}'}, "C"),
        (None, {"chat_template__jinja": "E"}, "E"),
    ],
)
def test_places_of_the_chat_template(settings_, files, text, tmp_path):
    tokenizer = folder(tmp_path, json_tokenizer(), settings_, **files)
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}'])
def test_what_is_no_tokenizer_json(text, tmp_path):
    folder(tmp_path, json_tokenizer())
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json is no tokenizer\.json: "):
        open_model(tmp_path)


def test_a_tokenizer_that_fails_at_its_first_text(tmp_path):
    """Its post-processor adds a word that it has no id for: the package only finds out when it encodes."""
    folder(tmp_path, json_tokenizer())
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(values))
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json is no tokenizer\.json: "):
        open_model(tmp_path)


def test_wrong_arguments(smollm2):
    with pytest.raises(InvalidTypeError, match="text is a list, not a str"):
        smollm2.encode(["Hi"])
    with pytest.raises(InvalidArgumentError, match="character 1 is half of a surrogate pair"):
        smollm2.encode("a\ud83d")
    for ids in (None, 5, [5.5], ["5"]):
        with pytest.raises(InvalidTypeError, match="not a list of token ids"):
            smollm2.decode(ids)
    with pytest.raises(InvalidArgumentError, match="ids has -1, no token"):
        smollm2.decode([3, -1])
    assert smollm2.decode(np.array([504], np.int32)) == "The"
    assert smollm2.decode([60000]) == ""  # the embedding may have rows without a word


def test_without_the_package(monkeypatch, tmp_path):
    folder(tmp_path, json_tokenizer())
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "tokenizers":
            raise ImportError(name=name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        MissingPackageError, match=r'tokenizers, which is not installed; do: pip install "cki-runtime'
    ):
        open_model(tmp_path)


@pytest.mark.transformers
def test_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=json_tokenizer(), bos_token="<s>", eos_token="</s>", chat_template="{{ bos_token }}x"
    )
    ours = Tokenizer.from_huggingface(theirs)
    assert ours.encode("ab") == theirs.encode("ab") == [0, 4]
    assert ours.encode("ab", special=False) == [4]
    assert ours.decode([0, 4, 2]) == "aba"
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size, ours.has_chat) == (0, (1,), len(theirs), True)
    assert ours.chat([{"role": "user", "content": "a"}]) == "<s>x"
    stream = ours.stream()
    assert [stream.push(token) for token in (0, 4, 2)] == ["", "ab", "a"]
    with pytest.raises(InvalidTypeError, match="tokenizer is a int without encode and decode"):
        Tokenizer.from_huggingface(3)
