"""A rewritten JSON schema, and places in a schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from runtime.engine.checks import is_integer
from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import MAX_MAXIMUM, MAX_REPEATS, grammar_error

Schema: TypeAlias = dict[str, Any] | bool

NO_PROMISE = "no grammar can enforce this; leave it out, and ask for it in the prompt"


@dataclass(slots=True)
class Prepared:
    """
    schema          for llguidance, with all definitions under "$defs"
    ignored         places of keywords that are not enforced: "properties.path.format=file-path"
    nodes           the schemas within `schema`, inner ones first, and their places
    num_closed      objects that got `additionalProperties: false`
    has_control_characters  it has texts that only `\\uXXXX` can write
    """

    schema: Schema = True
    ignored: list[str] = field(default_factory=list)
    nodes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_closed: int = 0
    has_control_characters: bool = False

    def note_characters(self, text: str) -> None:
        """Record a text that an answer may have to contain."""
        if any((c < " " and c not in "\b\f\n\r\t") or c == "\x7f" for c in text):
            self.has_control_characters = True


def schema_error(place: str, reason: str) -> RequestError:
    """The error for the schema at `place`."""
    error = grammar_error(reason)
    if not place:
        return error
    return RequestError(f"grammar.{place}: {reason}", param=f"grammar.{place}", code=error.code)


def place_in(place: str, *keys: str | int) -> str:
    """A nested place: "properties.a.anyOf[0]"."""
    for key in keys:
        if isinstance(key, int):
            place += f"[{key}]"
        elif key.translate(_PLAIN).isalnum():
            place += f".{key}" if place else key
        else:
            place += f"[{json.dumps(key[:80], ensure_ascii=False)}]"
    return place


_PLAIN = str.maketrans("", "", "$_-")


def take_counts(found: dict[str, Any], result: dict[str, Any], place: str, least: str, most: str) -> None:
    """Copy the two keywords that bound a number, if they constrain it."""
    for name in (least, most):
        count = found.get(name)
        if count is None:
            continue
        if isinstance(count, float) and count.is_integer():
            count = int(count)
        if not is_integer(count) or count < 0:
            raise schema_error(place_in(place, name), f"{name} must be a whole number from 0, got {count!r:.60}")
        if name == least and count > MAX_REPEATS:
            raise schema_error(place_in(place, name), f"{name} may be at most {MAX_REPEATS}, got {count}")
        if not (count == 0 if name == least else count > MAX_MAXIMUM):
            result[name] = count


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
