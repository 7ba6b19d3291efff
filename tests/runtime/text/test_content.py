"""Content in the form that the template takes, whichever form it was written in, for every role. The expected texts are
what transformers 5.24 renders of messages in the template's own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.engine.errors import RequestError
from runtime.text.chat import chat_prompt
from runtime.text.content import PictureText, plain_content
from tests.server.byte_tokenizer import make_byte_tokenizer
from tests.tokenizer.support import SHARED
from tests.tokenizer.test_template_forms import EITHER, FIRST_PART, JSON, LLAVA, OLD_PIXTRAL, STRINGS
from tokenizer import Tokenizer

PICTURE = {"type": "image", "image": "a.png"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_byte_tokenizer(tmp_path)


def rendered(tokenizer: Tokenizer, template: str, *messages: dict[str, Any], token: str | None = None) -> str:
    ids = chat_prompt(
        tokenizer, messages, chat_template=template, add_generation_prompt=False, picture_text=PictureText(token)
    )
    return tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "one", "two"),
    [
        (LLAVA, "USER: a ASSISTANT: b USER: c ", "USER: a z ASSISTANT: b z USER: c z "),
        (STRINGS, "<user>a<assistant>b<user>c", "<user>a\nz<assistant>b\nz<user>c\nz"),
        (EITHER, "<user>a<assistant>b<user>c", "<user>az<assistant>bz<user>cz"),
        (OLD_PIXTRAL, "<user>a<assistant>b<user>c", "<user>az<assistant>bz<user>cz"),
        (JSON, '<user>"a"<assistant>"b"<user>"c"', '<user>"a\\nz"<assistant>"b\\nz"<user>"c\\nz"'),
    ],
)
def test_texts_and_lists_of_texts(tokenizer: Tokenizer, template: str, one: str, two: str) -> None:
    roles = {"user": "a", "assistant": "b", "user ": "c"}
    messages = [{"role": role.strip(), "content": words} for role, words in roles.items()]
    assert rendered(tokenizer, template, *messages) == one
    assert rendered(tokenizer, template, *({**m, "content": [text(m["content"])]} for m in messages)) == one
    typed = [{"type": kind, "text": "a"} for kind in ("text", "input_text", "output_text")]
    for part in typed:
        assert rendered(tokenizer, template, {**messages[0], "content": [part]}, *messages[1:]) == one
    assert rendered(tokenizer, template, *({**m, "content": [text(m["content"]), text("z")]} for m in messages)) == two


def test_a_template_that_reads_the_first_part_gets_one(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": [text("a"), text("b")]}, {"role": "user", "content": "c"}]
    assert rendered(tokenizer, FIRST_PART, *messages) == "a\nb<user>c"
    only = FIRST_PART.replace("messages[0].content is string", "false")
    assert rendered(tokenizer, only, *messages) == "a\nb<user>c"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAVA, "USER: <image>\na b ASSISTANT: c USER: d "),
        (EITHER, "<user>a<|v|><|pad|><|/v|>b<assistant>c<user>d"),
        (OLD_PIXTRAL, "<user>a[IMG]b<assistant>c<user>d"),
        (STRINGS, "<user>a<pic>\nb<assistant>c<user>d"),  # vLLM: the token where the template takes strings alone
    ],
)
def test_pictures_and_what_is_said_beside_and_after_them(tokenizer: Tokenizer, template: str, expected: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [text("a"), PICTURE, text("b")]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert rendered(tokenizer, template, *messages, token="<pic>") == expected


CALLED = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
NO_PICTURE_IN_TOOLS = EITHER.replace("{% if m.content is string", "{% if m.role == 'tool' or m.content is string")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (EITHER, f"<user>a<assistant>{CALLED}<tool>b<|v|><|pad|><|/v|>c"),
        (NO_PICTURE_IN_TOOLS, f"<user>a<assistant>{CALLED}<tool>b<|v|><|pad|><|/v|>c"),
        (STRINGS, f"<user>a<assistant>{CALLED}<tool>b<pic>\nc"),
    ],
)
def test_pictures_in_a_tools_result(tokenizer: Tokenizer, template: str, expected: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [text("b"), PICTURE, text("c")], "tool_call_id": "1"},
    ]
    found = rendered(tokenizer, template, *messages, token="<pic>")
    assert found == expected
    placeholder = "b\n[image omitted: this model reads no pictures]\nc"
    assert placeholder.replace("\n", "" if template == EITHER else "\n") in rendered(tokenizer, template, *messages)


def test_messages_that_become_one_keep_their_pictures(tokenizer: Tokenizer) -> None:
    alternating = EITHER.replace(
        "<{{ m.role }}>",
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}<{{ m.role }}>",
    )
    first, second = ({"role": "user", "content": [PICTURE, text(words)]} for words in "ab")
    plain = {"role": "user", "content": "c"}
    picture = "<|v|><|pad|><|/v|>"
    assert rendered(tokenizer, alternating, first, second, token="") == f"<user>{picture}a\n\n{picture}b"
    assert rendered(tokenizer, alternating, plain, first, token="") == f"<user>c\n\n{picture}a"
    assert rendered(tokenizer, alternating, first, plain, token="") == f"<user>{picture}a\n\nc"


DROPS_TEXT = (  # Llama 3's: the text beside a call is left out
    "{% for m in messages %}{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
SYSTEM_BEFORE_THE_LAST = (  # Mistral's: the system's text stands in the last message, if that is the user's
    "{% for m in messages %}{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }};{% endif %}"
    "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def test_nothing_vanishes(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Look.", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    assert rendered(tokenizer, DROPS_TEXT, *messages) == "<system>s<user>a<assistant>Look.<call>{}<tool>b"
    assert rendered(tokenizer, SYSTEM_BEFORE_THE_LAST, *messages[:2]) == "s;<user>a"
    assert rendered(tokenizer, SYSTEM_BEFORE_THE_LAST, *messages) == (
        '<user>s\n\na<assistant>Look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><tool>b'
    )


@pytest.mark.parametrize("as_parts", [False, True])
@pytest.mark.parametrize("path", sorted((SHARED / "chat_templates").glob("*.jinja")), ids=lambda path: path.stem[:24])
def test_every_text_is_in_the_prompt_of_published_templates(tokenizer: Tokenizer, path: Path, as_parts: bool) -> None:
    """Mistral's has no place for a text beside a call once another answer follows."""
    template = path.read_text(encoding="utf-8")
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": "mark-arguments"}'}}
    said: list[Any] = [("system", "mark-system"), ("user", "mark-user"), ("assistant", "mark-said"), ("user", "mark-2")]
    called: list[Any] = [("assistant", "mark-beside"), ("tool", "mark-result")]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    for has_calls in (False, *([True] if "tool_calls" in template else ())):
        if has_calls and "mistral" in path.name:
            continue
        messages: list[dict[str, Any]] = [
            {"role": role, "content": [text(words)] if as_parts else words}
            for role, words in (*said, *(called if has_calls else ()))
        ]
        if has_calls:
            messages[4]["tool_calls"] = [call]
            messages[5]["tool_call_id"] = "call_1"
        ids = chat_prompt(tokenizer, messages, chat_template=template, tools=tools if has_calls else None)
        found = tokenizer.decode(ids)
        for words in (*said, *(called if has_calls else ()), *([("", "mark-arguments")] if has_calls else ())):
            assert words[1] in found, words
        assert "'type':" not in found
        assert '"text"' not in found


