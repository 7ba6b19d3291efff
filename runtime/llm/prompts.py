"""The forms of a prompt, the list of prompts of a call, and images: preprocessed for the model, and inserted at their
placeholder tokens."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np

from runtime.engine.checks import is_integer
from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineInfo, ImageItem
from runtime.engine.option_names import unknown_option
from runtime.engine.prompt_images import PreparedImage, image_places, place_images, prepare_image
from runtime.images.decoding import ImageError, pixels_of
from runtime.text.content import ImagePart, plain_content, plain_data

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. Such a mapping may also have
``EngineRequest``'s "cache_salt", "priority", "ttft_target_s" and "tpot_target_s", and "images": a list of
``PIL.Image.Image``, paths, bytes of files, or uint8 arrays, one for each of the model's image tokens in the prompt."""

_SCHEDULING_KEYS = ("cache_salt", "priority", "ttft_target_s", "tpot_target_s")

T = TypeVar("T")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. Raises ``RequestError`` for anything else."""
    if not isinstance(prompts, list) and isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not _is_row(prompts):
        raise RequestError(
            f"prompts must be a text, token ids, or a list of them, got {prompts!r:.80}", param="prompts"
        )
    listed: list[Any] = list(prompts)
    if listed and not isinstance(listed[0], (list, str)) and all(is_integer(item) for item in listed):
        return [listed]
    for item in listed:
        if not isinstance(item, (str, Mapping)) and not _is_row(item):
            raise RequestError(f"a prompt is a text or a list of token ids, got {item!r:.80}", param="prompts")
    return listed


def ids_of(name: str, given: Any) -> list[int]:
    """Token ids as a list, not yet compared with the vocabulary. Raises ``RequestError`` for anything else."""
    if isinstance(given, str) or not _is_row(given):
        raise RequestError(f"{name} must be a list of token ids, got {type(given).__name__}", param="prompt")
    ids = given.tolist() if isinstance(given, np.ndarray) else list(given)
    for kind in set(map(type, ids)) - {int}:
        if not issubclass(kind, np.integer):
            raise RequestError(f"{name} must hold integers, got {kind.__name__}", param="prompt")
    return ids


def _is_row(given: Any) -> bool:
    """Bytes are no token ids, and sets have no order."""
    is_other = isinstance(given, (bytes, bytearray, memoryview, set, frozenset))
    return hasattr(given, "__iter__") and not is_other and getattr(given, "ndim", 1) > 0


def conversations_of(name: str, given: Any, *, takes_texts: bool = False) -> list[list[Mapping[str, Any]]]:
    """One conversation, or several; with ``takes_texts`` a text is a user's message. Raises ``RequestError``."""
    if not isinstance(given, (list, tuple)) and not (takes_texts and isinstance(given, str)):
        kinds = "a text, a conversation, or" if takes_texts else "a conversation, a list of messages, or"
        raise RequestError(f"{name} must be {kinds} a list of them, got {given!r:.80}", param=name)
    is_one = isinstance(given, str) or (given and not isinstance(given[0], (str, list, tuple)))
    found = []
    for index, each in enumerate([given] if is_one else given):
        if takes_texts and isinstance(each, str):
            each = [{"role": "user", "content": each}]
        plain = plain_data(each)
        if not (isinstance(plain, list) and all(isinstance(one, Mapping) for one in plain)):
            kinds = "a text or a list of messages" if takes_texts else "a list of messages"
            raise RequestError(f"{name}[{index}] must be {kinds}, got {each!r:.80}", param=name)
        if not plain:
            raise RequestError(f"{name}[{index}] has no messages", param=name)
        found.append(plain)
    return found


def check_tools(tools: Any) -> None:
    """Raises ``RequestError`` if they are no list of functions in OpenAI's form."""
    if tools is None:
        return
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools must be a list, got {type(tools).__name__}", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            problem = f"tools[{i}] must be an object with a function that has a name, got {tool!r:.80}"
            raise RequestError(problem, param=f"tools[{i}]")


