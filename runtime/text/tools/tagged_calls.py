"""The reader of calls whose arguments are one by one between tags: Qwen3-Coder's, GLM-4.5's and others.

    <tool_call>                                 <tool_call>get_weather
    <function=get_weather>                      <arg_key>city</arg_key>
    <parameter=city>                            <arg_value>Rome</arg_value>
    Rome                                        </tool_call>
    </parameter>
    </function>
    </tool_call>

Only the tool's schema has a value's type: if that is text, the value is text as it comes; else it is JSON, or a Python
literal, of a type that the schema permits; else text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.text.tools.forms import KEY, CallForm, Tagged, pieces
from runtime.text.tools.json_scanner import as_json
from runtime.text.tools.reader import WHITE_SPACE, AnswerReader, Reader, Reading, accept_all

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def tagged_calls(form: CallForm) -> Reader:
    """Calls of this form. Opening tags before the innermost are optional, and a closing tag may be missing before the
    next element."""
    style = form.arguments
    assert isinstance(style, Tagged)
    openings, closings = tuple(pieces(form.before_name)), tuple(pieces(form.closing))
    name_end = form.after_name.strip()
    key_open = style.head.partition(KEY)[0].strip()
    key_ends = {pieces(head.partition(KEY)[2])[0]: head for head in (style.other_head, style.head) if head is not None}
    pad = "\n" if style.is_padded else ""
    ends = (style.tail.strip(), pad + key_open, *(pad + closing for closing in closings))

    def read(answer: AnswerReader) -> Reading[None]:
        while (opening := (yield from answer.content_until(openings))) is not None:
            yield from answer.next_character()
            if not (yield from accept_all(answer, openings[openings.index(opening) + 1 :])):
                continue
            name = yield from answer.name((name_end,) if name_end else ("\n", "\r\n", key_open, *closings))
            if name is None:
                continue
            answer.at += len(name_end)
            if not (yield from _begin(answer, name, key_open, closings)):
                continue
            arguments = _Arguments(answer, name)
            while (yield from answer.accept(key_open)) is not None:
                found = yield from answer.find(tuple(key_ends), answer.at, most=_MAX_KEY_LENGTH)
                if found is None:
                    break
                key = answer.held[answer.at : found[0]].strip(WHITE_SPACE)
                answer.at = found[0] + len(found[1])
                value_open = pieces(key_ends[found[1]].partition(KEY)[2])[1:]
                if value_open and not (yield from accept_all(answer, value_open)):
                    break
                answer.layout()
                is_text = None if style.other_head is None else key_ends[found[1]] == style.head
                yield from arguments.add(key, ends, is_padded=style.is_padded, is_text=is_text)
                yield from answer.accept(ends[0])
                yield from answer.next_character()
            yield from _end(answer, arguments, *closings)

    return read


def _begin(answer: AnswerReader, name: str, argument: str, ends: tuple[str, ...]) -> Reading[bool]:
    """Whether a call begins here: an argument follows, or its end."""
    yield from answer.next_character()
    start = answer.at
    found = yield from answer.accept(argument, *ends)
    answer.at = start
    return found is not None and answer.begin(name, "" if found == argument else "{}")


def _end(answer: AnswerReader, arguments: _Arguments, *closings: str) -> Reading[None]:
    """The call's end. If the answer broke off, its arguments stay open."""
    rest = answer.held[answer.at :]
    if answer.has_ended and (not rest or rest not in closings) and any(tag.startswith(rest) for tag in closings):
        answer.at = len(answer.held)
        answer.end_call()
        return
    is_closed = False
    for closing in closings:
        yield from answer.next_character()
        is_closed = (yield from answer.accept(closing)) is not None or is_closed
    arguments.end()
    if is_closed:
        answer.end_call()
    else:
        yield from answer.close()


_MAX_KEY_LENGTH = 1024


