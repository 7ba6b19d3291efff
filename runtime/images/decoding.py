"""From a file's bytes to RGB pixels, within limits.

A header's size is checked before anything is decoded. Rotation by EXIF and transparency are treated as transformers
treats them: the picture is turned upright, and what is transparent shows white.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.images.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Pillow's names of the formats that are read. Pillow knows many more, whose decoders are used less."""


@dataclass(frozen=True, slots=True)
class DecodingLimits:
    """max_bytes of the file; max_pixels of the decoded picture."""

    max_bytes: int = 32 << 20
    max_pixels: int = 64 << 20


def decode(data: bytes, limits: DecodingLimits | None = None) -> NDArray[np.uint8]:
    """The RGB pixels ``[height, width, 3]`` of an image file's bytes. Of several frames it takes the first.

    Raises ImageError.
    """
    return np.array(decoded_image(data, limits), np.uint8)


def decoded_image(data: bytes, limits: DecodingLimits | None = None) -> Image:
    """The same as Pillow's picture. Raises ImageError."""
    limits = limits or DecodingLimits()
    image_module = _pillow()
    if not data:
        raise ImageError("the image is empty")
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has {len(data):,} bytes, limit {limits.max_bytes:,}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own warning of many pixels; the limit below is ours
        try:
            with image_module.open(io.BytesIO(data), formats=FORMATS) as image:
                check_pixels(image, limits)
                return rgb_of(image)
        except (ImageError, MemoryError):
            raise
        except Exception as error:  # decoders raise errors of many classes for broken files
            raise ImageError(f"the image cannot be read as one of {', '.join(FORMATS)}") from error


def check_pixels(image: Any, limits: DecodingLimits) -> None:
    """Raises ImageError for a ``PIL.Image.Image`` of too many pixels."""
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(f"the image has {width} x {height} pixels, limit {limits.max_pixels:,}")


def rgb_of(image: Image) -> Image:
    """A picture upright, on white, in RGB: this one itself, or another."""
    from PIL import ImageOps

    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = _pillow().new("RGBA", image.size, (255, 255, 255))
        white.alpha_composite(image)
        image = white
    return image if image.mode == "RGB" else image.convert("RGB")


def pixels_of(image: Any, limits: DecodingLimits | None = None) -> NDArray[np.uint8]:
    """RGB pixels ``[height, width, 3]`` of what a script may hold: a ``PIL.Image.Image``, a file's path, its bytes, or
    an array ``[height, width, 3]`` or ``[height, width]`` of uint8.

    Raises ImageError.
    """
    limits = limits or DecodingLimits()
    if isinstance(image, (bytes, bytearray, memoryview)):
        return decode(bytes(image), limits)
    if isinstance(image, (str, Path)):
        try:
            size_bytes = Path(image).stat().st_size
            if size_bytes > limits.max_bytes:
                raise ImageError(f"{image} has {size_bytes:,} bytes, limit {limits.max_bytes:,}")
            return decode(Path(image).read_bytes(), limits)
        except OSError as error:
            raise ImageError(f"{image} cannot be read: {error.strerror}") from error
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
            raise ImageError(
                f"an array must be uint8 [height, width, 3] or [height, width], not {image.dtype} {list(image.shape)}"
            )
        if not image.size or image.shape[0] * image.shape[1] > limits.max_pixels:
            raise ImageError(f"an array of {list(image.shape)} is outside of 1 to {limits.max_pixels:,} pixels")
        return np.ascontiguousarray(image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2))
    if isinstance(image, _pillow().Image):
        check_pixels(image, limits)
        return np.array(rgb_of(image.copy()), np.uint8)
    raise ImageError(f"an image is a PIL.Image, a path, bytes or an array, not {type(image).__name__}")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageError("images need Pillow: install xserv[vision]") from error
    return Image
