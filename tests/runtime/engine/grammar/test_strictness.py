"""Which objects of a schema `strict` closes: a schema that says all about its keys stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.grammar.strictness import closed

CLOSED = {"additionalProperties": False}
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, {**A, **CLOSED}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": A}, {**A, "additionalProperties": {**A, **CLOSED}}),
        ({**A, "patternProperties": {"x": A}}, {**A, "patternProperties": {"x": {**A, **CLOSED}}}),
        ({"properties": {}}, {"properties": {}, **CLOSED}),
        ({"type": "object"}, {"type": "object"}),
        ({"items": A}, {"items": {**A, **CLOSED}}),
        ({"items": [A]}, {"items": [{**A, **CLOSED}]}),
        ({"properties": {"properties": A}}, {"properties": {"properties": {**A, **CLOSED}}, **CLOSED}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": {**A, **CLOSED}}, "$ref": "#/$defs/x"}),
        ({"anyOf": [A, B]}, {"anyOf": [{**A, **CLOSED}, {**B, **CLOSED}]}),
        ({"allOf": [A]}, {"allOf": [{**A, **CLOSED}]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({**A, "anyOf": [B]}, {**A, "anyOf": [B]}),
        ({"enum": [A], "default": A, "const": A}, {"enum": [A], "default": A, "const": A}),
        ({"properties": {"enum": {"enum": [B]}}}, {"properties": {"enum": {"enum": [B]}}, **CLOSED}),
        (True, True),
    ],
)
def test_what_is_closed(schema: Any, expected: Any) -> None:
    before = repr(schema)
    assert closed(schema) == expected
    assert closed(closed(schema)) == expected
    assert repr(schema) == before
