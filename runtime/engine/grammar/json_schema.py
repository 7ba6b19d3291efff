"""Rewrites a JSON schema for llguidance: the same values, with the few keywords that it supports.

Schemas come from many generators and every draft. Keywords that constrain nothing are dropped, those that others can
express are replaced, and those that cannot be enforced are refused with their place. The remaining references point to
`#/$defs/…`. A format that is not enforced is an annotation, as the specification has it, and so is OpenAPI's
`nullable`.
"""

from __future__ import annotations

import sys
from decimal import Decimal
from typing import Any

from runtime.engine.grammar.grammar import MAX_ENUM_VALUES, MAX_GRAMMAR_DEPTH, MAX_SCHEMA_NODES, grammar_error
from runtime.engine.grammar.schema_objects import IN_PLACE, ObjectKeywords, has_several_parts
from runtime.engine.grammar.schema_places import (
    NO_PROMISE,
    Disjointness,
    Prepared,
    References,
    Schema,
    place_in,
    schema_error,
    take_counts,
)
from runtime.engine.grammar.schema_strings import ENFORCED, patterns_of

ALL_TYPES = ["null", "boolean", "number", "string", "array", "object"]
TYPES = (*ALL_TYPES, "integer")

_BY_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
        "maxContains", "unevaluatedItems",
    },
    "object": {
        "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
        "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    },
}  # fmt: skip
_KNOWN = frozenset({"type", "const", "enum", "not", *IN_PLACE}.union(*_BY_TYPE.values()))
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WIDEST = 9 * 10**18
"""llguidance supports bounds of numbers slightly beyond these."""
_SIGNS_OF_CONTROL_CHARACTERS = ("\\x0", "\\x1", "\\x7f", "\\x7F", "\\u00")


def prepared(schema: Any, *, closes: bool = False) -> Prepared:
    """The schema rewritten for llguidance.

    closes  an object with declared properties and no rule for further ones gets none

    Raises ``RequestError`` with param "grammar" and the place of the keyword that cannot be enforced.
    """
    if not isinstance(schema, (dict, bool)):
        raise grammar_error(f"a JSON schema must be an object, true or false, got {schema!r:.40}")
    _check_size(schema)
    return _Preparer(schema, closes).prepared()


