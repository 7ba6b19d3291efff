"""Cuts a picture into a grid of square patches, by the rule of the model's training.

``PatchRule`` (Qwen2-VL, 2.5-VL, 3-VL), ``SideRule`` (Pixtral) and ``TokenRule`` (Gemma 4) keep its shape;
``FixedRule`` (CLIP, SigLIP, Gemma 3) gives all pictures one size. Equal to transformers' ``Qwen2VLImageProcessorPil``,
``PixtralImageProcessorPil``, ``Gemma4ImageProcessorPil``, ``CLIPImageProcessorPil``, ``SiglipImageProcessorPil`` and
``Gemma3ImageProcessorPil`` to the byte, before their normalisation. Patches are uint8 and stored once: the two frames
of a still picture in Qwen's tower are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from runtime.images.decoding import ImageError
from runtime.later import later

Image = Any
"""Pillow's, which is imported when it is first used."""
_images, _cutting = later("PIL.Image"), later("runtime.images.cutting")
Resample = Literal["bilinear", "bicubic"]

MOST_ASPECT = 200
"""Longer side over shorter side, at most."""

_WHITE = 255.0


class _ShapedRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that keeps a picture's shape. `patch_size`: pixels of a patch's side; `merge_size`: patches of a token's
    side."""

    patch_size: int
    merge_size: int

    @property
    def num_frames(self) -> int:
        """1: the towers do not support videos."""
        return 1

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that a picture is resized to: multiples of the factor. Raises ImageError for one that is
        too narrow."""
        raise NotImplementedError

    def fitted(self, image: Image) -> tuple[Image, tuple[int, int]]:
        """An RGB picture, and the height and width to resize it to, bicubically. Raises ImageError."""
        return image, self.resized(image.height, image.width)

    def token_grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Lines and columns of tokens of a picture of so many patches. Raises ImageError for an impossible grid."""
        if min(rows, columns) < self.merge_size or rows % self.merge_size or columns % self.merge_size:
            raise ImageError(f"{rows} x {columns} patches are no multiples of {self.merge_size}")
        return rows // self.merge_size, columns // self.merge_size


class PatchRule(_ShapedRule, frozen=True, tag=True):
    """Pictures keep their shape, within limits of pixels.

    patch_size   pixels of a patch's side
    merge_size   patches of a token's side
    num_frames   frames of a patch in the tower
    min_pixels, max_pixels  of a resized picture
    mean, std    of each channel, for normalising pixels in 0 … 1
    """

    patch_size: int = 14
    merge_size: int = 2
    num_frames: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        check_aspect(height, width)
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

    @property
    def most_pixels(self) -> int:
        """Pixels of a resized picture, at most."""
        return max(self.min_pixels, self.max_pixels)

    def at_most(self, side: int) -> PatchRule:
        """The rule for pictures of at most ``side * side`` pixels, or of one token."""
        most = max(min(self.max_pixels, side * side), self.factor**2)
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)


class SideRule(_ShapedRule, frozen=True, tag=True, kw_only=True):
    """Pictures keep their shape, and are shrunk if a side is too long; enlarged only to fill a token.

    most_height, most_width  pixels of a picture's sides, before filling a token
    patch_size   pixels of a patch's side
    merge_size   patches of a token's side
    mean, std    of each channel, for normalising pixels in 0 … 1
    """

    most_height: int
    most_width: int
    patch_size: int
    merge_size: int = 1
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def most_pixels(self) -> int:
        """Pixels of a resized picture, at most."""
        return -(-self.most_height // self.factor) * -(-self.most_width // self.factor) * self.factor**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        check_aspect(height, width)
        tall, wide = height, width
        ratio = max(height / self.most_height, width / self.most_width)
        if ratio > 1:
            tall, wide = math.floor(height / ratio), math.floor(width / ratio)
        if min(tall, wide) < 1:
            raise ImageError(f"the image is {width} x {height}: nothing is left of its shorter side when it is resized")
        return -(-tall // self.factor) * self.factor, -(-wide // self.factor) * self.factor

    def token_grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Lines and columns of tokens of a picture of so many patches, with an additional column for the token that
        ends a line. Raises ImageError for an impossible grid."""
        lines, across = _ShapedRule.token_grid(self, rows, columns)
        return lines, across + 1

    def at_most(self, side: int) -> SideRule:
        """The rule for pictures whose sides have at most so many pixels."""
        return replace(self, most_height=min(self.most_height, side), most_width=min(self.most_width, side))


TOKEN_COUNTS = (70, 140, 280, 560, 1120)
"""The most tokens of a picture that models with a ``TokenRule`` were trained with."""