class _Arguments:
    """A JSON object of the call's arguments, as they come."""

    def __init__(self, answer: AnswerReader, name: str) -> None:
        self._answer = answer
        self._schema: Any = answer.functions.get(name)
        self._before = "{"  # text to write before the next piece
        self._has_some = False

    def add(self, key: str, ends: Sequence[str], *, is_padded: bool, is_text: bool | None = None) -> Reading[None]:
        """The argument's value, up to the first of the ends. `is_padded`: a newline before it and one after it do not
        belong to it. `is_text`: what the answer says of its type; None leaves that to the schema."""
        answer = self._answer
        line_end = "\n"
        if is_padded:
            line_end = (yield from answer.accept("\n", "\r\n")) or line_end
            answer.layout()
        types = types_of(property_schema(self._schema, key), self._schema)
        if is_text is None:
            is_text = types == {"string"}
        head = f"{', ' if self._has_some else ''}{json.dumps(key, ensure_ascii=False)}: "
        self._has_some = True
        if is_text:
            self._before += head + '"'
        searched = 0
        while True:
            found = answer.first_of(ends, searched)
            end = answer.safe_end(ends, searched) if found is None else found[0]
            length = end
            if is_padded and not (answer.has_ended and found is None):
                length -= _line_end_length(answer.held[:end], line_end, may_go_on=found is None)
            if is_text:
                answer.at = length
                self._say(json.dumps(answer.held[:length], ensure_ascii=False)[1:-1])
                end -= length
            if found is not None or answer.has_ended:
                break
            searched = end
            yield
        value = answer.held[:length]
        answer.at = end
        if found is None:
            answer.layout()
        elif is_text:
            self._say('"')
        else:
            self._say(head + _json_of(value, types))

    def end(self) -> None:
        """Close the object, if it was opened."""
        if self._has_some:
            self._say("}")

    def _say(self, text: str) -> None:
        self._before += text
        if self._answer.at:
            self._answer.argue(self._before)
            self._before = ""


def _line_end_length(text: str, line_end: str, *, may_go_on: bool) -> int:
    """The length of the newline at its end: like the one before the value, or a plain one."""
    begun = line_end[:-1] if may_go_on else ""
    return next((len(each) for each in (line_end, "\n", begun) if each and text.endswith(each)), 0)


def _json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON, of one of the types, or of any if there are none."""
    stripped = text.strip(WHITE_SPACE)
    stripped = _PYTHON.get(stripped, stripped)
    stripped = as_json(stripped) or stripped
    try:
        value = json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and not types & _types_of_value(value):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _types_of_value(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int):
        return frozenset(("integer", "number"))
    if isinstance(value, float):
        return frozenset(("number", "integer") if value.is_integer() else ("number",))
    if value is None:
        return frozenset(("null",))
    return frozenset(("array",) if isinstance(value, list) else ("object",) if isinstance(value, dict) else ())


_MAX_STEPS = 64
"""Schemas visited for one property: references may be cyclic."""

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def property_schema(parameters: Any, key: str) -> Any:
    """The schema of one of a function's parameters, or None if it is not declared."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """The schema, or the target of its reference; empty if that is invalid."""
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = _referred(schema["$ref"], root)
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """The types that a schema permits; empty for any."""
    found: set[str] = set()
    waiting = [schema]
    for _ in range(_MAX_STEPS):
        if not waiting:
            return frozenset(found)
        each = waiting.pop()
        if not isinstance(each, Mapping):
            return frozenset()
        named = each.get("type")
        if isinstance(named, str):
            found.add(named)
        elif isinstance(named, list):
            found.update(name for name in named if isinstance(name, str))
        elif isinstance(each.get("enum"), list):
            found.update(map(_name_of, each["enum"]))
        elif "const" in each:
            found.add(_name_of(each["const"]))
        elif isinstance(each.get("$ref"), str):
            waiting.append(_referred(each["$ref"], root))
        else:
            parts = next((each[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(each.get(name), list)), None)
            if not parts:
                return frozenset()
            waiting += parts
    return frozenset()


def _name_of(value: Any) -> str:
    return _NAMES.get(type(value), "null")


def _referred(reference: str, root: Any) -> Any:
    """The target of a reference within the same schema."""
    found = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None
