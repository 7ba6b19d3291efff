"""Limits and normalises the decoded JSON of any request before it becomes typed objects. Normalised are unambiguous
values that a schema would refuse: a null field is absent, a whole float (2.0) is an integer. Lengths of text are
limited by the body's size and the context; other servers' fields are handled by `server.openai_api.extensions`.

The walk follows the schema's types. Values of any type (a JSON schema, a template's variables) stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import msgspec.inspect as inspect

from runtime.engine.sampling_params import MAX_N
from server.anthropic_api.schema import HELD as OF_MESSAGES
from server.config import ServerConfig
from server.errors import ApiError, invalid
from server.ollama_api.schema import HELD as OF_OLLAMA
from server.openai_api.extensions import WITHIN
from server.openai_api.schema import HELD as OF_CHATS
from server.openai_api.schema import ContentPart
from server.responses_api.schema import HELD as OF_RESPONSES
from server.responses_api.schema import InputPart

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


_HELD: dict[tuple[type, str], tuple[type, ...]] = OF_CHATS | OF_RESPONSES | OF_MESSAGES | OF_OLLAMA
"""Item types of lists whose objects the schema leaves open, since they are read one by one."""

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
        return self._fields(value, _struct(schema), "")

    def _fields(self, value: dict[str, Any], struct: inspect.StructType, path: str) -> dict[str, Any]:
        known = _fields_of(struct.cls)
        accepted = WITHIN.get(struct.cls.__name__, frozenset())
        cleaned = {}
        for name, item in value.items():
            where = f"{path}.{name}" if path else name
            field = known.get(name)
            if field is not None:
                if item is not None or field.required:
                    held = _HELD.get((struct.cls, name))
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
        inner = next((each.item_type for each in _kinds(kind) if isinstance(each, inspect.ListType)), None)
        if inner is None or kinds_of(value) <= {str, int}:  # a million ids are cheap
            return value
        return [self._value(item, inner, f"{path}[{i}]") for i, item in enumerate(value)]

    def _held(self, value: Any, structs: tuple[type, ...], path: str) -> Any:
        if not isinstance(value, list):
            return value
        return [
            self._fields(item, _struct(_chosen(item, structs)), f"{path}[{i}]") if isinstance(item, dict) else item
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
    structs = [each for each in _kinds(kind) if isinstance(each, inspect.StructType)]
    if len(structs) > 1:
        structs = [each for each in structs if each.tag_field is not None and value.get(each.tag_field) == each.tag]
    return structs[0] if len(structs) == 1 else None


def _asks_for_integer(kind: inspect.Type) -> bool:
    kinds = [type(each) for each in _kinds(kind)]
    return inspect.IntType in kinds and inspect.FloatType not in kinds


def _kinds(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


@functools.cache
def _struct(schema: type[msgspec.Struct]) -> inspect.StructType:
    struct = inspect.type_info(schema)
    assert isinstance(struct, inspect.StructType)
    return struct


@functools.cache
def _fields_of(schema: type) -> dict[str, inspect.Field]:
    return {field.encode_name: field for field in _struct(schema).fields}
