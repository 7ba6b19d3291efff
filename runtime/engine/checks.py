"""Checks of single values that users give."""

from __future__ import annotations

import math
import numbers

from runtime.engine.errors import RequestError


def is_integer(value: object) -> bool:
    """Whether value is an integer (Python's or numpy's); a bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether value is a real number (Python's or numpy's); a bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_positive(name: str, value: object) -> None:
    """Raise ``RequestError`` unless this is an integer, at least 1."""
    if not is_integer(value) or value < 1:  # type: ignore[operator]
        raise RequestError(f"{name} must be a positive integer, got {value!r:.80}", param=name)


def check_seconds(name: str, value: object) -> None:
    """Raise ``RequestError`` unless this is a positive, finite number of seconds."""
    if not is_number(value) or not 0.0 < value < math.inf:  # type: ignore[operator]
        raise RequestError(f"{name} must be a positive number of seconds, got {value!r:.80}", param=name)


def check_weight(name: str, value: object) -> None:
    """Raise ``RequestError`` unless this is a number from 1e-6 to 1e6, so that sums of costs stay finite."""
    if not is_number(value) or not 1e-6 <= value <= 1e6:  # type: ignore[operator]
        raise RequestError(f"{name} must be a number from 0.000001 to 1000000, got {value!r:.80}", param=name)


def check_texts(request: object, *names: str) -> None:
    """Raise ``RequestError`` unless each of these fields is None, or a string that is not empty."""
    for name in names:
        if (text := getattr(request, name)) is not None and not (isinstance(text, str) and text):
            raise RequestError(f"{name} must be a string, not empty, got {text!r:.80}", param=name)


def check_one_of(name: str, value: object, values: tuple[str, ...]) -> None:
    """Raise ``RequestError`` unless this is one of ``values``."""
    if value not in values:
        raise RequestError(f"{name} must be one of {', '.join(values)}, got {value!r:.80}", param=name)
