"""The values of a response template's fields: parses the text of a region as its template says.

Raises `ValueError` (also for missing parts and too deep nesting) if the text is not of that kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from runtime.text.tools.literals import Literals
from tokenizer.patterns.linear_pattern import LinearPattern

KINDS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines", "python-call-list")
_BARE_KEY = re.compile(r"\s*(\w+)\s*:")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_MARK = "\x01{}\x02"
_MAX_DEPTH = 8
"""Deepest nesting of parsers of values."""


class ValueParser:
    """Parses a text of this kind, by its arguments. Raises ``ValueError`` for those that are wrong, and for a pattern
    that is refused."""

    def __init__(self, kind: Any, arguments: Any, depth: int = 0) -> None:
        if kind not in KINDS:
            raise ValueError(f"content must be one of {', '.join(KINDS)}, got {kind!r}")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"content_args must be an object, got {arguments!r}")
        self.kind: str = kind
        self._strips = bool(arguments.get("strip", True))
        self._delimiters = _pairs(arguments.get("string_delims", []))
        self._arguments = arguments
        self._pattern: LinearPattern | None = None
        self._inner: ValueParser | None = None
        inner = arguments.get("value_parser")
        if inner is not None:
            if not isinstance(inner, Mapping) or depth >= _MAX_DEPTH:
                raise ValueError(f"value_parser must be an object, at most {_MAX_DEPTH} deep")
            self._inner = ValueParser(inner.get("name", "text"), inner.get("args", {}), depth + 1)
        if kind == "xml-inline":
            self._pattern = LinearPattern(_text_of(arguments, "tag_pattern", None))
            if "key" not in self._pattern.names:
                raise ValueError(f"tag_pattern {self._pattern.text!r} needs a group named key")
        self._line_separator = _text_of(arguments, "line_sep", "\n")
        self._key_separator = _text_of(arguments, "kv_sep", ":")

    @property
    def strips(self) -> bool:
        return self._strips

    def __call__(self, text: str) -> Any:
        try:
            return getattr(self, f"_{self.kind.replace('-', '_')}")(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    def _text(self, text: str) -> str:
        return text.strip() if self._strips else text

    def _int(self, text: str) -> int:
        return int(self._text(text))

    def _float(self, text: str) -> float:
        return float(self._text(text))

    def _bool(self, text: str) -> bool:
        return self._text(text).lower() in ("true", "1")

    def _json(self, text: str) -> Any:
        """JSON, whose strings may have other delimiters, and whose keys no quotes."""
        if self._delimiters and ("\x01" in text or "\x02" in text):
            raise ValueError("it has the characters U+0001 or U+0002")
        strings: list[str] = []
        working = text
        for opening, closing in self._delimiters:
            working = _marked(working, opening, closing, strings)
        if self._arguments.get("unquoted_keys"):
            working = _with_quoted_keys(working)
        if strings:
            parts = re.split("\x01(\\d+)\x02", working)
            parts[1::2] = [json.dumps(strings[int(i)]) if int(i) < len(strings) else i for i in parts[1::2]]
            working = "".join(parts)
        try:
            return json.loads(working)
        except json.JSONDecodeError:
            if self._arguments.get("allow_non_json"):
                return self._text(text)
            raise

    def _xml_inline(self, text: str) -> dict[str, Any]:
        assert self._pattern is not None
        found: dict[str, Any] = {}
        merged: set[str] = set()
        for match in self._pattern.matches(text):
            if "key" not in match.groups:
                raise ValueError("a tag has no key")
            key, value = match.groups["key"], self._value(match.groups.get("value", ""))
            if key in found and self._arguments.get("merge_duplicates"):
                if key not in merged:
                    merged.add(key)
                    found[key] = [found[key]]
                found[key].append(value)
            else:
                found[key] = value
        return found

    def _kv_lines(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for line in map(self._text, text.split(self._line_separator)):
            key, separator, value = line.partition(self._key_separator)
            if separator:
                found[self._text(key)] = self._value(self._text(value))
        return found

    def _python_call_list(self, text: str) -> list[dict[str, Any]]:
        return [{"name": name, "arguments": arguments} for name, arguments in Literals(text).calls()]

    def _value(self, text: str) -> Any:
        return text if self._inner is None else self._inner(text)


def _text_of(arguments: Mapping[str, Any], name: str, default: str | None) -> str:
    value = arguments.get(name, default)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text, got {value!r}")
    return value


def _pairs(given: Any) -> list[tuple[str, str]]:
    """Delimiters, checked."""
    pairs: list[tuple[str, str]] = []
    for pair in given if isinstance(given, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(each, str) and each for each in pair):
            raise ValueError(f"string_delims must be pairs of texts, got {given!r}")
        pairs.append((pair[0], pair[1]))
    return pairs


def _marked(text: str, opening: str, closing: str, strings: list[str]) -> str:
    """The text with a mark in place of each delimited string, which is added to `strings`."""
    pieces: list[str] = []
    at = 0
    while (start := text.find(opening, at)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        pieces += [text[at:start], _MARK.format(len(strings))]
        strings.append(text[start + len(opening) : end])
        at = end + len(closing)
    return "".join([*pieces, text[at:]])


def _with_quoted_keys(text: str) -> str:
    """The text with quotes around bare keys outside of strings."""
    pieces: list[str] = []
    at = copied = unclosed_until = 0
    while at < len(text):
        if text[at] == '"' and at >= unclosed_until:
            end = _string_end(text, at)
            if end > 0:
                at = end
                continue
            unclosed_until = -end
        if at and text[at - 1] in "{," and (found := _BARE_KEY.match(text, at)) is not None:
            start, end = found.span(1)
            pieces += [text[copied:start], '"', found[1], '"']
            copied, at = end, found.end()
            continue
        at += 1
    return "".join([*pieces, text[copied:]])


def _string_end(text: str, at: int) -> int:
    """The index after the string that begins here; the negated index where it breaks off if it is not closed."""
    at += 1
    while at < len(text):
        if text[at] == '"':
            return at + 1
        if text[at] == "\\":
            if text[at + 1 : at + 2] in ("", "\n"):
                break
            at += 1
        at += 1
    return -at


# Transforms

_MAX_TRANSFORM_DEPTH = 50


def check_transform(transform: Any) -> None:
    """Raises ``ValueError`` for a text that mixes a placeholder with others, too deep nesting and too many values."""
    waiting = [(transform, 0)]
    for _ in range(1000):
        if not waiting:
            return
        each, depth = waiting.pop()
        if depth > _MAX_TRANSFORM_DEPTH:
            raise ValueError(f"transform is nested deeper than {_MAX_TRANSFORM_DEPTH}")
        if isinstance(each, (Mapping, list)):
            inner = each.values() if isinstance(each, Mapping) else each
            waiting += [(value, depth + 1) for value in inner]
        elif isinstance(each, str) and _PLACEHOLDER.search(each) and not _PLACEHOLDER.fullmatch(each):
            raise ValueError(f"transform: {each!r} mixes a placeholder with other text")
    raise ValueError("transform has more than 1,000 values")


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """The transform with its placeholders replaced. Raises ``ValueError`` for an undefined one."""
    if isinstance(transform, Mapping):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for name in found[1].split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"transform: {transform} is not defined")
        value = value[name]
    return value


# Types of arguments


def cast(arguments: dict[str, Any], parameters: Any) -> dict[str, Any]:
    """The arguments, texts among them as values of the types that the function's schema declares."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return arguments
    found: dict[str, Any] = {}
    for key, value in arguments.items():
        types = _declared_types(properties.get(key), 0)
        if isinstance(value, str):
            value = _cast(value, types)
        elif isinstance(value, list) and types and "array" not in types:
            value = [_cast(each, types) if isinstance(each, str) else each for each in value]
        found[key] = value
    return found


def _declared_types(schema: Any, depth: int) -> list[str]:
    """In the order of the schema."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return []
    declared = schema.get("type")
    types = [each for each in (declared if isinstance(declared, list) else [declared]) if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        for choice in schema[union] if isinstance(schema.get(union), list) else ():
            types += _declared_types(choice, depth + 1)
    if schema.get("nullable"):
        types.append("null")
    return types


def _cast(text: str, types: list[str]) -> Any:
    """The text as the first of the types that it can be; else the text."""
    word = text.strip()
    for kind in types:
        try:
            if kind == "integer":
                return _integer(text)
            if kind == "number":
                number = float(text)
                if number - number == 0:  # finite
                    return int(number) if number.is_integer() and "." not in text else number
            elif kind == "boolean" and word.lower() in ("true", "1", "false", "0"):
                return word.lower() in ("true", "1")
            elif kind == "null" and word in ("null", "None"):
                return None
            elif kind in ("object", "array"):
                value = json.loads(text)
                if isinstance(value, dict if kind == "object" else list):
                    return value
        except (ValueError, OverflowError, RecursionError):
            continue
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)
