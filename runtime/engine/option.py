"""An option beside its name, type and default: written once, in the dataclass that has the field.

A field of `EngineConfig`, or of the server's `ServerConfig`, is annotated with an `Option`. From the fields are made:
the dataclass's checks, the flags of the commands (`runtime.commands.options`) and the list in its docstring, which
docs/python.md shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from runtime.engine.checks import is_integer, is_number
from runtime.engine.errors import RequestError
from runtime.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """An option on the command line, where that is more than the option's name and type.

    Attributes:
        name: of the flag, as an identifier; "": the option's.
        declarations: as typer takes them; empty: made of the name.
        kind: the type of the text's value; None: the option's.
        metavar: of the value.
        least: of the value.
        variable: of the environment, which has the value where no flag has.
        read: a flag's value as the option's. Raises `RequestError`.
        write: an option's value as the flag's, for the default.
    """

    name: str = ""
    declarations: tuple[str, ...] = ()
    kind: Any = None
    metavar: str | None = None
    least: float | None = None
    variable: str | None = None
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The words, bounds and flag of an option.

    Attributes:
        help: one line for the command line.
        about: for the docstring; "": `help` says it.
        heading: where the flag stands in the help; "": there is no flag.
        known_as: the name in messages, where users know another one.
        choices: of a text whose type does not list them.
        least, most: of an integer; None: it has no such bound. 0 may be a number of seconds where `least` is 0.
        below: the number of seconds that is too many.
        must_be: the bounds in words, where the usual ones do not do.
        flag: on the command line.
    """

    help: str = ""
    about: str = ""
    heading: str = ""
    known_as: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = 1
    most: int | None = None
    below: float = math.inf
    must_be: str = ""
    flag: Flag = Flag()


@dataclass(frozen=True, slots=True)
class OptionField:
    """A field that an `Option` annotates: `kind` is its type, without None, `is_optional` whether that may be given."""

    name: str
    kind: Any
    is_optional: bool
    default: Any
    option: Option

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return self.option.known_as or self.name

    @property
    def flag_name(self) -> str:
        """Its name on the command line, as an identifier."""
        return self.option.flag.name or self.name

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it may be; none: any."""
        return self.option.choices or (get_args(self.kind) if get_origin(self.kind) is Literal else ())

    def check(self, value: object, error: type[InvalidArgumentError] = RequestError) -> None:
        """Raise an error for a value of another type, or out of bounds."""
        if value is None and self.is_optional:
            return
        option, is_right, must_be = self.option, True, ""
        if self.choices:
            is_right, must_be = value in self.choices, f"one of {', '.join(self.choices)}"
        elif self.kind is bool:
            is_right, must_be = isinstance(value, bool), "True or False"
        elif self.kind is float:
            is_right = is_number(value) and (0 < value < option.below or value == option.least == 0)  # type: ignore[operator]
            must_be = "a positive number of seconds"
        elif self.kind is int:
            is_right = is_integer(value) and (option.least is None or value >= option.least)  # type: ignore[operator]
            bound = "" if option.least is None else f", at least {option.least}"
            or_none = " or None" if self.is_optional else ""
            must_be = "a positive integer" if option.least == 1 else f"an integer{bound}{or_none}"
            if is_right and option.most is not None:
                is_right, must_be = value <= option.most, f"at most {option.most}"  # type: ignore[operator]
        if not is_right:
            raise error(f"{self.shown} must be {option.must_be or must_be}, got {value!r:.80}", param=self.shown)


@functools.cache
def option_fields(owner: type) -> tuple[OptionField, ...]:
    """The table of a dataclass: its fields that an `Option` annotates."""
    hints = get_type_hints(owner, include_extras=True)
    found = []
    for field in fields(owner):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, option = get_args(hint)
        of_union = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        kinds = [each for each in of_union if each is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else Any
        found.append(OptionField(field.name, kind, NoneType in of_union, field.default, option))
    return tuple(found)


def check_options(config: object, error: type[InvalidArgumentError] = RequestError) -> None:
    """Raise an error for the first of a dataclass's options that is wrong."""
    owner: type = type(config)
    for each in option_fields(owner):
        each.check(getattr(config, each.name), error)


def describe(owner: type) -> str:
    """The options as lines of a docstring: a name, and what it is."""
    return "\n".join(f"{each.name}  {each.option.about or each.option.help}" for each in option_fields(owner))
