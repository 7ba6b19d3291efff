"""Converts a request's `response_format` and `structured_outputs` to the engine's grammar, and tracks its schemas."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.grammar.compiling import GrammarChecker
from runtime.engine.grammar.grammar import Grammar, parse_json
from runtime.engine.grammar.json_schema import prepared
from runtime.engine.grammar.structured_outputs import StructuredOutputsParams
from server.errors import ApiError, invalid
from server.openai_api.schema import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)


class RequestSchemas:
    """The JSON schemas of a request's grammar, by their places in the request.

    field    of the request that asks for a grammar, or None
    closes   objects that declare properties and do not mention additional ones have none
    ignored  formats that are not enforced, by their names in `X-Xserv-Ignored`
    closed   places of the schemas with closed objects
    """

    def __init__(self, *, closes: bool) -> None:
        self.field: str | None = None
        self._closes = closes
        self._taken: dict[str, dict[str, Any]] = {}
        self.ignored: list[str] = []
        self.closed: list[str] = []

    def take(self, place: str, schema: Any, strict: bool | None = None) -> dict[str, Any]:
        """The schema in the grammar's form. Raises `ApiError` 400 that names the place."""
        try:
            ready = prepared(schema, closes=self._closes if strict is None else strict)
        except RequestError as error:
            raise _placed(error, place) from None
        if ready.schema is False:
            raise invalid(place, f"{place}: no value matches this schema; change it", "invalid_grammar")
        self.ignored += [f"{place}.{name}" for name in ready.ignored]
        self.closed += [place] if ready.num_closed else []
        taken = {} if ready.schema is True else ready.schema
        if taken.keys() == {"$ref", "$defs"}:
            taken = {**taken["$defs"][taken["$ref"].rpartition("/")[2]], "$defs": taken["$defs"]}
        self._taken[place] = taken
        return taken

    def at_fault(self, checker: GrammarChecker, grammar: Grammar, error: RequestError) -> ApiError | None:
        """After `grammar` was refused with `error`: the error of its only schema, or of the first of its schemas that
        is refused by itself; None if none is."""
        for place, schema in self._taken.items():
            alone = schema_grammar(schema)
            if alone == grammar:
                return _placed(error, place)
            try:
                checker.check(alone)
            except RequestError as own:
                return _placed(own, place)
        return None


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """The grammar of a schema. Raises `RequestError` if it is too long."""
    return Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode())


def answer_grammar(request: GenerationRequest, schemas: RequestSchemas) -> Grammar | None:
    """The grammar of the answer's content; None if it is free. `schemas` gets its schema.

    Raises `ApiError` 400 if two fields contradict each other, and for a schema that cannot be enforced; `check_grammar`
    compiles the grammar.
    """
    schemas.field = field = grammar_field(request)
    try:
        if field == "structured_outputs":
            assert request.structured_outputs is not None
            return _structured_outputs(request.structured_outputs, schemas)
        return None if field is None else _response_format(request, schemas)
    except RequestError as error:
        is_named = (error.param or "").startswith("structured_outputs.")
        raise refused(error, error.param if is_named else field) from None


def grammar_field(request: GenerationRequest) -> str | None:
    """The request's field that the content's grammar comes from. Raises `ApiError` 400 if there are two."""
    has_format = isinstance(request.response_format, (JsonObjectFormat, JsonSchemaFormat))
    if request.structured_outputs is None:
        return "response_format" if has_format else None
    if has_format:
        raise contradiction("response_format", "structured_outputs")
    return "structured_outputs"


def contradiction(one: str, other: str) -> ApiError:
    """The error of two fields that contradict each other."""
    return invalid(one, f"{one} and {other} contradict each other; send one.")


def refused(error: RequestError, field: str | None) -> ApiError:
    """The answer for an unsupported grammar."""
    return invalid(field, str(error), error.code or "invalid_value")


def _placed(error: RequestError, place: str) -> ApiError:
    """The error with the request's name of the engine's "grammar"."""
    param = place + (error.param or "").removeprefix("grammar")
    return invalid(param, place + str(error).removeprefix("grammar"), error.code or "invalid_value")


def _response_format(request: GenerationRequest, schemas: RequestSchemas) -> Grammar:
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat) and wanted.schema is not None:
        return schema_grammar(schemas.take("response_format.schema", wanted.schema))
    if isinstance(wanted, JsonSchemaFormat) and wanted.json_schema.schema is not None:
        form = wanted.json_schema
        return schema_grammar(schemas.take("response_format.json_schema.schema", form.schema, form.strict))
    return Grammar(kind="json_object")


def _structured_outputs(wanted: StructuredOutputs, schemas: RequestSchemas) -> Grammar:
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
    if given.keys() != {"json"}:
        return StructuredOutputsParams(**given).as_grammar()
    schema = given["json"]
    place = "structured_outputs.json"
    if isinstance(schema, str):
        try:
            schema = parse_json(Grammar(kind="json_schema", text=schema))
        except RequestError as error:
            raise _placed(error, place) from None
    return schema_grammar(schemas.take(place, schema))