@pytest.mark.parametrize(
    ("part", "is_result", "message"),
    [
        ({"type": "audio"}, False, r"c\[0\]\.type \('audio': audio; the model reads text only\)"),
        ({"type": "image_url"}, False, r"c\[0\]\.type \('image_url': images; the model reads text only\)"),
        ({"type": "poem"}, True, r"c\[0\]\.type must be one of text, .*, got 'poem'"),
        ({"text": "a"}, False, r"c\[0\]\.type must be one of text, .*, it is missing"),
        ({"type": "text"}, False, r"c\[0\]\.text must be a string"),
        ({"type": "text", "text": "a", "size": 1}, False, r"Unknown parameter: c\[0\]\.size"),
        ({"type": "text", "text": ["a"]}, False, r"c\[0\]\.text must be a string, got array"),
        ({"type": "text", "txet": "a"}, False, r"Unknown parameter: c\[0\]\.txet\. Is 'text' meant\?"),
        (3, False, r"c\[0\] must be an object or a string, got integer"),
        ({"type": 3}, False, r"c\[0\]\.type must be a string, got integer"),
        (True, False, r"c\[0\] must be an object or a string, got boolean"),
        (None, False, r"c\[0\] must be an object or a string, got null"),
    ],
)
def test_a_part_that_is_not_read_is_named(part: Any, is_result: bool, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plain_content([part], "c", is_result=is_result)


def test_what_a_tools_result_has_beside_text_is_told() -> None:
    kinds = ("image", "input_file", "document", "input_audio", "video_url")
    texts = [part["text"] for part in plain_content([{"type": kind} for kind in kinds], "c", is_result=True) or ()]  # type: ignore[index]
    assert texts == [
        "[image omitted: this model reads no pictures]",
        "[file omitted: this model reads no files]",
        "[document omitted: this model reads no documents]",
        "[audio omitted: this model reads no audio]",
        "[video omitted: this model reads no videos]",
    ]


URI = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("part", "where", "value"),
    [
        ({"type": "image_url", "image_url": {"url": URI}}, "c[0].image_url.url", URI),
        ({"type": "image_url", "image_url": URI}, "c[0].image_url", URI),
        ({"type": "input_image", "image_url": URI, "detail": "low"}, "c[0].image_url", URI),
        ({"type": "image", "image": URI}, "c[0].image", URI),
        ({"type": "image", "url": "http://x/y"}, "c[0].url", "http://x/y"),
        ({"type": "image", "base64": "AAAA"}, "c[0].base64", "data:;base64,AAAA"),
        ({"type": "image", "data": "AAAA", "mimeType": "image/png"}, "c[0].data", URI),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            "c[0].source.data",
            URI,
        ),
        ({"type": "image", "source": {"type": "url", "url": "http://x/y"}}, "c[0].source.url", "http://x/y"),
    ],
)
def test_a_picture_in_each_apis_form(part: Any, where: str, value: str) -> None:
    taken: list[Any] = []
    assert plain_content([part], "c", take_image=taken.append) == [{"type": "image"}]
    assert (taken[0].where, taken[0].value) == (where, value)
