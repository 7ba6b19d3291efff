"""From a request's `response_format`, `structured_outputs` and forced `tool_choice` to the engine's grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import Grammar
from server.errors import ApiError, invalid
from server.openai_api.schema import (
    ChatCompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedToolChoice,
    StructuredOutputs,
)


def grammar_of(request: GenerationRequest, tools: Sequence[Mapping[str, Any]] | None = None) -> Grammar | None:
    """What the answer has to look like; None: nothing in particular.

    `tools` are the request's, once they have been checked. Raises `ApiError` 400 where two fields ask for different
    things, and where a text is too long; whether the grammar can be compiled is `check_grammar`'s to say.
    """
    field = grammar_field(request)
    try:
        if field == "tool_choice":
            return _tool_grammar(request, tools or ())
        if field == "structured_outputs":
            assert request.structured_outputs is not None
            return _structured_outputs(request.structured_outputs)
        return None if field is None else _response_format(request)
    except RequestError as error:
        raise refused(error, field) from None


def grammar_field(request: GenerationRequest) -> str | None:
    """The request's field that the grammar comes from. Raises `ApiError` 400 where there are two."""
    fields = []
    if isinstance(request.response_format, (JsonObjectFormat, JsonSchemaFormat)):
        fields.append("response_format")
    if request.structured_outputs is not None:
        fields.append("structured_outputs")
    if isinstance(request, ChatCompletionRequest) and _forces_call(request):
        fields.append("tool_choice")
    if len(fields) > 1:
        raise invalid(fields[0], f"{fields[0]} and {fields[1]} contradict each other; send one.")
    return fields[0] if fields else None


def refused(error: RequestError, field: str | None) -> ApiError:
    """The answer for a grammar that cannot be honoured."""
    return invalid(field, str(error), error.code or "invalid_value")


def _forces_call(request: ChatCompletionRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedToolChoice)


def _response_format(request: GenerationRequest) -> Grammar:
    wanted = request.response_format
    if isinstance(wanted, JsonSchemaFormat) and wanted.json_schema.schema is not None:
        return _json_schema(wanted.json_schema.schema)
    return Grammar(kind="json_object")


def _structured_outputs(wanted: StructuredOutputs) -> Grammar:
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise invalid(
            "structured_outputs",
            f"structured_outputs takes exactly one of {', '.join(wanted.__struct_fields__)}, "
            f"got {' and '.join(given) or 'none'}.",
        )
    if isinstance(wanted.json, str):
        return Grammar(kind="json_schema", text=wanted.json)
    if wanted.json is not None:
        return _json_schema(wanted.json)
    if wanted.regex is not None:
        return Grammar(kind="regex", text=wanted.regex)
    if wanted.choice is not None:
        return Grammar(kind="choice", text=msgspec.json.encode(wanted.choice).decode())
    if wanted.grammar is not None:
        return Grammar(kind="lark", text=wanted.grammar)
    if not wanted.json_object:
        raise invalid("structured_outputs.json_object", "structured_outputs.json_object must be true, or absent.")
    return Grammar(kind="json_object")


def _json_schema(schema: Mapping[str, Any]) -> Grammar:
    return Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode())


def _tool_grammar(request: GenerationRequest, tools: Sequence[Mapping[str, Any]]) -> Grammar:
    from runtime.text.tool_grammar import tool_grammar

    assert isinstance(request, ChatCompletionRequest)
    if not tools:
        raise invalid("tool_choice", "tool_choice asks for a call, and there are no tools.")
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None and not any(tool["function"]["name"] == named for tool in tools):
        raise invalid("tool_choice", f"tool_choice names {named!r}, which is not among the tools.")
    return Grammar(kind="lark", text=tool_grammar(tools, named, request.parallel_tool_calls is not False))
