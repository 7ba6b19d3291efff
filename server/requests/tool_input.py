"""A tool call's arguments as an object, for Anthropic's and Ollama's clients."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID_JSON = "INVALID_JSON"
"""The one key of an input that is no JSON object, as Anthropic's guide to tools has it."""


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; text that is not an object, such as truncated arguments, is kept inside one."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
