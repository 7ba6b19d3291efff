"""Fields of `config.json` that a user replaces: `--hf-overrides`, after vLLM's option.

A JSON object, whose fields take the place of the file's. Objects in it are merged into those of the file, but a
rotation that names its kind (`rope_type`) replaces the file's whole, in either spelling. Null means absent; it also
removes a field that the engine does not support.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.errors import InvalidArgumentError

_EXAMPLE = '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}'
_ROPES = ("rope_parameters", "rope_scaling")


def as_text(overrides: Any) -> str:
    """The overrides, given as JSON text or parsed, as one line of JSON; "" if there are none.

    Raises `InvalidArgumentError` for anything but an object.
    """
    if overrides in (None, ""):
        return ""
    problem, values = "", overrides
    try:
        values = json.loads(overrides) if isinstance(overrides, str) else json.loads(json.dumps(overrides))
    except (TypeError, ValueError, RecursionError) as error:
        problem = f" ({error})"
    if problem or not isinstance(values, dict):
        raise InvalidArgumentError(
            f"hf_overrides is {overrides!r:.200}, must be a JSON object of fields of config.json{problem}, such as"
            f" {_EXAMPLE}",
            param="hf_overrides",
        )
    return json.dumps(values) if values else ""


def overridden(values: Mapping[str, Any], overrides: str) -> dict[str, Any]:
    """A config's fields with the overrides of `as_text` applied."""
    return _merged(values, json.loads(overrides) if overrides else {})


def changes(values: Mapping[str, Any], overrides: str) -> list[str]:
    """A line for each field of the file that `overridden` changes."""
    return list(_changes(values, json.loads(overrides) if overrides else {}, ""))


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for name, value in new.items():
        before = result.get(name)
        if name in _ROPES and isinstance(value, dict) and {"rope_type", "type"} & value.keys():
            for other in _ROPES:
                result.pop(other, None)
            for outer in ("rope_theta", "partial_rotary_factor"):
                if outer in value and outer not in new:
                    result.pop(outer, None)
        elif isinstance(value, dict) and isinstance(before, dict):
            value = _merged(before, value)
        result[name] = value
    return result


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], under: str) -> Iterator[str]:
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            yield from _changes(before, value, f"{under}{name}.")
        elif value is None and before is not None:
            yield f"{under}{name} = {before!r:.80} is passed over"
        elif value != before:
            yield f"{under}{name} is {value!r:.80}" + (f", not {before!r:.80}" if name in old else "")
