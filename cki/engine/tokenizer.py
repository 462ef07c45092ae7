"""Text to tokens and back, by the `tokenizers` package.

A Hugging Face folder has the tokenizer whole (tokenizer.json); a GGUF file has its vocabulary, from which
`cki.engine.gguf_tokenizer` builds one.  Whose beginning of text (BOS) is added is up to that tokenizer: Llama's is,
SmolLM2's and Qwen's is not.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cki.engine.chat import ChatTemplate, check_messages
from cki.engine.missing import missing
from cki.engine.token_stream import TokenStream
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError


def tokenizers_package() -> Any:
    """The `tokenizers` package.  Raises MissingPackageError."""
    try:
        import tokenizers
    except ImportError as error:
        raise missing("tokenizers", "the tokenizer") from error
    return tokenizers


class Tokenizer:
    """Encodes and decodes; may be used from several threads.

    bos_id: None where the model has none.  eos_ids: tokens that end a text.  vocab_size: tokens it knows; the model's
    embedding may have more rows.
    """

    def __init__(
        self, tokenizer: Any, *, bos_id: int | None = None, eos_ids: Sequence[int] = (), template: str | None = None,
        tokens: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """tokenizer: of the package `tokenizers`.  template: in Jinja; tokens: what it may name, such as bos_token."""
        self._tokenizer = tokenizer
        self.bos_id, self.eos_ids = bos_id, tuple(eos_ids)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._template = template
        self._tokens = dict(tokens or {})
        self._compiled: ChatTemplate | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text.  Special tokens that are written in it ("<|im_end|>") become themselves.

        special: whether to add what the tokenizer puts around a text, such as BOS.  Not for a rendered chat.
        """
        if not isinstance(text, str):
            raise InvalidTypeError(f"text is a {type(text).__name__}, not a str")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"text is no valid Unicode: character {error.start} is half of a surrogate pair"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some ids.  Bytes that are no UTF-8 become U+FFFD.

        Raises InvalidTypeError for what are no ids, InvalidArgumentError for a negative one; an id beyond the
        vocabulary has no text.
        """
        try:
            listed = [operator.index(token) for token in ids]
        except TypeError as error:
            raise InvalidTypeError(f"ids is {str(ids)[:60]!r}, not a list of token ids") from error
        if any(not 0 <= token < 2**32 for token in listed):
            raise InvalidArgumentError(f"ids has {next(t for t in listed if not 0 <= t < 2**32)}, no token")
        return str(self._tokenizer.decode(listed, skip_special_tokens=skip_special))

    def stream(self, *, skip_special: bool = True) -> TokenStream:
        """Decodes a sequence while it comes."""
        return TokenStream(lambda ids: self.decode(ids, skip_special=skip_special))

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, for `encode(..., special=False)`.

        messages: each with "role" ("system", "user", "assistant") and "content".  add_generation_prompt: end with the
        beginning of the assistant's answer.  variables: whatever else the template knows, e.g. enable_thinking, tools.
        """
        if self._template is None:
            raise UnsupportedError(
                "the model has no chat template",
                hint="a prompt as text; chat models have one (Instruct, Chat)",
            )
        if self._compiled is None:
            self._compiled = ChatTemplate(self._template, self._tokens)
        given: dict[str, Any] = {"tools": None, "documents": None} | variables
        return self._compiled.render(messages, add_generation_prompt=add_generation_prompt, **given)

    @classmethod
    def from_file(
        cls, path: Path, *, settings: Mapping[str, Any] | None = None, template: str | None = None,
        bos_id: int | None = None, eos_ids: Sequence[int] = (),
    ) -> Tokenizer:  # fmt: skip
        """From a tokenizer.json.  settings: content of tokenizer_config.json.

        Raises InvalidArgumentError for a file that is none.
        """
        package = tokenizers_package()
        try:
            tokenizer = package.Tokenizer.from_str(path.read_text(encoding="utf-8"))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.decode(tokenizer.encode("a", add_special_tokens=True).ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # the package raises Exception itself, and panics that are not even that
            raise InvalidArgumentError(f"{path} is no tokenizer.json: {error}") from error
        settings = settings or {}
        tokens = _named_tokens(settings)
        if bos_id is None and "bos_token" in tokens:
            bos_id = tokenizer.token_to_id(tokens["bos_token"])
        ends = list(eos_ids)
        if not ends and "eos_token" in tokens and tokenizer.token_to_id(tokens["eos_token"]) is not None:
            ends = [tokenizer.token_to_id(tokens["eos_token"])]
        _follow_bos_setting(tokenizer, settings.get("add_bos_token"), tokens.get("bos_token"), bos_id)
        return cls(tokenizer, bos_id=bos_id, eos_ids=ends, template=template, tokens=tokens)

    @classmethod
    def from_huggingface(cls, tokenizer: Any) -> Tokenizer:
        """Of a tokenizer of transformers (slow or fast), which keeps doing the work."""
        return _HuggingFaceTokenizer(tokenizer)


def add_bos(tokenizer: Any, token: str, token_id: int) -> None:
    """Let a tokenizer put BOS before every text."""
    tokenizer.post_processor = tokenizers_package().processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, token_id)]
    )


def _follow_bos_setting(tokenizer: Any, wanted: Any, token: str | None, token_id: int | None) -> None:
    """add_bos_token of tokenizer_config.json wins over tokenizer.json's post-processor, as in transformers' classes of
    Llama (DeepSeek's distilled Llamas have only the setting)."""
    if not isinstance(wanted, bool) or token is None or token_id is None:
        return
    added = list(tokenizer.encode("", add_special_tokens=True).ids)
    if wanted and token_id not in added:
        add_bos(tokenizer, token, token_id)
    elif not wanted and added == [token_id]:
        tokenizer.post_processor = tokenizers_package().processors.TemplateProcessing(
            single=["$A"], pair=["$A", "$B"]
        )


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... of tokenizer_config.json; each is a text, or an object with one."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template of a Hugging Face folder: a file of its own, or in tokenizer_config.json.

    There it may be one of several by name; "default" is taken."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    older = folder / "chat_template.json"
    if found is None and older.is_file():
        try:
            found = json.loads(older.read_text(encoding="utf-8")).get("chat_template")
        except (ValueError, AttributeError) as error:
            raise InvalidArgumentError(f"{older} is no JSON object: {error}") from error
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, Mapping) and entry.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


class _HuggingFaceTokenizer(Tokenizer):
    """Passes everything on to a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        lacking = [name for name in ("encode", "decode") if not callable(getattr(tokenizer, name, None))]
        if lacking:
            raise InvalidTypeError(
                f"tokenizer is a {type(tokenizer).__name__} without {' and '.join(lacking)}"
            )
        self._tokenizer = tokenizer
        self.bos_id = getattr(tokenizer, "bos_token_id", None)
        end = getattr(tokenizer, "eos_token_id", None)
        self.eos_ids = () if end is None else (end,)
        self.vocab_size = len(tokenizer)
        self._template = getattr(tokenizer, "chat_template", None)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise InvalidTypeError(f"text is a {type(text).__name__}, not a str")
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return str(
            self._tokenizer.decode(
                [int(token) for token in ids],
                skip_special_tokens=skip_special,
                clean_up_tokenization_spaces=False,
            )
        )

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        check_messages(messages)
        return str(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
            )
        )
