"""The decoded JSON of any request becomes typed objects: it is limited, cleaned and converted, or refused by a 400 with
the field, its value and the allowed ones.

Cleaned are unambiguous values that a schema would refuse: a null field is absent, a whole float (2.0) is an integer.
Lengths of text are limited by the body's size and the context; other servers' fields are handled by
`server.openai_api.extensions`. The walk follows the schema's types. Values of any type (a JSON schema, a template's
variables) stay as they are."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as inspect

from runtime.engine.option_names import nearest_name
from runtime.engine.sampling_params import MAX_N
from server.config import ServerConfig
from server.errors import THE_BODY, ApiError, below, invalid, json_text
from server.openai_api.extensions import WITHIN
from server.openai_api.schema import PATTERNS_IN_WORDS, ContentPart
from server.responses_api.schema import InputPart

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


def held_in(kind: inspect.Type) -> tuple[type, ...] | None:
    """The types of a list's objects that are read one by one (`schema.held`)."""
    if isinstance(kind, inspect.Metadata):
        held: tuple[type, ...] | None = (kind.extra or {}).get("held")
        return held
    inners = kind.types if isinstance(kind, inspect.UnionType) else ()
    return next((held for inner in inners if (held := held_in(inner)) is not None), None)


def _flat(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _flat(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [each for inner in kind.types for each in _flat(inner)]
    return [kind]


_PLAIN = frozenset({str, int, float, bool, type(None)})

_AT_ONCE = 8192
"""Items whose types are looked at in one go: a tenth of a millisecond."""

_SCHEMA_FIELDS = ("response_format", "structured_outputs", "tools", "text", "output_config", "format")
"""Fields that may hold a JSON schema."""


def check_limits(request: Mapping[str, Any], config: ServerConfig) -> None:
    """Raises `ApiError` 400 with the field, its value and the limit. Wrong types pass: the schema refuses them."""
    for name, limit in (
        ("messages", config.max_messages),
        ("tools", config.max_tools),
        ("stop", config.max_stop_strings),
        ("stop_sequences", config.max_stop_strings),
        ("bad_words", config.max_stop_strings),
        ("logit_bias", config.max_logit_bias),
    ):
        _check_length(name, request.get(name), limit)
    items = request.get("input")  # a conversation, texts, or the ids of one text
    if isinstance(items, list) and items and not isinstance(items[0], int):
        _check_length("input", items, config.max_messages)
    n = request.get("n")
    most_choices = min(MAX_N, config.max_choices)
    if isinstance(n, int) and n > most_choices:
        raise invalid("n", f"n must be at most {most_choices}, got {n if n < 10**18 else 'more'}.")
    for name in _SCHEMA_FIELDS:
        value = request.get(name)
        if isinstance(value, (dict, list)) and is_deeper(value, config.max_schema_depth):
            raise invalid(name, f"{name} nests arrays and objects deeper than {config.max_schema_depth} levels.")


def is_deeper(value: Any, max_depth: int) -> bool:
    """Whether arrays and objects nest deeper than `max_depth` levels. Iterates level by level, so that no depth
    overflows the stack."""
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            return True
        level = [
            child
            for parent in level
            if isinstance(parent, dict) or not _PLAIN.issuperset(kinds_of(parent))  # a million ids are cheap
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    return False


def kinds_of(items: Sequence[Any]) -> set[type]:
    """The types of the items, in stretches, between which other threads may take the GIL."""
    kinds: set[type] = set()
    for start in range(0, len(items), _AT_ONCE):
        kinds.update(map(type, items[start : start + _AT_ONCE]))
    return kinds


def _check_length(name: str, value: Any, limit: int) -> None:
    if isinstance(value, (list, dict)) and len(value) > limit:
        raise too_many(name, len(value), limit)


def too_many(name: str, count: int, limit: int) -> ApiError:
    return invalid(name, f"{name} must have at most {limit} entries, got {count}.")


_PARTS = (ContentPart, InputPart)
_TEXT_PARTS = frozenset({"text", "refusal", "input_text", "output_text"})
"""Parts of these kinds are read. Further fields of other kinds stay, so that they are refused by name."""

LARGEST_EXACT = 2.0**53


class Cleaner:
    """Cleans one request.

    ignored  gets the names of skipped fields, such as "messages[0].cache_control"
    takes_unknown  skip unknown fields, too
    """

    def __init__(self, ignored: list[str], *, takes_unknown: bool) -> None:
        self.ignored = ignored
        self.takes_unknown = takes_unknown

    def request(self, value: dict[str, Any], schema: type[msgspec.Struct]) -> dict[str, Any]:
        return self._fields(value, struct_of(schema), "")

    def _fields(self, value: dict[str, Any], struct: inspect.StructType, path: str) -> dict[str, Any]:
        known = _fields_of(struct.cls)
        accepted = WITHIN.get(struct.cls.__name__, frozenset())
        cleaned = {}
        for name, item in value.items():
            where = f"{path}.{name}" if path else name
            field = known.get(name)
            if field is not None:
                if item is not None or field.required:
                    held = held_in(field.type)
                    cleaned[name] = (
                        self._value(item, field.type, where) if held is None else self._held(item, held, where)
                    )
            elif name == struct.tag_field:
                cleaned[name] = item
            elif item is None:
                continue
            elif name in accepted or (
                self.takes_unknown and (struct.cls not in _PARTS or value.get("type") in _TEXT_PARTS)
            ):
                self.ignored.append(where)
            else:
                cleaned[name] = item
        return cleaned

    def _value(self, value: Any, kind: inspect.Type, path: str) -> Any:
        if isinstance(value, float):
            is_whole = value.is_integer() and abs(value) <= LARGEST_EXACT
            return int(value) if is_whole and _asks_for_integer(kind) else value
        if isinstance(value, dict):
            struct = _struct_of(kind, value)
            return value if struct is None else self._fields(value, struct, path)
        if isinstance(value, list):
            return self._items(value, kind, path)
        return value

    def _items(self, value: list[Any], kind: inspect.Type, path: str) -> list[Any]:
        inner = next((each.item_type for each in _flat(kind) if isinstance(each, inspect.ListType)), None)
        if inner is None or kinds_of(value) <= {str, int}:  # a million ids are cheap
            return value
        return [self._value(item, inner, f"{path}[{i}]") for i, item in enumerate(value)]

    def _held(self, value: Any, structs: tuple[type, ...], path: str) -> Any:
        if not isinstance(value, list):
            return value
        return [
            self._fields(item, struct_of(_chosen(item, structs)), f"{path}[{i}]") if isinstance(item, dict) else item
            for i, item in enumerate(value)
        ]


def _chosen(value: dict[str, Any], structs: tuple[type, ...]) -> Any:
    """The type that the object's `type` names; an item without one is a message."""
    kind = value.get("type", "message")
    for struct in structs:
        field = _fields_of(struct).get("type")
        if field is not None and isinstance(field.type, inspect.LiteralType) and kind in field.type.values:
            return struct
    return structs[0] if len(structs) == 1 else _Unknown


class _Unknown(msgspec.Struct):
    """An object of a type that is refused by name."""

    type: Any = None


def _struct_of(kind: inspect.Type, value: dict[str, Any]) -> inspect.StructType | None:
    structs = [each for each in _flat(kind) if isinstance(each, inspect.StructType)]
    if len(structs) > 1:
        structs = [each for each in structs if each.tag_field is not None and value.get(each.tag_field) == each.tag]
    return structs[0] if len(structs) == 1 else None


def _asks_for_integer(kind: inspect.Type) -> bool:
    kinds = [type(each) for each in _flat(kind)]
    return inspect.IntType in kinds and inspect.FloatType not in kinds


@functools.cache
def _info(schema: Any) -> inspect.Type:
    return inspect.type_info(schema)


def struct_of(schema: type[msgspec.Struct]) -> inspect.StructType:
    struct = _info(schema)
    assert isinstance(struct, inspect.StructType)
    return struct


@functools.cache
def _fields_of(schema: type) -> dict[str, inspect.Field]:
    return {field.encode_name: field for field in struct_of(schema).fields}
