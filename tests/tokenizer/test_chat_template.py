"""Chat templates: the recorded renderings of real models, goldens of our own, and what is refused."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

import pytest

from tests.tokenizer.support import FIXTURES, build, byte_level_model, content_of, shared
from tokenizer import ChatTemplateError, Tokenizer
from tokenizer.templates.chat_template import render_chat

_USER = [{"role": "user", "content": "Hello"}]


def test_recorded_renderings() -> None:
    renderings = json.loads(shared("chat_templates/renderings.json").read_text(encoding="utf-8"))
    assert len(renderings) == 27
    for name, recorded in renderings.items():
        variables = dict(recorded["data"])
        arguments = {
            key: variables.pop(key) for key in ("tools", "documents", "add_generation_prompt") if key in variables
        }
        messages = variables.pop("messages")
        # One of the templates writes the day on which its rendering was recorded.
        now = datetime(2025, 7, 10)
        rendered = render_chat(recorded["chat_template"], messages, variables=variables, now=now, **arguments)
        assert rendered == recorded["target"], name


_GOLDENS: dict[str, Any] = json.loads((FIXTURES / "chat_goldens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("golden", _GOLDENS["goldens"], ids=lambda golden: f"{golden['template']}-{golden['case']}")
def test_goldens_from_transformers(golden: dict[str, str]) -> None:
    """What transformers 5.23 made of it on 2 January 2026, as a hash: the texts are not ours."""
    template = shared(f"chat_templates/{golden['template']}.jinja").read_text(encoding="utf-8")
    case = _GOLDENS["cases"][golden["case"]]
    variables = {"bos_token": "<s>", "eos_token": "</s>", **case["variables"]}
    rendered = render_chat(
        template, case["messages"], variables=variables, now=datetime(2026, 1, 2), **case["arguments"]
    )
    assert hashlib.sha256(rendered.encode()).hexdigest() == golden["sha256"], rendered


def _render(template: str, messages: list[dict[str, Any]] = _USER, **arguments: Any) -> str:
    return render_chat(template, messages, **arguments)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ {'b': '<é\\'>', 'a': [1, none]} | tojson }}", '{"b": "<é\'>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ ['é', 1] | tojson(ensure_ascii=true, separators=(',', ':')) }}", '["\\u00e9",1]'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{{ strftime_now('%d %b %Y') }}", "10 Jul 2025"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}", "2"),
        ("{{ dict(a=1).a }}{{ dict.fromkeys(['k']) }}", "1{'k': None}"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True False"),
        ("{{ messages[0].name is defined }}", "False"),
        ("{{ undefined_thing }}|{{ bos_token }}", "|<s>"),
    ],
)
def test_environment(template: str, expected: str) -> None:
    messages = [{"role": "user", "content": "Hello", "name": None}]
    assert _render(template, messages, variables={"bos_token": "<s>"}, now=datetime(2025, 7, 10)) == expected


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% if %}", "does not compile: line 1"),
        ("{{ messages[0]", "does not compile"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.x.y }}", "refuses"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ namespace(__init__=1) }}", "underscore"),
        ("{% for i in range(10000000) %}x{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{% include 'other' %}", "fails|refuses"),
    ],
)
def test_a_template_that_fails_is_named(template: str, problem: str) -> None:
    with pytest.raises(ChatTemplateError, match=problem):
        _render(template)


def test_continue_final_message() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>\n{% endfor %}"
    chat = [*_USER, {"role": "assistant", "content": "Once upon "}]
    assert _render(template, chat, continue_final_message=True) == "<user>Hello</end>\n<assistant>Once upon "
    trimmed = template.replace("m.content", "m.content | trim")
    assert _render(trimmed, chat, continue_final_message=True) == "<user>Hello</end>\n<assistant>Once upon"
    blocks = [*_USER, {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}]
    by_block = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }};"
    assert _render(by_block + "{% endif %}{% endfor %}", blocks, continue_final_message=True) == "HelloOnce"
    assert chat[-1]["content"] == "Once upon "  # the caller's messages stay as they were
    for arguments, problem in (
        ({"add_generation_prompt": True}, "exclude each other"),
        ({"messages": [{"role": "assistant"}]}, "no 'content'"),
    ):
        with pytest.raises(ChatTemplateError, match=problem):
            _render(template, **{"messages": chat, "continue_final_message": True, **arguments})
    with pytest.raises(ChatTemplateError, match="leaves out"):
        _render("content", chat, continue_final_message=True)


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        ("{% if m.content is not none %}<all>{{ m.content }}{% endif %}", ""),  # as functionary-medium-v2.2 has it
        ("{% if m.content is none %}<only calls>{% endif %}", "<only calls>"),  # as DeepSeek-V3 has it
        ("{{ '<all>' + m.content }}", "<all>"),  # fails on none
        ("{{ m.content | trim }}", ""),  # would print it
        ("{% if 'content' in m %}<all>{{ m.content or 'nothing' }}{% endif %}", "<all>nothing"),
    ],
)
def test_an_answer_without_content(written: str, rendered: str) -> None:
    template = "{% for m in messages %}" + written + "{% if m.tool_calls %}<call>{% endif %}{% endfor %}"
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert _render(template, [message]) == rendered + "<call>"
    assert message["content"] is None  # the caller's messages stay as they were
    said_none = [{"role": "user", "content": "None"}, message]
    assert _render("{{ messages[0].content }}{{ messages[1].content }}", said_none) == "None"


def test_reasoning_comes_under_each_name_that_templates_read() -> None:
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert _render(template, [{"role": "assistant", "content": "x", name: "why"}]) == "why|why"


def test_objects_reach_a_template_as_placeholders() -> None:
    class Image:
        secret = "s"

    messages = [{"role": "user", "content": [{"type": "image", "image": Image()}]}]
    assert _render("{{ messages[0].content[0].image }}", messages) == "<Image>"


def test_bad_conversations() -> None:
    with pytest.raises(ChatTemplateError, match="empty"):
        render_chat("x", [])
    with pytest.raises(ChatTemplateError, match="message 0 must be a mapping, found str"):
        render_chat("x", ["hello"])  # type: ignore[list-item]


def _tokenizer(**templates: str) -> Tokenizer:
    tokenizer = build(content_of(byte_level_model([])))
    tokenizer.chat_templates = templates
    return tokenizer


def test_apply_chat_template() -> None:
    tokenizer = _tokenizer(default="{{ messages[0].content }}{{ mood }}", tool_use="tools:{{ tools | length }}")
    assert tokenizer.has_chat_template
    text = tokenizer.apply_chat_template(_USER, tokenize=False, mood="!")
    assert text == "Hello!"
    assert tokenizer.apply_chat_template(_USER, mood="!") == tokenizer.encode("Hello!", add_special_tokens=False)
    assert tokenizer.apply_chat_template(_USER, tools=[{"a": 1}], tokenize=False) == "tools:1"
    assert tokenizer.apply_chat_template(_USER, chat_template="tool_use", tools=[], tokenize=False) == "tools:0"
    assert tokenizer.apply_chat_template(_USER, chat_template="own", tokenize=False) == "own"


def test_no_template() -> None:
    tokenizer = _tokenizer()
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template 'default' \\(it has: none\\)"):
        tokenizer.apply_chat_template(_USER)