class TokenRule(_ShapedRule, frozen=True, tag=True, kw_only=True):
    """Pictures keep their shape, and become as many tokens as fit, small ones too.

    max_tokens   of a picture
    patch_size   pixels of a patch's side
    merge_size   patches of a token's side
    mean, std    of each channel, for normalising pixels in 0 … 1
    """

    max_tokens: int
    patch_size: int
    merge_size: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def most_pixels(self) -> int:
        """Pixels of a resized picture, at most."""
        return self.max_tokens * self.factor**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        check_aspect(height, width)
        grow = math.sqrt(self.most_pixels / (height * width))
        tall, wide = (math.floor(grow * side / self.factor) for side in (height, width))
        if tall == 0:
            tall, wide = 1, min(width // height, self.max_tokens)
        elif wide == 0:
            tall, wide = min(height // width, self.max_tokens), 1
        return tall * self.factor, wide * self.factor

    def at_most(self, side: int) -> TokenRule:
        """The rule for pictures of at most ``side * side`` pixels, or of the fewest tokens that the model knows."""
        fitting = [count for count in TOKEN_COUNTS if count * self.factor**2 <= side * side]
        return replace(self, max_tokens=min(self.max_tokens, max(fitting, default=TOKEN_COUNTS[0])))


class FixedRule(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All pictures get one size.

    height, width   of the picture that is cut into patches; partial patches at the right and bottom are dropped
    patch_size      pixels of a patch's side
    num_tokens      of each picture
    shortest_edge   the shorter side is resized to this, and the middle cut out; None resizes both sides
    resample        Pillow's filter
    mean, std       of each channel, for normalising pixels in 0 … 1
    """

    height: int
    width: int
    patch_size: int
    num_tokens: int
    shortest_edge: int | None = None
    resample: Resample = "bicubic"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def merge_size(self) -> int:
        """1: a patch stands alone."""
        return 1

    @property
    def num_frames(self) -> int:
        """1: towers of fixed pictures do not support videos."""
        return 1

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // self.patch_size, self.width // self.patch_size

    @property
    def most_pixels(self) -> int:
        """Pixels of a resized picture, at most."""
        return self.height * self.width

    def fitted(self, image: Image) -> tuple[Image, tuple[int, int]]:
        """An RGB picture, resized and cut, and its height and width. Raises ImageError for one that is too narrow."""
        height, width = image.height, image.width
        check_aspect(height, width)
        if self.shortest_edge is None:
            return image.resize((self.width, self.height), _filter(self.resample)), (self.height, self.width)
        edge = self.shortest_edge
        long = int(edge * max(height, width) / min(height, width))
        wide, tall = (edge, long) if width <= height else (long, edge)
        left, top = (wide - self.width) // 2, (tall - self.height) // 2
        resized = image.resize((wide, tall), _filter(self.resample))
        return resized.crop((left, top, left + self.width, top + self.height)), (self.height, self.width)

    def token_grid(self, rows: int, columns: int) -> tuple[int, int]:
        """A picture's tokens are one line. Raises ImageError for another grid than the rule's."""
        if (rows, columns) != self.grid:
            raise ImageError(f"{rows} x {columns} patches, must be {self.grid[0]} x {self.grid[1]}")
        return 1, self.num_tokens

    def at_most(self, side: int) -> FixedRule:
        """The same: all pictures have one size."""
        return self


Rule = PatchRule | SideRule | TokenRule | FixedRule
"""How a model cuts pictures."""


def check_aspect(height: int, width: int) -> None:
    """Raises ImageError for a picture that is too narrow."""
    if min(height, width) < 1 or max(height, width) > MOST_ASPECT * min(height, width):
        raise ImageError(f"the image is {width} x {height}: its sides differ by more than {MOST_ASPECT} times")


def _filter(name: Resample) -> Any:
    return _images.Resampling[name.upper()]


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


def make_patches(image: NDArray[np.uint8] | Image, rule: Rule, out: memoryview | None = None) -> Patches:
    """The patches of an RGB picture, or of its pixels ``[height, width, 3]``, resized by the rule; written to the
    beginning of ``out`` if given. Raises ImageError."""
    fitted, (height, width) = rule.fitted(_images.fromarray(image) if isinstance(image, np.ndarray) else image)
    size = rule.patch_size
    rows, columns = height // size, width // size
    count = 3 * rows * columns * size**2
    pixels = np.empty(count, np.uint8) if out is None else np.frombuffer(out, np.uint8, count)
    _cutting.cut(fitted, height, width, size, rule.merge_size, pixels)
    return Patches(pixels.reshape(rows * columns, 3 * size * size), rows, columns)


def normalised(pixels: NDArray[np.uint8], rule: Rule) -> NDArray[np.float32]:
    """``[n, 3 * patch_size ** 2]`` uint8 as a tower reads it, ``[n, 3 * num_frames * patch_size ** 2]``: pixels over
    255, less the mean, over the deviation; each channel for all frames."""
    square = rule.patch_size**2
    scale = np.array([1.0 / (_WHITE * each) for each in rule.std])
    shift = np.array([-mean / std for mean, std in zip(rule.mean, rule.std)])
    values = (np.arange(256) * scale[:, None] + shift[:, None]).astype(np.float32)  # of each channel's bytes
    made = np.empty((len(pixels), 3, rule.num_frames, square), np.float32)
    for channel, plane in enumerate(pixels.reshape(-1, 3, square).transpose(1, 0, 2)):
        made[:, channel] = values[channel].take(plane)[:, None]
    return made.reshape(len(pixels), -1)


class NormalisedPatches:
    """Lazily applies `normalised` to the requested rows."""

    def __init__(self, pixels: NDArray[np.uint8], rule: Rule) -> None:
        self._pixels, self._rule = pixels, rule

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, rows: slice | NDArray[np.int64], /) -> NDArray[np.float32]:
        return normalised(self._pixels[rows], self._rule)
