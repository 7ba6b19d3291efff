"""Patches against transformers' ``Qwen2VLImageProcessorPil``: grids of 1,000 sizes, and the resized bytes."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from PIL import Image

from runtime.images.decoding import FORMATS, DecodingLimits, ImageError, decode, pixels_of
from runtime.images.patches import PatchRule, make_patches, normalised
from tests.runtime.images.pictures import PICTURES, SIZES, picture_bytes

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_patches.json").read_text())
HALVES = (0.5, 0.5, 0.5)
RULES = {
    "qwen2.5": PatchRule(max_pixels=1003520),
    "qwen3": PatchRule(patch_size=16, min_pixels=65536, max_pixels=16777216, mean=HALVES, std=HALVES),
    "small": PatchRule(patch_size=16, min_pixels=4096, max_pixels=65536, mean=HALVES, std=HALVES),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_thousand_sizes(rule: str) -> None:
    assert len(SIZES) == 1000
    assert [list(RULES[rule].resized(*size)) for size in SIZES] == GOLDEN["grids"][rule]


@pytest.mark.parametrize("case", GOLDEN["pictures"])
def test_patches_are_transformers(case: str) -> None:
    rule, name = RULES[case.split("/")[0]], case.split("/")[1]
    golden = GOLDEN["pictures"][case]
    made = make_patches(decode(picture_bytes(name)), rule)
    assert [1, *made.grid] == golden["grid"]
    frames = np.repeat(made.pixels.reshape(len(made.pixels), 3, 1, -1), 2, axis=2)
    assert frames.size == np.prod(golden["shape"])
    assert hashlib.sha256(frames.tobytes()).hexdigest() == golden["sha256"]
    values = normalised(made.pixels, rule)
    assert values.shape == tuple(golden["shape"])
    some = values.ravel()[:: max(1, values.size // 7)][:7]
    np.testing.assert_allclose(some, golden["normalised"], atol=1e-6)


def test_all_pictures_have_goldens() -> None:
    assert {case.split("/")[1] for case in GOLDEN["pictures"]} == set(PICTURES)


def test_what_a_script_may_hold(tmp_path: Path) -> None:
    data = picture_bytes("rgb")
    expected = decode(data)
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    with Image.open(io.BytesIO(data)) as image:
        for given in (data, bytearray(data), path, str(path), image, expected):
            assert np.array_equal(pixels_of(given), expected)
    gray = expected[:, :, 0]
    assert np.array_equal(pixels_of(gray)[:, :, 2], gray)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "is empty"),
        (b"no picture", "cannot be read"),
        (picture_bytes("rgb")[:200], "cut off: its 200 bytes end before the picture does"),
        (picture_bytes("large"), "1200 x 900 pixels, limit 100,000"),
        (picture_bytes("rgb") + bytes(200_000), "bytes, limit 200,000"),
        (np.zeros((4, 4, 3), np.float32), "must be uint8"),
        (np.zeros((0, 4, 3), np.uint8), "outside of 1 to"),
        ("/no/such/file.png", "cannot be read"),
        (7, "not int"),
    ],
)
def test_bad_pictures(given: Any, message: str) -> None:
    limits = DecodingLimits(max_bytes=5_000_000 if message.startswith("1200") else 200_000, max_pixels=100_000)
    with pytest.raises(ImageError, match=message):
        pixels_of(given, limits)


def test_too_narrow() -> None:
    with pytest.raises(ImageError, match="2000 x 9: its sides differ by more than 200 times"):
        RULES["small"].resized(9, 2000)


def test_only_the_named_formats_are_decoded() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PPM")
    assert "PPM" not in FORMATS
    with pytest.raises(ImageError, match="cannot be read as one of"):
        decode(file.getvalue())
