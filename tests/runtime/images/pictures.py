"""Pictures that are drawn by rule, in the formats and modes that a decoder meets; and sizes of pictures."""

from __future__ import annotations

import functools
import io
import random
from typing import Any

import numpy as np
from PIL import Image

PICTURES = {  # width, height, mode, format
    "rgb": (200, 120, "RGB", "PNG"),
    "tall": (9, 700, "RGB", "PNG"),
    "wide": (900, 11, "RGB", "PNG"),
    "tiny": (3, 2, "RGB", "PNG"),
    "large": (1200, 900, "RGB", "BMP"),
    "gray": (90, 70, "L", "PNG"),
    "bits": (64, 64, "1", "PNG"),
    "alpha": (80, 100, "RGBA", "PNG"),
    "gray-alpha": (80, 100, "LA", "PNG"),
    "palette": (100, 80, "P", "GIF"),
    "palette-alpha": (100, 80, "P", "PNG"),
    "sixteen": (60, 90, "I;16", "PNG"),
    "webp": (150, 100, "RGB", "WEBP"),
    "turned": (120, 60, "RGB", "TIFF"),
}


def _sizes() -> list[tuple[int, int]]:
    """1,000 heights and widths: extremes of aspect and sizes at which rounding turns over, then any."""
    sizes = [(1, 1), (1, 200), (200, 1), (2, 400), (28, 28), (27, 5400), (8000, 40), (4000, 4000), (16, 16), (42, 42)]
    sizes += [(14 * k, 16 * k + 1) for k in range(1, 91)]
    draw = random.Random(5)
    while len(sizes) < 1000:
        height = int(2 ** draw.uniform(0, 13))
        width = int(2 ** draw.uniform(0, 13))
        if max(height, width) <= 200 * min(height, width):
            sizes.append((height, width))
    return sizes


SIZES = _sizes()

_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

FIXED: dict[str, dict[str, Any]] = {
    "clip": {"processor": "CLIP", "size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    "clip-cut": {"processor": "CLIP", "size": {"shortest_edge": 35}, "crop_size": {"height": 28, "width": 28}},
    "siglip": {"processor": "Siglip", "size": {"height": 28, "width": 28}, **_HALVES},
    "gemma3": {"processor": "Gemma3", "size": {"height": 28, "width": 28}, **_HALVES},
}
"""Image processors of fixed pictures: transformers' name, and a preprocessor_config.json."""


SIDES: dict[str, dict[str, Any]] = {
    "large": {"size": {"longest_edge": 60}, "patch_size": {"height": 14, "width": 14}},
    "small": {"size": {"longest_edge": 48}, "patch_size": 8},
    "oblong": {"size": {"height": 40, "width": 100}, "patch_size": 7},
    "square": {"size": 50, "patch_size": 12},
}
"""Settings of Pixtral's processor; the patch size is a token's side."""

TOKENS: dict[str, dict[str, Any]] = {
    "squares": {"processor": "Gemma4", "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
    "pixels": {"processor": "Gemma4", "patch_size": 7, "pooling_kernel_size": 1, "max_soft_tokens": 140},
}
"""Settings of Gemma 4's processor."""


def _small_sizes() -> list[tuple[int, int]]:
    draw = random.Random(6)
    sizes = [(28, 28), (1, 1), (28, 35), (35, 28), (1, 150), (190, 2)]
    return sizes + [(draw.randint(1, 160), draw.randint(3, 160)) for _ in range(120)]


SMALL_SIZES = _small_sizes()
"""Heights and widths."""


def small_picture(height: int, width: int) -> Image.Image:
    """A picture of one of these sizes."""
    generator = np.random.RandomState(height * 200 + width)
    return Image.fromarray(generator.randint(0, 256, (height, width, 3)).astype(np.uint8))


@functools.cache
def picture_bytes(name: str) -> bytes:
    """The file of a picture."""
    width, height, mode, file_format = PICTURES[name]
    generator = np.random.RandomState(len(name) + width)
    smooth = np.add.outer(np.arange(height) * 3, np.arange(width) * 5)[:, :, None] + np.array([0, 85, 170, 40])
    pixels = ((smooth + generator.randint(0, 60, (height, width, 4))) % 256).astype(np.uint8)
    if mode == "I;16":
        image = Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
    elif mode == "P":
        image = Image.fromarray(pixels[:, :, 0] // 4)
        image.putpalette([(7 * i) % 256 for i in range(192)])
    else:
        image = Image.fromarray(pixels[:, :, : 4 if mode in ("RGBA", "LA") else 3]).convert(mode)
    options = {}
    if name == "palette-alpha":
        options["transparency"] = 5
    if file_format == "WEBP":
        options["lossless"] = True
    if name == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()
