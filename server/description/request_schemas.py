"""Request schemas' details that types do not express: ranges, ids, content parts, and fields without effect.

Ranges are those that `SamplingParams` checks; the fields without effect are in `server.openai_api.fields`."""

from __future__ import annotations

import msgspec

from runtime.engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_LENGTH
from runtime.sampling_table import COLUMNS, json_schema
from server.description.operations import Json
from server.openai_api.fields import tables_of
from server.openai_api.schema import (
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
)
from server.pictures.reader import DETAILS, MAX_UUID_LENGTH
from server.responses_api.schema import (
    ResponsesRequest,
)
from server.vllm_api.schema import (
    PoolingRequest,
    ScoreRequest,
)

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
_INPUT_ITEMS = ("InputMessage", "InputFunctionCall", "InputFunctionCallOutput", "InputReasoning")

_STOP: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
            "maxItems": 64,
        },
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
    if request is ScoreRequest:
        schema["oneOf"] = [{"required": ["text_1", "text_2"]}, {"required": ["queries", "documents"]}]
    if request is ResponsesRequest:
        items = [{"$ref": f"#/components/schemas/{item}"} for item in _INPUT_ITEMS]
        fields["input"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": items}, "minItems": 1}]}
    elif "tools" in fields:
        tools = {"type": "array", "items": {"$ref": "#/components/schemas/Tool"}, "maxItems": 128}
        fields["tools"] = {"anyOf": [tools, NULL], "default": None}
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
