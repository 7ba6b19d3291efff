"""`TemplateForms`: the forms in which a chat template takes content, pictures and the arguments of calls.

Some templates take content as a string, others as a list of parts, others either, and each role may differ. Given the
other form, a template silently writes nothing, or Python's text of a list. So the form is found by rendering marks: a
form works if the marks are in the text, and not inside the text of a list or mapping.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizer.errors import ChatTemplateError
from tokenizer.templates.chat_template import render_chat, variables_of

_ONE, _TWO = "xservmarkone", "xservmarktwo"
_WITH_CALLS = "assistant with calls"
_EMPTY: tuple[Any, Any] = ({}, "{}")
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "c", "parameters": _PARAMETERS}}
_PICTURES: tuple[dict[str, Any], ...] = ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}})


class ContentForm(NamedTuple):
    """The form in which a template takes the content of one role.

    text      a string
    parts     texts in a list of parts; "one": a single one of them
    picture   the part that means a picture between texts, or None if it writes none, or not the texts beside it
    fields    of a part that hold its text
    """

    text: bool
    parts: bool
    one_part: bool
    picture: Mapping[str, Any] | None
    fields: tuple[str, ...] = ("text",)

    @property
    def is_known(self) -> bool:
        """Whether the role's text was written in any form."""
        return self.text or self.one_part

    def part(self, text: str) -> dict[str, Any]:
        """A part with the text."""
        return {"type": "text", **dict.fromkeys(self.fields, text)}


class TemplateForms:
    """The forms of one template, each found on first use. `variables` are the special tokens' names."""

    def __init__(self, template: str, variables: Mapping[str, str], *, has_tools: bool) -> None:
        self.template, self._variables = template, variables
        self._tools = [_TOOL] if has_tools else None
        self._contents: dict[str, ContentForm] = {}

    def content(self, role: str) -> ContentForm:
        """How the template takes the content of a role."""
        if (found := self._contents.get(role)) is None:
            found = self._contents[role] = self._found(role)
        return found

    def content_of(self, message: Mapping[str, Any]) -> ContentForm:
        """How it takes the content of such a message: content beside calls may have another form."""
        role = str(message.get("role"))
        return self.content(_WITH_CALLS if role == "assistant" and message.get("tool_calls") else role)

    def _found(self, role: str) -> ContentForm:
        text = _ONE in (self._rendered(role, _ONE) or "")
        for fields in (("text",), ("text", "content")):
            form = ContentForm(text, parts=False, one_part=False, picture=None, fields=fields)
            if self._writes(role, [form.part(_ONE)], _ONE) is None:
                continue
            both = self._writes(role, [form.part(_ONE), form.part(_TWO)], _ONE, _TWO)
            if both is None:
                return form._replace(one_part=True)
            for picture in _PICTURES:
                with_picture = self._writes(role, [form.part(_ONE), picture, form.part(_TWO)], _ONE, _TWO)
                if with_picture is not None and _has_picture(with_picture, both):
                    return form._replace(parts=True, one_part=True, picture=picture)
            return form._replace(parts=True, one_part=True)
        return ContentForm(text, parts=False, one_part=False, picture=None)

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The variables that the template reads."""
        return variables_of(self.template)

    @functools.cached_property
    def picture_text(self) -> str | None:
        """The text that the template writes for a picture in a user's message; None if it writes none."""
        form = self.content("user")
        if form.picture is None:
            return None
        texts = [form.part(_ONE), form.part(_TWO)]
        without, written = (
            self._rendered("user", content) or "" for content in (texts, [texts[0], form.picture, texts[1]])
        )
        begin = next((i for i, (a, b) in enumerate(zip(without, written)) if a != b), len(without))
        return written[begin : begin + len(written) - len(without)]

    @functools.cached_property
    def arguments(self) -> tuple[bool, bool]:
        """Whether the template takes a call's arguments as a mapping, and whether as JSON's text. Some take both; a
        template without calls takes neither."""
        as_text = f'{{"{_ONE}": "{_TWO}"}}'
        return _written_as_json(self._call_of({_ONE: _TWO})), _written_as_json(self._call_of(as_text))

    @functools.cached_property
    def json_spacing(self) -> tuple[str, str] | None:
        """The separators of items and of keys in the JSON that the template writes into a call; None if it writes none.
        A template that takes text gets it with blanks."""
        value = {_ONE: [1, 2], _TWO: 3}
        text = self._call_of({"a": value}) or ""
        for separators in ((", ", ": "), (",", ":"), (",", ": "), (", ", ":")):
            if json.dumps(value, separators=separators) in text:
                return separators
        return (", ", ": ") if self.arguments[1] else None

    def _call_of(self, arguments: Any) -> str | None:
        answer = {"role": "tool", "content": "1", "name": "f", "tool_call_id": "callnine1"}
        for filler in _fillers():
            for following in ((), (answer,)):
                if (text := self._attempt([_user(filler), _call(arguments), *following])) is not None:
                    return text
        return None

    def _writes(self, role: str, content: list[Any], *marks: str) -> str | None:
        """The conversation's text if all marks are in it, and none inside a part written as JSON or Python."""
        text = self._rendered(role, content)
        if text is None or not all(mark in text for mark in marks):
            return None
        return None if re.search(rf"(?:text|content)\\*['\"]\s*:\s*\\*['\"]{_ONE}", text) else text

    def _rendered(self, role: str, content: Any) -> str | None:
        for messages in _conversations(role, content):
            if (text := self._attempt(messages)) is not None:
                return text
        return None

    def _attempt(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        try:
            return render_chat(self.template, messages, tools=self._tools, variables=self._variables)
        except ChatTemplateError:
            return None


@functools.lru_cache(maxsize=64)
def forms_of(template: str, variables: tuple[tuple[str, str], ...], has_tools: bool) -> TemplateForms:
    """The template's forms, found once."""
    return TemplateForms(template, dict(variables), has_tools=has_tools)


def _conversations(role: str, content: Any) -> Iterator[list[dict[str, Any]]]:
    """Conversations in which such a message may stand: a template may refuse some."""
    message = {"role": role, "content": content}
    for filler in _fillers():
        user = _user(filler)
        if role == "user":
            yield [message]
            yield [{"role": "system", "content": filler}, message]
        elif role == "assistant":
            yield [user, message, user]
            yield [user, message]
        elif role == _WITH_CALLS:
            for arguments in _EMPTY:
                call = {**_call(arguments), "content": content}
                yield [user, call, {"role": "tool", "content": filler, "name": "f", "tool_call_id": "callnine1"}]
                yield [user, call]
        elif role == "tool":
            for arguments in _EMPTY:
                yield [user, _call(arguments), {**message, "name": "f", "tool_call_id": "callnine1"}]
        else:
            yield [message, user]


def _fillers() -> tuple[Any, Any]:
    return "a", [{"type": "text", "text": "a"}]


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _call(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "id": "callnine1", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _has_picture(written: str, without: str) -> bool:
    """Whether a picture was written: more than white space, and not the part as JSON or Python."""
    is_more = "".join(written.split()) != "".join(without.split())
    return is_more and re.search(r"""['"]type\\*['"]\s*:\s*\\*['"]image""", written) is None


def _written_as_json(text: str | None) -> bool:
    """Whether a call's one argument was written, neither as Python writes a mapping nor as JSON within JSON."""
    if text is None or _ONE not in text or _TWO not in text:
        return False
    return f"'{_ONE}': '{_TWO}'" not in text and f'\\"{_ONE}' not in text
