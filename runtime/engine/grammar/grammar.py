"""The constraint on a choice's text, as a request gives it: a JSON schema, a regular expression, a choice of texts or a
grammar. Plain data that is sent to the engine; `runtime.engine.grammar.compiler` checks and compiles it.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from runtime.engine.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

SPACING = "x-guidance"
"""The keyword that fixes the separators of items and of keys of a schema in a grammar, as llguidance has it."""

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_LARK_BYTES = 512 * 1024
"""Bytes of a grammar, which may hold the schemas of many tools."""
MAX_REGEX_BYTES = 8 * 1024
MAX_GRAMMAR_DEPTH = 48
"""Levels of nesting: of a schema's objects and arrays, or of brackets in a grammar or a regular expression."""
MAX_SCHEMA_NODES = 20_000
"""Values in a schema of any kind, objects and arrays included."""
MAX_ENUM_VALUES = 1000
MAX_CHOICES = 1000
MAX_REPEATS = 10_000
"""The highest minimum of items, characters or properties that a schema may set."""
MAX_MAXIMUM = 1_000_000
"""The highest such maximum: no answer is longer, so a higher bound is dropped."""


class Grammar(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """
    kind  "json_schema": a value of the schema, without whitespace except one blank that may follow "," and ":"
          "json_object": any JSON object, written the same way
          "regex": a text that the regular expression matches from end to end (the syntax of Rust's regex crate)
          "choice": one of some texts
          "lark": a text of a context-free grammar in Lark's notation, as llguidance reads it
    text  the schema as JSON; ""; the expression; a JSON list of strings; the grammar

    Raises ``RequestError`` if the text is too long for its kind.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _LIMITS:
            raise grammar_error(f"the kind must be one of {', '.join(_LIMITS)}, got {self.kind!r:.40}")
        if not isinstance(self.text, str):
            raise grammar_error(f"the text must be a string, got {type(self.text).__name__}")
        limit = _LIMITS[self.kind]
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise grammar_error("the text has half of a surrogate pair") from None
        if size > limit:
            raise grammar_error(f"a {self.kind} may have at most {limit} bytes, got {size}")


_LIMITS: dict[str, int] = {
    "json_schema": MAX_GRAMMAR_BYTES,
    "json_object": 0,
    "regex": MAX_REGEX_BYTES,
    "choice": MAX_GRAMMAR_BYTES,
    "lark": MAX_LARK_BYTES,
}


def grammar_error(reason: str) -> RequestError:
    """The error for a request's grammar."""
    return RequestError(f"grammar: {reason}", param="grammar", code="invalid_grammar")


def parse_json(grammar: Grammar) -> Any:
    """The text as JSON. Raises ``RequestError``."""
    try:
        return json.loads(grammar.text, parse_constant=_refuse_constant)
    except RecursionError:
        raise grammar_error(f"it is nested more than {MAX_GRAMMAR_DEPTH} levels deep") from None
    except ValueError as error:
        raise grammar_error(f"a {grammar.kind} is not JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
