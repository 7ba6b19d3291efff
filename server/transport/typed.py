"""Converts plain values to a schema's typed objects, or raises a 400 with the field, its value and the allowed ones."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as inspect

from runtime.engine.option_names import nearest_name
from server.errors import THE_BODY, ApiError, below, invalid, json_text
from server.openai_api.schema import PATTERNS_IN_WORDS

T = TypeVar("T")

_ELSEWHERE = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "prompt": ("messages", "input"),
    "response_format": ("text", "output_config", "format"),
    "system": ("instructions",),
    "instructions": ("system",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "reasoning_effort": ("reasoning", "output_config", "think"),
    "effort": ("reasoning_effort", "reasoning", "output_config"),
}
"""Names of fields in one API, and those of fields that mean the same in others."""

MAX_SHOWN_NAME = 200
"""Characters of an unknown field's name that an error repeats."""

_PATH = re.compile(r" - at `(?:key in )?\$(.*?)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_WRONG_TYPE = re.compile(r"^Expected `(.+)`, got `(.+)`$")
_OUT_OF_RANGE = re.compile(r"^Expected `(.+)` (<=|>=|<|>|of length|matching) ?(?:(<=|>=|==) )?(.+)$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)
_JSON_NAMES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above", "==": "exactly"}


def converted(value: Any, schema: type[T], path: str = "") -> T:
    """The value as `schema`. Raises `ApiError` 400 of a field below `path`."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        told = _told(str(error), value, schema)
    raise below(path, told) if path else told


def _told(text: str, value: Any, schema: Any) -> ApiError:
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    problem = text[: found.start()] if found else text
    got, kinds = _at(path, value, schema)
    path = path.removeprefix(".")
    if match := _UNKNOWN.match(problem):
        name = match.group(1)[:MAX_SHOWN_NAME]
        param = f"{path}.{name}" if path else name
        known = [field.encode_name for field in _fields(kinds)]
        near = next((other for other in _ELSEWHERE.get(name, ()) if other in known), nearest_name(name, known))
        hint = f" Is {near!r} meant?" if near else ""
        return invalid(param, f"Unknown parameter: {param}.{hint}", "unknown_parameter")
    if match := _MISSING.match(problem):
        name = match.group(1)
        param = f"{path}.{name}" if path else name
        values = _words([_tags(kinds, name), *_kinds_of_field(kinds, name)])
        return invalid(param, f"Missing required parameter: {param}{values}.", "missing_required_parameter")
    param = path.partition("[...]")[0] or None
    where = param or THE_BODY
    allowed = _words(kinds)
    if match := _WRONG_TYPE.match(problem):
        expected = " or ".join(_JSON_NAMES.get(name, name) for name in match.group(1).split(" | "))
        kind = _JSON_NAMES.get(match.group(2), match.group(2))
        return invalid(param, f"Invalid type for {where}: expected {expected}, got {kind}{allowed}.", "invalid_type")
    shown = json_text(got)
    if match := _OUT_OF_RANGE.match(problem):
        kind, relation, of_length, bound = match.groups()
        if relation == "matching":
            patterns = [kind.pattern for kind in kinds if isinstance(kind, inspect.StrType) and kind.pattern]
            words = " or ".join(PATTERNS_IN_WORDS[pattern] for pattern in patterns)
            return invalid(param, f"Invalid value for {where}: it must be {words}, got {shown}.")
        if of_length is not None:
            unit, units = ("character", "characters") if kind == "str" else ("entry", "entries")
            most = f"{_BOUNDS[of_length]} {bound} {unit if bound == '1' else units}"
            return invalid(param, f"Invalid value for {where}: it must have {most}, got {_length(got)}.")
        return invalid(param, f"Invalid value for {where}: it must be {_BOUNDS[relation]} {bound}, got {shown}.")
    return invalid(param, f"Invalid value for {where}: got {shown}{allowed}.")


def _at(path: str, value: Any, schema: Any) -> tuple[Any, list[inspect.Type]]:
    """The value at a path, and the types that it may have; for the field of a tag, the tags that it may have."""
    kinds = _flat(_info(schema))
    for name, index in _STEP.findall(path):
        structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
        is_tag = any(name and kind.tag_field == name for kind in structs)
        inner = value
        if isinstance(value, dict):
            inner = value.get(name)
        elif isinstance(value, list) and index.isdecimal() and int(index) < len(value):
            inner = value[int(index)]
        if is_tag:
            return inner, [_tags(kinds, name)]
        if name:
            mine = [kind for kind in structs if kind.tag_field is None or _tag_in(value, kind) == kind.tag]
            kinds = _kinds_of_field(mine, name)
        else:
            inners = [getattr(kind, "item_type", getattr(kind, "value_type", None)) for kind in kinds]
            kinds = [each for kind in inners if kind is not None for each in _flat(kind)]
        value = inner
    return value, kinds


def _tags(kinds: list[inspect.Type], name: str) -> inspect.LiteralType:
    """The values of this field that distinguish tagged types."""
    structs = (kind for kind in kinds if isinstance(kind, inspect.StructType))
    return inspect.LiteralType(tuple(kind.tag for kind in structs if kind.tag_field == name and kind.tag is not None))


def _tag_in(value: Any, kind: inspect.StructType) -> Any:
    return value.get(kind.tag_field) if isinstance(value, dict) else None


def _kinds_of_field(kinds: Sequence[inspect.Type], name: str) -> list[inspect.Type]:
    return [each for field in _fields(kinds) if field.encode_name == name for each in _flat(field.type)]


def _fields(kinds: Sequence[inspect.Type]) -> Iterator[inspect.Field]:
    for kind in kinds:
        if isinstance(kind, inspect.StructType):
            yield from kind.fields


def _words(kinds: list[inspect.Type]) -> str:
    """The allowed values, as the rest of a sentence; empty if there is no choice."""
    values = [value for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values]
    tagged = [kind for kind in kinds if isinstance(kind, inspect.StructType) and kind.tag_field is not None]
    listed = [json.dumps(value) for value in values if value is not None]
    if tagged:
        tags = " or ".join(json.dumps(kind.tag) for kind in tagged)
        listed.append(f"an object with the {tagged[0].tag_field} {tags}")
    return f"; it must be {'one of ' if len(listed) > 1 else ''}{', '.join(listed)}" if listed else ""


def _length(value: Any) -> str:
    return str(len(value)) if isinstance(value, (str, list, dict)) else json_text(value)


def _flat(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _flat(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [each for inner in kind.types for each in _flat(inner)]
    return [kind]


@functools.cache
def _info(schema: Any) -> inspect.Type:
    return inspect.type_info(schema)
