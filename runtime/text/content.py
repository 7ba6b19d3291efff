"""Normalises the content of messages, and shapes it for a template.

Normalised content is None, a text, or a list of parts that are `{"type": "text", "text": …}` or `{"type": "image"}`.
Clients and scripts write parts under the names of several APIs; `plain_content` reads them all, for the server and for
`LLM.chat`. `shaped` gives each message the form that the template takes for its role; `picture_text` is what stands for
an image in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from runtime.engine.errors import RequestError
from runtime.engine.messages import ImageSupport
from runtime.engine.option_names import nearest_name
from tokenizer import ContentForm, TemplateForms, Tokenizer

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of text parts, and the field with the text."""

_IMAGES = ("image_url", "image", "input_image", "image_pil")
_MEDIA = {
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "video": "videos",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
    "document": "documents",
}
"""The types of parts that no model here reads, in words."""

_SOURCES = ("image_url", "image", "image_pil", "source", "url", "base64", "data", "path")
"""The fields of a part that may hold its image."""

_OF_MEDIA_TYPE = ("media_type", "mime_type", "mimeType")

_JSON_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "null"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    ((list, tuple), "array"),
    (Mapping, "object"),
)

TakeImage = Callable[["ImagePart"], None]


class ImagePart(NamedTuple):
    """A part's image, as it was given.

    path    of the part
    where   the path of the field with the image
    value   a URL, a `data:` URI, or another object of a script; None if missing, or sent before under `uuid`
    detail  as in OpenAI's API; `detail_path` is its field's
    """

    path: str
    where: str
    value: Any
    detail: Any
    detail_path: str
    uuid: Any


def omitted(what: str) -> str:
    """The text that replaces a part of a tool's result that the model does not read."""
    singular = what.removesuffix("s")
    return f"[{singular} omitted: this model reads no {'pictures' if what == 'images' else what}]"


def plain_content(
    content: Any, path: str, *, is_result: bool = False, take_image: TakeImage | None = None
) -> str | list[dict[str, Any]] | None:
    """A message's normalised content.

    path        of the content, for error messages
    is_result   a tool's result: parts that the model does not read are replaced by a note, since the client did
                not choose the tool's output
    take_image  called with each image in order; None if the model reads no images

    Raises ``RequestError`` naming the part's field.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        problem = f"{path} must be a string or an array of parts, got {json_type(content)}."
        raise RequestError(problem, param=path, code="invalid_type")
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if isinstance(part, str):
            parts.append(text_part(part))
            continue
        if not isinstance(part, Mapping):
            problem = f"{where} must be an object or a string, got {json_type(part)}."
            raise RequestError(problem, param=where, code="invalid_type")
        kind = part.get("type")
        if not (kind is None or isinstance(kind, str)):
            problem = f"{where}.type must be a string, got {json_type(kind)}."
            raise RequestError(problem, param=f"{where}.type", code="invalid_type")
        if kind in _IMAGES and take_image is not None:
            take_image(image_part(part, where))
            parts.append({"type": "image"})
        elif (field := _TEXTS.get(kind or "")) is not None:
            parts.append(text_part(_text(part, field, where)))
        else:
            parts.append(text_part(_unread(kind, where, is_result=is_result, reads_images=take_image is not None)))
    return parts


def plain_data(value: Any) -> Any:
    """A conversation with pydantic's objects, such as an SDK's messages and calls, and dataclasses as dicts, and
    numpy's scalars as Python's. Images and all else stay as they are."""
    if isinstance(value, Mapping):
        return {key: plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain_data(dump())
    return value.item() if isinstance(value, np.generic) else value


def text_part(text: str) -> dict[str, Any]:
    """A text part of normalised content."""
    return {"type": "text", "text": text}


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of normalised content; the texts of parts are on separate lines."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def around(before: str, content: Any, after: str = "") -> Any:
    """Normalised content between two texts."""
    if content is None or isinstance(content, str):
        return f"{before}{content or ''}{after}"
    first = content[0] if content else text_part("")
    if before and first["type"] == "text":  # not a separate part, which may be put on a line of its own
        before, content = "", [text_part(before + first["text"]), *content[1:]]
    last = content[-1] if content else text_part("")
    if after and last["type"] == "text":
        after, content = "", [*content[:-1], text_part(last["text"] + after)]
    return [*([text_part(before)] if before else ()), *content, *([text_part(after)] if after else ())]


def beside(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two normalised contents as one."""
    if isinstance(first, str):
        return around(f"{first}{between}", second)
    if isinstance(second, str):
        return around("", first, f"{between}{second}")
    begin, rest = (second[0]["text"], second[1:]) if second and second[0]["type"] == "text" else ("", second)
    return [*around("", first, f"{between}{begin}"), *rest]


