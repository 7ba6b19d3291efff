"""Translates patterns of JSON schemas, which are ECMAScript's, to the syntax of Rust's regex crate.

That syntax has no look-around. Some look-ahead at the start of a pattern can be expressed by separate patterns: that of
zod and pydantic for addresses and decimals.
"""

from __future__ import annotations

import re
from typing import Any

_NOT_BUILT = re.compile(r"\\[bB1-9]|\\k<|\(\?<?[=!]")
_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_IN_FRONT = re.compile(r"\^?\(\?([=!])((?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\\\[])*)\)")
_ONE = r"(\[\^?(?:\\.|[^\]\\])+\]|\\[^\w\s]|\\[dsw]|[^\\\[\](){}.*+?|^$])"
"""One character: a class, an escape or a plain character."""
_BEGINS = re.compile(f"{_ONE}")
_HOLDS = re.compile(rf"\.\*{_ONE}(?:\1)*")
_IS_ALL = re.compile(rf"\^?{_ONE}([*+])\$")
_ANY = "(?s:.*)"


def patterns_of(pattern: str) -> list[str]:
    """Patterns that a text matches together exactly if it matches the given one. Raises `ValueError`."""
    patterns, rest = [], pattern
    while (found := _IN_FRONT.match(rest)) is not None and pattern.startswith("^"):
        body = found[2]
        if found[1] == "=":
            patterns.append(f"^(?:{body})")
        elif is_all := _IS_ALL.fullmatch(body):
            other = _ANY + _other_than(is_all[1]) + _ANY
            patterns.append(f"^{other}$" if is_all[2] == "*" else f"^(?:{other})?$")
        elif _BEGINS.fullmatch(body):
            patterns.append(f"^(?:{_other_than(body)}{_ANY})?$")
        elif holds := _HOLDS.fullmatch(body):
            one, times = holds[1], (len(body) - 2) // len(holds[1]) - 1
            few = f"(?:{one}){{0,{times}}}"
            patterns.append(f"^(?:{few}{_other_than(one)})*{few}$")
        else:
            break
        rest = "^" + rest[found.end() :]
    return [*map(_translated, patterns), *([] if patterns and rest == "^" else [_translated(rest)])]


def _other_than(one: str) -> str:
    """A pattern of any character except this one, or those of this class."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:]}" if one.startswith("[") else f"[^{one}]"


def _translated(pattern: str) -> str:
    written: list[str] = []
    is_class, i = False, 0
    while i < len(pattern):
        piece = pattern[i : i + 2] if pattern[i] == "\\" else pattern[i]
        if not is_class and (wrong := _NOT_BUILT.match(pattern, i)):
            what = "a back-reference" if wrong[0][-1:].isdigit() or "k" in wrong[0] else "look-around"
            raise ValueError(f"{pattern!r:.200} has {what} ({wrong[0]}), which no grammar enforces; write it without")
        if is_class:
            is_class = piece != "]"
            piece = f"\\{piece}" if piece in "[&~" or (piece == "-" and pattern.startswith("--", i)) else piece
        elif pattern.startswith("[^]", i):
            piece, i = "(?s:.)", i + 2
        elif piece == "[":
            is_class = True
            if pattern.startswith("^", i + 1):
                piece, i = "[^", i + 1
        elif piece == "{" and not _QUANTIFIER.match(pattern, i) and written[-1:] not in ([r"\p"], [r"\P"], [r"\u"]):
            piece = r"\{"
        i += len(pattern[i : i + 2]) if piece.startswith("\\") and pattern[i] == "\\" else 1
        written.append(piece)
    return "".join(written)


_YEAR = "[1-9][0-9]{3}"
_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[13579][26]|[2468][048])00)"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"

ENFORCED = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""The formats that are enforced: those that llguidance supports."""

PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

NAME_PATTERNS = PATTERNS | {"uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"}
"""The same for property names."""

_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords whose values map names to schemas."""
_DATA = {"const", "enum", "default", "examples"}


def with_narrow_formats(schema: Any) -> Any:
    """The schema with patterns beside those formats; it accepts a subset of the values."""
    if isinstance(schema, list):
        return [with_narrow_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for keyword, value in schema.items():
        if keyword in _OF_SCHEMAS and isinstance(value, dict):
            value = {name: with_narrow_formats(each) for name, each in value.items()}
        elif keyword not in _DATA:
            value = with_narrow_formats(value)
        result[keyword] = value
    named = schema.get("format")
    pattern = PATTERNS.get(named) if isinstance(named, str) else None
    if pattern is not None:
        wanted = {"type": "string", "pattern": pattern}
        if schema.get("type") == "string" and "pattern" not in schema:
            result["pattern"] = pattern
        elif isinstance(schema.get("allOf", []), list):
            # It may be a value of another type, to which a format does not apply.
            others = {"type": ["null", "boolean", "number", "array", "object"]}
            result["allOf"] = [*result.get("allOf", []), {"anyOf": [wanted, others]}]
    return result
