"""The syntax of `--allowed-origin`, the pages that may use the server. (Without imports: every command needs it.)"""

from __future__ import annotations

import re
from collections.abc import Sequence

ANY_PORT = ":*"
"""The end of an origin that stands for those of every port."""

_WEB_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[^\s/?#@*:\[\]]+)(:([0-9]{1,5}|\*))?/?")
_APP_ORIGIN = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]*://(\*|[^\s/?#@*]*)/?")


def is_origin(text: str) -> bool:
    """Whether `origins_pattern` accepts it: "*", "null", a site, or all pages of an application's scheme ("app://")."""
    lowered = text.lower()
    return lowered in ("*", "null") or any(kind.fullmatch(lowered) for kind in (_WEB_ORIGIN, _APP_ORIGIN))


def origins_pattern(origins: Sequence[str]) -> str:
    """A regular expression that matches whole origins; it matches none if there are none."""
    patterns = []
    for origin in origins:
        lowered = origin.lower()
        scheme, _, rest = lowered.partition("://")
        lowered = lowered if rest in ("", "*") else lowered.rstrip("/")
        if lowered == "*":
            patterns.append(".*")
        elif rest in ("", "*", "/") and scheme != lowered:
            patterns.append(re.escape(f"{scheme}://") + ".*")
        elif lowered.endswith(ANY_PORT):
            patterns.append(re.escape(lowered.removesuffix(ANY_PORT)) + "(:[0-9]{1,5})?")
        else:
            patterns.append(re.escape(lowered))
    return "|".join(patterns) or "(?!)"
