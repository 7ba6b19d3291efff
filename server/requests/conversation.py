"""From a request's messages to the plain dicts that a chat template reads.

Content becomes one string (text parts are joined by newlines), or a list of parts where it has pictures, whose places
the template writes. A tool call's arguments become the object that templates expect, and what has no meaning to a
template is left out.
"""

from __future__ import annotations

import json
from typing import Any

from server.errors import ApiError, invalid
from server.openai_api.schema import ChatCompletionRequest, Message
from server.pictures.reader import PictureReader, PictureSource, picture_source
from server.transport.json_limits import is_deeper

MAX_ARGUMENTS_DEPTH = 64
"""Deepest nesting in a tool call's arguments that a template is given as objects."""

_IMAGES = ("image_url", "input_image")

_MEDIA = {
    **dict.fromkeys(_IMAGES, "images"),
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "file": "files",
}


def template_messages(
    request: ChatCompletionRequest, pictures: PictureReader | None
) -> tuple[list[dict[str, Any]], list[PictureSource]]:
    """The conversation in Hugging Face's form, and its pictures in order; `pictures` is None where the model reads
    none. Raises `ApiError` 400 naming the message's field."""
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
    """With `echo`, the last message's text, where it is the assistant's; else nothing."""
    last = messages[-1]
    return str(last["content"] or "") if request.echo and last["role"] == "assistant" else ""


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
    if content is None and is_assistant:
        content = message.refusal
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if content is None and not (is_assistant and (message.tool_calls or reasoning)):
        raise invalid(f"{path}.content", f"{path}.content must be a string or a list of text parts.", "invalid_type")
    # No content at all stays null, by which some templates know an answer of tool calls alone.
    plain = None if content is None else _content(content, message.role, path, pictures, sources)
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
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _content(
    content: str | list[dict[str, Any]],
    role: str,
    path: str,
    pictures: PictureReader | None,
    sources: list[PictureSource],
) -> str | list[dict[str, Any]]:
    """A text, or parts where there are pictures, whose sources go to `sources`."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        where = f"{path}.content[{i}]"
        kind = part.get("type")
        if kind in _IMAGES and pictures is not None and role != "assistant":
            if len(sources) == pictures.most:
                raise invalid(where, f"{where}: a request has at most {pictures.most} images (--limit-images).")
            sources.append(picture_source(part, where))
            parts.append({"type": "image"})
            continue
        if isinstance(kind, str) and kind in _MEDIA:
            why = "the model reads text only" if pictures is None else "only others' messages have images, and no media"
            raise _unsupported(f"{where}.type", f"{_MEDIA[kind]}: {why}")
        field = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "refusal"):
            raise invalid(f"{where}.type", f'{where}.type must be "text".')
        if unknown := sorted(set(part) - {"type", field}):
            name = f"{where}.{unknown[0]}"
            raise invalid(name, f"Unknown parameter: {name}.", "unknown_parameter")
        if not isinstance(part.get(field), str):
            raise invalid(f"{where}.{field}", f"{where}.{field} must be a string.", "invalid_type")
        parts.append({"type": "text", "text": part[field]})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _arguments(text: str) -> Any:
    """A tool call's arguments as an object. A model may have written what is no JSON object, and its client
    sends the history back as it is: then the text stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and not is_deeper(value, MAX_ARGUMENTS_DEPTH) else text


def _unsupported(param: str, reason: str) -> ApiError:
    return invalid(param, f"Unsupported parameter: {param} ({reason}).", "unsupported_parameter")
