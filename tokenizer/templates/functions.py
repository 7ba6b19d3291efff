"""The functions of chat templates beside Jinja's own. Imports no jinja2, which is slow to import."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter: Jinja's own escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format: str) -> str:
    """The `strftime_now` function: local time."""
    return datetime.now().strftime(format)
