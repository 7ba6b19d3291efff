"""What an option of the engine is, beside its name, type and default: said once, in `EngineConfig`.

A field of `EngineConfig` is annotated with an `Option`. From the fields are made: the checks of `EngineConfig`, the
flags of the commands (`runtime.commands.options`) and the list in docs/python.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from runtime.engine.checks import check_one_of, check_positive, check_seconds, is_integer
from runtime.engine.errors import RequestError

Heading = Literal["Model", "Memory and batches", "Execution", "Scheduling"]
"""Of the commands' help, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """An option on the command line, where that is more than the option's name and type.

    Attributes:
        name: of the flag, as an identifier; "": the option's.
        declarations: as typer takes them; empty: made of the name.
        kind: the type of the text's value; None: the option's.
        metavar: of the value.
        least: of the value.
        read: a flag's value as the option's. Raises `RequestError`.
        write: an option's value as the flag's, for the default.
    """

    name: str = ""
    declarations: tuple[str, ...] = ()
    kind: Any = None
    metavar: str | None = None
    least: float | None = None
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is said of an option.

    Attributes:
        help: one line for the command line.
        about: for docs/python.md and `help(EngineConfig)`; "": `help` says it.
        heading: where the flag stands in the help; "": there is no flag.
        known_as: the name in messages, where users know another one.
        least, most: of an integer; None: it has no such bound.
        flag: on the command line.
    """

    help: str = ""
    about: str = ""
    heading: Heading | Literal[""] = ""
    known_as: str = ""
    least: int | None = 1
    most: int | None = None
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
    def choices(self) -> tuple[str, ...]:
        """The values of a `Literal`; none for another type."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def check(self, value: object) -> None:
        """Raise `RequestError` for a value of another type, or out of bounds."""
        if value is None and self.is_optional:
            return
        if self.choices:
            check_one_of(self.shown, value, self.choices)
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise RequestError(f"{self.shown} must be True or False, got {value!r:.80}", param=self.shown)
        elif self.kind is float:
            check_seconds(self.shown, value)
        elif self.kind is int:
            self._check_integer(value)

    def _check_integer(self, value: object) -> None:
        least, most = self.option.least, self.option.most
        if least == 1:
            check_positive(self.shown, value)
        elif not is_integer(value) or (least is not None and value < least):  # type: ignore[operator]
            bound = "" if least is None else f", at least {least}"
            raise RequestError(
                f"{self.shown} must be an integer{bound}{' or None' if self.is_optional else ''}, got {value!r:.80}",
                param=self.shown,
            )
        if most is not None and value > most:  # type: ignore[operator]
            raise RequestError(f"{self.shown} must be at most {most}, got {value}", param=self.shown)


def option_fields(owner: type) -> Iterator[OptionField]:
    """The fields of a dataclass that an `Option` annotates."""
    hints = get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, option = get_args(hint)
        of_union = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        kinds = [each for each in of_union if each is not NoneType]
        yield OptionField(
            field.name, kinds[0] if len(kinds) == 1 else Any, NoneType in of_union, field.default, option
        )


def describe(owner: type) -> str:
    """The options as lines of a docstring: a name, and what it is."""
    table = list(option_fields(owner))
    return "\n".join(f"{each.name}  {each.option.about or each.option.help}" for each in table)
