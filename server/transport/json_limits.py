"""Limits on a request's parts, for any endpoint: checked in the decoded JSON, before it becomes typed objects. Lengths
of text are limited by the body's size and the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.engine.sampling_params import MAX_N
from server.config import ServerConfig
from server.errors import ApiError, invalid

_PLAIN = frozenset({str, int, float, bool, type(None)})

_AT_ONCE = 8192
"""Items whose types are looked at in one go: a tenth of a millisecond."""

_SCHEMA_FIELDS = ("response_format", "structured_outputs", "tools", "text", "output_config", "format")
"""Fields that may hold a JSON schema."""


def check_limits(request: Mapping[str, Any], config: ServerConfig) -> None:
    """Raises `ApiError` 400 with the field, its value and the limit. Wrong types pass: the schema refuses them."""
    for name, limit in (
        ("messages", config.max_messages),
        ("tools", config.max_tools),
        ("stop", config.max_stop_strings),
        ("stop_sequences", config.max_stop_strings),
        ("bad_words", config.max_stop_strings),
        ("logit_bias", config.max_logit_bias),
    ):
        _check_length(name, request.get(name), limit)
    items = request.get("input")  # a conversation, texts, or the ids of one text
    if isinstance(items, list) and items and not isinstance(items[0], int):
        _check_length("input", items, config.max_messages)
    n = request.get("n")
    most_choices = min(MAX_N, config.max_choices)
    if isinstance(n, int) and n > most_choices:
        raise invalid("n", f"n must be at most {most_choices}, got {n if n < 10**18 else 'more'}.")
    for name in _SCHEMA_FIELDS:
        value = request.get(name)
        if isinstance(value, (dict, list)) and is_deeper(value, config.max_schema_depth):
            raise invalid(name, f"{name} nests arrays and objects deeper than {config.max_schema_depth} levels.")


def is_deeper(value: Any, max_depth: int) -> bool:
    """Whether arrays and objects nest deeper than `max_depth` levels. Iterates level by level, so that no depth
    overflows the stack."""
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            return True
        level = [
            child
            for parent in level
            if isinstance(parent, dict) or not _PLAIN.issuperset(kinds_of(parent))  # a million ids are cheap
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    return False


def kinds_of(items: Sequence[Any]) -> set[type]:
    """The types of the items, in stretches, between which other threads may take the GIL."""
    kinds: set[type] = set()
    for start in range(0, len(items), _AT_ONCE):
        kinds.update(map(type, items[start : start + _AT_ONCE]))
    return kinds


def _check_length(name: str, value: Any, limit: int) -> None:
    if isinstance(value, (list, dict)) and len(value) > limit:
        raise too_many(name, len(value), limit)


def too_many(name: str, count: int, limit: int) -> ApiError:
    return invalid(name, f"{name} must have at most {limit} entries, got {count}.")
