"""Pictures for Gemma 4, as patches for our towers and as transformers takes them. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.models.golden_weights import Array, golden_tensor

Vision = dict[str, Any]
"""A model's `vision_config`."""


def drawn_pictures(vision: Vision, grids: Sequence[Sequence[int]], seed: int) -> list[Array]:
    """Pixels of 0 to 1, `[3, height, width]`, of pictures of so many lines and columns of tokens."""
    side = vision["patch_size"] * vision["pooling_kernel_size"]
    made = []
    for index, (lines, columns) in enumerate(grids):
        shape = (3, lines * side, columns * side)
        flat = golden_tensor(f"picture.{index}.weight", (1, int(np.prod(shape))), seed)
        made.append((flat / (2 * np.abs(flat).max()) + np.float32(0.5)).reshape(shape))
    return made


def _form(vision: Vision) -> tuple[int, int]:
    """A patch's side in pixels, and the patches along a token's side: a model without a tower sees whole tokens."""
    merge = vision["pooling_kernel_size"]
    return (vision["patch_size"] * merge, 1) if "mm_embed_dim" in vision else (vision["patch_size"], merge)


def our_patches(vision: Vision, pictures: Sequence[Array]) -> list[tuple[Array, tuple[int, int]]]:
    """Each picture's patches as the tower gets them, token by token, and their grid."""
    (side, merge), made = _form(vision), []
    for pixels in pictures:
        pixels = pixels if "mm_embed_dim" in vision else 2 * (pixels - np.float32(0.5))
        rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
        cut = pixels.reshape(3, rows // merge, merge, side, columns // merge, merge, side)
        made.append((cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1), (rows, columns)))
    return made


def their_patches(vision: Vision, pictures: Sequence[Array]) -> tuple[Array, Array]:
    """transformers' `pixel_values` and `image_position_ids`: patches line by line, with padding after them; the
    channels of a pixel together."""
    side, merge = _form(vision)
    grids = [(pixels.shape[1] // side, pixels.shape[2] // side) for pixels in pictures]
    most = max(rows * columns for rows, columns in grids) + 2 * merge**2
    values, places = np.zeros((len(grids), most, 3 * side * side), np.float32), np.full((len(grids), most, 2), -1)
    for index, (rows, columns) in enumerate(grids):
        cut = pictures[index].reshape(3, rows, side, columns, side).transpose(1, 3, 2, 4, 0)
        values[index, : rows * columns] = cut.reshape(rows * columns, -1)
        places[index, : rows * columns] = [(x, y) for y in range(rows) for x in range(columns)]
    return values, places
