"""The keys that an object of a JSON schema may have, and the schemas of their values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from runtime.engine.grammar.grammar import MAX_ENUM_VALUES
from runtime.engine.grammar.schema_places import (
    NO_PROMISE,
    Prepared,
    References,
    Schema,
    as_list,
    place_in,
    schema_error,
    take_counts,
)
from runtime.engine.grammar.schema_strings import NAME_PATTERNS, patterns_of

IN_PLACE = ("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "then", "else", "dependentSchemas")
"""Keywords of schemas that apply to the same value."""
_SAYS_WHICH_KEYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


class ObjectKeywords:
    """
    prepare     a subschema, its place, and whether it is one part of an object's declaration
    define      the same for several places: without it nested patterns would multiply the schema
    references  of the whole schema
    notes       collects the findings
    closes      an object with declared properties and no rule for further ones gets none
    """

    def __init__(
        self, prepare: Callable[[Any, str, bool], Schema], define: Callable[[Any, str, bool], Schema],
        references: References, notes: Prepared, closes: bool,
    ) -> None:  # fmt: skip
        self._prepare, self._define = prepare, define
        self._references = references
        self._notes = notes
        self._closes = closes
        self._names_under_way: set[int] = set()

    def take(
        self, node: dict[str, Any], found: dict[str, Any], result: dict[str, Any], place: str, is_part: bool
    ) -> None:
        """Adds the meaning of the keywords `found` of `node` to `result`."""
        take_counts(found, result, place, "minProperties", "maxProperties")
        required = self._required(found, place)
        parts = self._dependencies(found, place, required)
        for name in ("properties", "patternProperties"):
            table = found.get(name)
            if table is not None and not isinstance(table, dict):
                raise schema_error(place_in(place, name), f"{name} must be an object of schemas, got {table!r:.60}")
            for key, each in (table or {}).items():
                self._notes.note_characters(key)
                keys = [key] if name == "properties" else _names_of(key)
                prepare = self._define if len(keys or ()) > 1 else self._prepare
                schema = prepare(each, place_in(place, name, key), False)
                if keys is None:
                    result.setdefault(name, {})[_key_pattern(key, place)] = schema
                    continue
                declared = result.setdefault("properties", {})
                for one in keys:
                    declared[one] = {"allOf": [declared[one], schema]} if one in declared else schema
        if required:
            result["required"] = list(dict.fromkeys(required))
            for key in required:
                self._notes.note_characters(key)
        further = self._further(node, found, result, place, is_part)
        if further is not True:
            result["additionalProperties"] = further
        if parts:
            result["allOf"] = [*result.get("allOf", []), *parts]
        if "propertyNames" in found:
            self._property_names(found["propertyNames"], result, place)
        self._check_numbers(result, place)

    def _required(self, found: dict[str, Any], place: str) -> list[str]:
        required = found.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            reason = f"required must be a list of property names, beside properties, got {required!r:.60}"
            raise schema_error(place_in(place, "required"), reason)
        return list(required)

    def _dependencies(self, found: dict[str, Any], place: str, required: list[str]) -> list[Schema]:
        """Dependencies on required properties: further names go to `required`, schemas are returned."""
        parts: list[Schema] = []
        for name in ("dependentRequired", "dependencies", "dependentSchemas"):
            table = found.get(name) or {}
            if not isinstance(table, dict):
                raise schema_error(place_in(place, name), f"{name} must be an object, got {table!r:.60}")
            for key, wanted in table.items():
                where = place_in(place, name, key)
                further = wanted if isinstance(wanted, list) else []
                schema = True if isinstance(wanted, list) else self._prepare(wanted, where, True)
                if key in required and (schema is True or found.get("type") == "object"):
                    required += further
                    parts += [] if schema is True else [schema]
                elif schema is not True or not set(further) <= set(required):
                    raise schema_error(where, f"{key!r:.60} is not required: {NO_PROMISE}, or make it required")
        return parts

    def _further(
        self, node: dict[str, Any], found: dict[str, Any], result: dict[str, Any], place: str, is_part: bool
    ) -> Schema:
        """The schema of further properties: `additionalProperties`, or that implied by other keywords and `closes`."""
        if "additionalProperties" in found:
            return self._prepare(found["additionalProperties"], place_in(place, "additionalProperties"), False)
        unevaluated = found.get("unevaluatedProperties", True)
        if unevaluated is not True and unevaluated != {}:
            where = place_in(place, "unevaluatedProperties")
            names = self._names_of_parts(node)
            if names is None:
                raise schema_error(where, f"beside these keywords {NO_PROMISE}")
            if names:
                declared = result.setdefault("properties", {})
                declared.update({name: True for name in names if name not in declared})
            return self._prepare(unevaluated, where, False)
        is_open = is_part or any(found.get(name) for name in _SAYS_WHICH_KEYS) or _has_declaring_parts(found)
        declared = found.get("properties")
        if self._closes and isinstance(declared, dict) and not is_open and declared.keys() >= _wanted(found, result):
            self._notes.num_closed += 1
            return False
        return True

    def _property_names(self, names: Any, result: dict[str, Any], place: str) -> None:
        """Expressed by other keywords, as far as they can."""
        where = place_in(place, "propertyNames")
        try:
            names = self._references.followed(names)
        except LookupError as error:
            raise schema_error(where, str(error.args[0])) from None
        if id(names) in self._names_under_way:
            raise schema_error(where, f"the schema of the names refers to itself: {NO_PROMISE}")
        self._names_under_way.add(id(names))
        wanted = self._prepare(names, where, True)
        self._names_under_way.discard(id(names))
        if isinstance(wanted, dict):
            kinds = wanted.get("type", "string")
            wanted = wanted if "string" in (kinds if isinstance(kinds, list) else [kinds]) else False
        if wanted is False:
            result["maxProperties"] = 0
            return
        said = wanted.keys() - {"type"} if isinstance(wanted, dict) else set()
        if not said or wanted is True:
            return
        if said == {"format", "pattern"}:  # only one of them can be kept
            self._notes.ignored.append(f"{place_in(where, 'format')}={wanted['format']}")
            said = {"pattern"}
        further = result.get("additionalProperties", True)
        pattern = _pattern_of(wanted, said)
        if said <= {"enum", "const"} and "patternProperties" not in result:
            values = wanted.get("enum", [wanted.get("const")])
            allowed = {name: further for name in values if isinstance(name, str) and wanted.get("const", name) == name}
            declared = result.get("properties", {})
            result["properties"] = {name: each for name, each in (allowed | declared).items() if name in allowed}
            result["additionalProperties"] = False
        elif pattern is not None and not result.keys() & {"properties", "patternProperties", "required"}:
            result["patternProperties"] = {pattern: further}
            result["additionalProperties"] = False
        else:
            raise schema_error(where, f"with these keywords {NO_PROMISE}")

    def _check_numbers(self, result: dict[str, Any], place: str) -> None:
        """Drops bounds that always hold, and refuses one that repeated keys could violate."""
        required = result.get("required", [])
        least, most = result.get("minProperties", 0), result.get("maxProperties")
        is_closed = result.get("additionalProperties") is False and "patternProperties" not in result
        if least <= len(required):
            result.pop("minProperties", None)
        elif least > len(required) + 1 and not is_closed:
            reason = f"at most one more than the number of required properties ({len(required)}), got {least}"
            raise schema_error(place_in(place, "minProperties"), f"minProperties may be {reason}")
        if most is not None and is_closed and most >= len(result.get("properties", {})):
            del result["maxProperties"]

    def _names_of_parts(self, node: dict[str, Any]) -> list[str] | None:
        """The properties of a schema and of its parts in `allOf` and `$ref`; None if they cannot be determined."""
        names: list[str] = []
        waiting: list[Any] = [node]
        while waiting:
            try:
                each = self._references.followed(waiting.pop())
            except LookupError:
                return None
            if not isinstance(each, dict) or len(names) > MAX_ENUM_VALUES:
                return None
            others = (*IN_PLACE, *(_SAYS_WHICH_KEYS if each is not node else ("patternProperties",)))
            if any(each.get(name) not in (None, [], {}) for name in others if name != "allOf"):
                return None
            names += each.get("properties") or {}
            waiting += as_list(each.get("allOf"))
        return names


def has_several_parts(found: Mapping[str, Any]) -> bool:
    """Whether several of the schemas for one value declare properties, so that none knows all of them."""
    parts: list[Any] = [each for each in as_list(found.get("allOf")) if _may_declare(each)]
    parts += [name for name in ("anyOf", "oneOf") if any(map(_may_declare, as_list(found.get(name))))]
    parts += [name for name in IN_PLACE[3:] if name in found]
    parts += [name for name in ("properties", "patternProperties", "dependencies") if found.get(name)]
    return len(parts) > 1


def _has_declaring_parts(found: Mapping[str, Any]) -> bool:
    dependencies = found.get("dependencies")
    return (
        any(name in found for name in IN_PLACE[3:])
        or any(_may_declare(each) for name in IN_PLACE[:3] for each in as_list(found.get(name)))
        or (isinstance(dependencies, dict) and any(map(_may_declare, dependencies.values())))
    )


def _wanted(found: Mapping[str, Any], result: Mapping[str, Any]) -> set[str]:
    """Required properties: an object that does not declare them cannot be closed."""
    parts = [each for each in as_list(found.get("allOf")) if isinstance(each, dict)]
    lists = [result.get("required"), *(each.get("required") for each in parts)]
    return {name for names in lists for name in as_list(names) if isinstance(name, str)}


def _may_declare(schema: Any) -> bool:
    return isinstance(schema, dict) and any(schema.get(name) for name in ("properties", "patternProperties", *IN_PLACE))


def _names_of(pattern: str) -> list[str] | None:
    """The keys that match, if the pattern lists a few, as `^(one|two)$` and `^[ab]$` do. llguidance fails if a pattern
    matches no key that is not declared too, and lets a pattern's key come twice."""
    if (listed := _LISTED.fullmatch(pattern)) is None:
        return None
    names = list[str]()
    for each in re.split(r"(?<!\\)\|", listed[1] or listed[2]):
        parts = [_characters(part) for part in re.findall(_PART, each)]
        if not 0 < math.prod(map(len, parts)) <= MOST_NAMES - len(names):
            return None
        names += map("".join, itertools.product(*parts))
    return list(dict.fromkeys(names))


