"""Functions in namespaces, as agents send them for their MCP servers and subagents.

A model reads one list of functions, so a function in a namespace has both names there, "files__read". A call is mapped
back by the request's tools, since a function's name may also contain "__"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from server.errors import invalid
from server.openai_api.schema import MAX_NAME_CHARACTERS, MAX_TOOLS
from server.responses_api.schema import FunctionTool, NamespaceTool, ResponsesTool

Names = Mapping[str, tuple[str, str]]
"""The model's name of a function: its namespace, and its name there."""


def flat_name(namespace: str | None, name: str) -> str:
    """A function's name for the model."""
    return name if namespace is None else f"{namespace}__{name}"


def flat_tools(tools: Iterable[ResponsesTool]) -> tuple[list[dict[str, Any]], Names]:
    """The tools in a chat's form. Raises `ApiError` 400."""
    flat: list[dict[str, Any]] = []
    seen: set[str] = set()
    names: dict[str, tuple[str, str]] = {}
    for path, namespace, tool in _functions(tools):
        name = tool.name
        if namespace is not None:
            name = flat_name(namespace.name, tool.name)
            names[name] = (namespace.name, tool.name)
        if len(name) > MAX_NAME_CHARACTERS:
            raise invalid(
                f"{path}.name",
                f"{path}.name and its namespace's come to {len(name)} characters as {name!r}; "
                f"at most {MAX_NAME_CHARACTERS} are allowed.",
            )
        if name in seen:
            raise invalid(f"{path}.name", f"{path}.name: there are two functions that the model sees as {name!r}.")
        seen.add(name)
        flat.append(_chat_tool(tool, name, namespace))
    if len(flat) > MAX_TOOLS:
        raise invalid("tools", f"tools must have at most {MAX_TOOLS} functions, got {len(flat)}.")
    return flat, names


def names_of_tools(tools: Iterable[ResponsesTool]) -> dict[str, str]:
    """Maps a chat's names of the functions to their names here."""
    return {f"tools[{i}].function": path for i, (path, _, _) in enumerate(_functions(tools))}


def _functions(tools: Iterable[ResponsesTool]) -> Iterator[tuple[str, NamespaceTool | None, FunctionTool]]:
    """Each function with its path in the request and its namespace."""
    for i, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield f"tools[{i}]", None, tool
        else:
            for j, function in enumerate(tool.tools):
                yield f"tools[{i}].tools[{j}]", tool, function


def _chat_tool(tool: FunctionTool, name: str, namespace: NamespaceTool | None) -> dict[str, Any]:
    """A chat's tool; the namespace's description comes before the function's own."""
    about = (None if namespace is None else namespace.description, tool.description)
    fields = {
        "name": name,
        "description": "\n\n".join(filter(None, about)) or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
