"""A prepared schema takes exactly the values that the given one takes, by a validator that nobody here wrote."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import jsonschema
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.grammar.json_schema import prepared

SCALARS: list[Any] = [None, True, False, 0, 1, 2, 3.5, -1, "", "a", "b", "ab", "hello"]
VALUES: list[Any] = [
    *SCALARS, [], [1], [1, 1], ["a", 1], [1, 2, 3], [[]], {}, {"a": 1}, {"a": "x", "b": 2}, {"b": None}, {"c": 1},
    {"a": 1, "c": {"a": 2}}, {"a": {"a": {"b": 3}}}, {"ab": [1], "a": "a"}, {"a": 1, "b": 1, "c": 1},
]  # fmt: skip
PATTERNS = ["^(?!a)", "^(?!.*ll)[a-z]*$", "^(?!^[ab]*$)", "(?!b)", "^(?!a)(?!.*b)(?!^[^h]+$)h"]
TRIVIAL: list[Any] = [True, {}, {"title": "T"}]


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema)


class Schemas:
    """Random ones of few keywords with few values, among them many that constrain nothing."""

    def __init__(self, seed: int) -> None:
        self.sample = random.Random(seed)

    def root(self) -> dict[str, Any]:
        return {**self.schema(3, is_object=True), "$defs": {"x": self.schema(1), "y/z": self.schema(1, is_object=True)}}

    def schema(self, depth: int, *, is_object: bool = False) -> Any:
        sample = self.sample
        if not is_object and sample.random() < 0.2:
            return sample.choice([*TRIVIAL, False])
        keywords = list(self.KEYWORDS if depth > 0 else self.LEAVES)
        result: dict[str, Any] = {}
        for keyword in sample.sample(keywords, sample.choice([1, 1, 2, 2, 3])):
            result[keyword] = self.KEYWORDS[keyword](self, depth - 1)
        return result

    def some(self, depth: int) -> list[Any]:
        return [self.schema(depth) for _ in range(self.sample.choice([1, 2, 2]))]

    def table(self, depth: int) -> dict[str, Any]:
        names = self.sample.sample(["a", "b", "c", "ab"], self.sample.choice([0, 1, 2]))
        return {name: self.schema(depth) for name in names}

    def names(self, depth: int) -> list[str]:
        return self.sample.sample(["a", "b", "c"], self.sample.choice([0, 1, 2]))

    def types(self, depth: int) -> Any:
        kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
        return self.sample.choice([*kinds, "object", "object", "array", self.sample.sample(kinds, 2)])

    LEAVES = ("type", "const", "enum", "minLength", "maxLength", "pattern", "minimum", "exclusiveMaximum", "required",
              "minItems", "uniqueItems", "$ref", "title", "format", "minProperties", "maxProperties")  # fmt: skip
    KEYWORDS: ClassVar[dict[str, Any]] = {
        "type": types,
        "const": lambda self, depth: self.sample.choice(VALUES),
        "enum": lambda self, depth: self.sample.sample(VALUES, 3),
        "minLength": lambda self, depth: self.sample.choice([0, 1, 2]),
        "maxLength": lambda self, depth: self.sample.choice([0, 1, 2**31]),
        "pattern": lambda self, depth: self.sample.choice(["", "^a", "b$", *PATTERNS]),
        "minimum": lambda self, depth: self.sample.choice([0, 1.5]),
        "exclusiveMaximum": lambda self, depth: self.sample.choice([1, 3]),
        "multipleOf": lambda self, depth: self.sample.choice([1, 2]),
        "minItems": lambda self, depth: self.sample.choice([0, 0.0, 1, 2]),
        "maxItems": lambda self, depth: self.sample.choice([0, 1, 2, 2**31]),
        "uniqueItems": lambda self, depth: self.sample.choice([False, False, True]),
        "minProperties": lambda self, depth: self.sample.choice([0, 1]),
        "maxProperties": lambda self, depth: self.sample.choice([0, 1, 2, 9]),
        "minContains": lambda self, depth: self.sample.choice([0, 0, 1]),
        "maxContains": lambda self, depth: self.sample.choice([0, 1, 9]),
        "required": names,
        "title": lambda self, depth: "T",
        "format": lambda self, depth: self.sample.choice(["file-path", "int32"]),
        "$ref": lambda self, depth: self.sample.choice(["#/$defs/x", "#/$defs/y~1z", "#/$defs/y~1%7A"]),
        "properties": table,
        "patternProperties": lambda self, depth: {
            pattern: self.schema(depth) for pattern in self.sample.choice([[], ["^a"], ["^a$"], ["^(a|b)$", "b"]])
        },
        "additionalProperties": schema,
        "unevaluatedProperties": schema,
        "propertyNames": lambda self, depth: self.sample.choice(
            [*TRIVIAL, {"type": "string"}, {"enum": ["a", "b", 1]}, {"maxLength": 1}, {"pattern": "^a"},
             {"type": "null"}, {"const": "a"}, {"$ref": "#/$defs/x"}, False]
        ),
        "dependentRequired": lambda self, depth: {name: self.names(0) for name in self.names(0)},
        "dependentSchemas": table,
        "prefixItems": some,
        "items": schema,
        "contains": schema,
        "unevaluatedItems": schema,
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": schema,
        "if": schema,
        "then": schema,
        "else": schema,
    }  # fmt: skip


@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 40000), marks=pytest.mark.exhaustive)], ids=len)
def test_a_prepared_schema_takes_the_same_values(seeds: range) -> None:
    num_taken, keywords = 0, set()
    for seed in seeds:
        schema = Schemas(seed).root()
        try:
            ready = prepared(schema)
            again = prepared(ready.schema).schema
        except RequestError:
            continue
        before, after, twice = validator(schema), validator(ready.schema), validator(again)
        try:
            are_valid = [before.is_valid(value) for value in VALUES]
        except BaseException as error:  # a reference to where it stands; rpds, which is Rust, panics at the limit
            if "RecursionError" not in repr(error):
                raise
            continue
        num_taken += 1
        keywords |= schema.keys()
        for value, expected in zip(VALUES, are_valid, strict=True):
            assert after.is_valid(value) == twice.is_valid(value) == expected, (seed, schema, ready.schema, value)
    assert num_taken > 0.5 * len(seeds)
    assert keywords >= Schemas.KEYWORDS.keys()


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {}}}
FURTHER = {"a": 1, "b": 1, "z": 1}
"""Has a key that neither of them names."""


@pytest.mark.parametrize(
    ("schema", "num_closed"),
    [
        (A, 1),
        (B, 1),
        ({**A, "additionalProperties": None}, 1),
        ({**A, "description": "d", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, 1),
        ({"allOf": [A]}, 1),
        ({"allOf": [A, {}, {"title": "T"}]}, 1),
        ({"anyOf": [A, B]}, 2),
        ({"$ref": "#/$defs/x", "description": "d", "$defs": {"x": A, "unused": B}}, 1),
        ({**A, "properties": {"a": A}}, 2),
        ({**A, "additionalProperties": True}, 0),
        ({**A, "additionalProperties": {}}, 0),
        ({**A, "patternProperties": {"^z": {}}}, 0),
        ({**A, "unevaluatedProperties": True}, 0),
        ({"type": "object"}, 0),
        ({"required": ["a"]}, 0),
        ({"allOf": [A, B]}, 0),
        ({**A, "allOf": [B]}, 0),
        ({**A, "$ref": "#/$defs/x", "$defs": {"x": B}}, 0),
        ({**A, "required": ["a"]}, 1),
        ({**A, "required": ["a", "z"]}, 0),  # closed, no object could have it
        ({**A, "allOf": [{"required": ["z"]}]}, 0),
        ({"allOf": [{"$ref": "#/$defs/x"}, A], "$defs": {"x": B}}, 0),
        ({**A, "if": True, "then": B}, 0),
        ({"not": {"not": A}}, None),
        (True, 0),
    ],
)
def test_which_objects_are_closed(schema: Any, num_closed: int | None) -> None:
    """What knows all keys; a part does not, and neither does a definition where a part refers to it."""
    if num_closed is None:
        with pytest.raises(RequestError, match=r"grammar\.not"):
            prepared(schema, closes=True)
        return
    ready = prepared(schema, closes=True)
    assert ready.num_closed == num_closed
    assert validator(ready.schema).is_valid(FURTHER) == (num_closed == 0)
    assert prepared(schema).num_closed == 0


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/missing"}, r"grammar\.\$ref: .* points to nothing: there is no '\$defs'"),
        ({"properties": {"a b": {"$ref": "https://x/y"}}}, r'grammar\.properties\["a b"\]\.\$ref: .* nothing is fetch'),
        ({"$ref": "#nowhere"}, "an anchor that the schema does not have"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to itself"),
        ({"$ref": 3}, r"grammar\.\$ref: \$ref must be a string, got 3"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"type": "any"}}}}, r"\.\$defs\.a\.items\.type: .*'any'"),
        ({"properties": {"a": {"propertyNames": {"$ref": "#/properties/a"}}}}, "names refers to itself"),
        ({"enum": [1, {"id": 12345678901234567890}]}, r"grammar\.enum\[1\]\.id: 12345678901234567890 has more digits"),
        ({"enum": ["a", "\ud800"]}, r"grammar\.enum\[1\]: .* half of a surrogate pair"),
        ({"anyOf": [{}, {"minItems": -1}]}, r"grammar\.anyOf\[1\]\.minItems: .* from 0, got -1"),
        ({"properties": {"a": {"required": True}}}, r"grammar\.properties\.a\.required: .*, got True"),
        ({"items": [{"type": ["string", "int"]}]}, r"grammar\.items\[0\]\.type: there is no type 'int'; .*integer"),
    ],
)
def test_an_error_names_the_place_and_what_stands_there(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        prepared(schema)


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "https://x.y/z", "$ref": "#/$defs/b", "$defs": {"b": TEXT}},
        {"$id": "user.json", "$ref": "user.json#/$defs/b", "$defs": {"b": TEXT}},
        {"$ref": "#b", "$defs": {"b": {"$anchor": "b", **TEXT}}},
        {"$ref": "item.json", "$defs": {"b": {"$id": "item.json", **TEXT}}},
        {"$id": "https://x.y/a/", "$ref": "b", "$defs": {"b": {"$id": "https://x.y/a/b", **TEXT}}},
        {"$ref": "urn:x:b", "$defs": {"b": {"$id": "urn:x:b", "$ref": "#/$defs/c", "$defs": {"c": TEXT}}}},
        {"$ref": "#/$defs/a~1b~0c%25d%20e", "$defs": {"a/b~c%d e": TEXT}},
        {"$ref": "#/prefixItems/0", "prefixItems": [TEXT]},
        {"$ref": "#/components/schemas/Foo[int]", "components": {"schemas": {"Foo[int]": TEXT}}},
        {"allOf": [{"$id": "foo", "$ref": "#/definitions/b"}], "definitions": {"b": TEXT}},
        {"$dynamicRef": "#n", "$defs": {"b": {"$dynamicAnchor": "n", **TEXT}}},
    ],
)
def test_references(schema: Any) -> None:
    """The last but two is a pointer that is no URI, the next holds in drafts up to 7, which pass over `$id` there."""
    ready = validator(prepared(schema).schema)
    assert [value for value in SCALARS if ready.is_valid(value)] == [text for text in SCALARS if isinstance(text, str)]


def test_formats_that_no_answer_is_held_to_are_named() -> None:
    schema = {
        "properties": {"p": {"type": "string", "format": "file-path"}, "d": {"format": "date"}, "n": {"type": "null"}},
        "$defs": {"x": {"format": "uuid4"}, "unused": {"format": "byte"}},
        "items": {"$ref": "#/$defs/x"},
    }
    assert prepared(schema).ignored == ["properties.p.format=file-path", "$defs.x.format=uuid4"]
    assert prepared({"type": "integer", "format": "uuid4"}).ignored == []


def test_openapis_nullable_has_no_effect_and_is_named_where_it_would_have_one() -> None:
    note = {"type": "string", "nullable": True}
    found = prepared({"properties": {"note": note, "other": {"$ref": "#/$defs/n"}}, "$defs": {"n": note}})
    assert found.ignored == ["properties.note.nullable", "$defs.n.nullable"]
    assert isinstance(found.schema, dict)
    assert found.schema["properties"]["note"] == {"type": "string"}
    for harmless in ({"type": ["string", "null"], "nullable": True}, {"nullable": True}, note | {"nullable": False}):
        assert prepared(harmless).ignored == []
