"""Pictures of a prompt: prepared as the model reads them, and put in the place of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineInfo, ImageItem
from runtime.engine.prompt_images import PreparedImage, image_places, place_images, prepare_image
from runtime.images.decoding import pixels_of
from runtime.images.errors import ImageError


def with_images(
    token_ids: list[int], images: Sequence[Any], info: EngineInfo
) -> tuple[list[int], tuple[ImageItem, ...]]:
    """The prompt with as many of the picture's token as each picture has, where it has one, and the pictures.

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


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """A conversation whose parts ``{"type": "image", "image": ...}`` have lost their pictures, and these in order."""
    plain: list[Mapping[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(p, Mapping) and p.get("type") == "image" for p in content):
            parts = []
            for part in content:
                if isinstance(part, Mapping) and part.get("type") == "image":
                    if "image" not in part:
                        raise RequestError("a part of the type image needs 'image'", param="messages")
                    images.append(part["image"])
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        plain.append(message)
    return plain, images
