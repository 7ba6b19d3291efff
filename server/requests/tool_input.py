"""A tool call's arguments as the object that Anthropic's and Ollama's clients want."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID_JSON = "INVALID_JSON"
"""The one key of an input that is no JSON object, as Anthropic's guide to tools has it."""


def tool_input(arguments: str) -> dict[str, Any]:
    """What a model has written, such as arguments that were cut off, stays to be seen where it is no object."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
