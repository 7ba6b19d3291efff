"""Dequantised blocks beside the `gguf` package's, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from models.gguf.formats import FORMATS, OTHER_TYPES
from tests.models.gguf.files import random_blocks


def dequantised(raw: np.ndarray, ggml: Ggml) -> np.ndarray:
    """By the `gguf` package; it does not read two of the types."""
    if ggml == Ggml.F64:
        with np.errstate(all="ignore"):
            return raw.view(np.float64).astype(np.float32)
    if ggml == Ggml.Q1_0:
        blocks = raw.reshape(-1, 18)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), scales, -scales)
        return values.reshape(*raw.shape[:-1], -1)
    return gguf.dequantize(raw, ggml)


@pytest.mark.parametrize("number", FORMATS)
@pytest.mark.parametrize("shape", [(3, 512), (1, 256), (2, 5, 768), (300, 1024)])
def test_equal_to_the_gguf_package(number: int, shape: tuple[int, ...]) -> None:
    format, ggml = FORMATS[number], Ggml(number)
    raw = random_blocks(np.random.default_rng(number), ggml, shape, scale=0.3)
    ours = format.dequantise(raw)
    assert ours.shape == shape
    np.testing.assert_array_equal(ours.astype(np.float32).view(np.uint32), dequantised(raw, ggml).view(np.uint32))
    assert ours.dtype == format.dtype.numpy


@pytest.mark.parametrize("number", [number for number in FORMATS if FORMATS[number].decode])
def test_any_bytes_at_all(number: int) -> None:
    """Scales that are not finite, too."""
    format, ggml = FORMATS[number], Ggml(number)
    raw = np.random.default_rng(number).integers(0, 256, (4096, format.layout.itemsize), np.uint8)
    with np.errstate(all="ignore"):
        ours, theirs = format.dequantise(raw), dequantised(raw, ggml)
    np.testing.assert_array_equal(ours, theirs)


def test_blocks_are_as_large_as_the_gguf_package_says() -> None:
    for number, format in FORMATS.items():
        assert Ggml(number).name == format.name
        assert gguf.GGML_QUANT_SIZES[Ggml(number)] == (format.block, format.layout.itemsize)
    assert all(Ggml(number).name == name for number, (name, _) in OTHER_TYPES.items())
    assert {*FORMATS, *OTHER_TYPES} == set(Ggml)
