"""JSON schemas of many kinds, from a seed: objects in objects, arrays, tuples, maps, enums, bounds, patterns, formats,
anyOf, oneOf, allOf, $ref (recursive ones, too), keys in several scripts. All can be satisfied, and the grammar promises
all that they say.

About one string and one number in ten has no bound: a model with random weights hardly finds their end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

KEYS = (
    "id", "name", "first name", "größe", "名前", "город", "emoji 🎉", 'quo"te', "back\\slash", "new\nline", "a/b",
    "~tilde", "$price",
    "snake_case", "camelCase", "kebab-case", "x", "тип", "ναι", "empty", "0", "true", "null", "%", "é",
)  # fmt: skip
WORDS = (
    "red", "green", "blue", "Zürich", "東京", "two words", "", 'a "quoted" word', "tab\there", "ja/nein", "✓", "-1",
)  # fmt: skip
PATTERNS = (
    "^[a-z]{2,8}$", "^[A-Z][a-z]{1,10}$", r"^\d{3}-\d{4}$", "^(foo|bar|baz)+$", "^#[0-9a-f]{6}$", r"^v\d+\.\d+$",
    r"^[^\s]{1,12}$", "^(yes|no)$", r"^\+?[1-9]\d{5,10}$", "^[äöü]{1,4}$",
)  # fmt: skip
FORMATS = ("date", "date-time", "time", "ipv4", "ipv6", "uuid", "email", "hostname", "duration")
BOUNDLESS = 0.1


def schema_case(seed: int) -> Schema:
    """The same for the same seed."""
    return _Generator(random.Random(seed)).document()


class _Generator:
    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.definitions: dict[str, Schema] = {}
        self.open_names: list[str] = []

    def document(self) -> Schema:
        root = self.value(depth=0) if self.source.random() < 0.25 else self.object(depth=0)
        if self.source.random() < 0.3:
            root = {"title": "A case", "description": "Made from a seed.", **root}
        return {**root, "$defs": self.definitions} if self.definitions else root

    def value(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            self.string, self.integer, self.number, self.enum, self.constant, self.simple,
        ]  # fmt: skip
        branches: list[Callable[[], Schema]] = [
            lambda: self.object(depth + 1), lambda: self.object(depth + 1), lambda: self.array(depth + 1),
            lambda: self.tuple(depth + 1), lambda: self.map(depth + 1), lambda: self.any_of(depth + 1),
            lambda: self.one_of(depth + 1), lambda: self.all_of(depth + 1), lambda: self.reference(depth + 1),
        ]  # fmt: skip
        pool = leaves if depth >= 3 or self.source.random() < 0.55 else branches
        return self.source.choice(pool)()

    def string(self) -> Schema:
        kind = self.source.random()
        if kind < BOUNDLESS:
            return {"type": "string"}
        if kind < 0.5:
            least = self.source.randrange(4)
            return {"type": "string", "minLength": least, "maxLength": least + self.source.randrange(1, 12)}
        if kind < 0.8:
            return {"type": "string", "pattern": self.source.choice(PATTERNS)}
        return {"type": "string", "format": self.source.choice(FORMATS)}

    def integer(self) -> Schema:
        if self.source.random() < BOUNDLESS:
            return {"type": "integer"}
        low = self.source.randrange(-1000, 1000)
        schema: Schema = {"type": "integer"}
        schema[self.source.choice(("minimum", "exclusiveMinimum"))] = low
        schema[self.source.choice(("maximum", "exclusiveMaximum"))] = low + self.source.randrange(20, 5000)
        if self.source.random() < 0.2:
            schema["multipleOf"] = self.source.choice((2, 3, 5, 10))
        return schema

    def number(self) -> Schema:
        if self.source.random() < BOUNDLESS:
            return {"type": "number"}
        if self.source.random() < 0.3:
            return {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": self.source.choice((0.25, 0.5))}
        low = round(self.source.uniform(-100, 100), 2)
        return {"type": "number", "minimum": low, "maximum": round(low + self.source.uniform(1, 50), 2)}

    def enum(self) -> Schema:
        values: list[Any] = self.source.sample(WORDS, self.source.randrange(1, 6))
        if self.source.random() < 0.4:
            values += self.source.sample([None, True, 0, -7, 2.5], 2)
            return {"enum": values}
        return {"type": "string", "enum": values}

    def constant(self) -> Schema:
        return {"const": self.source.choice([*WORDS, 3, None, False, [1, "two"], {"k": "v"}])}

    def simple(self) -> Schema:
        return {"type": self.source.choice(("boolean", "null", ["boolean", "null"]))}

    def object(self, depth: int) -> Schema:
        keys = self.source.sample(KEYS, self.source.randrange(1, 6))
        schema: Schema = {"type": "object", "properties": {key: self.value(depth) for key in keys}}
        if self.source.random() < 0.7:
            schema["required"] = self.source.sample(keys, self.source.randrange(1, len(keys) + 1))
        if self.source.random() < 0.9:
            schema["additionalProperties"] = False
        return schema

    def map(self, depth: int) -> Schema:
        """An object whose keys are not known."""
        value = self.value(max(depth, 2))
        if self.source.random() < 0.75:
            return {
                "type": "object", "patternProperties": {"^[a-z]{1,5}$": value}, "additionalProperties": False,
                "maxProperties": 3,
            }  # fmt: skip
        return {"type": "object", "additionalProperties": value, "maxProperties": 2}

    def array(self, depth: int) -> Schema:
        least = self.source.randrange(3)
        most = least + self.source.randrange(4)
        return {"type": "array", "items": self.value(depth), "minItems": least, "maxItems": most}

    def tuple(self, depth: int) -> Schema:
        items = [self.value(depth) for _ in range(self.source.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth) for _ in range(self.source.randrange(2, 4))]}

    def one_of(self, depth: int) -> Schema:
        """Told apart by a constant."""
        options = []
        for name in self.source.sample(("circle", "square", "line"), self.source.randrange(2, 4)):
            options.append(
                {
                    "type": "object", "properties": {"kind": {"const": name}, "value": self.value(max(depth, 3))},
                    "required": ["kind", "value"], "additionalProperties": False,
                }
            )  # fmt: skip
        return {"oneOf": options}

    def all_of(self, depth: int) -> Schema:
        first, second = self.source.sample(KEYS, 2)
        return {
            "allOf": [
                {"type": "object", "properties": {first: self.value(max(depth, 2))}, "required": [first]},
                {"type": "object", "properties": {second: self.integer()}, "required": [second]},
            ],
            "maxProperties": 2,
        }

    def reference(self, depth: int) -> Schema:
        """To a definition, made now or before; at times to one within which it stands, which then is optional."""
        finished = [name for name in self.definitions if name not in self.open_names]
        if finished and self.source.random() < 0.4:
            return {"$ref": f"#/$defs/{self.source.choice(finished)}"}
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}
        self.open_names.append(name)
        definition = self.object(depth)
        if self.source.random() < 0.4:
            definition["properties"]["next"] = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
        self.open_names.pop()
        self.definitions[name] = definition
        return {"$ref": f"#/$defs/{name}"}
