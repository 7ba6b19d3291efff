"""Strict reading of JSON objects: every value is checked for its type, and an error names file, field and
value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tokenizer.errors import TokenizerFileError, pointer_problem

_MAX_SHOWN = 80


def shown(value: object) -> str:
    """`value` as it appears in an error message: JSON-like and never long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


class Fields:
    """One JSON object of a tokenizer file, with the path that leads to it.

    The readers (`string`, `boolean`, ...) raise `TokenizerFileError` for a value of the wrong type. Without `default`
    the field is required.
    """

    def __init__(self, values: Mapping[str, Any], file: str, path: str = "") -> None:
        self.values = values
        self.file = file
        self.path = path

    @classmethod
    def of(cls, value: object, file: str, path: str) -> Fields:
        """Wrap `value`, which must be a JSON object."""
        if not isinstance(value, dict):
            raise TokenizerFileError(file, path, f"expected an object, found {shown(value)}")
        return cls(value, file, path)

    @classmethod
    def read(cls, file: Path) -> Fields:
        """Read a JSON file whose top level is an object."""
        try:
            content = file.read_bytes()
        except OSError as error:
            raise TokenizerFileError(file.name, "", f"cannot be read: {error.strerror}") from error
        if problem := pointer_problem(content):
            raise TokenizerFileError(file.name, "", problem)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TokenizerFileError(file.name, "", f"is not valid JSON: {error}") from error
        return cls.of(value, file.name, "")

    def field(self, name: str) -> str:
        """The full path of field `name`."""
        return f"{self.path}.{name}" if self.path else name

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise the typed error for field `name`."""
        raise TokenizerFileError(self.file, self.field(name), problem)

    def wrong(self, name: str, expected: str) -> NoReturn:
        """Raise the typed error for a value of field `name` that is not `expected`."""
        if name not in self.values:
            self.fail(name, f"is missing, expected {expected}")
        self.fail(name, f"expected {expected}, found {shown(self.values[name])}")

    def known(self, names: Iterable[str]) -> None:
        """Refuses every field that is not one of `names`."""
        for name in self.values.keys() - set(names):
            self.fail(name, f"is not supported (value {shown(self.values[name])})")

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self.values.get(name)

    def string(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(name, default)
        if not isinstance(value, str):
            self.wrong(name, "a string")
        return value

    def optional_string(self, name: str) -> str | None:
        """A string, or None when the field is missing or null."""
        return None if self.values.get(name) is None else self.string(name)

    def character(self, name: str) -> str:
        """A string of exactly one character."""
        value = self.string(name)
        if len(value) != 1:
            self.wrong(name, "one character")
        return value

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """A boolean; null counts as missing."""
        value = self.values.get(name)
        if value is None:
            value = default
        if not isinstance(value, bool):
            self.wrong(name, "true or false")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A non-negative integer."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.wrong(name, "a non-negative integer")
        return value

    def choice(self, name: str, choices: Iterable[str], default: str | None = None) -> str:
        """One of a few strings."""
        value = self.values.get(name, default)
        allowed = list(choices)
        if value not in allowed:
            self.wrong(name, "one of " + ", ".join(allowed))
        return str(value)

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self.values.get(name)
        if not isinstance(value, list):
            self.wrong(name, "a list")
        return value

    def object(self, name: str) -> Fields:
        """A nested object."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            self.wrong(name, "an object")
        return Fields(value, self.file, self.field(name))

    def optional_object(self, name: str) -> Fields | None:
        """A nested object, or None when the field is missing or null."""
        return None if self.values.get(name) is None else self.object(name)

    def objects(self, name: str) -> list[Fields]:
        """A list of nested objects."""
        return [Fields.of(value, self.file, f"{self.field(name)}[{i}]") for i, value in enumerate(self.items(name))]

    def one_of(self, what: str, types: Iterable[str]) -> str:
        """The object's "type", which must be one of `types`; another is refused by its name."""
        name = self.string("type")
        if name not in set(types):
            self.fail("type", f"{what} {name!r} is not supported")
        return name
