"""vLLM's form of a grammar: ``StructuredOutputsParams``."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import Grammar, parse_json
from runtime.engine.grammar.json_schema import prepared
from runtime.engine.option_names import KnownOptions


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, tag=True, metaclass=KnownOptions):
    """The constraint on an answer; exactly one of

    json         a value of this JSON schema, given as a mapping or as JSON; an object with declared properties has no
                 others, unless `additionalProperties` allows them
    regex        a text that the regular expression matches from end to end
    choice       one of these texts
    grammar      a text of a context-free grammar in Lark's notation
    json_object  True for any JSON object

    JSON is written without whitespace except one blank after "," and ":". Raises ``RequestError``.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(self.__struct_fields__)}, "
                f"got {' and '.join(given) or 'none'}",
                param="structured_outputs",
            )
        self.as_grammar()

    def as_grammar(self) -> Grammar:
        """The engine's form of it. Raises ``RequestError`` for a value of a wrong type."""
        if self.json is not None:
            if not isinstance(self.json, (str, dict)):
                raise _wrong("json", "a schema, or its text", self.json)
            text = self.json if isinstance(self.json, str) else msgspec.json.encode(self.json).decode()
            ready = prepared(parse_json(Grammar(kind="json_schema", text=text)), closes=True)
            return Grammar(kind="json_schema", text=msgspec.json.encode(ready.schema).decode())
        if self.choice is not None:
            if not isinstance(self.choice, (list, tuple)) or not all(isinstance(text, str) for text in self.choice):
                raise _wrong("choice", "a list of texts", self.choice)
            return Grammar(kind="choice", text=msgspec.json.encode(self.choice).decode())
        if self.json_object is not None:
            if self.json_object is not True:
                raise _wrong("json_object", "true, or left out", self.json_object)
            return Grammar(kind="json_object")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise _wrong(name, "a text", getattr(self, name))
        if self.regex is not None:
            return Grammar(kind="regex", text=self.regex)
        return Grammar(kind="lark", text=self.grammar or "")


def _wrong(name: str, wanted: str, value: object) -> RequestError:
    field = f"structured_outputs.{name}"
    return RequestError(f"{field} must be {wanted}, got {value!r:.80}", param=field)
