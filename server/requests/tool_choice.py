"""The tools of a request that may be called, whether a call is forced, and a call's arguments as an object."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.json_schema import TYPES
from runtime.text.formats import AnswerFormat
from runtime.text.tools.grammar import marker_ids, tool_grammar
from runtime.text.tools.notation import Notation
from runtime.text.tools.schema_types import types_of
from server.errors import invalid
from server.openai_api.schema import AllowedToolsChoice, ChatCompletionRequest, NamedToolChoice, Tool
from server.requests.structured import RequestSchemas
from server.transport.typed import converted
from tokenizer import Tokenizer


def callable_tools(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """The tools that may be called, as they were sent, checked; None if there are none. Raises `ApiError` 400."""
    for i, tool in enumerate(request.tools or ()):
        converted(tool, Tool, f"tools[{i}]")
    choice = request.tool_choice
    tools = request.tools or []
    if isinstance(choice, AllowedToolsChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        known = {tool["function"]["name"] for tool in tools}
        for i, name in enumerate(names):
            if name not in known:
                raise invalid(
                    f"tool_choice.allowed_tools.tools[{i}]",
                    f"tool_choice.allowed_tools names {name!r}, which is not among the tools{_names(tools)}.",
                )
        tools = [tool for tool in tools if tool["function"]["name"] in names]
    return tools if tools and choice != "none" else None


def _names(tools: list[dict[str, Any]]) -> str:
    shown = ", ".join(tool["function"]["name"] for tool in tools[:20])
    return f" ({shown}{', …' if len(tools) > 20 else ''})" if shown else ""


def forces_call(request: ChatCompletionRequest) -> bool:
    """Whether the answer has to be a call."""
    choice = request.tool_choice
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedToolChoice)


def forced_calls(
    request: ChatCompletionRequest,
    tools: list[dict[str, Any]] | None,
    answer_format: AnswerFormat,
    tokenizer: Tokenizer | None,
    schemas: RequestSchemas,
) -> Grammar:
    """The grammar of the calls that the request forces; `schemas` gets the tools'. Raises `ApiError` 400."""
    schemas.field = "tool_choice"
    if not tools:
        raise invalid("tool_choice", "tool_choice asks for a call, and there are no tools.")
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None and not any(tool["function"]["name"] == named for tool in tools):
        raise invalid("tool_choice", f"tool_choice names {named!r}, which is not among the tools{_names(tools)}.")
    notation = answer_format.forced_tools
    if notation is None:
        raise invalid(
            "tool_choice",
            'Calls cannot be forced: this model has no tokenizer, or its server was started with "--tool-call-parser '
            'none"; tool_choice can be "none" or "auto".',
            "unsupported_value",
        )
    places = {id(tool): f"tools[{i}].function.parameters" for i, tool in enumerate(request.tools or ())}
    taken = []
    for tool in tools:
        function = tool["function"]
        if function.get("parameters") is not None and named in (None, function["name"]):
            ready = schemas.take(places[id(tool)], function["parameters"], function.get("strict"))
            tool = {**tool, "function": {**function, "parameters": ready}}
        taken.append(tool)
    try:
        return Grammar(kind="lark", text=_calls_text(request, taken, notation, tokenizer, named))
    except RequestError as error:
        raise invalid("tool_choice", str(error), error.code or "invalid_value") from None


def free_calls_text(
    request: ChatCompletionRequest, tools: list[dict[str, Any]], notation: Notation, tokenizer: Tokenizer | None
) -> str:
    """The grammar, in Lark's notation, of optional calls. It enforces the notation and the tools' names, not the tools'
    schemas."""
    free = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        declared = _properties_of(parameters) if notation.form.arguments != "json" else {}
        schema = {"type": "object"} | ({"properties": declared} if declared else {})
        free.append({**tool, "function": {**function, "parameters": schema}})
    return _calls_text(request, free, notation, tokenizer, None)


def _properties_of(parameters: Any) -> dict[str, Any]:
    """Each property with only its types, which determine its notation."""
    declared = parameters.get("properties") if isinstance(parameters, dict) else None
    properties = {}
    for name, schema in (declared if isinstance(declared, dict) else {}).items():
        types = sorted(types_of(schema, parameters))
        properties[name] = {"type": types} if types and set(types) <= set(TYPES) else {}
    return properties


def _calls_text(
    request: ChatCompletionRequest,
    tools: list[dict[str, Any]],
    notation: Notation,
    tokenizer: Tokenizer | None,
    named: str | None,
) -> str:
    parallel = request.parallel_tool_calls is not False
    return tool_grammar(notation, tools, named, parallel, marker_ids(notation, tokenizer))


INVALID_JSON = "INVALID_JSON"
"""The one key of an input that is no JSON object, as Anthropic's guide to tools has it."""


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; text that is not an object, such as truncated arguments, is kept inside one."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
