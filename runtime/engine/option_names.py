"""Errors for unknown options, with the name that was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import msgspec

from runtime.engine.errors import UnknownOptionError

P = ParamSpec("P")
R = TypeVar("R")


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` most like ``name``, or None if none is close."""
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1)), None)


def unknown_option(owner: str, name: str, names: Iterable[str], param: str | None = None) -> UnknownOptionError:
    """The error for ``owner(name=…)``, which takes ``names``; ``param`` is the server's name, if it differs."""
    near = nearest_name(name, names)
    hint = f"; did you mean {near!r}?" if near else ""
    return UnknownOptionError(f"{owner} has no option {name!r}{hint}", param=param or name)


def known_options(*more: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a method: unknown keywords raise ``UnknownOptionError``. ``more`` are names that it takes beside those
    of its signature."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(function).parameters.values()
        names = {each.name for each in parameters if each.kind in kinds}.difference(("self",)).union(more)

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            for name in options:
                if name not in names:
                    owner = type(args[0]).__name__
                    if function.__name__ != "__init__":
                        owner += f".{function.__name__}"
                    raise unknown_option(owner, name, names)
            return function(*args, **options)

        return call

    return decorate


class KnownOptions(msgspec.StructMeta):
    """Makes structs whose constructor raises ``UnknownOptionError`` for a keyword that is not a field."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        names = cls.__struct_fields__
        for name in options:
            if name not in names:
                raise unknown_option(cls.__name__, name, names)
        return super().__call__(*args, **options)