def _characters(part: str) -> list[str]:
    """Those that match one part of a pattern; of a range, a few more than `MOST_NAMES` at most."""
    if not part.startswith("["):
        return [part[-1]]
    spans = [range(ord(each[0]), ord(each[-1]) + 1) for each in re.findall(r"\w-\w|.", part[1:-1])]
    return list(dict.fromkeys(chr(code) for span in spans for code in span[: MOST_NAMES + 1]))


MOST_NAMES = 64
_PART = r"(?:[\w ,:;@/-]|\\[.$+*?()\[\]{}|^/-]|\[(?:\w-\w|[\w ,:;@/])+\])"
_LISTED = re.compile(rf"\^(?:({_PART}+)|\((?:\?:)?({_PART}+(?:\|{_PART}+)*)\))\$")


def _key_pattern(pattern: str, place: str) -> str:
    where = place_in(place, "patternProperties", pattern)
    try:
        patterns = patterns_of(pattern)
    except ValueError as error:
        raise schema_error(where, str(error)) from None
    if len(patterns) != 1:
        raise schema_error(where, f"{pattern!r:.200} has look-around, which no grammar enforces; write it without")
    return patterns[0]


def _pattern_of(schema: Any, said: set[str]) -> str | None:
    """The pattern of all texts that match the schema, if there is one."""
    if said == {"pattern"}:
        return str(schema["pattern"])
    if said == {"format"}:
        return NAME_PATTERNS.get(schema["format"])
    if said and said <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})$"
    return None
