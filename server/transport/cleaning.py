"""Normalises unambiguous values that a schema would refuse: a null field is absent, a whole float (2.0) is an integer,
and other servers' fields are handled by `server.openai_api.extensions`.

The walk follows the schema's types. Values of any type (a JSON schema, a template's variables) stay as they are."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import msgspec.inspect as inspect

from server.anthropic_api.schema import HELD as OF_MESSAGES
from server.ollama_api.schema import HELD as OF_OLLAMA
from server.openai_api.extensions import WITHIN
from server.openai_api.schema import HELD as OF_CHATS
from server.openai_api.schema import ContentPart
from server.responses_api.schema import HELD as OF_RESPONSES
from server.responses_api.schema import InputPart
from server.transport.json_limits import kinds_of

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
