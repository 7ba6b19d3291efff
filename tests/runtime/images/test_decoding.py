"""Greys of more than 8 bits are scaled, AVIF is read where Pillow reads it, and a file that lacks its end is named."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from PIL import Image, features

from runtime.images.decoding import FORMATS, ImageError, decode, formats, pixels_of

RAMP = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
EXPECTED = (RAMP >> 8).astype(np.uint8)
"""Which is what stb_image makes of a PNG of 16 bits, and Pillow of one with three channels."""
PIXELS = np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)


def file_of(image: Any, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def unsigned(tiff: bytes) -> bytes:
    """A TIFF of 32 bits whose integers are said to be unsigned."""
    changed = bytearray(tiff)
    (first,) = struct.unpack_from("<I", changed, 4)
    for entry in range(first + 2, first + 2 + 12 * struct.unpack_from("<H", changed, first)[0], 12):
        if struct.unpack_from("<H", changed, entry) == (339,):
            struct.pack_into("<H", changed, entry + 8, 1)
    return bytes(changed)


@pytest.mark.parametrize(
    "file",
    [
        file_of(Image.fromarray(RAMP), "PNG"),
        file_of(Image.fromarray(RAMP), "TIFF"),
        file_of(Image.fromarray(RAMP.astype(">u2")), "TIFF"),
        file_of(Image.fromarray(RAMP.astype(np.int32)), "TIFF"),
        file_of(Image.fromarray((RAMP >> 8).astype(np.int32)), "TIFF"),
        file_of(Image.fromarray((RAMP.astype(np.int64) * 32768).astype(np.int32)), "TIFF"),
        file_of(Image.fromarray(RAMP.astype(np.int32) - 30000), "TIFF"),
        unsigned(file_of(Image.fromarray((RAMP.astype(np.uint32) * 65537).view(np.int32)), "TIFF")),
        file_of(Image.fromarray((RAMP / 65535).astype(np.float32)), "TIFF"),
        file_of(Image.fromarray((RAMP / 257).astype(np.float32)), "TIFF"),
        file_of(Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
        file_of(Image.fromarray(RAMP * np.float32(3.5) - np.float32(700)), "TIFF"),
    ],
)
def test_greys_of_more_bits_are_scaled(file: bytes) -> None:
    found = decode(file)
    assert (found == found[:, :, :1]).all()
    assert np.abs(found[:, :, 0].astype(int) - EXPECTED).max() <= 1
    np.testing.assert_array_equal(pixels_of(Image.open(io.BytesIO(file))), found)


def test_what_is_transparent_or_no_number_in_them() -> None:
    file = file_of(Image.fromarray(RAMP), "PNG", transparency=int(RAMP[0, 1]))
    assert decode(file)[:, :, 0].ravel().tolist() == [0, 255, *EXPECTED.ravel()[2:].tolist()]
    values = (RAMP / 65535).astype(np.float32)
    values[0, :3] = np.nan, np.inf, -np.inf
    assert decode(file_of(Image.fromarray(values), "TIFF"))[0, :3, 0].tolist() == [0, 255, 0]
    assert decode(file_of(Image.fromarray(np.full((2, 2), np.nan, np.float32)), "TIFF")).max() == 0


def test_a_grey_of_16_bits_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    found = decode(file_of(Image.fromarray(RAMP), "PNG", exif=exif))
    np.testing.assert_array_equal(found[:, :, 0], np.rot90(EXPECTED, -1))


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_avif() -> None:
    smooth = np.repeat(np.repeat(PIXELS[:4, :4], 16, axis=0), 16, axis=1)
    found = decode(file_of(Image.fromarray(smooth), "AVIF", quality=100, subsampling="4:4:4"))
    assert np.abs(found.astype(int) - smooth).max() <= 3


@pytest.mark.parametrize("name", formats())
def test_a_file_that_lacks_its_end_is_told_to(name: str) -> None:
    file = file_of(Image.fromarray(PIXELS), name)
    for size in (12, 30, len(file) // 2, len(file) - 100):
        with pytest.raises(ImageError, match=f"cut off: its {size:,} bytes end before the picture does"):
            decode(file[:size])


def test_a_file_that_is_whole_and_wrong_is_not_called_cut() -> None:
    image = Image.fromarray(PIXELS)
    png, tiff = file_of(image, "PNG"), file_of(image, "TIFF", compression="tiff_lzw")
    broken = (png[:60] + bytes(200) + png[260:], b"no picture at all", tiff[:8] + bytes(len(tiff) - 8), b"II*\0")
    for file in broken[:2]:
        with pytest.raises(ImageError, match=f"cannot be read as one of .*{FORMATS[1]}"):
            decode(file)
    for file in broken[2:]:
        with pytest.raises(ImageError):
            decode(file)
