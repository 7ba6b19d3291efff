"""The names of parsers that an operator may choose, where they cost nothing to import."""

from __future__ import annotations

TOOL_CALL_PARSERS = ("auto", "hermes", "none")
REASONING_PARSERS = ("auto", "think", "none")
