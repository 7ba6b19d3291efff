"""Renders a conversation by a chat template.

The templates are Jinja, with the environment of Hugging Face transformers (`utils/chat_template_utils.py`):
the immutable sandbox, trimmed blocks, loop controls, the `{% generation %}` tag, `tojson` without HTML
escapes,
`raise_exception`, `strftime_now`. A template comes from the model's folder, so it sees plain data only:
strings, numbers, lists and dictionaries, never an object of ours (`written_json` has dictionaries that keep a text).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from runtime.later import later
from tokenizer.errors import ChatTemplateError
from tokenizer.templates.written_json import rebuilt

jinja2, _meta = later("jinja2"), later("jinja2.meta")
_environment = later("tokenizer.templates.environment")

Message = Mapping[str, Any]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# The names of a message's reasoning: most templates read the first, gpt-oss's the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> str:
    """Render `messages` with `template`.

    Message fields that are None count as missing, except "content": some templates detect an answer of tool calls alone
    by `content is none`. If a template fails on it, or would print None or null, it gets "". `continue_final_message`
    leaves the last message open for the model to continue: True means its "content", a string names another field.
    `variables` are further names that the template may read. `now` replaces the current time in `strftime_now`, so that
    a prompt is reproducible.

    Raises `ChatTemplateError` when the template does not compile, fails, or refuses the conversation.
    """
    if not messages:
        raise ChatTemplateError("the conversation is empty: a chat template needs at least one message")
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
    chat = [_prepare_message(message, i) for i, message in enumerate(messages)]
    final_text = _mark_final_message(chat, continue_final_message, template) if continue_final_message else None
    compiled = compile_template(template)
    names = dict(_plain(variables or {}))
    names |= {
        "messages": chat,
        "tools": None if tools is None else _environment.Tools(_plain(list(tools))),
        "documents": _plain(documents),
        "add_generation_prompt": add_generation_prompt,
    }
    if now is not None:
        names["strftime_now"] = now.strftime
    rendered = _render(compiled, names)
    return rendered if final_text is None else _cut_at_mark(rendered, final_text)


def _render(compiled: Any, names: dict[str, Any]) -> str:
    chat = names["messages"]
    without_content = [message for message in chat if message.get("content", "") is None]
    if not without_content:
        return _render_once(compiled, names)
    with_none: str | None
    try:
        with_none = _render_once(compiled, names)
    except ChatTemplateError:
        with_none = None
    for message in without_content:
        message["content"] = ""
    try:
        with_empty = _render_once(compiled, names)
    except ChatTemplateError:
        if with_none is None:
            raise
        return with_none
    is_written = with_none is None or any(with_none.count(word) > with_empty.count(word) for word in ("None", "null"))
    return with_empty if is_written or with_none is None else with_none


def _render_once(compiled: Any, names: dict[str, Any]) -> str:
    try:
        rendered: str = compiled.render(names)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template refuses the conversation: {error.message}") from error
    except RecursionError as error:
        raise ChatTemplateError("the chat template recurses without end") from error
    except Exception as error:  # any error of the template, which is foreign code, becomes a typed one
        raise ChatTemplateError(f"the chat template fails: {type(error).__name__}: {error}") from error
    return rendered


@functools.lru_cache(maxsize=64)
def compile_template(template: str) -> Any:
    """The compiled Jinja template. Raises `ChatTemplateError` when it does not compile."""
    try:
        return _environment.environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ChatTemplateError("the chat template does not compile: it is nested too deeply") from error


def variables_of(template: str) -> frozenset[str]:
    """The variables that a template reads from its context. Raises `ChatTemplateError` when it does not compile."""
    compile_template(template)
    return frozenset(_meta.find_undeclared_variables(_environment.environment().parse(template)))


def _prepare_message(message: Message, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"message {index} must be a mapping, found {type(message).__name__}")
    plain = {key: _plain(value) for key, value in message.items() if value is not None or key == "content"}
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any) -> Any:
    """`value` rebuilt from plain types; anything else becomes a placeholder that names its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return rebuilt(value, {_plain(key): _plain(item) for key, item in value.items()})
    if isinstance(value, list):
        return rebuilt(value, [_plain(item) for item in value])
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return f"<{type(value).__name__}>"


def _mark_final_message(chat: list[dict[str, Any]], continued: bool | str, template: str) -> str:
    """Puts the mark after the text to be continued, and returns that text."""
    field = continued if isinstance(continued, str) else "content"
    final = chat[-1]
    content = final.get(field)
    fields = [field]
    if field in _REASONING_FIELDS:
        fields = [name for name in _REASONING_FIELDS if final.get(name) == content]
    if content is None:
        raise ChatTemplateError(f"continue_final_message: the final message has no {field!r} to continue")
    if not any(name in template for name in fields):
        raise ChatTemplateError(f"continue_final_message: the chat template does not read {field!r}")
    if isinstance(content, str):
        for name in fields:
            final[name] = content + _CONTINUE_TAG
        return content
    blocks = content if isinstance(content, (list, tuple)) else []
    for block in reversed(blocks):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text: str = block["text"]
            block["text"] = text + _CONTINUE_TAG
            return text
    raise ChatTemplateError("continue_final_message: the final message has no text to continue")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    mark = _CONTINUE_TAG.strip()
    if final_text.strip() not in rendered or mark not in rendered:
        raise ChatTemplateError("continue_final_message: the chat template leaves out or changes the final message")
    position = rendered.rindex(mark)
    if rendered[position : position + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return rendered[:position]
    return rendered[:position].rstrip()  # the template trims the message
