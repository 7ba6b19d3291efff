"""Nothing of a conversation vanishes where a template leaves it out, as published templates do: it comes another way,
or is told by name. Texts that hold no call of our own are what transformers 5.24 renders of the conversation in the
template's own form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from runtime.engine.errors import RequestError
from runtime.text.chat import chat_prompt
from tests.runtime.text.harmony.small_model import small_tokenizer
from tests.runtime.text.test_chat import LENIENT, said
from tests.server.byte_tokenizer import make_byte_tokenizer

CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.arguments | tojson }}{% endfor %}"
ONE_CALL = "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + CALLS + "{% endfor %}"
FIRST_CALL = ALL.replace(CALLS, ONE_CALL)  # GigaChat 3's
PARTS_BESIDE_CALLS = (  # Kimi K2's: content beside calls is a text, other content a text or parts
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls or m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}" + CALLS + "{% endfor %}"
)
ALTERNATING_CALLS = (  # Mistral Nemo's: no text beside a call, and no two messages of the assistant's
    "{% for m in messages %}{% if m.role == 'assistant' and loop.previtem.role == 'assistant' %}"
    "{{ raise_exception('must alternate') }}{% endif %}<{{ m.role }}>{% if m.tool_calls %}" + CALLS + "{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}"
)
OTHER_DEVELOPERS = (  # Command R7B's, Apertus's: it names developers, and writes no message of theirs
    "{# developer #}{% for m in messages %}{% if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
ONE_SYSTEM = (  # gpt-oss's, Reka's: the first message alone
    "{% for m in messages %}{% if loop.first or m.role not in ('system', 'developer') %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
NAMES_RESULTS = (  # Hermes 2's
    "{% for m in messages %}{% if m.role == 'tool' and not m.name %}{{ raise_exception('a name') }}{% endif %}"
    "<{{ m.role }}>{{ m.name }}={{ m.content }}" + CALLS + "{% endfor %}"
)


@dataclass
class Spoken:
    content: str
    role: str = "user"


def call(value: int) -> dict[str, Any]:
    return {"type": "function", "id": f"call_{value}", "function": {"name": "f", "arguments": {"a": value}}}


def texts(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in words]


HEAD = said("user", "a")
ONE = [HEAD, said("assistant", None, tool_calls=[call(1)]), said("tool", "b", tool_call_id="call_1")]
BESIDE = [HEAD, said("assistant", "c", tool_calls=[call(1)]), ONE[2], said("assistant", "d")]
TWO = [
    HEAD,
    said("assistant", "c", tool_calls=[call(1), call(2)]),
    said("tool", "b", tool_call_id="call_1"),
    said("tool", "d", tool_call_id="call_2"),
]
WITH_PARTS = [HEAD, said("assistant", texts("c", "d"), tool_calls=[call(1)]), ONE[2]]
SYSTEM, DEVELOPER = said("system", "s"), said("developer", texts("d", "e"))
TOLD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "messages", "expected", "notes"),
    [
        (LENIENT, ONE, f"<user>a<assistant>{TOLD}<tool>b", []),
        (LENIENT, BESIDE, f"<user>a<assistant>c\n{TOLD}<tool>b<assistant>d", []),
        (LENIENT.replace("{#", "[TOOL_CALLS]{#"), ONE, f"<user>a<assistant>{TOLD}<tool>b", []),
        (ALL, TWO, '<user>a<assistant>c<call>{"a": 1}<call>{"a": 2}<tool>b<tool>d', []),
        (FIRST_CALL, TWO, '<user>a<assistant>c<call>{"a": 1}<tool>b<assistant><call>{"a": 2}<tool>d', []),
        (PARTS_BESIDE_CALLS, WITH_PARTS, '<user>a<assistant>c\nd<call>{"a": 1}<tool>b', []),
        (ALTERNATING_CALLS, BESIDE, '<user>a<assistant><call>{"a": 1}<tool>b<assistant>d', ["messages[1].content"]),
        (OTHER_DEVELOPERS, [DEVELOPER, HEAD], "<system>d\ne<user>a", []),
        (ONE_SYSTEM, [SYSTEM, DEVELOPER, HEAD], "<system>s\n\nd\ne<user>a", []),
        (ONE_SYSTEM, [SYSTEM, HEAD, DEVELOPER], "<system>s<user>a\n\nd\ne", []),
        (NAMES_RESULTS, ONE, '<user>=a<assistant>=<call>{"a": 1}<tool>f=b', []),
        (LENIENT, [{**HEAD, "name": "Ann"}], "<user>a", ["messages[0].name"]),
        (LENIENT.replace("{{ m.role }}", "{{ m.name }}"), [{**HEAD, "name": "Ann"}], "<Ann>a", []),
        (LENIENT, [said("user", []), said("assistant", "")], "<user><assistant>", []),
        (
            LENIENT.replace("m.content", "m.content[0].text"),
            [said("user", []), said("assistant", "")],
            "<user><assistant>",
            [],
        ),
    ],
)
def test_nothing_vanishes(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], expected: str, notes: list[str]
) -> None:
    tokenizer, found = make_byte_tokenizer(tmp_path), list[str]()
    ids = chat_prompt(tokenizer, messages, chat_template=template, add_generation_prompt=False, notes=found)
    assert tokenizer.decode(ids) == expected
    assert found == notes


def test_a_variable_that_the_template_does_not_read_is_told(tmp_path: Path) -> None:
    found = list[str]()
    variables: dict[str, Any] = {"documents": [{"text": "b"}], "tone": "dry", "size": 3}
    template = LENIENT + "{{ size }}{# tone #}{{ 'documents'[:0] }}"
    tokenizer = make_byte_tokenizer(tmp_path)
    ids = chat_prompt(tokenizer, [HEAD], chat_template=template, add_generation_prompt=False, notes=found, **variables)
    assert tokenizer.decode(ids) == "<user>a3"
    assert found == ["chat_template_kwargs.documents", "chat_template_kwargs.tone"]


def test_objects_of_an_sdk_are_messages(tmp_path: Path) -> None:
    """As transformers 5.24 takes them: `model_dump`, without what is None."""
    function = Function(name="f", arguments='{"a": 1}')
    spoken = ChatCompletionMessage(
        role="assistant",
        content="c",
        tool_calls=[ChatCompletionMessageFunctionToolCall(id="call_1", type="function", function=function)],
    )
    counted = said("assistant", None, tool_calls=[call(1)])
    counted["tool_calls"][0]["function"]["arguments"] = {"a": np.int64(2), "b": np.bool_(False)}
    tokenizer = make_byte_tokenizer(tmp_path)
    messages: list[Any] = [HEAD, spoken, {**HEAD, "content": Spoken("d")}, counted]
    with pytest.raises(RequestError, match=r"messages\[2\]\.content must be"):
        chat_prompt(tokenizer, messages, chat_template=ALL)
    messages[2] = Spoken("d")
    ids = chat_prompt(tokenizer, messages, chat_template=ALL, add_generation_prompt=False)
    assert tokenizer.decode(ids) == ('<user>a<assistant>c<call>{"a": 1}<user>d<assistant><call>{"a": 2, "b": false}')


def test_harmony_has_no_names_of_speakers() -> None:
    found = list[str]()
    chat_prompt(small_tokenizer(), [{**HEAD, "name": "Ann"}, said("assistant", "b")], harmony=True, notes=found)
    assert found == ["messages[0].name"]
