"""Tools told to a model whose template knows none: what its prompt says, and that calls written so are read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runtime.text.chat import chat_prompt
from runtime.text.tools.table import GLM45, HERMES, MISTRAL, Notation, ToolCallParser, ToolReading
from runtime.text.tools.tool_prompt import ignores_tools
from tests.runtime.text.answers import parse
from tests.server.byte_tokenizer import make_byte_tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = (  # as Gemma 2's
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"at": "it"}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Look!"},
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
    {"role": "tool", "content": "A", "tool_call_id": "c1"},
    {"role": "tool", "content": "B", "tool_call_id": "c1"},
]


@pytest.fixture
def prompt(tmp_path: Path) -> Any:
    tokenizer = make_byte_tokenizer(tmp_path)

    def render(template: str, messages: list[Any], notation: Notation = HERMES, tools: Any = TOOLS) -> str:
        tokenizer.chat_templates = {"default": template}
        assert ignores_tools(tokenizer)
        ids = chat_prompt(tokenizer, messages, tools=tools, told_tools=notation)
        return bytes(i for i in ids if i < 256).decode()

    return render


def test_the_system_message_tells_them(prompt: Any) -> None:
    text = prompt(PLAIN, HISTORY[:1])
    told, asked = text.split("<user>")
    assert asked == "Look!"
    assert told.startswith("<system>")
    assert '{"name": "look", "parameters": {"type": "object"}}' in told
    assert '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>' in told
    joined = prompt(PLAIN, [{"role": "system", "content": "Be kind."}, *HISTORY[:1]])
    assert joined == text.replace("<system>", "<system>Be kind.\n\n")


def test_without_a_system_message_the_user_s_tells_them(prompt: Any) -> None:
    told = prompt(PLAIN, HISTORY[:1]).split("<user>")[0].removeprefix("<system>")
    assert prompt(NO_SYSTEM, HISTORY[:1]) == f"<user>{told}\n\nLook!"


@pytest.mark.parametrize("notation", [HERMES, GLM45, MISTRAL])
def test_past_calls_and_their_answers_are_text(prompt: Any, notation: Notation) -> None:
    text = prompt(PLAIN, HISTORY, notation, None)
    first, call, answers = text.removeprefix("<user>").replace("<assistant>", "<user>").split("<user>")
    assert first == "Look!"
    assert answers == "<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>"
    message = parse(ToolCallParser(ToolReading.of(notation, TOOLS)), [call])
    assert (message.content, message.tool_calls) == ("Well.", [("look", '{"at": "it"}')])


def test_parts_are_told_as_texts(prompt: Any) -> None:
    def in_parts(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    system = {"role": "system", "content": "Be kind."}
    for template in (PLAIN, NO_SYSTEM):
        texts = [*([system] if template == PLAIN else ()), *HISTORY]
        found = prompt(template, [in_parts(message) for message in texts])
        assert re.sub(r"\n+", "\n", found) == re.sub(r"\n+", "\n", prompt(template, texts))


def test_templates_with_tools_are_not_told(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer(tmp_path)
    for template in (
        "{{ tools }}",
        "{% for t in tools %}{{ t.function.name }}{% endfor %}",
        "{% if messages[0].role == 'system' and tools %}{{ tools[0].function.name }}{% endif %}",
        "{% if tools %}{{ raise_exception('a tool must have a result') }}{% endif %}",
    ):
        tokenizer.chat_templates = {"default": template}
        assert not ignores_tools(tokenizer)
