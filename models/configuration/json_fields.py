"""JSON files of a model folder, read with typed errors: the file, the field, the value and the limit are
named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.errors import ConfigError, one_line
from runtime.later import later
from tokenizer.errors import pointer_problem

_other_formats = later("models.checkpoints.other_formats")  # of folders that are refused

_LARGEST_JSON_BYTES = 64 << 20  # an index of half a million tensors fits


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


def config_path(folder: str | Path) -> Path:
    """`folder`/config.json. Raises `ConfigError` if there is none, with what to do about it."""
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: there is no such folder")
    if not path.exists():
        raise ConfigError(f"{path}: the file is missing; {_other_formats.remedy(path.parent)}")
    return path


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object stored at `path`.

    Raises `ConfigError` when the file is missing, larger than 64 MiB, not UTF-8, not JSON, or not an object.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > _LARGEST_JSON_BYTES:
            raise ConfigError(f"{path}: {size_bytes} bytes is more than the limit of {_LARGEST_JSON_BYTES}")
        content = path.read_bytes()
        if problem := pointer_problem(content):
            raise ConfigError(f"{path}: {problem}")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: the file is missing") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply, or a number too long"
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, line {error.lineno}"
        raise ConfigError(f"{path}: not JSON ({reason})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


class Fields:
    """Typed access to the fields of one JSON object; records the fields that were read.

    `null` means the same as absent, as in transformers. `refuse_unread` refuses every field that was not read.
    """

    def __init__(self, values: dict[str, Any], where: str, path: tuple[str, ...] = ()) -> None:
        self.where = where  # the file, and the path inside it
        self.owner = ""  # such as an architecture, for messages
        self.notes: frozenset[str] = frozenset()  # names that are harmless here, besides those that are so anywhere
        self._path = path  # the objects that these lie in, from the file's own
        self._values = values
        self._defaults: dict[str, Any] = {}
        self._read: set[str] = set()
        self._objects: dict[str, Fields] = {}

    def error(self, name: str, message: str) -> ConfigError:
        return ConfigError(one_line(f"{self.where}: {name} {message}"))

    def values(self) -> dict[str, Any]:
        """All fields as JSON has them."""
        return dict(self._values)

    def names(self) -> list[str]:
        """The fields that are present and not null."""
        return [name for name, value in self._values.items() if value is not None]

    def has(self, name: str) -> bool:
        """True if the field has a value that is not null. Does not count as reading it."""
        return self._values.get(name, self._defaults.get(name)) is not None

    def __contains__(self, name: str) -> bool:
        """True if the field is present, even as null: only an absent one takes a default that is not null."""
        return name in self._values

    def default(self, values: Mapping[str, Any]) -> None:
        """Sets values of absent fields; these need not be read."""
        self._defaults = {**values, **self._defaults}

    def raw(self, name: str) -> Any:
        """The value as JSON has it; its default, or None, if absent."""
        self._read.add(name)
        return self._values.get(name, self._defaults.get(name))

    def expect(self, name: str, *supported: Any) -> None:
        """Reads a field that must be absent or one of `supported`, the architecture's fixed values."""
        value = self.raw(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in supported):
            known = ", ".join([*dict.fromkeys(map(repr, supported)), "null or absent"])
            raise self._unsupported(name, f": it must be {known}")

    def refuse_unread(self, is_harmless: Callable[[str, Any], bool], advice: str = "") -> None:
        """Raises `ConfigError` for a field that was not read, here or in an object below, unless it is harmless.

        `advice` ends the message: in it `{null}` stands for a JSON object that makes the field null."""
        for name, value in self._values.items():
            is_passed_over = value is None or name in self.notes or is_harmless(name, value)
            if name not in self._read and not is_passed_over:
                null: Any = None
                for outer in (name, *reversed(self._path)):
                    null = {outer: null}
                raise self._unsupported(name, advice.replace("{null}", json.dumps(null)))
        for nested in self._objects.values():
            nested.refuse_unread(is_harmless, advice)

    def _unsupported(self, name: str, what_to_do: str = "") -> ConfigError:
        owner = f" for {self.owner}" if self.owner else ""
        return self.error(name, f"= {self._values[name]!r:.80} is not supported{owner}{what_to_do}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is None:
            if default is REQUIRED:
                raise self.error(name, "is missing")
            return default
        return value

    def integer(self, name: str, default: Any = REQUIRED, *, least: int = 1, most: int = 1 << 30) -> Any:
        """An int in [least, most]; a bool or a float is refused."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, not {value!r:.80}")
        if not least <= value <= most:
            shown = value if abs(value) < 1 << 63 else f"one of {value.bit_length()} bits"
            raise self.error(name, f"must be from {least} to {most}, not {shown}")
        return value

    def number(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        above: float = -math.inf,
        least: float = -math.inf,
        most: float = math.inf,
    ) -> Any:
        """A finite float greater than `above`, at least `least` and at most `most`."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {value!r:.80}")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not (math.isfinite(value) and above < value and least <= value <= most):
            bounds = ["finite"]
            bounds += [f"greater than {above:g}"] if above > -math.inf else []
            bounds += [f"at least {least:g}"] if least > -math.inf else []
            bounds += [f"at most {most:g}"] if most < math.inf else []
            raise self.error(name, f"must be {', '.join(bounds)}, not {value!r}")
        return value

    def numbers(self, name: str, *, least: float = -math.inf, most: float = math.inf) -> tuple[float, ...]:
        """A list of finite floats from `least` to `most`."""
        entries = self._entries(name, REQUIRED, "numbers")
        return tuple(entries.number(each, least=least, most=most) for each in entries.values())

    def integers(self, name: str, *, least: int = 0) -> tuple[int, ...]:
        """A list of integers from `least` on; absent gives none."""
        entries = self._entries(name, [], "integers")
        return tuple(entries.integer(each, least=least) for each in entries.values())

    def _entries(self, name: str, default: Any, kind: str) -> Fields:
        values = self._get(name, default)
        if not isinstance(values, list):
            raise self.error(name, f"must be a list of {kind}, not {values!r:.80}")
        return Fields({f"{name}[{i}]": value for i, value in enumerate(values)}, self.where)

    def boolean(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._get(name, default)
        if value is not default and not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r:.80}")
        return value

    def string(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self.error(name, f"must be a string, not {value!r:.80}")
        return value

    def object(self, name: str) -> Fields:
        """A nested object, whose fields are recorded too; absent gives an empty one."""
        if name not in self._objects:
            value = self._get(name, {})
            if not isinstance(value, dict):
                raise self.error(name, f"must be an object, not {value!r:.80}")
            self._objects[name] = Fields(value, f"{self.where}: {name}", (*self._path, name))
            self._objects[name].owner = self.owner
            self._objects[name].notes = self.notes
        return self._objects[name]

    def insert(self, name: str, values: dict[str, Any], where: str) -> None:
        """Adds an object from another file, ``where``."""
        self._values = {**self._values, name: values}
        self._objects[name] = Fields(values, where, (*self._path, name))
        self._read.add(name)

    def strings(self, name: str) -> list[str] | None:
        """A list of strings."""
        value = self._get(name, None)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise self.error(name, f"must be a list of names, not {value!r:.80}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or nothing: a tuple without repeats, in the file's order."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not -1 <= token_id < 1 << 31:
                raise self.error(name, f"must be a token id or a list of them, not {value!r:.80}")
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id >= 0))  # -1 is an older "none"
