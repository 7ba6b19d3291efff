"""Converts requests of Ollama's `/api` to chats or completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from server.config import ServerConfig
from server.errors import ApiError, below, invalid
from server.ollama_api.schema import (
    CHAT_NAMES,
    AnswerFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    Think,
)
from server.openai_api.extensions import FILL_CONTEXT
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
from server.requests.thinking import nearest_effort, thinking_variables
from server.service import Service
from server.transport.body import typed_fields
from server.transport.typed import converted

RENAMED = {
    **{name: f"options.{option}" for option, name in CHAT_NAMES.items()},
    "response_format": "format",
    "response_format.json_schema.schema": "format",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
}
"""A chat's fields by the names that they have here."""

NAMES_OF_PROMPT = {"messages": "prompt", **RENAMED}
"""The same for `/api/generate`, which has no messages."""


def chat_of_messages(
    service: Service, asked: OllamaChatRequest, ignored: list[str], names: dict[str, str]
) -> ChatCompletionRequest:
    """Converts `/api/chat`; `names` gets a chat's names of its images. Raises `ApiError` 400."""
    messages = _messages(asked, service, names)
    return ChatCompletionRequest(
        messages=messages,
        continue_final_message=_continues(messages),
        tools=asked.tools,
        **_fields(service, asked, ignored),
        **_thinking(service, asked.think, ignored, has_tools=bool(asked.tools)),
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
    )


def chat_of_prompt(
    service: Service, asked: OllamaGenerateRequest, ignored: list[str], names: dict[str, str]
) -> ChatCompletionRequest:
    """Converts `/api/generate` to a chat; `names` gets a chat's names of its images. Raises `ApiError` 400."""
    _check_images(asked.images, "images", service)
    system = [Message(role="system", content=asked.system)] if asked.system else []
    content: str | list[dict[str, Any]] | None = asked.prompt
    if asked.images:
        content, numbers = _with_images(asked.prompt, asked.images, 0)
        names |= _names_of(numbers, f"messages[{len(system)}].content", "images")
    return ChatCompletionRequest(
        messages=[*system, Message(role="user", content=content)],
        **_fields(service, asked, ignored),
        **_thinking(service, asked.think, ignored, has_tools=False),
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
    )


def completion_of_prompt(service: Service, asked: OllamaGenerateRequest, ignored: list[str]) -> CompletionRequest:
    """Converts a raw `/api/generate` to a completion. Raises `ApiError` 400."""
    for name in ("system", "think", "images"):
        if getattr(asked, name):
            raise invalid(name, f"{name} means nothing to a raw prompt.")
    fields = _fields(service, asked, ignored)
    fields.setdefault("max_tokens", -1)
    return CompletionRequest(
        prompt=asked.prompt or "", logprobs=(asked.top_logprobs or 0) if asked.logprobs else None, **fields
    )


def _fields(service: Service, asked: AnswerFields, ignored: list[str]) -> dict[str, Any]:
    """The common fields of all answers. `ignored` gets the names of options without effect."""
    options = _options(asked.options or {}, service.config, ignored)
    given: dict[str, Any] = {
        CHAT_NAMES[name]: value for name in CHAT_NAMES if (value := getattr(options, name)) is not None
    }
    if given.get("max_tokens") in (0, FILL_CONTEXT):  # Ollama treats only values above 0 as limits
        given["max_tokens"] = -1
    if given.get("seed") == -1:
        del given["seed"]
    return {
        "model": asked.model,
        "stream": asked.stream is not False,
        "response_format": _response_format(asked.format),
        **given,
    }


def _options(fields: dict[str, Any], config: ServerConfig, ignored: list[str]) -> OllamaOptions:
    """Unknown options have no effect, as in Ollama; `ignored` and the log name them."""
    without_effect: list[str] = []
    try:
        options = typed_fields(fields, OllamaOptions, config, without_effect, takes_unknown=True)
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


