"""Pictures of a prompt: prepared as the model reads them, and put in the place of their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineInfo, ImageItem
from runtime.images.decoding import pixels_of
from runtime.images.errors import ImageError
from runtime.images.patches import PatchRule, make_patches


def with_images(
    token_ids: list[int], images: Sequence[Any], info: EngineInfo
) -> tuple[list[int], tuple[ImageItem, ...]]:
    """The prompt with as many of the picture's token as each picture has, where it has one, and the pictures.

    Raises ``RequestError``.
    """
    support = info.images
    if support is None:
        raise RequestError(f"the model reads no images, got {len(images)}", param="images")
    places = [place for place, token_id in enumerate(token_ids) if token_id == support.token_id]
    if len(places) != len(images):
        raise RequestError(
            f"the prompt has {len(places)} image tokens ({support.token_id}), but there are {len(images)} images",
            param="images",
        )
    rule = PatchRule(
        patch_size=support.patch_size, merge_size=support.merge_size, min_pixels=support.min_pixels,
        max_pixels=support.max_pixels,
    )  # fmt: skip
    ids: list[int] = []
    items, begin = [], 0
    for index, (place, image) in enumerate(zip(places, images, strict=True)):
        try:
            patches = make_patches(pixels_of(image), rule)
        except ImageError as error:
            raise RequestError(f"images[{index}]: {error}", param=f"images[{index}]") from error
        data = patches.pixels.tobytes()
        digest = hashlib.blake2b(data, digest_size=32, person=b"%d,%d" % patches.grid)
        ids += token_ids[begin:place]
        items.append(
            ImageItem(
                digest=digest.digest(), first_token=len(ids), rows=patches.rows, columns=patches.columns, patches=data
            )
        )
        ids += [support.token_id] * (len(patches.pixels) // support.merge_size**2)
        begin = place + 1
    return [*ids, *token_ids[begin:]], tuple(items)


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
