"""Checks a grammar's limits before llguidance reads it, in time proportional to the text. Its size is checked by its
constructor, JSON schemas when they are rewritten."""

from __future__ import annotations

import re
from typing import Any

from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import (
    MAX_CHOICES,
    MAX_GRAMMAR_DEPTH,
    Grammar,
    grammar_error,
    parse_json,
)

_OPENING, _CLOSING = "([{", ")]}"
_IGNORED_ATTRIBUTE = re.compile(r"^[ \t]*[!?_a-z][\w-]*[ \t]*\[[^\]\n]*\b(temperature|stop)\b", re.MULTILINE)


def check_limits(grammar: Grammar) -> None:
    """Raises ``RequestError`` with the quantity, its value and its limit."""
    if grammar.kind == "choice":
        _check_choices(parse_json(grammar))
    elif grammar.kind == "regex":
        _check_brackets(grammar.text)
    elif grammar.kind == "lark":
        _check_lark(grammar.text)


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


def _check_brackets(text: str) -> None:
    """Brackets in strings count too, which does no harm if they close."""
    depth = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            if depth > MAX_GRAMMAR_DEPTH:
                raise grammar_error(f"brackets may be nested at most {MAX_GRAMMAR_DEPTH} levels deep, got more")
        elif character in _CLOSING:
            depth = max(0, depth - 1)
