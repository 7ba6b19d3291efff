"""Finds schemas that no value matches at once, as far as that is visible. `oneOf` of such schemas is `anyOf`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runtime.engine.grammar.schema_references import References

_MAX_DEPTH = 8
_MAX_ALTERNATIVES = 64
_NAMES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


class Disjointness:
    """Rewrites the schemas within one, and follows its references."""

    def __init__(self, references: References) -> None:
        self._references = references

    def are_apart(self, one: Any, other: Any, beside: dict[str, Any] | None = None) -> bool:
        """True only if no value matches both. `beside` holds for either as well."""
        required = set(_strings(beside.get("required"))) if beside else set()
        return self._apart(one, other, required, 0)

    def _apart(self, one: Any, other: Any, required: set[str], depth: int) -> bool:
        if one is False or other is False:
            return True
        if depth > _MAX_DEPTH:
            return False
        pairs = [(a, b) for a in self._alternatives(one) for b in self._alternatives(other)]
        return len(pairs) <= _MAX_ALTERNATIVES and all(
            any(self._contradict(a, b, required, depth) for a in first for b in second) for first, second in pairs
        )

    def _contradict(self, one: dict[str, Any], other: dict[str, Any], required: set[str], depth: int) -> bool:
        """Whether one of two groups of keywords excludes the other."""
        if not _types(one) & _types(other):
            return True
        first, second = _values(one), _values(other)
        if first is not None and second is not None:
            return not any(_is_same(a, b) for a in first for b in second)
        if _types(one) & _types(other) <= {"number"} and (_is_below(one, other) or _is_below(other, one)):
            return True
        if _types(one) & _types(other) != {"object"}:
            return False
        needed = required | set(_strings(one.get("required"))) | set(_strings(other.get("required")))
        return any(self._apart(_property(one, key), _property(other, key), set(), depth + 1) for key in needed)

    def _alternatives(self, schema: Any) -> list[list[dict[str, Any]]]:
        """Groups of keywords that hold together, one group for each way to match the schema."""
        found: list[list[dict[str, Any]]] = [[]]
        for each in self._in_place(schema):
            options = next((each[name] for name in ("oneOf", "anyOf") if isinstance(each.get(name), list)), None)
            if options is None or len(options) * len(found) > _MAX_ALTERNATIVES:
                found = [[*group, each] for group in found]
                continue
            inner = [list(self._in_place(option)) for option in options if option is not False]
            found = [[*group, each, *more] for group in found for more in inner]
        return found

    def _in_place(self, schema: Any) -> Iterator[dict[str, Any]]:
        """The schema and those that apply to the same value."""
        waiting, seen = [schema], set()
        while waiting:
            each = waiting.pop()
            if not isinstance(each, dict) or id(each) in seen:
                continue
            seen.add(id(each))
            yield each
            if isinstance(each.get("allOf"), list):
                waiting += each["allOf"]
            if isinstance(each.get("$ref"), str):
                try:
                    waiting.append(self._references.target(each, each["$ref"]))
                except LookupError:
                    continue


def _types(schema: dict[str, Any]) -> set[str]:
    values = _values(schema)
    if values is not None:
        return {_NAMES.get(type(value), "null") for value in values}
    given = schema.get("type")
    names = given if isinstance(given, list) else [given] if given is not None else [*_NAMES.values(), "null"]
    return {"number" if name == "integer" else name for name in names}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _is_same(one: Any, other: Any) -> bool:
    """Equality with True unlike 1; values inside lists and objects are never reported as different for it."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _is_below(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all numbers of one are below those of the other."""
    touching = (("maximum", "exclusiveMinimum", True), ("exclusiveMaximum", "minimum", True))
    pairs = (("maximum", "minimum", False), ("exclusiveMaximum", "exclusiveMinimum", True), *touching)
    for most, least, may_touch in pairs:
        high: Any = one.get(most)
        low: Any = other.get(least)
        are_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (high, low))
        if are_numbers and (high < low or (may_touch and high == low)):
            return True
    return False


def _property(schema: dict[str, Any], key: str) -> Any:
    """The schema of the value at the key."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
