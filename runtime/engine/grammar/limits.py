"""What a grammar's text may hold before llguidance reads it: its size was checked when it was made; here depth and
numbers are, and what a grammar cannot promise is refused by name. Pure checks, in time proportional to the text."""

from __future__ import annotations

import re
from typing import Any

from runtime.engine.checks import is_integer
from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import (
    MAX_CHOICES,
    MAX_ENUM_VALUES,
    MAX_GRAMMAR_DEPTH,
    MAX_REPEATS,
    MAX_SCHEMA_NODES,
    Grammar,
    grammar_error,
    parse_json,
)
from runtime.engine.grammar.lark import schemas_in

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_OPENING, _CLOSING = "([{", ")]}"
_IGNORED_ATTRIBUTE = re.compile(r"^[ \t]*[!?_a-z][\w-]*[ \t]*\[[^\]\n]*\b(temperature|stop)\b", re.MULTILINE)


def check_limits(grammar: Grammar) -> None:
    """Raises ``RequestError`` that names what is too much, how much there is, and the limit."""
    if grammar.kind == "json_schema":
        _check_schema(parse_json(grammar))
    elif grammar.kind == "choice":
        _check_choices(parse_json(grammar))
    elif grammar.kind == "regex":
        _check_brackets(grammar.text)
    elif grammar.kind == "lark":
        _check_lark(grammar.text)


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise grammar_error(f"a JSON schema must be an object, got {schema!r:.40}")
    if "x-guidance" in schema:
        raise _unsupported("keyword x-guidance")
    num_nodes = 0
    level: list[Any] = [schema]
    for _ in range(MAX_GRAMMAR_DEPTH):
        num_nodes += len(level)
        if num_nodes > MAX_SCHEMA_NODES:
            raise grammar_error(f"a schema may have at most {MAX_SCHEMA_NODES} values, got more")
        following: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                _check_object(node)
                following += node.values()
            elif isinstance(node, list):
                following += node
        if not following:
            return
        level = following
    raise grammar_error(f"a schema may be nested at most {MAX_GRAMMAR_DEPTH} levels deep, got more")


def _check_object(node: dict[str, Any]) -> None:
    """Where a keyword's value is of another type, the node is not a schema, or llguidance says what is wrong."""
    values = node.get("enum")
    if isinstance(values, list) and len(values) > MAX_ENUM_VALUES:
        raise grammar_error(f"an enum may have at most {MAX_ENUM_VALUES} values, got {len(values)}")
    for name in _COUNTS:
        count: Any = node.get(name)
        if is_integer(count) and count > MAX_REPEATS:
            raise grammar_error(f"{name} may be at most {MAX_REPEATS}, got {count}")
    least: Any = node.get("minProperties")
    required = node.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    is_closed = node.get("additionalProperties", True) is False and "patternProperties" not in node
    if is_integer(least) and least > num_required + 1 and not is_closed:
        # Keys that are not in "properties" can come twice, and then count once.
        raise grammar_error(
            f"minProperties may be at most one more than the number of required properties ({num_required}), "
            f"got {least}"
        )


def _unsupported(what: str) -> RequestError:
    return grammar_error(f"the {what} is not supported")


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise grammar_error("a choice must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise grammar_error(f"a choice must have 1 to {MAX_CHOICES} strings, got {len(choices)}")
    if "" in choices:
        raise grammar_error("a choice must not hold an empty string")


def _check_lark(text: str) -> None:
    _check_brackets(text)
    if (found := _IGNORED_ATTRIBUTE.search(text)) is not None:
        raise _unsupported(f"attribute {found[1]}")
    for _, _, schema in schemas_in(text):
        _check_schema(schema)


def _check_brackets(text: str) -> None:
    """Brackets in strings count, too: where they close, they do no harm."""
    depth = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            if depth > MAX_GRAMMAR_DEPTH:
                raise grammar_error(f"brackets may be nested at most {MAX_GRAMMAR_DEPTH} levels deep, got more")
        elif character in _CLOSING:
            depth = max(0, depth - 1)
