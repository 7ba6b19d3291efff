"""Resolves the references of a JSON schema by JSON pointer, anchor and `$id`, within the schema alone.

Nothing is fetched. A reference to another document is an error with that reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import unquote, urljoin

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
