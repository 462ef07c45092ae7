"""The tokenizer of a GGUF file, built from its vocabulary into one of the `tokenizers` package.

Two kinds occur in the models that the engine runs.  "gpt2" is byte-level BPE with its merges; how text is cut into
words before merging is named by `tokenizer.ggml.pre`.  "llama" is SentencePiece's BPE: no merges but a score for each
piece; two neighbours merge if their union is a piece, best score first, and what no piece covers is spelled in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cki.engine.config import ModelConfig
from cki.engine.tokenizer import Tokenizer, add_bos, tokenizers_package
from cki.errors import InvalidArgumentError, UnsupportedError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


class _Cut(NamedTuple):
    """How text becomes words.  pattern: a word; None is GPT-2's own.  digits_first: each digit is a word.
    whole_words: a word that is in the vocabulary is not built by merges.  bos: BOS by default.  nfc: text is
    brought to that normal form."""

    pattern: str | None = None
    digits_first: bool = False
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_LLAMA3 = _Cut(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", whole_words=True, bos=True
)
_QWEN2 = _Cut(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", nfc=True)
_TEKKEN = _Cut(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True, bos=True,
)  # fmt: skip
#: By tokenizer.ggml.pre.
_CUTS = {
    "gpt-2": _Cut(), "smollm": _Cut(digits_first=True), "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN,
}  # fmt: skip


def gguf_tokenizer(metadata: Mapping[str, Any], config: ModelConfig, source: str) -> Tokenizer:
    """source: the file, for messages.

    Raises UnsupportedError for a tokenizer of another kind, InvalidArgumentError for a vocabulary that does not fit.
    """
    vocabulary = _Vocabulary(metadata, config, source)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, bos = _byte_level(vocabulary)
    elif model == "llama":
        tokenizer, bos = _sentencepiece(vocabulary)
    else:
        raise UnsupportedError(
            f"the engine has no tokenizer for {source}", [f"tokenizer.ggml.model is {model!r}, not 'gpt2' or 'llama'"],
            "the model as a Hugging Face folder, with its tokenizer.json",
        )  # fmt: skip
    vocabulary.add_special(tokenizer)
    bos_id = config.bos_id
    if metadata.get("tokenizer.ggml.add_bos_token", bos) and bos_id is not None:
        add_bos(tokenizer, vocabulary.words[bos_id], bos_id)
    tokens = {"bos_token": bos_id, "pad_token": config.pad_id, "eos_token": _first(config.eos_ids)}
    return Tokenizer(
        tokenizer,
        bos_id=bos_id,
        eos_ids=config.eos_ids,
        template=metadata.get("tokenizer.chat_template"),
        tokens={name: vocabulary.words[token] for name, token in tokens.items() if token is not None},
    )


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


class _Vocabulary:
    """words by id, ids by word, and the kind of each."""

    def __init__(self, metadata: Mapping[str, Any], config: ModelConfig, source: str) -> None:
        self.metadata, self.source = metadata, source
        self.words: list[str] = metadata.get("tokenizer.ggml.tokens", [])
        self.kinds = np.asarray(metadata.get("tokenizer.ggml.token_type", np.ones(len(self.words))))
        problems = []
        if not isinstance(self.words, list) or not self.words:
            problems.append("tokenizer.ggml.tokens is no list of words")
        elif len(self.words) > config.vocab_size:
            problems.append(f"{len(self.words)} words for {config.vocab_size} rows of token_embd.weight")
        elif self.kinds.shape != (len(self.words),):
            problems.append(
                f"tokenizer.ggml.token_type has {self.kinds.size} kinds for {len(self.words)} words"
            )
        special = [token for token in (config.bos_id, config.pad_id, *config.eos_ids) if token is not None]
        problems += [
            f"token {token} of {len(self.words)} words" for token in special if token >= len(self.words)
        ]
        if problems:
            raise InvalidArgumentError(f"the vocabulary of {source} is wrong", problems)
        self.ids = {word: number for number, word in enumerate(self.words)}

    def list_of(self, key: str, length: int | None = None) -> Any:
        """A list of the metadata, of that length."""
        value = self.metadata.get(key)
        if not isinstance(value, (list, np.ndarray)) or (length is not None and len(value) != length):
            found = "missing" if value is None else f"{type(value).__name__} of {np.size(value)}"
            raise InvalidArgumentError(f"the vocabulary of {self.source} is wrong", [f"{key} is {found}"])
        return value

    def add_special(self, tokenizer: Any) -> None:
        """Control words are never cut, and left out of decoded text; user-defined ones are never cut."""
        package = tokenizers_package()
        for kinds, is_special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
            words = [
                self.words[token] for token in np.flatnonzero(np.isin(self.kinds, kinds)) if self.words[token]
            ]
            added = [package.AddedToken(word, normalized=False, special=is_special) for word in words]
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)


def _byte_level(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    package = tokenizers_package()
    name = vocabulary.metadata.get("tokenizer.ggml.pre")
    cut = _CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise UnsupportedError(
            f"the engine has no tokenizer for {vocabulary.source}",
            [f"tokenizer.ggml.pre is {name!r}, not of {', '.join(_CUTS)}"],
            "the model as a Hugging Face folder, with its tokenizer.json",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.list_of("tokenizer.ggml.merges")]
    _refuse_merges(merges, vocabulary)
    tokenizer = package.Tokenizer(
        package.models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=cut.whole_words)
    )
    pre = package.pre_tokenizers
    steps = [pre.Digits(individual_digits=True)] if cut.digits_first else []
    if cut.pattern is not None:
        steps.append(pre.Split(package.Regex(cut.pattern), "isolated"))
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    if cut.nfc:
        tokenizer.normalizer = package.normalizers.NFC()
    tokenizer.decoder = package.decoders.ByteLevel()
    return tokenizer, cut.bos


def _refuse_merges(merges: list[tuple[str, ...]], vocabulary: _Vocabulary) -> None:
    """Merges of words that are not there would end in an error of the package that names no file."""
    ids = vocabulary.ids
    for number, merge in enumerate(merges):
        if len(merge) != 2 or merge[0] not in ids or merge[1] not in ids or merge[0] + merge[1] not in ids:
            raise InvalidArgumentError(
                f"the vocabulary of {vocabulary.source} is wrong",
                [
                    f"tokenizer.ggml.merges[{number}] is {' '.join(merge)!r}, of words that are not in the vocabulary"
                ],
            )


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    package = tokenizers_package()
    words, ids = vocabulary.words, vocabulary.ids
    scores = vocabulary.list_of("tokenizer.ggml.scores", len(words))
    unknown = vocabulary.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    merges = []
    # Best score first; of one piece, its splits in the order of their halves' ids.
    for token in sorted(range(len(words)), key=lambda token: (-float(scores[token]), token)):
        word = words[token]
        halves = [(word[:cut], word[cut:]) for cut in range(1, len(word))]
        known = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    tokenizer = package.Tokenizer(
        package.models.BPE(
            vocab=ids, merges=merges, unk_token=words[unknown] if 0 <= unknown < len(words) else None,
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    has_space = bool(vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True))
    normal, decode = package.normalizers, package.decoders
    prefix = [normal.Prepend(_SPACE)] if has_space else []
    tokenizer.normalizer = normal.Sequence([*prefix, normal.Replace(" ", _SPACE)])
    strip = [decode.Strip(" ", 1, 0)] if has_space else []
    tokenizer.decoder = decode.Sequence(
        [decode.Replace(_SPACE, " "), decode.ByteFallback(), decode.Fuse(), *strip]
    )
    return tokenizer, True
