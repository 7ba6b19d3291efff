"""Writes the results of transformers' image processors (``backend="pil"``):
``tests/runtime/images/golden_patches.json`` of ``Qwen2VLImageProcessorPil``, ``golden_fixed.json`` of those of CLIP,
SigLIP and Gemma 3, ``golden_sides.json`` of Pixtral's, ``golden_tokens.json`` of Gemma 4's, and
``golden_gemma4.json`` of Gemma 4's as published, for 1,000 sizes.

    python -m tools.references.make_image_goldens          # needs transformers, torch and Pillow
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image, ImageOps
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as oracle

from tests.runtime.images.pictures import (
    FIXED,
    PICTURES,
    SIDES,
    SIZES,
    SMALL_SIZES,
    TOKENS,
    picture_bytes,
    small_picture,
)

TARGET = Path(__file__).resolve().parents[2] / "tests/runtime/images/golden_patches.json"
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
RULES: dict[str, dict[str, Any]] = {
    "qwen2.5": {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 1003520}},
    "qwen3": {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}, **HALVES},
    "small": {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}, **HALVES},
}


def main() -> None:
    grids = {
        name: [
            oracle.smart_resize(
                *size, 2 * rule["patch_size"], rule["size"]["shortest_edge"], rule["size"]["longest_edge"]
            )
            for size in SIZES
        ]
        for name, rule in RULES.items()
    }
    pictures = {}
    for name in PICTURES:
        image = opened(name)
        for rule in ("qwen2.5", "small"):
            raw = oracle.Qwen2VLImageProcessorPil(**RULES[rule], do_rescale=False, do_normalize=False)
            pixels = raw([image], return_tensors="np")["pixel_values"]
            made = oracle.Qwen2VLImageProcessorPil(**RULES[rule])([image], return_tensors="np")
            values = made["pixel_values"].ravel()
            pictures[f"{rule}/{name}"] = {
                "grid": made["image_grid_thw"][0].tolist(),
                "shape": list(pixels.shape),
                "sha256": hashlib.sha256(pixels.astype(np.uint8).tobytes()).hexdigest(),
                "normalised": [float(each) for each in values[:: max(1, values.size // 7)][:7]],
            }
    found = {"transformers": transformers.__version__, "grids": grids, "pictures": pictures}
    TARGET.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
    make_others("golden_fixed.json", FIXED, digest)
    for name, cases in (("golden_sides.json", SIDES), ("golden_tokens.json", TOKENS)):
        make_others(name, cases, lambda pixels: [*pixels.shape[1:], digest(pixels)])
    make_gemma4()


def make_gemma4() -> None:
    """Height, width and digest of the pixels of each size, or None if transformers refuses it."""
    processor = transformers.Gemma4ImageProcessorPil(do_rescale=False, do_normalize=False)
    found: list[Any] = []
    for size in SIZES:
        try:
            pixels = pixels_of(processor([small_picture(*size)], return_tensors="np")).astype(np.uint8)
            found.append([*pixels.shape[1:], digest(pixels)])
        except ValueError:
            found.append(None)
    TARGET.with_name("golden_gemma4.json").write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")


def opened(name: str) -> Any:
    """A picture, upright. Greys of 16 bits are scaled to 8 beforehand: transformers clips them."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(picture_bytes(name))))
    if image.mode == "I;16":
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


def make_others(name: str, cases: dict[str, dict[str, Any]], summary: Callable[[Any], Any]) -> None:
    """The summary of the pixels of each picture by processors of one picture; None if a side would have no pixels."""
    found: dict[str, Any] = {}
    for case, fields in cases.items():
        settings = {"processor": "Pixtral", **fields}
        kind = getattr(transformers, f"{settings.pop('processor')}ImageProcessorPil")
        raw, whole = kind(**settings, do_rescale=False, do_normalize=False), kind(**settings)

        def made(image: Any, raw: Any = raw) -> Any:
            try:
                return summary(pixels_of(raw([image], return_tensors="np")).astype(np.uint8))
            except ValueError:
                return None

        files = {one: opened(one) for one in PICTURES}
        values = pixels_of(whole([files["rgb"]], return_tensors="np")).ravel()
        found[case] = {
            "files": {one: made(image) for one, image in files.items()},
            "sizes": [made(small_picture(*size)) for size in SMALL_SIZES],
            "normalised": [float(each) for each in values[:: max(1, values.size // 7)][:7]],
        }
    TARGET.with_name(name).write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")


def pixels_of(made: Any) -> np.ndarray[Any, Any]:
    """`[3, height, width]` of the first picture; Gemma 4's is put together from its patches, after which is padding."""
    pixels = np.asarray(made["pixel_values"][0])
    if "image_position_ids" not in made:
        return pixels
    columns, rows = 1 + np.asarray(made["image_position_ids"][0]).max(axis=0)
    side = math.isqrt(pixels.shape[1] // 3)
    cut = pixels[: rows * columns].reshape(rows, columns, side, side, 3).transpose(4, 0, 2, 1, 3)
    return np.ascontiguousarray(cut).reshape(3, rows * side, columns * side)


def digest(pixels: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(pixels.tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
