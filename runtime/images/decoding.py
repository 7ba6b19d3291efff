"""Decodes a file's bytes to RGB pixels, within limits.

A header's size is checked before anything is decoded. EXIF rotation and transparency are handled as in transformers:
the picture is turned upright, and transparent pixels become white. Greys of more than 8 bits are scaled (Pillow and
transformers clip them, which makes such pictures white).
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from runtime.errors import XservError
from runtime.later import later


class ImageError(XservError):
    """A picture that cannot be read or is beyond a limit. The message is one line, safe to show to the client."""


Image = Any
"""Pillow's, which is imported when it is first used."""
_features, _image_ops = later("PIL.features"), later("PIL.ImageOps")

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Pillow's names of the formats that are read, AVIF where Pillow was built with it. Pillow knows many more, whose
decoders are used less."""


@dataclass(frozen=True, slots=True)
class DecodingLimits:
    """max_bytes of the file; max_pixels of the decoded picture."""

    max_bytes: int = 32 << 20
    max_pixels: int = 64 << 20


def decode(data: bytes, limits: DecodingLimits | None = None) -> NDArray[np.uint8]:
    """The RGB pixels ``[height, width, 3]`` of an image file's bytes. It uses the first of several frames.

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
        warnings.simplefilter("ignore")  # Pillow's own warning of many pixels: our limit is below
        try:
            with image_module.open(io.BytesIO(data), formats=formats()) as image:
                check_pixels(image, limits)
                return rgb_of(image, is_unsigned=_is_unsigned(image))
        except (ImageError, MemoryError):
            raise
        except Exception as error:  # decoders raise errors of many classes for broken files
            if is_cut(data):
                problem = f"the image is cut off: its {len(data):,} bytes end before the picture does"
                raise ImageError(problem) from error
            raise ImageError(f"the image cannot be read as one of {', '.join(formats())}") from error


def formats() -> tuple[str, ...]:
    """The formats of `FORMATS` that this Pillow supports."""
    return FORMATS if _features.check("avif") else FORMATS[1:]


def is_cut(data: bytes) -> bool:
    """Whether an undecodable file of one of the formats is truncated."""
    size = len(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return b"IEND" not in data[-64:]
    if data.startswith(b"\xff\xd8"):
        return b"\xff\xd9" not in data[-64:]
    if data.startswith((b"GIF87a", b"GIF89a")):
        return b";" not in data[-2:]
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return size < 8 + int.from_bytes(data[4:8], "little")
    if data.startswith(b"BM"):
        return size < int.from_bytes(data[2:6], "little")
    if data[4:8] == b"ftyp":
        return _boxes_end(data) > size
    return data.startswith((b"II*\0", b"MM\0*")) and _directory_end(data) > size


def _boxes_end(data: bytes) -> int:
    """The length of an AVIF file in bytes, by its outer boxes."""
    end = 0
    while end + 8 <= len(data):
        box = int.from_bytes(data[end : end + 4])
        if box == 1:
            box = int.from_bytes(data[end + 8 : end + 16])
        if box < 8:  # 0: to the end of the file
            return len(data)
        end += box
    return end


_TIFF_SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
"""Bytes of a value of each kind of TIFF's; of the others, one."""


def _directory_end(data: bytes) -> int:
    """The end of a TIFF file's first directory and of its picture's strips, in bytes."""
    order: Literal["little", "big"] = "little" if data[:1] == b"I" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], order)

    first = number(4, 4)
    end = first + 2 + 12 * number(first, 2)
    if end > len(data):
        return end
    found: dict[int, list[int]] = {}
    for entry in range(first + 2, end, 12):
        tag, kind, count = number(entry, 2), number(entry + 2, 2), number(entry + 4, 4)
        size = _TIFF_SIZES.get(kind, 1)
        at = entry + 8 if size * count <= 4 else number(entry + 8, 4)
        end = max(end, at + size * count)
        if tag in (273, 279, 324, 325) and count < 1 << 16:  # offsets and sizes of strips and tiles
            found[tag] = [number(at + size * i, size) for i in range(count)]
    for offsets, sizes in ((273, 279), (324, 325)):
        end = max([end, *map(sum, zip(found.get(offsets, ()), found.get(sizes, ())))])
    return end


def check_pixels(image: Any, limits: DecodingLimits) -> None:
    """Raises ImageError for a ``PIL.Image.Image`` of too many pixels."""
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(f"the image has {width} x {height} pixels, limit {limits.max_pixels:,}")


def rgb_of(image: Image, *, is_unsigned: bool = False) -> Image:
    """The picture upright, on white, in RGB; perhaps the same object."""
    image.load()
    _image_ops.exif_transpose(image, in_place=True)
    if image.mode.startswith("I") or image.mode == "F":
        image = _scaled(image, is_unsigned=is_unsigned)
    if {"A", "a"}.intersection(image.getbands()) or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = _pillow().new("RGBA", image.size, (255, 255, 255))
        white.alpha_composite(image)
        image = white
    return image if image.mode == "RGB" else image.convert("RGB")


def _is_unsigned(image: Image) -> bool:
    """Whether it is a TIFF of unsigned integers with 32 bits, which Pillow reads as signed ones."""
    return image.mode == "I" and getattr(image, "tag_v2", {}).get(339) == (1,)


def _scaled(image: Image, *, is_unsigned: bool) -> Image:
    """Scales greys of more than 8 bits to 8. 16 bits lose the lower half, as in other decoders. For 32 bits a file does
    not give the used ones: a picture is scaled by the first of 1 (floats), 8, 16 and 32 bits that holds its values, or
    by its own range if some are negative or larger."""
    values = np.asarray(image)
    if is_unsigned:
        values = values.view(np.uint32)
    grey: NDArray[Any]
    if image.mode.startswith("I;16"):
        grey = values >> 8
    else:
        known = values[np.isfinite(values)].astype(np.float64)
        low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
        if image.mode == "F":
            limits: tuple[float, ...] = (1.0, 255.0, 65535.0)
        else:
            limits = (255.0, 65535.0, 2.0**31 - 1, 2.0**32 - 1)
        limit = next((each for each in limits if low >= 0 and high <= each), None)
        begin, span = (0.0, limit) if limit is not None else (low, high - low)
        grey = np.nan_to_num((values - begin) / span, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1) * 255 + 0.5
    scaled = _pillow().fromarray(grey.astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        alpha = np.where(values == transparent, 0, 255).astype(np.uint8)
        scaled.putalpha(_pillow().fromarray(alpha))
    result: Image = scaled
    return result


def pixels_of(image: Any, limits: DecodingLimits | None = None) -> NDArray[np.uint8]:
    """RGB pixels ``[height, width, 3]`` of a script's picture: a ``PIL.Image.Image``, a file's path, its bytes, or
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
        return np.array(rgb_of(image.copy(), is_unsigned=_is_unsigned(image)), np.uint8)
    raise ImageError(f"an image is a PIL.Image, a path, bytes or an array, not {type(image).__name__}")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageError("images need Pillow: pip install '.[vision]' in xserv's checkout") from error
    return Image
