"""Chooses an answer's API dialect by its path, not by endpoint: errors come from every layer."""

from __future__ import annotations

from typing import Literal

from starlette.types import Scope

Dialect = Literal["openai", "anthropic", "ollama"]

ANTHROPIC_VERSION = b"anthropic-version"
"""The header that Anthropic's clients send with every request."""


def dialect_of(scope: Scope) -> Dialect:
    """`/v1/models` is Anthropic's with its header, `/v1/messages` always."""
    path: str = scope["path"]
    if path.startswith("/api/"):
        return "ollama"
    if _is_below(path, "/v1/messages"):
        return "anthropic"
    if _is_below(path, "/v1/models") and any(name == ANTHROPIC_VERSION for name, _ in scope["headers"]):
        return "anthropic"
    return "openai"


def _is_below(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")
