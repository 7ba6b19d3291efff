"""Writes calls in a model's notation: for past calls of a conversation that its template cannot write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.text.tools.notation import Notation


def written(notation: Notation, calls: Sequence[tuple[str, Any]]) -> str:
    """The text of calls, given names and arguments, which are objects, or texts that are not."""
    form = notation.form
    texts = [
        form.head.replace("NAME", name) + _WRITERS[form.arguments](arguments) + form.tail for name, arguments in calls
    ]
    return form.before + form.between.join(texts) + form.after


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _qwen3_coder(arguments: Any) -> str:
    return "".join(f"<parameter={key}>\n{_text_or_json(value)}\n</parameter>\n" for key, value in _items(arguments))


def _glm45(arguments: Any) -> str:
    pairs = ((key, _text_or_json(value)) for key, value in _items(arguments))
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)


def _python(arguments: Any) -> str:
    return ", ".join(f"{key}={_python_value(value)}" for key, value in _items(arguments))


def _python_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python_value(key)}: {_python_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_python_value, value))}]"
    return str(value)


def _gemma(arguments: Any) -> str:
    return ",".join(f"{key}:{_gemma_value(value)}" for key, value in _items(arguments))


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return json.dumps(value)


def _items(arguments: Any) -> list[tuple[str, Any]]:
    """The arguments one by one; none for a value that is not an object."""
    return list(arguments.items()) if isinstance(arguments, Mapping) else []


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_WRITERS = {"json": _json, "qwen3_coder": _qwen3_coder, "glm45": _glm45, "python": _python, "gemma": _gemma}
