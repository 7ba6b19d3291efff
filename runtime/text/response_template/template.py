"""A response template, checked: what opens and closes each field, and how its text is parsed.

The format is version 1 of transformers' `response_template`. A template that is wrong, or that cannot be followed here,
is refused with the reason, which names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runtime.text.response_template.values import ValueParser, check_transform
from tokenizer.patterns.linear_pattern import LinearPattern

Role = Literal["content", "reasoning", "call", "layout"]
_ROLES: Mapping[str, Role] = {
    "content": "content", "reasoning_content": "reasoning", "thinking": "reasoning", "reasoning": "reasoning",
    "tool_calls": "call",
}  # fmt: skip
_KEYS = frozenset(("version", "defaults", "fields", "start_anchor", "start_anchor_pattern"))
_FIELD_KEYS = frozenset(
    ("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
     "transform", "transform_each")
)  # fmt: skip


class ResponseTemplateError(ValueError):
    """The template is wrong, or not supported."""


@dataclass(frozen=True, slots=True)
class Delimiter:
    """The texts that open or close a region."""

    pattern: LinearPattern
    literals: tuple[str, ...] = ()

    def names(self, token: str) -> bool:
        """Whether it may match a text with this token."""
        escaped = "".join(f"\\{character}" if character in "|[]{}()*+?.^$\\" else character for character in token)
        texts = self.literals or (self.pattern.text,)
        return any(token in text or escaped in text for text in texts)


@dataclass(frozen=True, slots=True)
class Field:
    """
    role       what its text is in an answer; fields of other names are "layout"
    opening    None for the field of the text outside of all others
    join       between the texts of its regions
    """

    name: str
    role: Role
    opening: Delimiter | None
    closing: Delimiter | None
    value: ValueParser
    join: str | None
    transform: Any
    transforms_each: bool


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """`fields` in their order; `implicit`: the one without an opening; `anchor`: the beginning of the answer's turn."""

    fields: tuple[Field, ...]
    implicit: Field | None
    anchor: Delimiter

    def names(self, token: str) -> bool:
        """Whether any delimiter may match this token."""
        delimiters = [each for field in self.fields for each in (field.opening, field.closing) if each is not None]
        return any(each.names(token) for each in delimiters)


def read_response_template(given: Any) -> ResponseTemplate:
    """The template of tokenizer_config.json. Raises ``ResponseTemplateError``."""
    if not isinstance(given, Mapping):
        raise ResponseTemplateError(f"it must be an object, got {type(given).__name__}")
    if given.get("version", 1) != 1:
        raise ResponseTemplateError(f"version {given['version']!r} is not known, only 1")
    if unknown := sorted(map(str, set(given) - _KEYS)):
        raise ResponseTemplateError(f"unknown keys: {', '.join(unknown)}")
    if not isinstance(given.get("defaults", {}), Mapping):
        raise ResponseTemplateError("defaults must be an object")
    listed = given.get("fields")
    if not isinstance(listed, Mapping) or not listed:
        raise ResponseTemplateError("fields must be an object with at least one field")
    fields = tuple(_field(str(name), each) for name, each in listed.items())
    implicit = [field for field in fields if field.opening is None]
    if len(implicit) > 1:
        raise ResponseTemplateError(f"more than one field has no opening: {', '.join(f.name for f in implicit)}")
    anchor = _delimiter("the template", given, "start_anchor")
    if anchor is None:
        raise ResponseTemplateError("it needs start_anchor or start_anchor_pattern")
    return ResponseTemplate(fields, implicit[0] if implicit else None, anchor)


def _field(name: str, given: Any) -> Field:
    scope = f"field {name!r}"
    if not isinstance(given, Mapping):
        raise ResponseTemplateError(f"{scope} must be an object")
    if unknown := sorted(map(str, set(given) - _FIELD_KEYS)):
        raise ResponseTemplateError(f"{scope}: unknown keys: {', '.join(unknown)}")
    role = _ROLES.get(name, "layout")
    repeats, join = given.get("repeats", False), given.get("join")
    transform, each = given.get("transform"), given.get("transform_each", False)
    if join is not None and (not isinstance(join, str) or not repeats):
        raise ResponseTemplateError(f"{scope}: join must be a text, beside repeats: true")
    if not isinstance(each, bool) or (each and transform is None):
        raise ResponseTemplateError(f"{scope}: transform_each must be a bool, beside a transform")
    opening, closing = _delimiter(scope, given, "open"), _delimiter(scope, given, "close")
    try:
        value = ValueParser(given.get("content", "text"), given.get("content_args", {}))
        check_transform(transform)
    except ValueError as error:
        raise ResponseTemplateError(f"{scope}: {error}") from error
    if role in ("content", "reasoning") and (value.kind != "text" or transform is not None):
        raise ResponseTemplateError(f"{scope}: only plain text can be streamed, not {value.kind} or a transform")
    named = [name for each in (opening, closing) if each is not None for name in each.pattern.names]
    if named and transform is None:
        raise ResponseTemplateError(f"{scope}: the group {named[0]!r} of its pattern has no use without a transform")
    return Field(name, role, opening, closing, value, join, transform, each)


def _delimiter(scope: str, given: Mapping[str, Any], key: str) -> Delimiter | None:
    text, pattern = given.get(key), given.get(f"{key}_pattern")
    if key in given and f"{key}_pattern" in given:
        raise ResponseTemplateError(f"{scope}: {key} and {key}_pattern exclude each other")
    try:
        if f"{key}_pattern" in given:
            if not isinstance(pattern, str):
                raise ValueError(f"{key}_pattern must be a text, got {pattern!r}")
            compiled = LinearPattern(pattern)
            if compiled.may_be_empty:
                raise ValueError(f"the pattern {pattern!r} matches the empty text")
            return Delimiter(compiled)
        if key in given:
            literals = [text] if isinstance(text, str) else text
            if not isinstance(literals, list) or not literals or not all(isinstance(x, str) and x for x in literals):
                raise ValueError(f"{key} must be a text or a list of texts, got {text!r}")
            return Delimiter(LinearPattern.of_literals(literals), tuple(literals))
    except ValueError as error:
        raise ResponseTemplateError(f"{scope}: {error}") from error
    return None
