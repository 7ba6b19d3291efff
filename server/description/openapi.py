"""The API's description, from the types that requests are decoded into and answers encoded from.

Details that types do not express are added to the requests' schemas: ranges, which are those that `SamplingParams`
checks, ids, content parts, and the fields without effect of `server.openai_api.fields`. A request that the description
allows is accepted, or refused for a reason that no schema can express (a token id beyond the vocabulary)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from runtime.engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_LENGTH
from runtime.sampling_table import COLUMNS, json_schema
from runtime.version import release
from server.anthropic_api.schema import MESSAGE_PARTS, complete_messages
from server.description.operations import ERRORS, OPERATIONS, Json, Operation, Readiness
from server.ollama_api.schema import OLLAMA_PARTS, OllamaOptions, complete_ollama
from server.openai_api.fields import tables_of
from server.openai_api.schema import CompletionRequest, DetokenizeRequest, EmbeddingRequest, Tool
from server.pictures.reader import DETAILS, MAX_UUID_LENGTH
from server.responses_api import schema as responses
from server.transport.typed import held_in, struct_of
from server.vllm_api.scoring_schema import (
    OF_DOCUMENTS,
    OF_TEXTS,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    SimilarityRequest,
)

_EVERYWHERE = (401, 403, 405, 431, 500, 503)
"""Statuses of the layers around the routes: no key, a foreign Host or Origin, headers too large, draining."""


@functools.cache
def description(
    model_names: tuple[str, ...], vocab_size: int, *, reads_images: bool, fills_in: bool = False,
    operations: tuple[Operation, ...] = OPERATIONS,
) -> Json:  # fmt: skip
    """The whole document, OpenAPI 3.1, of a server of this model, or of several."""
    types = {operation.request for operation in operations if operation.request is not None}
    answers = [operation.answer for operation in operations if operation.answer not in (None, Json)]
    answers += [operation.anthropic_answer for operation in operations if operation.anthropic_answer is not None]
    streams = [operation.stream for operation in operations if operation.stream is not None]
    items = responses.INPUT_ITEMS
    parts = (Tool, *items, *MESSAGE_PARTS, *OLLAMA_PARTS)
    ordered = [*sorted(types, key=lambda each: each.__name__), *answers, *streams, *ERRORS.values(), *parts]
    references, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    named = dict(zip(map(repr, ordered), references, strict=True))
    for request in (*types, OllamaOptions):
        complete(components[request.__name__], request, model_names, vocab_size)
    if not fills_in:
        components["CompletionRequest"]["properties"]["suffix"] = {**NULL, "default": None}
    of_chats = IMAGES_OF_CHATS if reads_images else ()
    components["Message"]["properties"]["content"] = content_schema("text", images=of_chats)
    pixels: Json = {"type": "integer", "minimum": 1}
    size: Json = {"type": "object", "properties": {"longest_edge": pixels}, "additionalProperties": False}
    kwargs: Json = {
        "type": "object",
        "properties": {"min_pixels": pixels, "max_pixels": pixels, "size": size} if reads_images else {},
        "additionalProperties": False,
    }
    for name in ("ChatCompletionRequest", "EmbeddingRequest"):
        components[name]["properties"]["mm_processor_kwargs"] = {"anyOf": [kwargs, NULL], "default": None}
    for item in items:
        for name in {"content", "output"}.intersection(components[item.__name__]["properties"]):
            if item is not responses.InputReasoning:
                has_images = item is responses.InputFunctionCallOutput or (
                    reads_images and item is responses.InputMessage
                )
                images = IMAGES_OF_RESPONSES if has_images else ()
                content = content_schema("input_text", "output_text", images=images)
                components[item.__name__]["properties"][name] = content
    complete_messages(components, reads_images=reads_images)
    complete_ollama(components, model_names, reads_images=reads_images)
    paths: Json = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method] = _operation(operation, path, named)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "xserv",
            "version": release(),
            "description": "OpenAI's API with vLLM's extensions, Anthropic's messages and Ollama's API, for one model.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _without(required: str, others: Sequence[str]) -> Json:
    """An object with the one field, not null, and without the others, or with null in their places."""
    absent = dict.fromkeys(others, NULL)
    return {"required": [required], "properties": {required: {"not": NULL}, **absent}}


def _operation(operation: Operation, path: str, named: dict[str, Json]) -> Json:
    content: Json = {}
    if operation.answer is Json:
        content["application/json"] = {"schema": {"type": "object"}}
    elif operation.answer is not None:
        kinds = [named[repr(kind)] for kind in (operation.answer, operation.anthropic_answer) if kind is not None]
        content["application/json"] = {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}
    elif operation.stream is None:
        content[operation.media_type] = {"schema": {"type": "string"}}
    if operation.stream is not None:
        is_lines = operation.dialect == "ollama"
        told = "Lines of JSON, each by" if is_lines else "Server-sent events; each one's `data` by"
        content["application/x-ndjson" if is_lines else "text/event-stream"] = {
            "schema": {"type": "string", "description": f"{told} `x-event-data`."},
            "x-event-data": {"anyOf": [named[repr(operation.stream)], named[repr(operation.error)]]},
        }
    answers: Json = {"200": {"description": operation.summary, "content": content}}
    error = {"application/json": {"schema": named[repr(operation.error)]}}
    for status in sorted({*operation.errors, *_EVERYWHERE}):
        answers[str(status)] = {"description": _MEANINGS[status], "content": error}
    if operation.answer is Readiness:
        answers["503"]["content"] = {"application/json": {"schema": named[repr(Readiness)]}}
    result: Json = {
        "operationId": f"{operation.method} {path}",
        "summary": operation.summary,
        "responses": answers,
        "security": [{}] if operation.is_open else [{"key": []}, {}],
    }
    if parameters := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        result["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in parameters
        ]
    if operation.request is not None:
        result["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": named[repr(operation.request)]}},
        }
    return result


_MEANINGS = {
    400: "The request cannot be honoured; `param` names the field",
    401: "No key, or a wrong one, where keys are set",
    403: "A Host or an Origin that is not allowed",
    404: "There is no such thing",
    405: "Another method is meant",
    408: "The body did not arrive in time",
    409: "The request was cancelled by its name",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "The queue is full; Retry-After says when to come again",
    431: "The headers are too large",
    500: "A fault of the server's; its log has the cause",
    503: "The engine, or the server, takes no requests now",
}


NULL = {"type": "null"}
_LIMIT: Json = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, {"const": -1}]}
_RANGES: dict[str, Json] = {
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_N},
    **{name: json_schema(name) for name in COLUMNS},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _LIMIT),
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
    },
}
"""`SamplingParams`' bounds of a field, beside its type. null is allowed everywhere."""

