"""Writes a function's JSON schema as a TypeScript type, the form in gpt-oss's training.

The rules are those of the package `openai-harmony`, which supports objects, arrays, oneOf, enums of strings, nullable
and lists of types; any other schema (anyOf, $ref) is `any`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 64
"""Deepest nesting; below it, a type is `any`."""


def typescript_type(schema: Any, indent: str = "", depth: int = 0) -> str:
    """The type, with `indent` before all lines but the first."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    variants, kind = schema.get("oneOf"), schema.get("type")
    if isinstance(variants, list):
        return "".join(_variant_line(variant, indent, depth) for variant in variants)
    if isinstance(kind, list) and (names := [each for each in kind if isinstance(each, str)]):
        return " | ".join("number" if name == "integer" else name for name in names)
    if kind == "object":
        return _object_type(schema, indent, depth)
    if kind == "array":
        return f"{typescript_type(schema['items'], indent, depth + 1)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        values = schema.get("enum")
        texts = [f'"{value}"' for value in values if isinstance(value, str)] if isinstance(values, list) else []
        return " | ".join(texts) or "string"
    if kind == "integer":
        return "number"
    return kind if kind in ("number", "boolean") else "any"


def _object_type(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    description = _text(schema, "description")
    lines = [] if description is None else [f"{indent}// {description}\n"]
    lines.append("{\n")
    properties, required = schema.get("properties"), schema.get("required")
    names = required if isinstance(required, list) else []
    if isinstance(properties, Mapping):
        for key, value in properties.items():
            lines += _property_lines(f"{key}{'' if key in names else '?'}", value, indent, depth)
    return "".join([*lines, f"{indent}}}"])


def _property_lines(key: str, schema: Any, indent: str, depth: int) -> list[str]:
    """key: with a question mark if the property is optional"""
    fields = schema if isinstance(schema, Mapping) else {}
    lines = []
    if (title := _text(fields, "title")) is not None:
        lines.append(f"{indent}// {title}\n{indent}//\n")
    description = _text(fields, "description")
    if description is not None and "oneOf" not in fields:
        lines.append(f"{indent}// {description}\n")
    examples = fields.get("examples")
    if isinstance(examples, list) and examples:
        lines.append(f"{indent}// Examples:\n")
        lines += [f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str)]
    if isinstance(fields.get("oneOf"), list):
        return lines + _choice_lines(key, fields, description, indent, depth)
    default = _default(fields) if "oneOf" not in fields else None
    comment = "" if default is None else f" // {default}"
    return [*lines, f"{indent}{key}: {_nullable(fields, f'{indent}    ', depth)},{comment}\n"]


def _choice_lines(key: str, schema: Mapping[str, Any], description: str | None, indent: str, depth: int) -> list[str]:
    """A property with several alternative types, one a line. Its description is above, unless the first type has the
    same."""
    variants: list[Any] = schema["oneOf"]
    is_above = description is not None and not (variants and _text(variants[0], "description") == description)
    lines = [f"{indent}// {description}\n"] if is_above else []
    if (default := _default(schema)) is not None:
        lines.append(f"{indent}// {default}\n")
    lines.append(f"{indent}{key}:\n")
    for i, variant in enumerate(variants):
        own = _text(variant, "description")
        has_own = own is not None and own != description and not (i == 0 and is_above)
        comments = [each for each in (own if has_own else None, _default(variant)) if each is not None]
        behind = f" // {' '.join(comments)}" if comments else ""
        lines.append(f"{indent} | {_nullable(variant, f'{indent}   ', depth)}{behind}\n")
    return [*lines, f"{indent},\n"]


def _variant_line(variant: Any, indent: str, depth: int) -> str:
    """One of several types outside a property, such as an array's items."""
    default = _default(variant, is_quoted=True)
    comments = [each for each in (_text(variant, "description"), default) if each is not None]
    behind = f" // {' '.join(comments)}" if comments else ""
    return f"\n{indent} | {_nullable(variant, f'{indent}   ', depth)}{behind}"


def _nullable(schema: Any, indent: str, depth: int) -> str:
    text = typescript_type(schema, indent, depth + 1)
    is_nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{text} | null" if is_nullable and "null" not in text else text


def _default(schema: Any, *, is_quoted: bool = False) -> str | None:
    """The comment on a default. Strings are quoted, but not those of an enum; with `is_quoted` these are JSON."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return None
    default, values = schema["default"], schema.get("enum")
    if not isinstance(default, str):
        return f"default: {_json(default)}"
    if not (isinstance(values, list) and values):
        return f'default: "{default}"'
    return f"default: {_json(default) if is_quoted else default}"


def _text(schema: Any, name: str) -> str | None:
    value = schema.get(name) if isinstance(schema, Mapping) else None
    return value if isinstance(value, str) else None


def _json(value: Any) -> str:
    """JSON without white space, numbers as serde writes them."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_json(str(key))}:{_json(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 64:
        value = float(value) if abs(value) < 1 << 1023 else math.inf
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    """The shortest digits; an exponent below 1e-5 and from 1e16 on, without a plus sign or leading zeros."""
    if not math.isfinite(value):
        return "null"
    text = repr(value)
    if "e" in text:
        digits, exponent = text.split("e")
        if int(exponent) == -5:
            sign, digits = ("-", digits[1:]) if digits[0] == "-" else ("", digits)
            return f"{sign}0.0000{digits.replace('.', '')}"
        return f"{digits}e{int(exponent)}"
    return text
