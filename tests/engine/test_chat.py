"""Chat templates against transformers', their sandbox, and messages that are refused."""

from __future__ import annotations

import pytest

from cki.engine import chat
from cki.engine.chat import ChatTemplate
from cki.engine.files import open_model
from cki.errors import InvalidArgumentError, InvalidTypeError, MissingPackageError
from tests.engine.model_files import smollm2_path

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 < 3 & \"é\" – yes?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": ""},
]  # fmt: skip
TEMPLATES = {
    "llama2": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "blocks": "{%- for m in messages -%}\n  {% if loop.index0 == 2 %}\n    {% continue %}\n  {% endif %}\n"
    "  {{ m | tojson }}\n{% if loop.last %}{% break %}{% endif %}\n{% endfor %}",
    "generation": "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ 'think' if enable_thinking is defined and enable_thinking else 'no' }}",
    "methods": "{{ messages[0].content.split(' ')[-1].upper() }}{{ messages[::-1][0].role.startswith('u') }}",
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "properties": {}}}}
]


def theirs(template, messages, **variables):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template, **TOKENS
    )
    return tokenizer.apply_chat_template(messages, tokenize=False, **variables)


@pytest.mark.transformers
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_equals_transformers(name, prompt):
    ours = ChatTemplate(TEMPLATES[name], TOKENS)
    variables = {"tools": TOOLS, "enable_thinking": True} if name == "tools" else {}
    assert ours.render(TALK, add_generation_prompt=prompt, **variables) == theirs(
        TEMPLATES[name], TALK, add_generation_prompt=prompt, **variables
    )


@pytest.mark.transformers
def test_smollm2_equals_transformers():
    tokenizer = open_model(smollm2_path()).tokenizer
    for messages in (TALK, TALK[1:], TALK[1:2]):
        ours = tokenizer.chat(messages)
        assert ours == theirs(tokenizer._template, messages, add_generation_prompt=True)
        assert ours.endswith("<|im_start|>assistant\n")
    assert not tokenizer.chat(TALK, add_generation_prompt=False).endswith("assistant\n")


def test_date():
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TALK)
    assert year.isdecimal() and int(year) >= 2024


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages | tojson(indent='x') }}{{ 1 + 'a' }}",
    ],
)
def test_templates_stay_in_their_sandbox(source):
    talk = [dict(message) for message in TALK]
    with pytest.raises(InvalidArgumentError, match="the chat template refuses these messages: "):
        ChatTemplate(source, {}).render(talk)
    assert talk == TALK


def test_a_template_that_refuses():
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first!') }}{% endif %}", {}
    )
    with pytest.raises(InvalidArgumentError, match=r"the chat template refuses these messages: user first!"):
        template.render(TALK)
    assert template.render(TALK[1:]) == ""


def test_what_is_no_template():
    with pytest.raises(InvalidArgumentError, match=r"no Jinja template: .*endfor.*\(line 1\)"):
        ChatTemplate("{% for m in messages %}\n", {})


@pytest.mark.parametrize(
    ("messages", "error", "said"),
    [
        ("Hi", InvalidTypeError, "messages is a str, not a list of messages"),
        ({"role": "user", "content": "Hi"}, InvalidTypeError, "messages is a dict"),
        (None, InvalidTypeError, "messages is a NoneType"),
        ([], InvalidArgumentError, "messages is empty"),
        (["Hi"], InvalidArgumentError, "messages[0] is 'Hi', without a \"role\""),
        (
            [TALK[0], {"content": "Hi"}],
            InvalidArgumentError,
            "messages[1] is {'content': 'Hi'}, without a \"role\"",
        ),
        ([{"role": "user"}], InvalidArgumentError, 'messages[0] has a role but no "content"'),
    ],
)
def test_wrong_messages(messages, error, said):
    with pytest.raises(error) as caught:
        ChatTemplate("x", {}).render(messages)
    assert said in str(caught.value)


def test_without_jinja(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("jinja2"):
            raise ImportError(name=name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        MissingPackageError, match=r'jinja2, which is not installed; do: pip install "cki-runtime\[engine\]"'
    ):
        chat.ChatTemplate("x", {})