_TOKEN_IDS: dict[str, Json] = {
    "stop_token_ids": {"maxItems": 1024},
    "allowed_token_ids": {"minItems": 1, "maxItems": 2**18},
}

_STOP: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}, "maxItems": 64},
        NULL,
    ],
    "default": None,
}


def _object(*required: str, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_URL: Json = {"type": "string", "minLength": 1}
_DETAIL: Json = {"enum": [*DETAILS, None]}
_UUID: Json = {"type": "string", "minLength": 1, "maxLength": MAX_UUID_LENGTH}
_NO_DATA: Json = {"anyOf": [{"type": "null"}, _object(url={"type": "null"}, detail=_DETAIL)]}
"""Instead of a URL, where a uuid says which image it is."""
IMAGES_OF_RESPONSES = (
    _object("type", "image_url", type={"const": "input_image"}, image_url=_URL, detail=_DETAIL, uuid=_UUID),
    _object("type", "uuid", type={"const": "input_image"}, image_url={"type": "null"}, detail=_DETAIL, uuid=_UUID),
)
IMAGES_OF_CHATS = (
    _object(
        "type", "image_url", type={"const": "image_url"}, uuid=_UUID,
        image_url={"anyOf": [_URL, _object("url", url=_URL, detail=_DETAIL)]},
    ),
    _object("type", "uuid", type={"const": "image_url"}, image_url=_NO_DATA, uuid=_UUID),
    *IMAGES_OF_RESPONSES,
)  # fmt: skip


def content_schema(*kinds: str, images: tuple[Json, ...]) -> Json:
    """A text, or parts that are texts or images; null if a chat's assistant has only called tools."""
    part: Json = {
        "type": "object",
        "properties": {"type": {"enum": kinds}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    if images:
        part = {"anyOf": [part, *images]}
    content: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    if kinds == ("text",):
        content["anyOf"].append(NULL)
    return content


def complete(schema: Json, request: type[msgspec.Struct], model_names: tuple[str, ...], vocab_size: int) -> None:
    """Adds the details of a request type: the model's name and ids, ranges, items, and the tables' fields."""
    fields = schema["properties"]
    required = schema.get("required", ())
    if "model" in fields:
        fields["model"] = {"enum": [*model_names] if "model" in required else [*model_names, None]}
    for name, limits in _RANGES.items():
        if name in required:
            fields[name] = limits
        elif name in fields:
            fields[name] = {"anyOf": [limits, NULL], "default": None}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    for name, limits in _TOKEN_IDS.items():
        if name in fields:
            fields[name] = {"anyOf": [{**ids, **limits}, NULL], "default": None}
    if request is DetokenizeRequest:
        fields["tokens"] = ids
    has_prompts = request in (CompletionRequest, EmbeddingRequest, PoolingRequest)
    for name in {"prompt", "input"}.intersection(fields) if has_prompts else ():
        texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        one = {**ids, "minItems": 1}
        fields[name] = {"anyOf": [{"type": "string"}, texts, one, {"type": "array", "items": one, "minItems": 1}]}
    if request in (EmbeddingRequest, PoolingRequest):
        of_messages = dict.fromkeys(("messages", "mm_processor_kwargs"), NULL)
        of_input = dict.fromkeys(("input", "add_special_tokens", "truncate_prompt_tokens"), NULL)
        schema["oneOf"] = [
            {"required": ["input"], "properties": of_messages},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, **of_input}},
        ]
    if request in (ScoreRequest, SimilarityRequest):
        schema["oneOf"] = [{"required": ["text_1", "text_2"]}, {"required": ["queries", "documents"]}]
    if request is SimilarityRequest:
        schema["oneOf"].append({"required": ["inputs"]})
        fields["parameters"] = {"anyOf": [{"type": "object", "maxProperties": 0}, NULL], "default": None}
    if request is RerankRequest:
        schema["oneOf"] = [_without("documents", OF_TEXTS), _without("texts", OF_DOCUMENTS)]
    for field in struct_of(request).fields:
        references = [{"$ref": f"#/components/schemas/{each.__name__}"} for each in held_in(field.type) or ()]
        for each in (fields[field.name], *fields[field.name].get("anyOf", ())) if references else ():
            if each.get("type") == "array":
                each["items"] = references[0] if len(references) == 1 else {"anyOf": references}
    for name in {"stop", "stop_sequences"}.intersection(fields):
        fields[name] = _STOP if name == "stop" else {**_STOP, "anyOf": _STOP["anyOf"][1:]}
    if request is CompletionRequest:  # 0 means that only the prompt is wanted; alternatives are a number here
        limit = {"type": "integer", "minimum": -1, "maximum": 2**31 - 1}
        fields["max_tokens"] = {"anyOf": [limit, NULL], "default": None}
        fields["logprobs"] = {"anyOf": [_RANGES["top_logprobs"], NULL], "default": None}
    accepted, refused = tables_of(request)
    for name, entry in accepted.items():
        fields[name] = {"anyOf": [msgspec.json.schema(entry.type), NULL], "description": f"No effect: {entry.reason}."}
    for name, missing in refused.items():
        fields.setdefault(name, {"enum": [*missing.harmless, None], "description": f"Not built: {missing.reason}."})
