"""JSON files of a model folder, read with typed errors: the file, the field, the value and the limit are
named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from models.errors import ConfigError

_LARGEST_JSON_BYTES = 64 << 20  # an index of half a million tensors fits


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object stored at `path`.

    Raises `ConfigError` when the file is missing, larger than 64 MiB, not UTF-8, not JSON, or not an object.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > _LARGEST_JSON_BYTES:
            raise ConfigError(f"{path}: {size_bytes} bytes is more than the limit of {_LARGEST_JSON_BYTES}")
        text = path.read_bytes().decode("utf-8-sig")
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
    """Typed access to the fields of one JSON object; `null` means the same as absent, as in transformers."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where  # the file, and the path inside it

    def error(self, name: str, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} {message}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
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

    def object(self, name: str) -> dict[str, Any]:
        """A nested object; absent gives an empty one."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {value!r:.80}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or nothing: a tuple without repeats, in the file's order."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not -1 <= token_id < 1 << 31:
                raise self.error(name, f"must be a token id or a list of them, not {value!r:.80}")
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id >= 0))  # -1 is an older "none"
