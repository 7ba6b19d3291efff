"""`GET /openapi.json`: the API's description, from the types that requests are decoded into and answers encoded from.

Details that types do not express are added to the requests' schemas (`request_schemas`). A request that the description
allows is accepted, or refused for a reason that no schema can express (a token id beyond the vocabulary)."""

from __future__ import annotations

import functools

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from runtime.version import release
from server.anthropic_api.schema import MESSAGE_PARTS, complete_messages
from server.description.operations import ERRORS, OPERATIONS, Json, Operation, Readiness
from server.description.request_schemas import IMAGES_OF_CHATS, IMAGES_OF_RESPONSES, NULL, complete, content_schema
from server.ollama_api.schema import OLLAMA_PARTS, OllamaOptions, complete_ollama
from server.openai_api.schema import Tool
from server.responses_api.schema import InputFunctionCall, InputFunctionCallOutput, InputMessage, InputReasoning
from server.service import Service

_EVERYWHERE = (401, 403, 405, 431, 500, 503)
"""Statuses of the layers around the routes: no key, a foreign Host or Origin, headers too large, draining."""


@functools.cache
def description(model_names: tuple[str, ...], vocab_size: int, *, reads_images: bool) -> Json:
    """The whole document, OpenAPI 3.1, of a server of this model."""
    types = {operation.request for operation in OPERATIONS if operation.request is not None}
    answers = [operation.answer for operation in OPERATIONS if operation.answer not in (None, Json)]
    answers += [operation.anthropic_answer for operation in OPERATIONS if operation.anthropic_answer is not None]
    streams = [operation.stream for operation in OPERATIONS if operation.stream is not None]
    items = (InputMessage, InputFunctionCall, InputFunctionCallOutput, InputReasoning)
    parts = (Tool, *items, *MESSAGE_PARTS, *OLLAMA_PARTS)
    ordered = [*sorted(types, key=lambda each: each.__name__), *answers, *streams, *ERRORS.values(), *parts]
    references, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    named = dict(zip(map(repr, ordered), references, strict=True))
    for request in (*types, OllamaOptions):
        complete(components[request.__name__], request, model_names, vocab_size)
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
            if item is not InputReasoning:
                has_images = item is InputFunctionCallOutput or (reads_images and item is InputMessage)
                images = IMAGES_OF_RESPONSES if has_images else ()
                content = content_schema("input_text", "output_text", images=images)
                components[item.__name__]["properties"][name] = content
    complete_messages(components, reads_images=reads_images)
    complete_ollama(components, model_names, reads_images=reads_images)
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, named)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "xserv",
            "version": release(),
            "description": "OpenAI's API with vLLM's extensions, Anthropic's messages and Ollama's API, for one model.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, named: dict[str, Json]) -> Json:
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
        "operationId": f"{operation.method} {operation.path}",
        "summary": operation.summary,
        "responses": answers,
        "security": [{}] if operation.is_open else [{"key": []}, {}],
    }
    if parameters := [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]:
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


def description_of(service: Service) -> Json:
    """The document of this server."""
    info = service.client.info
    return description(service.model_names, info.vocab_size, reads_images=info.images is not None)


async def get_description(request: Request) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(description_of(request.app.state.service)), media_type="application/json")
