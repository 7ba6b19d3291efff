"""Images of a prompt: preprocessed for the model, and inserted at their placeholder tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.errors import RequestError
from runtime.engine.messages import ImageItem, ImageSupport
from runtime.images.patches import Patches, Rule, make_patches


class PreparedImage(msgspec.Struct, frozen=True, tag=True):
    """An image's patches in `ImageItem`'s form, and the digest of these and their grid."""

    digest: bytes
    rows: int
    columns: int
    patches: bytes


def prepare_image(image: NDArray[np.uint8] | Any, rule: Rule) -> PreparedImage:
    """An RGB image of Pillow, or its pixels ``[height, width, 3]``, cut into patches. Raises ImageError."""
    patches = make_patches(image, rule)
    return PreparedImage(digest_of(patches), patches.rows, patches.columns, patches.pixels.tobytes())


def digest_of(patches: Patches) -> bytes:
    """A 32-byte digest of the image's patches and their grid."""
    digest = hashlib.sha256(b"%d,%d:" % patches.grid)
    digest.update(patches.pixels.data)
    return digest.digest()


def image_places(token_ids: Sequence[int], num_images: int, support: ImageSupport) -> list[int]:
    """The indices of image tokens in the prompt. Raises ``RequestError`` unless there is one for each image."""
    places = [place for place, token_id in enumerate(token_ids) if token_id == support.token_id]
    if len(places) != num_images:
        raise RequestError(
            f"the prompt has {len(places)} image tokens ({support.token_id}), but there are {num_images} images",
            param="images",
        )
    return places


def place_images(
    token_ids: list[int], images: Sequence[PreparedImage], support: ImageSupport
) -> tuple[list[int], tuple[ImageItem, ...]]:
    """The prompt with each image token expanded to all tokens of its image, and the images.

    Raises ``RequestError``.
    """
    ids: list[int] = []
    items, begin = [], 0
    for place, image in zip(image_places(token_ids, len(images), support), images, strict=True):
        ids += token_ids[begin:place]
        items.append(
            ImageItem(
                digest=image.digest, first_token=len(ids), rows=image.rows, columns=image.columns, patches=image.patches
            )
        )
        ids += support.picture_ids(*support.rule.token_grid(image.rows, image.columns))
        begin = place + 1
    return [*ids, *token_ids[begin:]], tuple(items)
