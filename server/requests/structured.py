"""From a request's `response_format` and `structured_outputs` to the engine's grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import Grammar, parse_json
from runtime.engine.grammar.strictness import closed
from runtime.engine.grammar.structured_outputs import StructuredOutputsParams
from server.errors import ApiError, invalid
from server.openai_api.schema import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)


def answer_grammar(request: GenerationRequest, *, closes_schemas: bool) -> Grammar | None:
    """What the answer's content has to look like; None: nothing in particular.

    Raises `ApiError` 400 where two fields ask for different things, and where a text is too long; whether the grammar
    can be compiled is `check_grammar`'s to say.
    """
    field = grammar_field(request)
    try:
        if field == "structured_outputs":
            assert request.structured_outputs is not None
            return _structured_outputs(request.structured_outputs, closes_schemas)
        return None if field is None else _response_format(request, closes_schemas)
    except RequestError as error:
        is_named = (error.param or "").startswith("structured_outputs.")
        raise refused(error, error.param if is_named else field) from None


def grammar_field(request: GenerationRequest) -> str | None:
    """The request's field that the content's grammar comes from. Raises `ApiError` 400 where there are two."""
    has_format = isinstance(request.response_format, (JsonObjectFormat, JsonSchemaFormat))
    if request.structured_outputs is None:
        return "response_format" if has_format else None
    if has_format:
        raise contradiction("response_format", "structured_outputs")
    return "structured_outputs"


def contradiction(one: str, other: str) -> ApiError:
    """Two fields that ask for different things."""
    return invalid(one, f"{one} and {other} contradict each other; send one.")


def refused(error: RequestError, field: str | None) -> ApiError:
    """The answer for a grammar that cannot be honoured."""
    return invalid(field, str(error), error.code or "invalid_value")


def _response_format(request: GenerationRequest, closes_schemas: bool) -> Grammar:
    wanted = request.response_format
    if not isinstance(wanted, JsonSchemaFormat) or wanted.json_schema.schema is None:
        return Grammar(kind="json_object")
    strict = wanted.json_schema.strict
    return _json_schema(wanted.json_schema.schema, closes_schemas if strict is None else strict)


def _structured_outputs(wanted: StructuredOutputs, closes_schemas: bool) -> Grammar:
    grammar = StructuredOutputsParams(**msgspec.structs.asdict(wanted)).as_grammar()
    is_schema = grammar.kind == "json_schema"
    return _json_schema(parse_json(grammar), True) if is_schema and closes_schemas else grammar


def _json_schema(schema: Mapping[str, Any], is_closed: bool) -> Grammar:
    return Grammar(kind="json_schema", text=msgspec.json.encode(closed(schema) if is_closed else schema).decode())