def _text(part: Mapping[str, Any], field: str, path: str) -> str:
    known = {"type", field, "annotations", "logprobs", "cache_control"}
    check_known(part, known, path)
    text = part.get(field)
    if not isinstance(text, str):
        name = f"{path}.{field}"
        got = "it is missing" if field not in part else f"got {json_type(text)}"
        raise RequestError(f"{name} must be a string, {got}.", param=name, code="invalid_type")
    return text


def _unread(kind: str | None, path: str, *, is_result: bool, reads_images: bool) -> str:
    """A note in place of a part of a tool result that the model does not read. Raises ``RequestError`` elsewhere."""
    name = f"{path}.type"
    what = "images" if kind in _IMAGES else _MEDIA.get(kind or "")
    if what is not None and is_result:
        return omitted(what)
    if what is not None:
        why = "the model reads text and images only" if reads_images else "the model reads text only"
        raise RequestError(
            f"Unsupported parameter: {name} ({kind!r}: {what}; {why}).", param=name, code="unsupported_parameter"
        )
    allowed = (*_TEXTS, *(_IMAGES[:3] if reads_images else ()))
    got = "it is missing" if kind is None else f"got {kind!r:.80}"
    raise RequestError(f"{name} must be one of {', '.join(allowed)}, {got}.", param=name)


def image_part(part: Mapping[str, Any], path: str) -> ImagePart:
    """The image of a part, in any of these forms:

        {"type": "image_url", "image_url": {"url": URL, "detail": …}}         and with the URL itself
        {"type": "input_image", "image_url": URL, "detail": …}
        {"type": "image", "image": URL}, or with "url", or "base64"            transformers
        {"type": "image", "source": {"type": "base64", "media_type": …, "data": …}}, or {"type": "url", …}    Anthropic
        {"type": "image", "data": …, "mimeType": …}                            MCP

    Raises ``RequestError`` naming the part's field.
    """
    kind = part["type"]
    given = [name for name in _SOURCES if part.get(name) is not None]
    default = "image" if kind == "image" else "image_pil" if kind == "image_pil" else "image_url"
    name = given[0] if given else default
    where, detail, detail_path, uuid = f"{path}.{name}", part.get("detail"), f"{path}.detail", part.get("uuid")
    if len(given) > 1:
        other = f"{path}.{given[1]}"
        raise RequestError(f"{other}: the picture is given in {where}; send one of them.", param=other)
    others = ("type", "uuid", "detail", "cache_control", *(_OF_MEDIA_TYPE if name == "data" else ()))
    check_known(part, {name, *others}, path)
    value = part.get(name)
    if isinstance(value, Mapping) and name == "image_url":
        check_known(value, {"url", "detail"}, where)
        if "detail" in value:
            detail, detail_path = value["detail"], f"{where}.detail"
        where, value = f"{where}.url", value.get("url")
    elif isinstance(value, Mapping) and name == "source":
        where, value = _source(value, where)
    elif name in ("base64", "data") and isinstance(value, str) and not value.startswith("data:"):
        value = f"data:{next((part[each] for each in _OF_MEDIA_TYPE if part.get(each)), '')};base64,{value}"
    return ImagePart(path, where, value, detail, detail_path, uuid)


