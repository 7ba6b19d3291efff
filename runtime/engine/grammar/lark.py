"""A grammar in llguidance's notation: Lark's, with JSON schemas in it (https://github.com/guidance-ai/llguidance,
docs/syntax.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import regex_to_lark

from runtime.engine.grammar.grammar import SPACING, Grammar, grammar_error, parse_json
from runtime.engine.grammar.json_schema import prepared
from runtime.engine.grammar.schema_strings import with_narrow_formats

_TOKENS = re.compile(r'(?:\#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<json>%json\b)')
"""Comments, strings and regular expressions, which cannot hold a schema; and the start of a schema."""

_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    # \uXXXX only where it is needed: otherwise a key has two spellings, and can occur twice.
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}

_SEPARATORS = {"item_separator": (",", ", "), "key_separator": (":", ": ")}

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def lark_of(grammar: Grammar, *, is_canonical: bool) -> str:
    """The whole grammar in Lark's notation.

    is_canonical  False lets the model choose the tokenization of forced bytes
    """
    if grammar.kind == "lark":
        text = _with_options(grammar.text)
    elif grammar.kind == "regex":
        text = f"start: /{regex_to_lark(grammar.text)}/"
    elif grammar.kind == "choice":
        text = f"start: {' | '.join(json.dumps(choice) for choice in parse_json(grammar))}"
    else:
        schema = ANY_OBJECT if grammar.kind == "json_object" else parse_json(grammar)
        text = f"start: {_embedded(schema)}"
    return text if is_canonical else f'%llguidance {{"no_forcing": true}}\n{text}'


def schemas_in(text: str) -> Iterator[tuple[int, int, Any]]:
    """The JSON schemas in a text in Lark's notation: start (at ``%json``), end and value of each.

    Raises ``RequestError`` if one is not JSON.
    """
    decoder = json.JSONDecoder()
    position = 0
    while (found := _TOKENS.search(text, position)) is not None:
        position = found.end()
        if found["json"] is None:
            continue
        first = len(text) - len(text[position:].lstrip())
        try:
            schema, position = decoder.raw_decode(text, first)
        except (ValueError, RecursionError):
            raise grammar_error(f"no JSON schema follows %json at character {found.start()}") from None
        yield found.start(), position, schema


def _with_options(text: str) -> str:
    pieces: list[str] = []
    position = 0
    for start, end, schema in schemas_in(text):
        pieces += (text[position:start], _embedded(schema))
        position = end
    return "".join(pieces) + text[position:]


def _embedded(schema: Any) -> str:
    """A schema as a part of a grammar: no whitespace except one blank after a comma or a colon, or as it says."""
    options = _JSON_OPTIONS
    if isinstance(schema, dict) and isinstance(spacing := schema.get(SPACING), dict):
        fixed = {name: spacing[name] for name, values in _SEPARATORS.items() if spacing.get(name) in values}
        options, schema = options | fixed, {name: value for name, value in schema.items() if name != SPACING}
    ready = prepared(schema)
    if ready.schema is False:
        raise grammar_error("no value matches this schema; change it")
    if ready.has_control_characters:
        options = options | {"json_allowed_escapes": f"u{options['json_allowed_escapes']}"}
        for _, node in ready.nodes:
            _hold_spelling(node)
    text = {} if ready.schema is True else with_narrow_formats(ready.schema)
    return f"%json {json.dumps({**text, 'x-guidance': options})}"


def _hold_spelling(node: dict[str, Any]) -> None:
    """If \\uXXXX is allowed, llguidance lets every character of an undeclared key be escaped, so that a declared key
    could occur again. Under `patternProperties` it does not."""
    further = node.get("additionalProperties", True)
    if further is False or not node.keys() & {"properties", "required"}:
        return
    if "patternProperties" in node:
        raise grammar_error("patternProperties with further keys cannot stand beside texts with control characters")
    node["patternProperties"], node["additionalProperties"] = {"^(?s:.*)$": further}, False
