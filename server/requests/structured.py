"""Converts what a request wants of its answer's form to the engine's grammar: its `response_format`, its
`structured_outputs`, and the calls that its `tool_choice` forces. Tracks the request's schemas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.grammar.compiling import GrammarChecker
from runtime.engine.grammar.grammar import Grammar, parse_json
from runtime.engine.grammar.json_schema import TYPES, prepared
from runtime.engine.grammar.structured_outputs import StructuredOutputsParams
from runtime.text.formats import AnswerFormat, json_spacing
from runtime.text.tools.grammar import marker_ids, tool_grammar
from runtime.text.tools.table import Notation
from runtime.text.tools.tagged_calls import types_of
from server.errors import ApiError, invalid
from server.openai_api.schema import (
    AllowedToolsChoice,
    ChatCompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedToolChoice,
    StructuredOutputs,
    Tool,
)
from server.transport.typed import converted
from tokenizer import Tokenizer


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
    with grammar_errors(field):
        if field == "structured_outputs":
            assert request.structured_outputs is not None
            return _structured_outputs(request.structured_outputs, schemas)
        return None if field is None else _response_format(request, schemas)


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


@contextmanager
def grammar_errors(field: str | None) -> Iterator[None]:
    """Raises `ApiError` 400 of the field for an unsupported grammar, or one that is too long."""
    try:
        yield
    except RequestError as error:
        is_named = (error.param or "").startswith("structured_outputs.")
        raise invalid(error.param if is_named else field, str(error), error.code or "invalid_value") from None


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
    with grammar_errors("tool_choice"):
        return Grammar(kind="lark", text=_calls_text(request, taken, notation, answer_format, tokenizer, named))


def free_calls_text(
    request: ChatCompletionRequest,
    tools: list[dict[str, Any]],
    notation: Notation,
    answer_format: AnswerFormat,
    tokenizer: Tokenizer | None,
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
    return _calls_text(request, free, notation, answer_format, tokenizer, None)


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
    answer_format: AnswerFormat,
    tokenizer: Tokenizer | None,
    named: str | None,
) -> str:
    parallel = request.parallel_tool_calls is not False
    spacing = json_spacing(answer_format, tokenizer)
    return tool_grammar(notation, tools, named, parallel, marker_ids(notation, tokenizer), spacing)


INVALID_JSON = "INVALID_JSON"
"""The one key of an input that is no JSON object, as Anthropic's guide to tools has it."""


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; text that is not an object, such as truncated arguments, is kept inside one."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