def _thinking(service: Service, think: Think | None, ignored: list[str], *, has_tools: bool) -> dict[str, Any]:
    """A chat's fields for `think`; without it, the model's default. `ignored`: see `nearest_effort`."""
    if think is None:
        return {}
    if not service.answer_format.reasoning:
        if think is False:
            return {}
        raise invalid("think", f"think: {service.model_name!r} does not think.", "unsupported_parameter")
    variables = {}
    if think is not False and think != "none":
        variables = thinking_variables(service, True, has_tools=has_tools)
    effort = None if think is True else think or "none"
    effort = nearest_effort(service, effort, "think", ignored, has_tools=has_tools)
    return {"chat_template_kwargs": variables or None, "reasoning_effort": effort}


_MARK = re.compile(r"\[img(?:-(\d+))?\]")


def _with_images(text: str | None, images: Sequence[str], first: int) -> tuple[list[dict[str, Any]], list[int]]:
    """A message's parts, and each one's image, or -1 for text. As in Ollama, each image replaces the next "[img]" of
    the text, or the "[img-7]" with its number in the conversation (`first` is the first's); other images stand before
    the text. An image that is named twice stands at the first place."""
    pieces = _MARK.split(text or "")  # a text, the number of a mark or None, a text, …
    places: list[int | None] = [None if number is None else int(number) - first for number in pieces[1::2]]
    named = {number for number in places if number is not None}
    others = iter([number for number in range(len(images)) if number not in named])
    seen: set[int] = set()
    parts: list[tuple[int, str]] = []
    said = pieces[0]
    for place, number, piece in zip(_MARK.findall(text or ""), places, pieces[2::2]):
        index = next(others, -1) if number is None else number
        if not 0 <= index < len(images) or index in seen:
            said += f"[img-{place}]" if place else "[img]"  # not an image of this message
        else:
            parts += [*([(-1, said)] if said else ()), (index, images[index])]
            seen.add(index)
            said = ""
        said += piece
    parts = [*((number, images[number]) for number in others), *parts, *([(-1, said)] if said else ())]
    return [
        {"type": "text", "text": each} if index < 0 else {"type": "image", "base64": each} for index, each in parts
    ], [index for index, _ in parts]


def _check_images(images: list[str] | None, name: str, service: Service) -> None:
    if images and service.pictures is None:
        raise invalid(name, f"Unsupported parameter: {name} (the model reads text only).", "unsupported_parameter")


def _names_of(numbers: Sequence[int], content: str, own: str) -> dict[str, str]:
    """A chat's names of the image parts of a content, mapped to the request's own names of the images."""
    images = ((i, number) for i, number in enumerate(numbers) if number >= 0)
    return {f"{content}[{i}]{end}": f"{own}[{number}]" for i, number in images for end in ("", ".base64")}


def _messages(asked: OllamaChatRequest, service: Service, names: dict[str, str]) -> list[Message]:
    messages, num_images = list[Message](), 0
    for i, fields in enumerate(asked.messages or ()):
        messages.append(_message(fields, f"messages[{i}]", service, num_images, names))
        num_images += len(fields.get("images") or ())
    return messages


def _continues(messages: list[Message]) -> bool:
    """Whether the answer continues the last message: a text of the assistant, as Ollama's templates leave it open."""
    last = messages[-1] if messages else None
    return last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls


def _message(fields: dict[str, Any], path: str, service: Service, num_images: int, names: dict[str, str]) -> Message:
    """`num_images`: in the earlier messages."""
    message = converted(fields, OllamaMessage, path)
    if message.role != "tool":  # in a tool's result, a text model reads a note about images
        _check_images(message.images, f"{path}.images", service)
    calls = [
        ToolCall(FunctionCall(call.function.name, call.function.arguments), call.id)
        for call in message.tool_calls or ()
    ]
    content: str | list[dict[str, Any]] | None = message.content
    if message.images:
        content, numbers = _with_images(message.content, message.images, num_images)
        names |= _names_of(numbers, f"{path}.content", f"{path}.images")
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
