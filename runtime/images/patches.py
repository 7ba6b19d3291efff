"""Qwen's preprocessing (Qwen2-VL, 2.5-VL, 3-VL): a picture keeps its shape, and becomes a grid of square patches.

Equal to transformers' ``Qwen2VLImageProcessorPil`` to the byte, before its normalisation. Patches are uint8 and stand
once: the tower's two frames of a still picture are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.images.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_ASPECT = 200
"""Longer side over shorter side, at most."""

_WHITE = 255.0


@dataclass(frozen=True, slots=True)
class PatchRule:
    """How a model cuts pictures.

    patch_size   pixels of a patch's side
    merge_size   patches of a token's side
    num_frames   frames that a patch of the tower has
    min_pixels, max_pixels  of a resized picture
    mean, std    of each channel, by which pixels in 0 … 1 are normalised
    """

    patch_size: int = 14
    merge_size: int = 2
    num_frames: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that a picture is resized to: multiples of the factor, near its shape, within the
        limits of pixels.

        Raises ImageError for one that is too narrow.
        """
        if min(height, width) < 1 or max(height, width) > MOST_ASPECT * min(height, width):
            raise ImageError(f"the image is {width} x {height}: its sides differ by more than {MOST_ASPECT} times")
        factor = self.factor
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        if tall * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            tall = max(factor, math.floor(height / shrink / factor) * factor)
            wide = max(factor, math.floor(width / shrink / factor) * factor)
        elif tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            tall = math.ceil(height * grow / factor) * factor
            wide = math.ceil(width * grow / factor) * factor
        return tall, wide

    def num_tokens(self, height: int, width: int) -> int:
        """Tokens of the language model that a picture becomes. Raises ImageError."""
        tall, wide = self.resized(height, width)
        return tall * wide // self.factor**2


@dataclass(frozen=True, slots=True)
class Patches:
    """A picture's patches ``[rows * columns, 3 * patch_size ** 2]`` uint8, each of channels, lines, columns. The
    patches of a token stand together, tokens in reading order."""

    pixels: NDArray[np.uint8]
    rows: int
    columns: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.rows, self.columns


def make_patches(image: NDArray[np.uint8] | Image, rule: PatchRule, out: memoryview | None = None) -> Patches:
    """The patches of an RGB picture, or of its pixels ``[height, width, 3]``, resized by Pillow's bicubic filter; at
    the front of ``out`` where it is given. Raises ImageError."""
    from PIL import Image

    if isinstance(image, np.ndarray):
        height, width, _ = image.shape
    else:
        width, height = image.size
    tall, wide = rule.resized(height, width)
    if (tall, wide) != (height, width):
        picture = Image.fromarray(image) if isinstance(image, np.ndarray) else image
        image = picture.resize((wide, tall), Image.Resampling.BICUBIC)
    size, merge = rule.patch_size, rule.merge_size
    rows, columns = tall // size, wide // size
    cut = np.asarray(image).reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    count = 3 * tall * wide
    pixels = np.empty(count, np.uint8) if out is None else np.frombuffer(out, np.uint8, count)
    ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
    pixels.reshape(ordered.shape)[...] = ordered
    return Patches(pixels.reshape(rows * columns, 3 * size * size), rows, columns)


def normalised(pixels: NDArray[np.uint8], rule: PatchRule) -> NDArray[np.float32]:
    """``[n, 3 * patch_size ** 2]`` uint8 as a tower reads it, ``[n, 3 * num_frames * patch_size ** 2]``: pixels over
    255, less the mean, over the deviation; each channel for all frames."""
    square = rule.patch_size**2
    scale = np.array([1.0 / (_WHITE * each) for each in rule.std])
    shift = np.array([-mean / std for mean, std in zip(rule.mean, rule.std)])
    values = pixels.reshape(-1, 3, 1, square) * scale[:, None, None] + shift[:, None, None]
    frames = np.broadcast_to(values, (len(pixels), 3, rule.num_frames, square))
    return np.ascontiguousarray(frames, np.float32).reshape(len(pixels), -1)
