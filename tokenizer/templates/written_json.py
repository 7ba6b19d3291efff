"""JSON that a template writes as a model has written it: objects and arrays that keep their text beside their value.

A template sees a plain dictionary or list. `tojson` writes the kept text, wherever in a value it stands, so that white
space, escapes, the form of numbers and the order of keys are those of the text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any


class WrittenText(str):
    """The arguments of a call, to be rendered as they are written here."""


class WrittenObject(dict[str, Any]):
    """An object and its text. A template cannot read an attribute that begins with an underscore."""

    _written: str


class WrittenArray(list[Any]):
    """An array and its text."""

    _written: str


def written_object(text: str) -> WrittenObject:
    """The object of this text; objects and arrays in it keep their texts, too. Raises `ValueError` for other JSON."""
    value, end = _value(text, _after_space(text, 0))
    if not isinstance(value, WrittenObject) or text[end:].strip():
        raise ValueError("the text is not one JSON object")
    value._written = text
    return value


_DECODER = json.JSONDecoder()


def _value(text: str, start: int) -> tuple[Any, int]:
    if text[start : start + 1] not in ("{", "["):
        return _DECODER.raw_decode(text, start)
    is_object = text[start] == "{"
    closing = "}" if is_object else "]"
    fields, items = WrittenObject(), WrittenArray()
    at = _after_space(text, start + 1)
    while text[at : at + 1] != closing:
        if fields or items:
            at = _after_space(text, _after(text, at, ","))
        if is_object:
            key, at = scanstring(text, _after(text, at, '"'))
            at = _after_space(text, _after(text, _after_space(text, at), ":"))
            fields[key], at = _value(text, at)
        else:
            item, at = _value(text, at)
            items.append(item)
        at = _after_space(text, at)
    found: WrittenObject | WrittenArray = fields if is_object else items
    found._written = text[start : at + 1]
    return found, at + 1


def _after(text: str, at: int, character: str) -> int:
    if text[at : at + 1] != character:
        raise ValueError(f"{character!r} is missing at character {at}")
    return at + 1


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n") and at < len(text):
        at += 1
    return at


def text_of(value: Any) -> str | None:
    """The text that a value keeps; None if it keeps none."""
    return value._written if isinstance(value, (WrittenObject, WrittenArray)) else None


def rebuilt(value: Any, built: dict[str, Any] | list[Any], put: Callable[[str], str] | None = None) -> Any:
    """`built`, which was made of `value`, with the text that `value` keeps, changed by `put`."""
    if (text := text_of(value)) is None:
        return built
    kept = WrittenObject(built) if isinstance(built, dict) else WrittenArray(built)
    kept._written = text if put is None else put(text)
    return kept


def dumps(value: Any, **options: Any) -> str:
    """JSON, with kept texts as they are. `options` are those of `json.dumps`."""
    texts: dict[str, str] = {}
    mark = secrets.token_hex(16)  # unknown to who wrote the value
    text = json.dumps(_with_marks(value, mark, texts), **options)
    for name, written in texts.items():
        text = text.replace(f'"{name}"', written)
    return text


def _with_marks(value: Any, mark: str, texts: dict[str, str]) -> Any:
    if (text := text_of(value)) is not None:
        name = f"{mark}:{len(texts)}:"
        texts[name] = text
        return name
    if isinstance(value, dict):
        return {key: _with_marks(item, mark, texts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_marks(item, mark, texts) for item in value]
    return value


def equal(one: Any, other: Any) -> bool:
    """Whether two values of JSON are the same: 1 and 1.0 are, and not true."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    kinds = (str, dict, list)
    return not any(isinstance(one, kind) != isinstance(other, kind) for kind in kinds) and bool(one == other)
