"""A rewritten JSON schema, places in a schema, what its references lead to, and which schemas exclude each other."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote, urljoin

from runtime.engine.checks import is_integer
from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import MAX_MAXIMUM, MAX_REPEATS, grammar_error

Schema: TypeAlias = dict[str, Any] | bool

NO_PROMISE = "no grammar can enforce this; leave it out, and ask for it in the prompt"


@dataclass(slots=True)
class Prepared:
    """
    schema          for llguidance, with all definitions under "$defs"
    ignored         places of keywords that are not enforced: "properties.path.format=file-path"
    nodes           the schemas within `schema`, inner ones first, and their places
    num_closed      objects that got `additionalProperties: false`
    has_control_characters  it has texts that only `\\uXXXX` can write
    """

    schema: Schema = True
    ignored: list[str] = field(default_factory=list)
    nodes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_closed: int = 0
    has_control_characters: bool = False

    def note_characters(self, text: str) -> None:
        """Record a text that an answer may have to contain."""
        if any((c < " " and c not in "\b\f\n\r\t") or c == "\x7f" for c in text):
            self.has_control_characters = True


def schema_error(place: str, reason: str) -> RequestError:
    """The error for the schema at `place`."""
    error = grammar_error(reason)
    if not place:
        return error
    return RequestError(f"grammar.{place}: {reason}", param=f"grammar.{place}", code=error.code)


def place_in(place: str, *keys: str | int) -> str:
    """A nested place: "properties.a.anyOf[0]"."""
    for key in keys:
        if isinstance(key, int):
            place += f"[{key}]"
        elif key.translate(_PLAIN).isalnum():
            place += f".{key}" if place else key
        else:
            place += f"[{json.dumps(key[:80], ensure_ascii=False)}]"
    return place


_PLAIN = str.maketrans("", "", "$_-")


def take_counts(found: dict[str, Any], result: dict[str, Any], place: str, least: str, most: str) -> None:
    """Copy the two keywords that bound a number, if they constrain it."""
    for name in (least, most):
        count = found.get(name)
        if count is None:
            continue
        if isinstance(count, float) and count.is_integer():
            count = int(count)
        if not is_integer(count) or count < 0:
            raise schema_error(place_in(place, name), f"{name} must be a whole number from 0, got {count!r:.60}")
        if name == least and count > MAX_REPEATS:
            raise schema_error(place_in(place, name), f"{name} may be at most {MAX_REPEATS}, got {count}")
        if not (count == 0 if name == least else count > MAX_MAXIMUM):
            result[name] = count


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


SUBSCHEMAS = (
    "items", "additionalItems", "contains", "additionalProperties", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
SCHEMA_LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
SCHEMA_TABLES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


def subschemas(node: dict[str, Any]) -> Iterator[Any]:
    """The direct subschemas of a schema."""
    yield from (node[name] for name in SUBSCHEMAS if name in node)
    for name in SCHEMA_LISTS:
        if isinstance(node.get(name), list):
            yield from node[name]
    for name in SCHEMA_TABLES:
        if isinstance(node.get(name), dict):
            yield from node[name].values()


class References:
    """The references of one schema. Subschemas are keyed by identity, so `root` must be a tree.

    constraining  the keywords that constrain values
    """

    def __init__(self, root: dict[str, Any], constraining: Collection[str] = ()) -> None:
        self._constraining = frozenset(constraining) - {"$ref"}
        self._bases: dict[int, tuple[str, ...]] = {}  # of each schema: its own base, then those of its parents
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], dict[str, Any]] = {}
        self._dynamic: dict[str, list[dict[str, Any]]] = {}
        self._index(root, ("",))

    def target(self, node: dict[str, Any], reference: Any) -> Any:
        """The schema that `reference` names in `node`. Raises `LookupError` with the reason."""
        if not isinstance(reference, str):
            raise LookupError(f"$ref must be a string, got {reference!r:.60}")
        first: LookupError | None = None
        for base in self._bases[id(node)]:  # outer ones, too: drafts up to 7 ignore an `$id` beside `$ref`
            try:
                return self._target(base, reference)
            except LookupError as error:
                first = first or error
        assert first is not None
        raise first

    def followed(self, schema: Any) -> Any:
        """The schema, or its target if it has no other keyword than `$ref`. Raises `LookupError`, also for a cycle."""
        seen = set()
        while isinstance(schema, dict) and "$ref" in schema and not schema.keys() & self._constraining:
            if id(schema) in seen:
                raise LookupError(f"{schema['$ref']!r:.200} refers to itself")
            seen.add(id(schema))
            schema = self.target(schema, schema["$ref"])
        return schema

    def dynamic_target(self, node: dict[str, Any], reference: str) -> Any:
        """The target of a `$dynamicRef` or `$recursiveRef`, if it is unambiguous."""
        candidates = self._dynamic.get(reference.partition("#")[2], [])
        if len(candidates) > 1:
            raise LookupError(f"{len(candidates)} schemas have the dynamic anchor {reference!r:.80}")
        return candidates[0] if candidates else self.target(node, reference)

    def _target(self, base: str, reference: str) -> Any:
        address, _, fragment = _joined(base, reference).partition("#")
        if address not in self._resources:
            raise LookupError(f"{reference!r:.200} points out of the schema, and nothing is fetched; put it in $defs")
        fragment = unquote(fragment)
        resource = self._resources[address]
        if fragment and not fragment.startswith("/"):
            if (address, fragment) not in self._anchors:
                raise LookupError(f"{reference!r:.200} names an anchor that the schema does not have")
            return self._anchors[address, fragment]
        found = resource
        for escaped in fragment.split("/")[1:]:
            name = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                raise LookupError(f"{reference!r:.200} points to nothing: there is no {name!r:.80}")
        if isinstance(found, dict) and id(found) not in self._bases:  # it is not under a keyword for schemas
            self._index(found, (address,))
        return found

    def _index(self, root: Any, bases: tuple[str, ...]) -> None:
        waiting = [(root, bases)]
        while waiting:
            node, bases = waiting.pop()
            if not isinstance(node, dict) or id(node) in self._bases:
                continue
            own = bases[0]
            named = node.get("$id", node.get("id"))
            if isinstance(named, str):
                own, _, anchor = _joined(own, named).partition("#")
                if anchor:
                    self._anchors[own, anchor] = node
                if not named.startswith("#"):
                    self._resources.setdefault(own, node)
                    bases = (own, *bases)
            self._bases[id(node)] = bases
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(keyword), str):
                    self._anchors[own, node[keyword]] = node
            if isinstance(node.get("$dynamicAnchor"), str):
                self._dynamic.setdefault(node["$dynamicAnchor"], []).append(node)
            if node.get("$recursiveAnchor") is True:
                self._dynamic.setdefault("", []).append(node)
            waiting += [(each, bases) for each in subschemas(node)]


def _joined(base: str, reference: str) -> str:
    """The joined URI; Python's urljoin does not handle fragments of URIs such as urn:uuid:…"""
    return base + reference if reference.startswith("#") or not reference else urljoin(base, reference)


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
