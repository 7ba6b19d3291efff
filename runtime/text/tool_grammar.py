"""The grammar that forces a tool call: what `tool_choice` asks for, written the way the model writes calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.text.tool_calls import HERMES


def tool_grammar(tools: Sequence[Mapping[str, Any]], name: str | None = None, parallel: bool = True) -> str:
    """A grammar, in Lark's notation as llguidance reads it, of which every text is a call that the parser reads.

    tools     checked, in OpenAI's form; their names need no escape in JSON
    name      the one function that may be called; None: any of them
    parallel  further calls may follow the first, unless it was named
    """
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    calls = [f"call_{i}" for i in range(len(functions))]
    lines = [
        'start: call (LINE_END call)*' if parallel and name is None else "start: call",
        f"call: {_quoted(HERMES.open_tag)} LINE_END ({' | '.join(calls)}) LINE_END {_quoted(HERMES.close_tag)}",
        'LINE_END: "\\n"',
    ]
    for call, function in zip(calls, functions, strict=True):
        head = f'{{"name": "{function["name"]}", "arguments": '
        lines.append(f'{call}: {_quoted(head)} {call}_arguments {_quoted("}")}')
        lines.append(f"{call}_arguments: %json {json.dumps(_object_schema(function.get('parameters')))}")
    return "\n".join(lines)


def _object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function without a schema takes nothing (OpenAI's rule); one with a schema takes an object."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def _quoted(text: str) -> str:
    """A string of Lark's, which are JSON's."""
    return json.dumps(text)
