"""Looks up the type of a property in a JSON schema, for notations that write values without types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
