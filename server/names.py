"""Models' names in requests."""

from __future__ import annotations

from collections.abc import Sequence

from server.config import ServerConfigError

UNTAGGED = ":latest"
"""The tag that Ollama, and so its clients, give to a name without one."""


def tagged(name: str) -> str:
    """A model's name as Ollama lists it: with a tag."""
    return name if ":" in name else name + UNTAGGED


def served_names(given: str | Sequence[str] | None) -> list[str]:
    """The model's names in the API, each once. Raises `ServerConfigError` for one that no request can contain."""
    parts = [given] if isinstance(given, str) else list(given or ())
    names = list(dict.fromkeys(name.strip() for part in parts for name in part.split(",")))
    how = "; for several names repeat the option, or separate them by commas: --served-model-name a,b"
    for name in names:
        check_served_name(name, "--served-model-name", how)
    return names


def check_served_name(name: str, where: str, how: str = "") -> None:
    """Raises `ServerConfigError` for a name that no request can contain."""
    if not name or any(c.isspace() or not c.isprintable() for c in name):
        raise ServerConfigError(f"{where} has {name!r}, must be a name without white space{how}")
