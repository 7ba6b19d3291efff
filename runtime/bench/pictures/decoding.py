"""From a 1080p JPEG to patches: each part by the processor's time of this thread, and the whole through one of the
server's processes."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from runtime.bench.metrics import BenchmarkError
from runtime.engine.prompt_images import PreparedImage, digest_of
from runtime.images.decoding import DecodingLimits, decoded_image
from runtime.images.patches import PatchRule, make_patches

HALF = (0.5, 0.5, 0.5)
RULES = {
    "Qwen3-VL": PatchRule(patch_size=16, min_pixels=65536, max_pixels=16777216, mean=HALF, std=HALF),
    "at most 1,003,520 pixels": PatchRule(),
}
"""As published checkpoints have them, and as Qwen2.5-VL's class has it."""


def drawn_jpeg(width: int, height: int) -> bytes:
    """A file with slow and fast changes, of quality 85: like a photograph, it has something in every block."""
    from PIL import Image

    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width]
    slow = [np.sin(x / 97 + y / 211), np.cos(y / 83), np.sin((x + y) / 151)]
    grain = Image.fromarray(rng.integers(88, 169, (height // 8, width // 8, 3)).astype(np.uint8))
    pixels = np.stack(slow, -1) * 90 + np.asarray(grain.resize((width, height))) + rng.normal(0, 3, (height, width, 1))
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def bench_decoding(num_rounds: int) -> dict[str, Any]:
    """Milliseconds by rule: medians of the rounds, and the least, which other work on the machine disturbed least. What
    is timed has been compared with Pillow's own resizing."""
    file = drawn_jpeg(1920, 1080)
    return {"file_bytes": len(file), "rules": {name: _of_rule(file, rule, num_rounds) for name, rule in RULES.items()}}


def _of_rule(file: bytes, rule: PatchRule, num_rounds: int) -> dict[str, Any]:
    memory = memoryview(bytearray(3 * rule.most_pixels))
    _check(file, rule)
    parts: dict[str, list[float]] = {"decode": [], "resize and cut": [], "digest": [], "together": []}
    for _ in range(num_rounds + 1):
        image, decode = _timed(lambda: decoded_image(file))
        patches, cut = _timed(lambda image=image: make_patches(image, rule, memory))  # type: ignore[misc]
        _, digest = _timed(lambda patches=patches: digest_of(patches))  # type: ignore[misc]
        for name, each in zip(parts, (decode, cut, digest, decode + cut + digest)):
            parts[name].append(each)
    found = {
        name: {"median": round(median(each[1:]), 2), "least": round(min(each[1:]), 2)} for name, each in parts.items()
    }
    return {"patches": [patches.rows, patches.columns], "processor_ms": found, **_by_process(file, rule, num_rounds)}


def _by_process(file: bytes, rule: PatchRule, num_rounds: int) -> dict[str, Any]:
    """The server's way: a process that decodes, and patches in memory that it shares."""
    from server.pictures.decoder import PictureDecoder

    decoder = PictureDecoder(1, 60.0, rule.most_pixels)

    def ask() -> PreparedImage:
        return decoder.decode(file, DecodingLimits(), rule)

    try:
        ask()
        times = []
        for _ in range(num_rounds):
            begin = time.perf_counter()
            ask()
            times.append(time.perf_counter() - begin)
    finally:
        decoder.close()
    return {"by_process_ms": {"median": round(1e3 * median(times), 2), "least": round(1e3 * min(times), 2)}}


def _check(file: bytes, rule: PatchRule) -> None:
    """Raises BenchmarkError unless the patches are those of Pillow's resizing, cut by numpy."""
    from PIL.Image import Resampling

    image, size, merge = decoded_image(file), rule.patch_size, rule.merge_size
    tall, wide = rule.resized(image.height, image.width)
    resized = np.asarray(image.resize((wide, tall), Resampling.BICUBIC))
    blocks = resized.reshape(tall // size // merge, merge, size, wide // size // merge, merge, size, 3)
    wanted = hashlib.sha256(np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).data).digest()
    if hashlib.sha256(make_patches(image, rule).pixels.data).digest() != wanted:
        raise BenchmarkError("the patches are not those of Pillow's resizing")


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and the milliseconds of a processor that this thread took: other work on the machine counts little."""
    begin = time.thread_time()
    result = work()
    return result, 1e3 * (time.thread_time() - begin)
