"""From requests of Ollama's `/api` to the chat, or the completion, that they are."""

from __future__ import annotations

from typing import Any

import msgspec

from server.config import ServerConfig
from server.errors import ApiError, below, invalid
from server.ollama_api.schema import (
    CHAT_NAMES,
    AnswerFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from server.openai_api.fields import take_table_fields
from server.openai_api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    FunctionCall,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    ToolCall,
)
from server.requests.thinking import has_variable, thinking_variables
from server.service import Service
from server.transport.body import schema_error
from server.transport.cleaning import Cleaner
from server.transport.json_limits import check_limits

FILL_CONTEXT = -2
"""`num_predict`: to the end of the context, which is no other limit than -1 here."""

RENAMED = {
    **{name: f"options.{option}" for option, name in CHAT_NAMES.items()},
    "response_format": "format",
    "reasoning_effort": "think",
}
"""A chat's fields by the names that they have here."""

NAMES_OF_PROMPT = {"messages": "prompt", **RENAMED}
"""The same for `/api/generate`, which has no messages."""


def own_model(service: Service, name: str) -> str:
    """Ollama's clients may add the tag ":latest" to a name that has none."""
    return next((own for own in service.model_names if name == tagged(own)), name)


def tagged(name: str) -> str:
    """A model's name as Ollama lists it: with a tag."""
    return name if ":" in name else f"{name}:latest"


def chat_of_messages(service: Service, asked: OllamaChatRequest, ignored: list[str]) -> ChatCompletionRequest:
    """Raises `ApiError` 400."""
    return ChatCompletionRequest(
        messages=[_message(fields, f"messages[{i}]", service) for i, fields in enumerate(asked.messages or ())],
        tools=asked.tools,
        **_fields(service, asked, ignored),
        **_thinking(service, asked.think, has_tools=bool(asked.tools)),
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
    )


def chat_of_prompt(service: Service, asked: OllamaGenerateRequest, ignored: list[str]) -> ChatCompletionRequest:
    """Raises `ApiError` 400."""
    _check_images(asked.images, "images", service)
    system = [Message(role="system", content=asked.system)] if asked.system else []
    content = _with_images(asked.prompt, asked.images) if asked.images else asked.prompt
    return ChatCompletionRequest(
        messages=[*system, Message(role="user", content=content)],
        **_fields(service, asked, ignored),
        **_thinking(service, asked.think, has_tools=False),
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
    )


def completion_of_prompt(service: Service, asked: OllamaGenerateRequest, ignored: list[str]) -> CompletionRequest:
    """Raises `ApiError` 400."""
    for name in ("system", "think", "images"):
        if getattr(asked, name):
            raise invalid(name, f"{name} means nothing to a raw prompt.")
    fields = _fields(service, asked, ignored)
    fields.setdefault("max_tokens", -1)
    return CompletionRequest(
        prompt=asked.prompt or "", logprobs=(asked.top_logprobs or 0) if asked.logprobs else None, **fields
    )


def _fields(service: Service, asked: AnswerFields, ignored: list[str]) -> dict[str, Any]:
    """What any answer may be asked for. `ignored` gets the names of options without effect."""
    options = _options(asked.options or {}, service.config, ignored)
    given: dict[str, Any] = {
        CHAT_NAMES[name]: value for name in CHAT_NAMES if (value := getattr(options, name)) is not None
    }
    if given.get("max_tokens") == FILL_CONTEXT:
        given["max_tokens"] = -1
    if given.get("seed") == -1:
        del given["seed"]
    return {
        "model": own_model(service, asked.model),
        "stream": asked.stream is not False,
        "response_format": _response_format(asked.format),
        **given,
    }


def _options(fields: dict[str, Any], config: ServerConfig, ignored: list[str]) -> OllamaOptions:
    without_effect: list[str] = []
    try:
        fields = take_table_fields(fields, OllamaOptions, without_effect)
        cleaner = Cleaner(without_effect, takes_unknown=config.unknown_fields == "warn")
        fields = cleaner.request(fields, OllamaOptions)
        check_limits(fields, config)
        options = msgspec.convert(fields, OllamaOptions)
    except msgspec.ValidationError as error:
        raise below("options", schema_error(str(error))) from None
    except ApiError as error:
        raise below("options", error) from None
    ignored += [f"options.{name}" for name in without_effect]
    return options


def _response_format(form: str | dict[str, Any] | None) -> JsonObjectFormat | JsonSchemaFormat | None:
    if not isinstance(form, str):
        return None if form is None else JsonSchemaFormat(JsonSchema("format", schema=form))
    if form not in ("", "json"):
        raise invalid("format", f'format must be "json" or a JSON schema, got {form[:40]!r}.')
    return JsonObjectFormat() if form else None


def _thinking(service: Service, think: bool | str | None, *, has_tools: bool) -> dict[str, Any]:
    """A chat's fields for what `think` asks for. Without it, the model does as it does."""
    if think is None:
        return {}
    if not service.answer_format.reasoning:
        if think is False:
            return {}
        raise invalid("think", f"think: {service.model_name!r} does not think.", "unsupported_parameter")
    if think is False:
        return {"reasoning_effort": "none"}
    tokenizer = service.tokenizer
    variables = thinking_variables(tokenizer, True, has_tools=has_tools)
    has_effort = isinstance(think, str) and has_variable(tokenizer, "reasoning_effort", has_tools=has_tools)
    return {"chat_template_kwargs": variables or None, "reasoning_effort": think if has_effort else None}


def _with_images(text: str | None, images: list[str]) -> list[dict[str, Any]]:
    """A message's parts: what it says, then its images."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text or ""}]
    return parts + [{"type": "image_url", "image_url": f"data:;base64,{image}"} for image in images]


def _check_images(images: list[str] | None, name: str, service: Service) -> None:
    if images and service.pictures is None:
        raise invalid(name, f"Unsupported parameter: {name} (the model reads text only).", "unsupported_parameter")


def names_of_prompt(asked: OllamaGenerateRequest) -> dict[str, str]:
    """A chat's names of what `chat_of_prompt` makes, to the request's own."""
    place = f"messages[{int(bool(asked.system))}]"
    images = range(len(asked.images or ()))
    return NAMES_OF_PROMPT | {f"{place}.content[{1 + i}].image_url": f"images[{i}]" for i in images}


def names_of_images(asked: OllamaChatRequest) -> dict[str, str]:
    """A chat's names of the parts that `_with_images` makes, to the request's own."""
    return {
        f"messages[{i}].content[{1 + number}].image_url": f"messages[{i}].images[{number}]"
        for i, fields in enumerate(asked.messages or ())
        if isinstance(images := fields.get("images"), list)
        for number in range(len(images))
    }


def _message(fields: dict[str, Any], path: str, service: Service) -> Message:
    try:
        message = msgspec.convert(fields, OllamaMessage)
    except msgspec.ValidationError as error:
        raise below(path, schema_error(str(error))) from None
    _check_images(message.images, f"{path}.images", service)
    calls = [
        ToolCall(FunctionCall(call.function.name, msgspec.json.encode(call.function.arguments).decode()), call.id)
        for call in message.tool_calls or ()
    ]
    content: str | list[dict[str, Any]] | None = message.content
    if message.images:
        content = _with_images(message.content, message.images)
    elif content is None and not calls:
        content = ""
    return Message(
        role=message.role,
        content=content,
        name=message.tool_name,
        reasoning_content=message.thinking or None,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
    )
