"""Durations as Ollama's `keep_alive` has them: seconds, or Go's notation ("5m", "1h30m", "-1"). Negative ones and those
of more than a century are for ever."""

from __future__ import annotations

import math
import re

from runtime.errors import InvalidArgumentError

FOR_EVER = math.inf
_CENTURY_S = 100 * 365.25 * 86400
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_WHOLE = re.compile(rf"[+-]?(?:{_PART.pattern})+")
_NUMBER = re.compile(r"[+-]?\d{1,18}(?:\.\d*)?")
_MOST_CHARACTERS = 64


def seconds_of(value: object, param: str = "keep_alive") -> float:
    """The seconds, or `FOR_EVER`. Raises `InvalidArgumentError` for anything else."""
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(min(max(value, -1), 10**18)) if isinstance(value, int) else value
    elif isinstance(value, str) and len(value) <= _MOST_CHARACTERS:
        if _NUMBER.fullmatch(value):
            seconds = float(value)
        elif _WHOLE.fullmatch(value):
            seconds = sum(float(count) * _UNITS_S[unit] for count, unit in _PART.findall(value))
            seconds = -seconds if value[0] == "-" else seconds
    if seconds is None or math.isnan(seconds):
        raise InvalidArgumentError(
            f'{param} must be seconds or a duration such as "5m" or "1h30m" (negative: for ever), got {value!r:.80}',
            param=param,
        )
    return FOR_EVER if seconds < 0 or seconds > _CENTURY_S else seconds
