"""What a conversation becomes where a template knows less than OpenAI's API allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.engine.errors import RequestError
from runtime.text.chat import chat_prompt
from tests.server.byte_tokenizer import make_byte_tokenizer

ALTERNATING = (  # as Mistral's, Llama 2's and Gemma's templates do
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LENIENT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_TOOLS = "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"


def said(role: str, content: str | list[Any] | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


CALL = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.fixture
def rendered(tmp_path: Path) -> Any:
    tokenizer = make_byte_tokenizer(tmp_path)

    def render(template: str, *messages: dict[str, Any]) -> str:
        ids = chat_prompt(tokenizer, messages, chat_template=template, add_generation_prompt=False)
        return tokenizer.decode(ids)

    return render


def test_messages_of_one_role_in_a_row_are_joined_where_the_template_refuses_them(rendered: Any) -> None:
    chat = [said("user", "a"), said("assistant", "b"), said("assistant", "c"), said("user", "d"), said("user", "e")]
    assert rendered(LENIENT, *chat) == "<user>a<assistant>b<assistant>c<user>d<user>e"
    assert rendered(ALTERNATING, *chat) == "<user>a<assistant>b\n\nc<user>d\n\ne"


NO_LATE_SYSTEM = (  # as gpt-oss' template does
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_system_message_in_the_midst_becomes_the_users_where_the_template_does_not_take_it(rendered: Any) -> None:
    chat = [said("system", "s"), said("user", "a"), said("system", "b"), said("assistant", "c"), said("system", "d")]
    assert rendered(LENIENT, *chat) == "<system>s<user>a<system>b<assistant>c<system>d"
    assert rendered(NO_LATE_SYSTEM, *chat) == "<system>s<user>a\n\nb<assistant>c<user>d"
    assert rendered(ALTERNATING, *chat[1:]) == "<user>a\n\nb<assistant>c<user>d"


GEMMA_2 = (  # as Gemma 2's template does
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + ALTERNATING
)


def test_system_messages_go_in_front_of_the_users_text_where_the_template_takes_none(rendered: Any) -> None:
    chat = [said("system", "s"), said("system", "t"), said("user", "a"), said("assistant", "b"), said("user", "c")]
    assert rendered(GEMMA_2, *chat) == "<user>s\n\nt\n\na<assistant>b<user>c"
    assert rendered(GEMMA_2, said("system", "s")) == "<user>s"
    assert rendered(LENIENT, *chat) == "<system>s<system>t<user>a<assistant>b<user>c"
    with pytest.raises(RequestError, match="System role not supported"):  # a name, which would be lost
        rendered(GEMMA_2, said("system", "s"), said("user", "a", name="Ann"))


@pytest.mark.parametrize(
    "chat",
    [
        [said("user", "a"), said("assistant", "b"), said("assistant", "c", tool_calls=CALL)],
        [said("user", "a"), said("user", "b", name="Ann")],
        [said("assistant", "a"), said("user", "b")],
    ],
)
def test_what_the_template_refuses_all_the_same_is_refused_in_its_own_words(
    rendered: Any, chat: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        rendered(ALTERNATING, *chat)
    assert caught.value.param == "messages"


def test_a_tools_answer_that_the_template_leaves_out_is_refused(rendered: Any) -> None:
    chat = [said("user", "a"), said("assistant", None, tool_calls=CALL), said("tool", "hot", tool_call_id="1")]
    called = '<user>a<assistant><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><tool>hot'
    assert rendered(LENIENT, *chat) == called  # it writes no calls, so they become text
    with pytest.raises(RequestError, match=r'messages\[2\]: .* leaves out messages of the role "tool"') as caught:
        rendered(NO_TOOLS, *chat)
    assert caught.value.param == "messages[2]"
    as_json = "{% for m in messages %}{{ m.content | tojson }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    plain = rendered(as_json, *chat)
    assert plain == '"a"""[{"type": "function", "function": {"name": "f", "arguments": {}}}]"hot"'


def calling(*names: str) -> dict[str, Any]:
    calls = [{"type": "function", "id": f"call_{n}", "function": {"name": n, "arguments": {"a": 1}}} for n in names]
    return said("assistant", None, tool_calls=calls)


MISTRAL = (  # as Mistral's templates: ids of nine characters, and no messages of one role in a row
    "{% for m in messages %}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[{{ c.id }}]{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}={{ m.content }};{% endif %}{% endfor %}"
)
TEXTUAL = (  # as DeepSeek V3.1's: arguments are put into a text as they are
    "{% for m in messages %}{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
SINGLE = (  # as Llama 3's
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{{ m.content or '' }};{% endfor %}"
)


def test_calls_become_what_the_template_takes(rendered: Any) -> None:
    history = [
        said("user", "Hi"),
        calling("f", "g"),
        said("tool", "F", tool_call_id="call_f"),
        said("tool", "G", tool_call_id="call_g"),
    ]
    short = rendered(MISTRAL, *history)
    first, second = short[1:10], short[20:29]
    assert short == f'[{first}]{{"a": 1}}[{second}]{{"a": 1}}{first}=F;{second}=G;'
    assert first != second
    assert rendered(TEXTUAL, *history).startswith('Hi<{"a": 1}><{"a": 1}>')
    f, g = ('{"name": "' + name + '", "arguments": {"a": 1}}' for name in "fg")
    assert rendered(SINGLE, *history) == f"Hi;{f};F;{g};G;"
    with pytest.raises(RequestError, match="one call"):  # what it says of the conversation as it was sent
        rendered(SINGLE.replace("> 1", "> 0"), *history)


RESPONSES = (  # as Gemma 4's first templates
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments }}{% endfor %}{% for r in m['tool_responses'] or [] %}[{{ r.name }}:{{ r.response }}]"
    "{% endfor %}{% endfor %}"
)


def test_answers_of_tools_as_the_message_of_their_calls_has_them(rendered: Any) -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"at": "it"}}}
    text = rendered(
        RESPONSES,
        said("assistant", "Well.", tool_calls=[call, call | {"id": "c2"}]),
        said("tool", "A", tool_call_id="c1"),
        said("tool", [{"type": "text", "text": "B"}], tool_call_id="c2"),
        said("user", "So?"),
    )
    assert text.endswith("[look:A][look:B]<user>So?")
    assert "<tool>" not in text
