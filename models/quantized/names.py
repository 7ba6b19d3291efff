"""Matches modules by the names and patterns of a config."""

from __future__ import annotations

import re
from collections.abc import Iterable

from models.configuration.json_fields import Fields

_LONGEST_PATTERN = 4096
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def compiled(fields: Fields, name: str, pattern: str) -> re.Pattern[str]:
    """A regular expression out of a config; raises `ConfigError` for one that is none."""
    try:
        if len(pattern) > _LONGEST_PATTERN:
            raise re.error(f"longer than {_LONGEST_PATTERN} characters")
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.error(name, f"has {pattern!r:.80}, which is no regular expression: {error}") from None


class UnconvertedModules:
    """The list `modules_to_not_convert`, by transformers' rule: a pattern names a module and all below it, or ends a
    name."""

    def __init__(self, fields: Fields, name: str, patterns: Iterable[str]) -> None:
        self._patterns = [(pattern, compiled(fields, name, f"(?:{pattern}){_BOUNDARY}")) for pattern in patterns]

    def __contains__(self, module: str) -> bool:
        return any(regex.match(module) or module.endswith(pattern) for pattern, regex in self._patterns)
