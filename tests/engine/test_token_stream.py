"""Text that comes token by token is the text of all tokens, without halves of characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cki.engine.files import open_model
from cki.engine.token_stream import TokenStream
from tests.engine.model_files import smollm2_path
from tests.engine.vocabularies import byte_level, bytes_to_characters, of, sentencepiece

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def smollm2():
    return open_model(smollm2_path()).tokenizer


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=40))
def test_stream_of_any_text(smollm2, text):
    ids = smollm2.encode(text, special=False)
    stream = smollm2.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.end() == smollm2.decode(ids)
    if "\ufffd" not in smollm2.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=60))
def test_stream_of_any_tokens(smollm2, ids):
    """The first 300 tokens are the special ones and most of the bytes: nearly nothing is valid UTF-8."""
    stream = smollm2.stream()
    assert "".join([stream.push(token) for token in ids]) + stream.end() == smollm2.decode(ids)


def test_stream_gives_out_characters_when_they_are_whole():
    tokenizer = of(byte_level())
    ids = tokenizer.encode("a🎉é", special=False)
    assert len(ids) == 7
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "🎉", "", "é"]
    assert stream.end() == ""
    # Cut in the middle of a character.
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids[:3]] == ["a", "", ""]
    assert stream.end() == "\ufffd"


def test_stream_of_bytes_that_are_no_text_does_not_wait_for_ever():
    tokenizer = of(byte_level())
    token = tokenizer._tokenizer.token_to_id(bytes_to_characters()[0xFF])
    stream = tokenizer.stream()
    pieces = [stream.push(token) for _ in range(100)]
    assert len("".join(pieces)) >= 90
    assert "".join(pieces) + stream.end() == "\ufffd" * 100


def test_stream_of_sentencepiece():
    """The space before the first word is no part of the text, those before later ones are."""
    tokenizer = of(sentencepiece(), bos=1, eos=2)
    ids = tokenizer.encode("ab ab é🎉 c")
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.end() == "ab ab é🎉 c"
    assert not any("\ufffd" in piece for piece in pieces)
    # A special token in the middle is no text, and no beginning of one.
    middle = [*tokenizer.encode("ab"), 2, *tokenizer.encode(" ab", special=False)]
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in middle) + stream.end() == tokenizer.decode(middle)


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="abc é🎉\n", max_size=30))
def test_stream_of_any_sentencepiece_text(text):
    tokenizer = of(sentencepiece(), bos=1, eos=2)
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids) + stream.end() == tokenizer.decode(ids) == text


def test_stream_decodes_little():
    """The work for a token does not grow with the text."""
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join("x" if token else "" for token in ids)

    stream = TokenStream(decode)
    assert "".join(stream.push(1) for _ in range(1000)) == "x" * 1000
    assert longest <= 3
