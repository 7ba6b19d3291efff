"""Dequantised blocks beside the `gguf` package's, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from models.gguf.formats import FORMATS, OTHER_NAMES
from tests.models.gguf.files import random_blocks


@pytest.mark.parametrize("number", FORMATS)
@pytest.mark.parametrize("shape", [(3, 512), (1, 256), (2, 5, 768), (300, 1024)])
def test_equal_to_the_gguf_package(number: int, shape: tuple[int, ...]) -> None:
    format, ggml = FORMATS[number], Ggml(number)
    raw = random_blocks(np.random.default_rng(number), ggml, shape, scale=0.3)
    ours = format.dequantise(raw)
    assert ours.shape == shape
    np.testing.assert_array_equal(ours.astype(np.float32).view(np.uint32), gguf.dequantize(raw, ggml).view(np.uint32))
    assert ours.dtype == format.dtype.numpy


@pytest.mark.parametrize("number", [number for number in FORMATS if FORMATS[number].decode])
def test_any_bytes_at_all(number: int) -> None:
    """Scales that are not finite, too."""
    format, ggml = FORMATS[number], Ggml(number)
    raw = np.random.default_rng(number).integers(0, 256, (4096, format.layout.itemsize), np.uint8)
    with np.errstate(all="ignore"):
        ours, theirs = format.dequantise(raw), gguf.dequantize(raw, ggml)
    np.testing.assert_array_equal(ours, theirs)


def test_blocks_are_as_large_as_the_gguf_package_says() -> None:
    for number, format in FORMATS.items():
        assert Ggml(number).name == format.name
        assert gguf.GGML_QUANT_SIZES[Ggml(number)] == (format.block, format.layout.itemsize)
    assert all(Ggml(number).name == name for number, name in OTHER_NAMES.items())
