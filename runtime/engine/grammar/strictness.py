"""What `strict` asks of a JSON schema: an object that does not say whether it may have further keys has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCHEMAS = ("items", "additionalItems", "contains", "not", "if", "then", "else", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_TABLES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref")


def closed(schema: Any, *, is_part: bool = False) -> Any:
    """The schema with `additionalProperties: false` in every object that has "properties" and does not say it, at any
    depth. Left as they are: an object without "properties", which takes any keys on purpose; and one that stands beside
    others under "allOf" (`is_part`), or has such words beside its own, since none of them knows all the keys."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for name in _SCHEMAS:
        if isinstance(result.get(name), Mapping):
            result[name] = closed(result[name])
    for name in _LISTS:
        if isinstance(result.get(name), list):
            is_open = (name == "allOf" and len(result[name]) > 1) or "properties" in schema
            result[name] = [closed(each, is_part=is_open and name in _COMBINED) for each in result[name]]
    for name in _TABLES:
        if isinstance(result.get(name), Mapping):
            result[name] = {key: closed(each) for key, each in result[name].items()}
    is_open = is_part or any(name in schema for name in (*_SAYS, *_COMBINED))
    if not is_open and isinstance(schema.get("properties"), Mapping):
        result["additionalProperties"] = False
    return result
