"""Pictures resized and cut: equal to Pillow's own resizing, and to numpy's cutting, to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from PIL import Image

from runtime.images import cutting
from runtime.images.cutting import cut, line_taps


def picture(rng: Any, height: int, width: int) -> Image.Image:
    """Noise, or only black and white, which overshoot most."""
    pixels = rng.integers(0, 256, (height, width, 3))
    return Image.fromarray(np.where(rng.random() < 0.5, pixels, pixels // 128 * 255).astype(np.uint8))


def expected(image: Image.Image, height: int, width: int, size: int, merge: int) -> Any:
    rows, columns = height // size, width // size
    resized = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    blocks = resized[: rows * size, : columns * size].reshape(
        rows // merge, merge, size, columns // merge, merge, size, 3
    )
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).ravel()


def check(image: Image.Image, height: int, size: int, merge: int, width: int | None = None) -> None:
    width = width or image.width
    out = np.full(3 * (height // size) * (width // size) * size**2 + 64, 77, np.uint8)
    cut(image, height, width, size, merge, out[:-64])
    wanted = expected(image, height, width, size, merge)
    assert np.array_equal(out[:-64], wanted), (image.size, height, width, size, merge)
    assert (out[-64:] == 77).all()


@pytest.mark.parametrize("size", [1, 2, 14, 16, 24])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.exhaustive_cases("-2", "False")
def test_cut(size: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Pillow's pixels do not lie in one block, so that they are copied without their fourth byte."""
    if is_packed:
        monkeypatch.setattr(cutting, "_pixels_of", lambda image: (np.asarray(image).ravel(), 3, None))
    rng = np.random.default_rng(size)
    for _ in range(40):
        merge = int(rng.integers(1, 4))
        unit = size * merge
        height, width = (unit * int(rng.integers(1, 1 + 160 // unit)) for _ in range(2))
        before = int(rng.choice([1, 2, height, height + 1, max(1, height - 1), 7 * height, int(rng.integers(1, 500))]))
        check(picture(rng, before, width), height, size, merge)
        check(picture(rng, height, width), height, size, merge)
        wide = int(rng.choice([1, width + 1, max(1, width - 1), 7 * width, int(rng.integers(1, 500))]))
        check(picture(rng, before, wide), height, size, merge, width)


def test_this_pillow_resizes_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is asked to, which is slow; and then gives the same."""
    assert cutting.is_known_pillow()
    monkeypatch.setattr(cutting, "is_known_pillow", lambda: False)
    check(picture(np.random.default_rng(3), 70, 90), 32, 16, 2, 64)


def test_extreme_heights() -> None:
    rng = np.random.default_rng(0)
    for before, height in ((5000, 4), (1, 640), (2, 1000), (3, 4), (4000, 3996), (999, 1000)):
        check(picture(rng, before, 8), height, 2, 2)
        check(picture(rng, 8, before), 8, 2, 2, height)
        check(picture(rng, 11, before), 4, 2, 2, height)


def test_what_is_left_of_a_patch_is_dropped() -> None:
    rng = np.random.default_rng(1)
    for height, width in ((33, 47), (30, 31), (29, 28)):
        image = picture(rng, height, width)
        out = np.empty(3 * (height // 14) * (width // 14) * 14**2, np.uint8)
        cut(image, height, width, 14, 1, out)
        assert np.array_equal(out, expected(image, height, width, 14, 1))


def test_a_picture_in_several_blocks() -> None:
    image = picture(np.random.default_rng(2), 2112, 2112)
    with pytest.raises(ValueError):  # Pillow keeps it so; else this test shows nothing
        image.__arrow_c_array__()
    check(image, 2112, 16, 2)
    check(image, 2080, 16, 2)
    check(image, 1056, 16, 2, 1024)


def test_pillows_pixels_are_read_where_they_lie() -> None:
    """And are kept for that long."""
    image = picture(np.random.default_rng(3), 30, 20)
    pixels, channels, owner = cutting._pixels_of(image)
    assert channels == 4
    assert owner is not None
    assert np.array_equal(pixels.reshape(30, 20, 4)[:, :, :3], np.asarray(image))


def test_taps_sum_to_one() -> None:
    for size, new_size in ((1, 1), (1, 9), (9, 1), (1080, 1088), (4000, 37), (3, 1000)):
        first, taps = line_taps(size, new_size)
        assert (abs(taps.sum(axis=1) - (1 << 22)) <= taps.shape[1]).all()
        assert (first >= 0).all()
        assert all((first[y] + np.flatnonzero(taps[y]) < size).all() for y in range(new_size))