def _source(source: Mapping[str, Any], path: str) -> tuple[str, Any]:
    """Anthropic's form: the image's URL or data URI, and the path of its field."""
    kind = source.get("type")
    if kind not in ("base64", "url"):
        got = "it is missing" if kind is None else f"got {str(kind)[:80]!r}"
        raise RequestError(f"{path}.type must be base64 or url, {got}.", param=f"{path}.type")
    field, known = ("data", {"type", "data", "media_type"}) if kind == "base64" else ("url", {"type", "url"})
    check_known(source, known, path)
    value = source.get(field)
    if not isinstance(value, str) or not value:
        name = f"{path}.{field}"
        got = "it is missing" if field not in source else f"got {json_type(value) if value != '' else 'an empty one'}"
        problem = f"{name} must be a string, {got}: the source's type is {kind!r}."
        raise RequestError(problem, param=name, code="invalid_type")
    return f"{path}.{field}", value if kind == "url" else f"data:{source.get('media_type') or ''};base64,{value}"


def check_known(given: Mapping[str, Any], known: set[str], path: str) -> None:
    """Raises ``RequestError`` for an unknown field that is not null."""
    if unknown := sorted(str(name) for name in given if name not in known and given[name] is not None):
        name, near = f"{path}.{unknown[0]}", nearest_name(unknown[0], known)
        hint = f" Is {near!r} meant?" if near else ""
        raise RequestError(f"Unknown parameter: {name}.{hint}", param=name, code="unknown_parameter")


def json_type(value: Any) -> str:
    """JSON's name of a value's type; Python's name of a type that JSON does not have."""
    return next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), type(value).__name__)


def shaped(messages: Sequence[Mapping[str, Any]], forms: TemplateForms, place: str) -> list[Mapping[str, Any]]:
    """The messages in the template's form. If it writes no images in a role, the text `place` replaces them."""
    return [
        message
        if message.get("content") is None
        else {**message, "content": _shaped(message["content"], forms.content_of(message), place)}
        for message in messages
    ]


def _shaped(content: Any, form: ContentForm, place: str) -> Any:
    if isinstance(content, list):
        has_pictures = any(part["type"] == "image" for part in content)
        takes = form.picture is not None if has_pictures else form.parts
        if content and (takes or (has_pictures and not form.is_known)):
            return [form.part(part["text"]) if part["type"] == "text" else form.picture or part for part in content]
        content = _in_one_text(content, place)
    return content if form.text or not form.one_part else [form.part(content)]


def _in_one_text(content: Sequence[Mapping[str, Any]], place: str) -> str:
    """Texts on separate lines; images stay in place."""
    written = ""
    for before, part in zip([None, *content], content):
        is_line = before is not None and before["type"] == part["type"] == "text"
        written += ("\n" if is_line else "") + (part["text"] if part["type"] == "text" else place)
    return written


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message with normalised content has images."""
    return any(
        isinstance(content := message.get("content"), list) and any(part["type"] == "image" for part in content)
        for message in messages
    )


class PictureText(NamedTuple):
    """The text of an image in a prompt.

    token     the template's token for it, or None if the model reads no images
    replaced  texts that templates write, and their replacements: for Gemma 3 and 4, the image token between those that
              frame it, for 3 with empty lines around them. Most models' templates write the image token, and need
              nothing
    """

    token: str | None = None
    replaced: Mapping[str, str] = MappingProxyType({})


NO_PICTURES = PictureText()


def picture_text(tokenizer: Tokenizer | None, support: ImageSupport | None) -> PictureText:
    """The texts of a model's images. ``support`` describes how it reads images, or is None if it reads none."""
    if tokenizer is None or support is None:
        return NO_PICTURES
    token = tokenizer.id_to_token(support.token_id)
    if support.frame is None:
        return PictureText(token)
    begin, end = (tokenizer.id_to_token(each) for each in support.frame)
    if begin is None or token is None or end is None:
        return PictureText(token)
    if support.frame_sign == "picture":
        return PictureText(token, {token: f"{begin}{token}{end}"})
    return PictureText(begin, {begin: f"\n\n{begin}{token}{end}\n\n"})


def with_picture_texts(text: str, texts: Mapping[str, str]) -> str:
    """The text with these replacements."""
    for written, meant in texts.items():
        text = text.replace(written, meant)
    return text
