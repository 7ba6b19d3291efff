"""The grammar that forces a tool call for `tool_choice`, in the model's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.engine.grammar.grammar import SPACING
from runtime.text.tools.forms import CALL_ID, CALL_NUMBER, KEY, NAME, CallForm, Tagged
from runtime.text.tools.table import Notation
from runtime.text.tools.tagged_calls import property_schema, resolved, types_of
from tokenizer import Tokenizer

_IDS = {CALL_ID: "/[0-9A-Za-z]{9}/", CALL_NUMBER: "/[0-9]{1,3}/"}
"""Regular expressions of ids."""
_MAX_DEPTH = 8
"""Deepest nesting with separate rules for each level; below it anything goes."""


def marker_ids(notation: Notation, tokenizer: Tokenizer | None) -> dict[str, int]:
    """The notation's markers that are special tokens of the tokenizer's, which are sampled as such."""
    if tokenizer is None:
        return {}
    ids = {marker: tokenizer.token_to_id(marker) for marker in notation.markers}
    return {marker: i for marker, i in ids.items() if i is not None and i in tokenizer.all_special_ids}


def tool_grammar(
    notation: Notation,
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    parallel: bool = True,
    markers: Mapping[str, int] | None = None,
    spacing: tuple[str, str] | None = None,
) -> str:
    """A grammar, in llguidance's Lark notation, whose every text is a call that the parser reads.

    tools     checked, in OpenAI's form; their names need no escape in JSON
    name      the only function that may be called, or None for any
    parallel  further calls may follow the first, unless `name` is given
    markers   those that are special tokens, with their ids
    spacing   the separators of items and of keys in JSON; None: a blank may follow both
    """
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    return _Writer(notation.form, markers or {}, spacing).grammar(functions, parallel and name is None)


class _Writer:
    def __init__(self, form: CallForm, markers: Mapping[str, int], spacing: tuple[str, str] | None) -> None:
        self._form = form
        self._spacing = {} if spacing is None else dict(zip(("item_separator", "key_separator"), spacing, strict=True))
        self._markers = markers
        self._terms = {**{marker: f"<[{token_id}]>" for marker, token_id in markers.items()}, **_IDS}
        self._split = re.compile(f"({'|'.join(map(re.escape, self._terms))})")
        self._rules: list[str] = []

    def grammar(self, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
        form = self._form
        further = f"({self._texts(form.between)} call)*" if parallel and form.several else ""
        lines = [
            _joined("start:", self._texts(form.before), "call", further, self._texts(form.after)),
            f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
        ]
        for i, function in enumerate(functions):
            head, tail = (self._texts(text, NAME, function["name"]) for text in (form.head, form.tail))
            arguments = self._arguments(f"call_{i}", function.get("parameters"))
            lines.append(_joined(f"call_{i}:", head, arguments, tail))
        return "\n".join([*lines, *self._rules])

    def _texts(self, text: str, placeholder: str = NAME, value: str = NAME) -> str:
        """The text as terms of a rule, with the value in the placeholder's place."""
        pieces = filter(None, self._split.split(text))
        return " ".join(self._terms.get(piece) or _quoted(piece.replace(placeholder, value)) for piece in pieces)

    def _arguments(self, rule: str, parameters: Any) -> str:
        """Makes the rules of a call's arguments, and returns the term."""
        style = self._form.arguments
        if style == "json":
            return self._rule(f"{rule}_arguments", self._json(_object_schema(parameters)))
        if isinstance(style, Tagged):
            return self._one_by_one(rule, parameters, style)
        return self._listed(rule, parameters, parameters, style.separator, style.comma, style.quote)

    def _json(self, schema: Any) -> str:
        """A value of the schema."""
        if self._spacing and isinstance(schema, Mapping):
            schema = {**schema, SPACING: self._spacing}
        return f"%json {json.dumps(schema)}"

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    # The arguments' styles

    def _one_by_one(self, rule: str, parameters: Any, style: Tagged) -> str:
        """Each argument between texts of its own; optional ones may be omitted."""
        terms = []
        end = self._texts(style.tail + style.after)
        for i, (key, schema, is_required) in enumerate(_properties(parameters)):
            text, other = (
                self._texts(style.head if head is None else head, KEY, key) for head in (style.head, style.other_head)
            )
            values = _text_values(schema)
            if values is not None:
                term = f"{text} ({' | '.join(map(_quoted, values))}) {end}"
            elif types_of(schema, parameters) == {"string"}:
                value = self._free_text(f"{rule}_value_{i}", style.tail)
                term = f"{text} {value} {self._texts(style.after)}"
            else:
                value = self._rule(f"{rule}_value_{i}", self._json(_with_definitions(schema, parameters)))
                term = f"{other} {value} {end}"
            terms.append(self._rule(f"{rule}_argument_{i}", term) + ("" if is_required else "?"))
        return " ".join(terms)

    def _listed(
        self, rule: str, parameters: Any, root: Any, separator: str, comma: str, quote: str = "", depth: int = 0
    ) -> str:
        """The arguments with commas between; optional ones may be omitted."""
        properties = _properties(parameters)
        if not properties:
            return ""
        # first_i: argument i and the later ones, as the first; more_i: the same after a comma.
        first, more = "", ""
        for i, (key, schema, is_required) in reversed(list(enumerate(properties))):
            value = self._value(f"{rule}_value_{i}", schema, root, quote, depth)
            argument = self._rule(f"{rule}_argument_{i}", f"{self._texts(KEY + separator, KEY, key)} {value}")
            here = f"{argument} {more}"
            skipped = "" if is_required else f" | {first}" if first else ' | ""'
            first_rule = self._rule(f"{rule}_first_{i}", here + skipped)
            behind = f"{self._texts(comma)} {argument} {more}"
            more = self._rule(f"{rule}_more_{i}", behind + ("" if is_required else f" | {more}" if more else ' | ""'))
            first = first_rule
        return first

    def _value(self, rule: str, schema: Any, root: Any, quote: str, depth: int) -> str:
        """JSON, which is read as Python, too; if strings have special quotes, JSON with these."""
        types = types_of(schema, root)
        if not quote and types == {"boolean"}:
            return self._rule(rule, '"True" | "False"')
        if not quote or (types and types <= {"integer", "number", "boolean", "null"}):
            return self._rule(rule, self._json(_with_definitions(schema, root)))
        mark = self._texts(quote)
        if (values := _text_values(schema)) is not None:
            return f"{mark} ({' | '.join(map(_quoted, values))}) {mark}"
        if types == {"string"}:
            return f"{mark} {self._free_text(rule, quote)}"
        schema = resolved(schema, root)
        if depth < _MAX_DEPTH and types == {"array"} and isinstance(schema.get("items"), Mapping):
            item = self._value(f"{rule}_item", schema["items"], root, quote, depth + 1)
            return self._rule(rule, f'"[" "]" | "[" {item} ("," {item})* "]"')
        if depth < _MAX_DEPTH and types == {"object"} and _properties(schema):
            inner = self._listed(f"{rule}_in", schema, root, ":", ",", quote, depth + 1)
            return self._rule(rule, f'"{{" {inner} "}}"')
        self._any_gemma(quote)
        kinds = [f"gemma_{kind}" for kind in ("array", "object", "string") if not types or kind in types]
        kinds += ["gemma_scalar"] if not types or types & {"integer", "number", "boolean", "null"} else []
        return self._rule(rule, " | ".join(kinds))

    def _any_gemma(self, quote: str) -> None:
        if any(line.startswith("gemma_value:") for line in self._rules):
            return
        mark = self._texts(quote)
        text = self._free_text("gemma_text", quote)
        self._rule("gemma_value", "gemma_array | gemma_object | gemma_string | gemma_scalar")
        self._rule("gemma_string", f"{mark} {text}")
        self._rule("gemma_scalar", '%json {"type": ["number", "boolean", "null"]}')
        self._rule("gemma_array", '"[" "]" | "[" gemma_value ("," gemma_value)* "]"')
        self._rule("gemma_object", '"{" "}" | "{" gemma_pair ("," gemma_pair)* "}"')
        self._rule("gemma_pair", 'GEMMA_KEY ":" gemma_value')
        self._rules.append("GEMMA_KEY: /[A-Za-z_][A-Za-z0-9_]*/")

    def _free_text(self, rule: str, end: str) -> str:
        """Any text up to and including ``end``."""
        if any(marker in end for marker in self._markers):
            return f"{self._rule(rule, '/(?s:.*)/')} {self._texts(end)}"
        self._rules.append(f"{rule}[suffix={_quoted(end)}]: /(?s:.*)/")
        return rule


def _object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function without a schema takes nothing (OpenAI's rule); one with a schema takes an object."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def _properties(parameters: Any) -> list[tuple[str, Any, bool]]:
    """Each declared argument, its schema, and whether it is required. Others are not generated."""
    declared = parameters.get("properties") if isinstance(parameters, Mapping) else None
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    names = required if isinstance(required, list) else []
    keys = declared if isinstance(declared, Mapping) else {}
    return [(key, property_schema(parameters, key), key in names) for key in keys]


def _text_values(schema: Any) -> list[str] | None:
    """The texts that the schema allows, or None if it is not a choice among texts."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(schema, Mapping) and isinstance(schema.get("const"), str):
        values = [schema["const"]]
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return values
    return None


def _with_definitions(schema: Any, root: Any) -> Any:
    """A property's schema as a separate schema, with the definitions that it may refer to."""
    if not isinstance(schema, Mapping):
        return {} if schema is None else schema
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root and name not in schema}
    return {**schema, **definitions}


def _joined(*terms: str) -> str:
    return " ".join(filter(None, terms))


def _quoted(text: str) -> str:
    """A string in Lark, whose strings are JSON's."""
    return json.dumps(text, ensure_ascii=False)
