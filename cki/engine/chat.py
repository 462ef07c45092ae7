"""Chat templates: a conversation to the text that the model was trained on.

Models bring their template in Jinja's language.  It comes with the weights, from anywhere, so it runs in Jinja's
sandbox.  What templates may use beside plain Jinja is what transformers gives them: `raise_exception`, `strftime_now`,
a `tojson` that escapes no HTML, `break` and `continue`, and `generation` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cki.engine.missing import missing
from cki.errors import InvalidArgumentError, InvalidTypeError


class ChatTemplate:
    """A compiled template.  tokens: bos_token, eos_token, ... as the template may name them."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Raises InvalidArgumentError for what is no Jinja template."""
        self.source = source
        self._tokens = dict(tokens)
        self._template = _compile(source)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """messages: each with "role" and "content".  variables: what the template knows besides.

        Raises InvalidArgumentError if the template refuses them, with its words.
        """
        check_messages(messages)
        try:
            return str(self._template.render(messages=messages, **(self._tokens | variables)))
        except Exception as error:  # a template is code, and may raise anything
            raise InvalidArgumentError(f"the chat template refuses these messages: {error}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises an error that names the first message which has no role, or no content."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidTypeError(
            f"messages is a {type(messages).__name__}, not a list of messages",
            hint='[{"role": "user", "content": "..."}]',
        )
    if not messages:
        raise InvalidArgumentError("messages is empty", hint='[{"role": "user", "content": "..."}]')
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(f'messages[{number}] is {message!r:.100}, without a "role"')
        if "content" not in message and "tool_calls" not in message:
            raise InvalidArgumentError(f'messages[{number}] has a role but no "content"')


def _compile(source: str) -> Any:
    try:
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise missing("jinja2", "the chat template") from error

    class Generation(Extension):  # type: ignore[misc]  # jinja2 is looked at through `Any`
        """{% generation %}...{% endgeneration %} marks what training learns from; here it is its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, **({"ensure_ascii": False} | options), indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except (TemplateSyntaxError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise InvalidArgumentError(
            f"the chat template is no Jinja template: {error}" + (f" (line {line})" if line else "")
        ) from error
