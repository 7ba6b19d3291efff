"""Dates and times in JSON schemas, narrowed to values that every parser accepts.

llguidance's "date" has a 29th of February in every year and a year 0000; its "time" has a second 60 and a lower-case z,
as RFC 3339 allows. Many parsers refuse these, and so do the usual validators. A string of such a format therefore gets
a pattern as well.
"""

from __future__ import annotations

from typing import Any

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