def texts_of(name: str, given: str | Sequence[str]) -> list[str]:
    """One text or several, at least one, as a list. Raises ``RequestError`` for anything else."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(each, str) for each in texts):
        raise RequestError(f"{name} must be a text, or a list of one text or more, got {given!r:.80}", param=name)
    return list(texts)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for a request; vLLM's name. The folder is read at the first use of an equal ``LoRARequest``; give
    another ``lora_int_id`` to have changed files read again.

    lora_name    a name, for error messages
    lora_int_id  a number of your own
    lora_path    the adapter's folder, as PEFT writes it, or its GGUF file
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name, kind in (("lora_name", str), ("lora_int_id", int), ("lora_path", str)):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or value == "":
                raise RequestError(f"{name} must be {kind.__name__}, not empty, got {value!r:.80}", param=name)


def scheduling_of(prompt: Prompt) -> dict[str, Any]:
    """The scheduling fields and cache salt of a prompt that is a mapping. Raises ``RequestError`` for unknown keys."""
    if not isinstance(prompt, Mapping):
        return {}
    known = ("prompt", "prompt_token_ids", "images", *_SCHEDULING_KEYS)
    for name in prompt:
        if name not in known:
            raise unknown_option("a prompt", str(name), known, param="prompt")
    return {name: prompt[name] for name in _SCHEDULING_KEYS if name in prompt}


def one_each(name: str, prompts: Sequence[Prompt], given: T | Sequence[T], kind: type[T]) -> Iterable[T]:
    """``given`` once for all prompts, or one a prompt. Raises ``RequestError`` if the numbers differ."""
    if isinstance(given, kind):
        return [given] * len(prompts)
    listed: Any = given
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise RequestError(
            f"{name} must be a {kind.__name__}, or a list of one a prompt, got {type(given).__name__}", param=name
        )
    if len(listed) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts, but {len(listed)} {name}", param=name)
    result: Iterable[T] = listed
    return result


def with_images(
    token_ids: list[int], images: Sequence[Any], info: EngineInfo
) -> tuple[list[int], tuple[ImageItem, ...]]:
    """The prompt with each image token expanded to all tokens of its image, and the images.

    Raises ``RequestError``.
    """
    support = info.images
    if support is None:
        raise RequestError(f"the model reads no images, got {len(images)}", param="images")
    image_places(token_ids, len(images), support)
    prepared = []
    for index, image in enumerate(images):
        if isinstance(image, PreparedImage):
            prepared.append(image)
            continue
        try:
            prepared.append(prepare_image(pixels_of(image), support.rule))
        except ImageError as error:
            raise RequestError(f"images[{index}]: {error}", param=f"images[{index}]") from error
    return place_images(token_ids, prepared, support)


def take_images(
    messages: Sequence[Mapping[str, Any]], *, reads_images: bool = True
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """A conversation with normalised content (``runtime.text.content``), and its images in order. If the model reads no
    images, those in tools' results become a text. Raises ``RequestError``."""
    images: list[Any] = []
    plain = [
        {
            **message,
            "content": plain_content(
                message["content"],
                f"messages[{i}].content",
                is_result=message.get("role") == "tool",
                take_image=(lambda part: images.append(_given(part))) if reads_images else None,
            ),
        }
        if "content" in message
        else message
        for i, message in enumerate(plain_data(messages))
    ]
    return plain, images


def _given(part: ImagePart) -> Any:
    """A part's image in the form of a prompt's "images"; the bytes of a ``data:`` URI. Raises ``RequestError``."""
    value = part.value
    if value is None:
        raise RequestError(f"{part.where} is missing: the part needs a picture", param=part.where)
    if not isinstance(value, str):
        return value
    if value[:5].lower() == "data:":
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError:
            raise RequestError(f"{part.where}: the data: URI is not base64", param=part.where) from None
    if value.startswith(("http://", "https://")):
        raise RequestError(
            f"{part.where} is {value[:80]!r}, but no URL is fetched here: give the picture, its bytes, a path or a "
            "data: URI",
            param=part.where,
        )
    return unquote(value.removeprefix("file://")) if value.startswith("file://") else value
