"""Converts a request's messages to plain dicts for `runtime.text.chat`.

Content has a single form (`runtime.text.content`), with the pictures' sources beside it. Fields that templates do not
use are left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.text.content import ImagePart, plain_content, text_of
from server.errors import ApiError, from_engine, invalid
from server.openai_api.schema import ChatCompletionRequest, Message
from server.pictures.reader import PictureReader, PictureSource, picture_source


def template_messages(
    request: ChatCompletionRequest, pictures: PictureReader | None
) -> tuple[list[dict[str, Any]], list[PictureSource]]:
    """The conversation in Hugging Face's form, and its pictures in order; `pictures` is None if the model reads none.
    Raises `ApiError` 400 naming the message's field."""
    sources: list[PictureSource] = []
    messages = [_message(message, f"messages[{i}]", pictures, sources) for i, message in enumerate(request.messages)]
    return messages, sources


def check_ending(request: ChatCompletionRequest) -> tuple[bool, bool]:
    """`add_generation_prompt` and `continue_final_message`, which exclude each other. Raises `ApiError`
    400."""
    continues = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt if request.add_generation_prompt is not None else not continues
    if continues and adds_prompt:
        raise invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other; set the latter to false.",
        )
    return adds_prompt, continues


def echoed_text(request: ChatCompletionRequest, messages: list[dict[str, Any]]) -> str:
    """With `echo`, the last message's text if it is the assistant's; else nothing."""
    last = messages[-1]
    return text_of(last["content"]) if request.echo and last["role"] == "assistant" else ""


def _message(
    message: Message, path: str, pictures: PictureReader | None, sources: list[PictureSource]
) -> dict[str, Any]:
    is_assistant = message.role == "assistant"
    if message.audio is not None:
        raise _unsupported(f"{path}.audio", "audio")
    if message.function_call is not None:
        raise _unsupported(f"{path}.function_call", "the older form of tool_calls; send tool_calls")
    if message.tool_calls and not is_assistant:
        raise invalid(f"{path}.tool_calls", f"{path}.tool_calls: only the assistant's messages have them.")
    if message.tool_call_id is not None and message.role != "tool":
        raise invalid(f"{path}.tool_call_id", f"{path}.tool_call_id: only a tool's messages have it.")
    content = message.content
    if message.refusal and is_assistant:
        refusal: dict[str, Any] = {"type": "refusal", "refusal": message.refusal}
        said = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        content = [*said, refusal] if content else message.refusal
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if content is None and not (is_assistant and (message.tool_calls or reasoning)):
        problem = f"{path}.content must be a string or an array of parts; it is missing, or null."
        raise invalid(f"{path}.content", problem, "invalid_type")
    # Missing content stays null: some templates detect an answer of tool calls alone by it.
    plain = _content(content, message.role, path, pictures, sources)
    result: dict[str, Any] = {"role": message.role, "content": plain}
    if message.name is not None:
        result["name"] = message.name
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id is not None else {}),
                "function": {"name": call.function.name, "arguments": _json_of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _json_of(arguments: str | dict[str, Any]) -> str:
    """A call's arguments as text."""
    return (arguments or "{}") if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _content(
    content: str | list[dict[str, Any]] | None,
    role: str,
    path: str,
    pictures: PictureReader | None,
    sources: list[PictureSource],
) -> str | list[dict[str, Any]] | None:
    """Content in its single form; its pictures' sources are added to `sources`."""

    def take(image: ImagePart) -> None:
        assert pictures is not None
        if role == "assistant":
            raise _unsupported(f"{image.path}.type", "images are the user's, the system's or a tool's")
        if len(sources) == pictures.most:
            where = image.path
            raise invalid(where, f"{where}: a request has at most {pictures.most} images (--limit-images).")
        sources.append(picture_source(image))

    try:
        return plain_content(
            content, f"{path}.content", is_result=role == "tool", take_image=None if pictures is None else take
        )
    except RequestError as error:
        raise from_engine(error, {}) from None


def _unsupported(param: str, reason: str) -> ApiError:
    return invalid(param, f"Unsupported parameter: {param} ({reason}).", "unsupported_parameter")
