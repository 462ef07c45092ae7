"""Tiny vocabularies as GGUF files hold them."""

from __future__ import annotations

from cki.engine.config import ModelConfig
from cki.engine.gguf_tokenizer import gguf_tokenizer
from tests.engine.model_files import hf_config


def bytes_to_characters() -> dict[int, str]:
    """GPT-2's: bytes that are no printable character of Latin-1 get one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        found.setdefault(byte, chr(256 + len(found) - len(printable)))
    return found


def byte_level(pre="smollm", more=(), merges=("Ġ t", "h e", "Ġt he"), **keys):
    """The metadata of a vocabulary: two control words, all bytes, merged words, and more."""
    words = ["<s>", "</s>", *bytes_to_characters().values(), *(m.replace(" ", "") for m in merges), *more]
    kinds = [3, 3] + [1] * (len(words) - 2 - len(more)) + [4] * len(more)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": list(merges), **keys,
    }  # fmt: skip


def sentencepiece(**keys):
    """Pieces with scores: the longer, the better."""
    pieces = ["▁", "a", "b", "c", "ab", "▁ab", "abc", "bc"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -1.0, -4.0]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.unknown_token_id": 0, **keys,
    }  # fmt: skip


def of(metadata, bos=0, eos=1):
    size = max(len(metadata.get("tokenizer.ggml.tokens", [])), 1)
    config = ModelConfig.from_hf(hf_config(vocab_size=size, bos_token_id=bos, eos_token_id=eos))
    return gguf_tokenizer(metadata, config, "x.gguf")