def _check_size(schema: Any) -> None:
    """Walks level by level, so that no depth can exhaust the stack."""
    num_nodes = 0
    level: list[Any] = [schema]
    for _ in range(MAX_GRAMMAR_DEPTH):
        num_nodes += len(level)
        if num_nodes > MAX_SCHEMA_NODES:
            raise grammar_error(f"a schema may have at most {MAX_SCHEMA_NODES} values, got more")
        level = [
            inner
            for node in level
            if isinstance(node, (dict, list))
            for inner in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise grammar_error(f"a schema may be nested at most {MAX_GRAMMAR_DEPTH} levels deep, got more")


class _Preparer:
    def __init__(self, root: Schema, closes: bool) -> None:
        self._root = root
        self._references = References(root if isinstance(root, dict) else {}, _KNOWN)
        self._disjointness = Disjointness(self._references)
        self._notes = Prepared()
        self._objects = ObjectKeywords(self._schema, self._defined, self._references, self._notes, closes)
        self._definitions: dict[tuple[int, bool], str] = {}
        self._waiting: list[tuple[str, Any, str, bool]] = []

    def prepared(self) -> Prepared:
        schema = self._schema(self._root, "", False)
        bodies = {}
        while self._waiting:
            name, target, place, is_part = self._waiting.pop()
            bodies[name] = self._schema(target, place, is_part)
        if isinstance(schema, dict) and bodies:
            schema["$defs"] = bodies
        self._notes.schema = schema
        return self._notes

    def _schema(self, node: Any, place: str, is_part: bool) -> Schema:
        """`is_part` means that sibling schemas declare properties too, so that this one does not know all of them."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise schema_error(place, f"a schema must be an object, true or false, got {node!r:.60}")
        found = {k: v for k, v in node.items() if k in _KNOWN and (v is not None or k == "const")}
        types = _types(found, place)
        if node.get("nullable") is True and "null" not in types:  # OpenAPI 3.0's; JSON Schema has no such keyword
            self._notes.ignored.append(place_in(place, "nullable"))
        kinds = {"number" if name == "integer" else name for name in types}
        dropped = {name for kind, names in _BY_TYPE.items() if kind not in kinds for name in names}
        found = {k: v for k, v in found.items() if k not in dropped}
        result: dict[str, Any] = {}
        if len(types) < len(ALL_TYPES):
            result["type"] = types if len(types) != 1 else types[0]
        is_inner_part = is_part or has_several_parts(found)
        self._numbers(found, result, place)
        self._strings(found, result, place)
        self._arrays(found, result, place)
        self._objects.take(node, found, result, place, is_part)
        if not types or not self._values(found, result, place):
            return False
        if not self._combined(node, found, result, place, is_inner_part):
            return False
        self._notes.nodes.append((place, result))
        return result or True

    # Each of these adds its keywords' meaning to `result`. Those for any type return False if no value is left.

    def _values(self, found: dict[str, Any], result: dict[str, Any], place: str) -> bool:
        values = found.get("enum")
        if values is not None:
            where = place_in(place, "enum")
            if not isinstance(values, list):
                raise schema_error(where, f"enum must be a list of values, got {values!r:.60}")
            if len(values) > MAX_ENUM_VALUES:
                raise schema_error(where, f"an enum may have at most {MAX_ENUM_VALUES} values, got {len(values)}")
            self._check_value(values, where)
            result["enum"] = values
        if "const" in found:
            self._check_value(found["const"], place_in(place, "const"))
            result["const"] = found["const"]
        return values != []

    def _check_value(self, value: Any, place: str) -> None:
        """Raises if an answer could not have exactly this value."""
        if isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > 2**53 and (abs(value) > 10**300 or int(Decimal(repr(float(value)))) != value):
                reason = "has more digits than a grammar of numbers keeps; it must be at most 2**53 or end in zeros"
                raise schema_error(place, f"{value!r:.40} {reason}")
        elif isinstance(value, str):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise schema_error(place, f"{value!r:.60} has half of a surrogate pair: write the whole character")
            self._notes.note_characters(value)
        elif isinstance(value, list):
            for i, each in enumerate(value):
                self._check_value(each, place_in(place, i))
        elif isinstance(value, dict):
            for key, each in value.items():
                self._notes.note_characters(key)
                self._check_value(each, place_in(place, key))

    def _numbers(self, found: dict[str, Any], result: dict[str, Any], place: str) -> None:
        for name in _BOUNDS:
            value = found.get(name)
            if value is None:
                continue
            if isinstance(value, bool) and name.startswith("exclusive"):  # draft 4 and OpenAPI 3.0
                inclusive = name.removeprefix("exclusive").lower()
                if value and inclusive in result:
                    result[name] = result.pop(inclusive)
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise schema_error(place_in(place, name), f"{name} must be a number, got {value!r:.60}")
            if name == "multipleOf" and value <= 0:
                raise schema_error(place_in(place, name), f"multipleOf must be above 0, got {value!r:.60}")
            if name == "multipleOf":
                if value != 1 or result.get("type") != "integer":
                    result[name] = value
            elif abs(value) <= _WIDEST:
                result[name] = value
            elif value < 0 if name.lower().endswith("maximum") else value > 0:
                reason = f"{name} must be from -{_WIDEST} to {_WIDEST}, got {value!r:.60}"
                raise schema_error(place_in(place, name), reason)
            elif abs(value) < sys.float_info.max:  # a narrower bound, which the grammar can enforce
                result[name] = _WIDEST if value > 0 else -_WIDEST

    def _strings(self, found: dict[str, Any], result: dict[str, Any], place: str) -> None:
        take_counts(found, result, place, "minLength", "maxLength")
        pattern, named = found.get("pattern"), found.get("format")
        for name, value in (("pattern", pattern), ("format", named)):
            if value is not None and not isinstance(value, str):
                raise schema_error(place_in(place, name), f"{name} must be a string, got {value!r:.60}")
        if pattern:
            self._notes.note_characters(pattern)
            if any(sign in pattern for sign in _SIGNS_OF_CONTROL_CHARACTERS):
                self._notes.has_control_characters = True
            try:
                first, *others = patterns_of(pattern)
            except ValueError as error:
                raise schema_error(place_in(place, "pattern"), str(error)) from None
            result["pattern"] = first
            if others:
                result["allOf"] = [{"pattern": other} for other in others]
        if named in ENFORCED:
            result["format"] = named
        elif named:
            self._notes.ignored.append(f"{place_in(place, 'format')}={named:.80}")

    def _arrays(self, found: dict[str, Any], result: dict[str, Any], place: str) -> None:
        take_counts(found, result, place, "minItems", "maxItems")
        rest, prefix = found.get("items"), found.get("prefixItems")
        names = ("prefixItems", "items")
        if isinstance(rest, list):  # drafts up to 2019-09
            rest, prefix, names = found.get("additionalItems"), rest, ("items", "additionalItems")
        if prefix is not None and not isinstance(prefix, list):
            raise schema_error(place_in(place, names[0]), f"{names[0]} must be a list of schemas, got {prefix!r:.60}")
        if prefix:
            places = [place_in(place, names[0], i) for i in range(len(prefix))]
            result["prefixItems"] = [self._schema(*each, False) for each in zip(prefix, places, strict=True)]
        unevaluated = found.get("unevaluatedItems", True)
        if rest is None and unevaluated is not True and unevaluated != {}:
            if any(keyword in found for keyword in (*IN_PLACE, "contains")):
                raise schema_error(place_in(place, "unevaluatedItems"), f"beside these keywords {NO_PROMISE}")
            rest = unevaluated
        if rest is not None and (items := self._schema(rest, place_in(place, names[1]), False)) is not True:
            result["items"] = items
        is_unique = found.get("uniqueItems", False)
        if not isinstance(is_unique, bool):
            raise schema_error(place_in(place, "uniqueItems"), f"it must be true or false, got {is_unique!r:.60}")
        if is_unique and result.get("maxItems", 2) > 1:
            raise schema_error(place_in(place, "uniqueItems"), NO_PROMISE)
        self._contains(found, result, place)

    def _contains(self, found: dict[str, Any], result: dict[str, Any], place: str) -> None:
        counts: dict[str, Any] = {}
        take_counts({"minContains": 1} | found, counts, place, "minContains", "maxContains")
        if "contains" not in found or not counts:
            return
        wanted = self._schema(found["contains"], place_in(place, "contains"), True)
        if wanted is False:
            result |= {"minItems": 1, "maxItems": 0} if "minContains" in counts else {}
            return
        if wanted is not True:
            raise schema_error(place_in(place, "contains"), NO_PROMISE)
        for name, count, chosen in (
            ("minItems", counts.get("minContains"), max),
            ("maxItems", counts.get("maxContains"), min),
        ):
            if count is not None:
                result[name] = chosen(count, result.get(name, count))

    def _combined(
        self, node: dict[str, Any], found: dict[str, Any], result: dict[str, Any], place: str, is_part: bool
    ) -> bool:
        parts: list[Schema] = result.pop("allOf", [])
        parts += [self._referred(node, name, place, is_part) for name in IN_PLACE[3:6] if name in found]
        parts += self._condition(found, place)
        if not self._negation(found, result, place):
            return False
        for keyword in ("allOf", "anyOf", "oneOf"):
            given = found.get(keyword)
            if given is None:
                continue
            where = place_in(place, keyword)
            if not isinstance(given, list):
                raise schema_error(where, f"{keyword} must be a list of schemas, got {given!r:.60}")
            schemas = [self._schema(each, place_in(where, i), is_part) for i, each in enumerate(given)]
            if keyword == "allOf":
                parts += schemas
                continue
            options = [i for i, each in enumerate(schemas) if each is not False]
            if keyword == "oneOf":
                self._check_apart(given, options, node, where)
            if len(options) > 1:
                is_any = any(schemas[i] is True for i in options)
                parts.append(is_any or {"anyOf": [schemas[i] for i in options]})
            else:
                parts.append(schemas[options[0]] if options else False)
        parts = [part for part in parts if part is not True]
        first = parts[0] if parts else False
        is_simple = isinstance(first, dict) and first.keys() <= {"$ref", "anyOf"} and not first.keys() & result
        if isinstance(first, dict) and (is_simple or not (result or parts[1:])):
            result |= first
            del parts[0]
        if parts:
            result["allOf"] = parts
        return False not in parts

    def _check_apart(self, options: list[Any], kept: list[int], node: dict[str, Any], place: str) -> None:
        """`oneOf` equals `anyOf` if no value matches two options."""
        for n, i in enumerate(kept):
            for j in kept[:n]:
                if not self._disjointness.are_apart(options[j], options[i], node):
                    why = f"options {j} and {i} may take the same value, which oneOf then refuses"
                    raise schema_error(place, f"{why}: {NO_PROMISE}, or send anyOf")

    def _referred(self, node: dict[str, Any], keyword: str, place: str, is_part: bool) -> Schema:
        where = place_in(place, keyword)
        reference = node[keyword]
        if not isinstance(reference, str):
            raise schema_error(where, f"{keyword} must be a string, got {reference!r:.60}")
        find = self._references.target if keyword == "$ref" else self._references.dynamic_target
        try:
            target = self._references.followed(find(node, reference))
        except LookupError as error:
            raise schema_error(where, str(error.args[0])) from None
        names = reference.partition("#")[2].strip("/").replace("~1", "/").split("/")
        shown = "" if target is self._root else place_in("", *names) if names != [""] else reference
        return self._defined(target, shown if isinstance(target, dict) else where, is_part)

    def _defined(self, target: Any, place: str, is_part: bool) -> Schema:
        """The schema, by reference to one of the definitions, so that it may apply in several places."""
        if isinstance(target, dict) and target.get("not") in (True, {}) and "not" in target:
            return False
        if not isinstance(target, dict):
            return self._schema(target, place, is_part)
        key = id(target), is_part
        if key not in self._definitions:
            self._definitions[key] = f"d{len(self._definitions)}"
            self._waiting.append((self._definitions[key], target, place, is_part))
        return {"$ref": f"#/$defs/{self._definitions[key]}"}

    def _condition(self, found: dict[str, Any], place: str) -> list[Schema]:
        if "if" not in found:
            return []
        chosen = {name: self._schema(found.get(name, True), place_in(place, name), True) for name in ("then", "else")}
        if chosen["then"] is True and chosen["else"] is True:
            return []
        condition = self._schema(found["if"], place_in(place, "if"), True)
        if not isinstance(condition, bool):
            raise schema_error(place_in(place, "if"), NO_PROMISE)
        return [chosen["then" if condition else "else"]]

    def _negation(self, found: dict[str, Any], result: dict[str, Any], place: str) -> bool:
        if "not" not in found:
            return True
        unwanted = self._schema(found["not"], place_in(place, "not"), True)
        if isinstance(unwanted, bool):
            return not unwanted
        given = (unwanted.get("type", []), result.get("type", ALL_TYPES))
        kinds, had = ([each] if isinstance(each, str) else each for each in given)
        if unwanted.keys() != {"type"} or ("integer" in kinds and "number" in had):
            raise schema_error(place_in(place, "not"), NO_PROMISE)
        result["type"] = [kind for kind in had if kind not in kinds and not (kind == "integer" and "number" in kinds)]
        return bool(result["type"])


def _types(found: dict[str, Any], place: str) -> list[str]:
    """The types that `type` names, or all; "integer" only without "number"."""
    given = found.get("type", ALL_TYPES)
    names = given if isinstance(given, list) else [given]
    for name in names:
        if name not in TYPES:
            allowed = ", ".join(TYPES)
            raise schema_error(place_in(place, "type"), f"there is no type {name!r:.60}; it must be one of {allowed}")
    return [name for name in dict.fromkeys(names) if name != "integer" or "number" not in names]
