"""The processes that decode: what they refuse, and that nothing of a picture's harm reaches the server."""

from __future__ import annotations

import io
import os
import random
import signal
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from PIL import Image

from runtime.engine.prompt_images import prepare_image
from runtime.images.decoding import DecodingLimits, ImageError, decode, formats
from runtime.images.patches import PatchRule
from server.pictures.decoder import PictureDecoder
from tests.waiting import TIMEOUT_S

RULE = PatchRule(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)
LIMITS = DecodingLimits(max_bytes=1 << 20, max_pixels=1 << 20)
PIXELS = np.random.RandomState(1).randint(0, 256, (40, 56, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    opened = PictureDecoder(2, TIMEOUT_S, RULE.max_pixels)
    yield opened
    opened.close()


def file_of(image: Any, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def pictures() -> dict[str, bytes]:
    """Of every mode and format that is read."""
    image = Image.fromarray(PIXELS)
    found = {name: file_of(image, name) for name in formats()}
    found |= {mode: file_of(image.convert(mode)) for mode in ("L", "LA", "P", "RGBA", "1")}
    found["CMYK"] = file_of(image.convert("CMYK"), "JPEG")
    found["16 bits"] = file_of(Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) << 8))
    found["palette"] = file_of(image.convert("P"), transparency=0)
    found["animated"] = file_of(image, "GIF", save_all=True, append_images=[image] * 3)
    found["turned"] = file_of(image, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\1\3\0\1\0\0\0\x06\0\0\0\0\0\0\0")
    return found


@pytest.mark.parametrize("name", pictures())
def test_a_process_gives_what_a_call_gives(decoder: PictureDecoder, name: str) -> None:
    data = pictures()[name]
    assert decoder.decode(data, LIMITS, RULE) == prepare_image(decode(data, LIMITS), RULE)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A small PNG that says it is large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 16), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


BAD = {
    "empty": b"",
    "text": b"not a picture",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "pdf": b"%PDF-1.7\n",
    "head alone": b"\x89PNG\r\n\x1a\n",
    "cut png": file_of(Image.fromarray(PIXELS))[:600],
    "cut jpeg": file_of(Image.fromarray(PIXELS), "JPEG")[:300],
    "no pixels": bomb(0, 10),
    "too many pixels": bomb(60_000, 60_000),
    "too wide": bomb(1 << 19, 1),
    "too narrow": file_of(Image.new("RGB", (1000, 2))),
    "too long": b"\x89PNG\r\n\x1a\n" + bytes(1 << 20),
    "icon": file_of(Image.new("RGB", (16, 16)), "ICO"),
    "targa": file_of(Image.new("RGB", (16, 16)), "TGA"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(decoder: PictureDecoder, name: str) -> None:
    with pytest.raises(ImageError):
        decoder.decode(BAD[name], LIMITS, RULE)


def test_bent_files_harm_nobody(decoder: PictureDecoder) -> None:
    """Bytes changed, cut and doubled at random: a picture or an error, as a call of its own gives."""
    chance, files = random.Random(3), list(pictures().values())
    for _ in range(150):
        data = bytearray(chance.choice(files))
        for _ in range(chance.choice((1, 3, 30))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        refusals = []
        try:
            assert decoder.decode(bytes(data), LIMITS, RULE).patches
        except ImageError as error:
            refusals.append(str(error))
        assert not any("process" in refusal for refusal in refusals)


def test_too_much_memory_is_an_error_of_the_picture(decoder: PictureDecoder) -> None:
    with pytest.raises(ImageError, match="more memory"):
        decoder.decode(bomb(24_000, 24_000), DecodingLimits(1 << 24, 1 << 30), RULE)
    assert decoder.decode(pictures()["PNG"], LIMITS, RULE).patches


def test_a_process_that_ended_is_replaced() -> None:
    decoder = PictureDecoder(1, TIMEOUT_S, RULE.max_pixels)
    try:
        first = decoder.decode(pictures()["PNG"], LIMITS, RULE)
        process = decoder._free.queue[0]
        assert process is not None
        os.kill(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
        assert decoder.decode(pictures()["PNG"], LIMITS, RULE) == first
    finally:
        decoder.close()
    with pytest.raises(ImageError, match="shutting down"):
        decoder.decode(pictures()["PNG"], LIMITS, RULE)


def test_one_that_takes_too_long_ends_its_process() -> None:
    decoder = PictureDecoder(1, TIMEOUT_S, RULE.max_pixels)
    try:
        decoder.decode(pictures()["PNG"], LIMITS, RULE)
        process = decoder._free.queue[0]
        assert process is not None
        os.kill(process.popen.pid, signal.SIGSTOP)
        decoder._timeout_s = 0.3
        with pytest.raises(ImageError, match=r"longer than 0\.3 s"):
            decoder.decode(pictures()["PNG"], LIMITS, RULE)
        decoder._timeout_s = TIMEOUT_S
        assert process.popen.poll() is not None
        assert decoder.decode(pictures()["PNG"], LIMITS, RULE).patches
    finally:
        decoder.close()


def test_many_at_once(decoder: PictureDecoder) -> None:
    files = list(pictures().values())
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda data: decoder.decode(data, LIMITS, RULE), files * 3))
    assert found == [prepare_image(decode(data, LIMITS), RULE) for data in files] * 3
