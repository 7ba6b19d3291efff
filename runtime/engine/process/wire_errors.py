"""Sends errors over the socket, to be raised on the other side as the same type with the same text.

Only classes of ``XservError``'s tree and ``OSError`` are rebuilt there, without running their constructors.
"""

from __future__ import annotations

import models.errors
import runtime.device.errors
import runtime.engine.errors
from runtime.engine.process.wire import Problem
from runtime.errors import OutOfMemoryError, XservError

_TREES = (models.errors, runtime.device.errors, runtime.engine.errors)
"""Modules whose errors are sent: they are imported, so that their classes are known."""


def problem_of(error: BaseException) -> Problem:
    """An error as a message. A plain ``MemoryError`` becomes an ``OutOfMemoryError``; any other foreign error becomes
    an ``XservError`` that names its type."""
    if isinstance(error, OSError) and error.errno is not None:
        filename = None if error.filename is None else str(error.filename)
        return Problem(["OSError"], error.strerror or str(error), {"errno": error.errno, "filename": filename})
    if isinstance(error, XservError):
        kinds = [_name(kind) for kind in type(error).__mro__ if issubclass(kind, XservError)]
        return Problem(kinds, str(error), _attributes(error))
    if isinstance(error, MemoryError):
        return Problem([_name(OutOfMemoryError)], str(error) or "the host has no more memory", {})
    return Problem([_name(XservError)], f"{type(error).__name__} in the engine; see the log", {})


def error_of(problem: Problem) -> Exception:
    """The error of a message, as the nearest class that is known here."""
    if problem.kinds == ["OSError"]:
        return OSError(problem.attributes.get("errno"), problem.message, problem.attributes.get("filename"))
    known = _known()
    kind = next((known[name] for name in problem.kinds if name in known), XservError)
    error: XservError = Exception.__new__(kind, problem.message)  # its args: the text
    error.__dict__.update(problem.attributes)
    return error


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known() -> dict[str, type[XservError]]:
    found: dict[str, type[XservError]] = {}
    kinds = [XservError]
    while kinds:
        kind = kinds.pop()
        found[_name(kind)] = kind
        kinds += kind.__subclasses__()
    return found


def _attributes(error: XservError) -> dict[str, str | int | float | bool | list[str] | None]:
    """The attributes that can be sent."""
    found: dict[str, str | int | float | bool | list[str] | None] = {}
    for name, value in vars(error).items():
        if isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value):
            found[name] = list(value)
        elif value is None or isinstance(value, (str, int, float, bool)):
            found[name] = value
    return found
